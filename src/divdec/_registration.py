"""Teaches transformers' Auto classes and lm-eval what a bundle is, without importing them.

`import divdec` must stay free of torch, so each registration waits until somebody imports what it registers with.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable
from types import ModuleType


def register_config() -> None:
    """Make `AutoConfig` know `divergence`."""
    from transformers import AutoConfig

    from divdec.model.configuration import DivergenceConfig

    AutoConfig.register("divergence", DivergenceConfig, exist_ok=True)


def register_model() -> None:
    """Make `AutoModelForCausalLM`, and with it pipelines, know the same."""
    from transformers import AutoModelForCausalLM

    from divdec.model.configuration import DivergenceConfig
    from divdec.model.modeling import DivergenceForCausalLM

    AutoModelForCausalLM.register(DivergenceConfig, DivergenceForCausalLM, exist_ok=True)


def register_lm_eval() -> None:
    """Make lm-eval know the model name `divdec`."""
    from lm_eval.api.registry import model_registry  # pyright: ignore[reportMissingImports]

    model_registry.register("divdec", target="divdec.evaluation.harness:DivdecLM")


# The modules that define the Auto classes, and what to do once each has been executed.
REGISTRATIONS: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": register_config,
    "transformers.models.auto.modeling_auto": register_model,
    "lm_eval.models": register_lm_eval,
}


def install() -> None:
    """Register now with the Auto classes that are loaded, and with the others as soon as they are."""
    for name, register in REGISTRATIONS.items():
        if name in sys.modules:
            register()
        else:
            sys.meta_path.insert(0, _Finder(name, register))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find one module, and registers once it has been executed."""

    def __init__(self, name: str, register: Callable[[], None]) -> None:
        self.name = name
        self.register = register

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, self.register)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, register: Callable[[], None]) -> None:
        self.loader = loader
        self.register = register

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.register()
