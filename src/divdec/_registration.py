"""Teaches transformers' Auto classes the model type `divergence`, without importing them.

`import divdec` must stay free of torch, so the registration waits until somebody imports the Auto classes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

# The module that defines AutoModelForCausalLM; it imports that of AutoConfig.
AUTO_CLASSES = "transformers.models.auto.modeling_auto"


def install() -> None:
    """Register now if the Auto classes are loaded, else as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register() -> None:
    """Make `AutoConfig`, `AutoModelForCausalLM` and pipelines know `divergence`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from divdec.model.configuration import DivergenceConfig
    from divdec.model.modeling import DivergenceForCausalLM

    AutoConfig.register("divergence", DivergenceConfig, exist_ok=True)
    AutoModelForCausalLM.register(DivergenceConfig, DivergenceForCausalLM, exist_ok=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find the Auto classes' module, and registers once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != AUTO_CLASSES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        register()
