"""State of the installation and of a bundle, for `divdec doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.extras import EXTRAS, missing
from divdec.runs import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.configuration import DivergenceConfig
    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.steering import Steering


def describe_installation() -> dict[str, Any]:
    """Return versions of libraries, devices, and which extras are installed."""
    extras = {extra: not missing(modules) for extra, modules in EXTRAS.items()}
    return {"versions": versions(), "devices": _devices(), "extras": extras}


def try_bundle(
    name: str, load: Callable[[str], tuple[DivergenceForCausalLM, PreTrainedTokenizerBase]]
) -> dict[str, Any]:
    """Load a bundle and run it once; return its parts, or the reason why it does not load."""
    import torch

    try:
        model, tokenizer = load(name)
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 1]], device=model.device))
    except Exception as error:  # any error is a reason why the bundle does not load
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        return {"name": name, "loads": False, "why_not": f"{kind}{error}"}
    experts: list[Any] = getattr(model.experts, "parts", [model.experts])
    content: dict[str, Any] = {
        "name": name,
        "loads": True,
        "steering": model.rule,
        "measured": measured_text(model.config, model.steering, model.takedowns),
        "vocabulary": model.vocab_size,
        "parameters": {"target": model.target.num_parameters(), **_parameters(experts)},
        "experts": [type(part).__name__ for part in experts],
    }
    if model.takedowns is not None:
        state = model.takedowns.snapshot().state
        content["takedowns"] = f"{len(state.entries)} requests in force at strength {state.strength:g}"
    if sources := [part.source for part in experts if hasattr(part, "source")]:
        content["bridged"] = f"{(sources[0] >= 0).float().mean():.0%} of the target's tokens"
    return content | {"chat_template": bool(tokenizer.chat_template)}


def measured_text(config: DivergenceConfig, steering: Steering, takedowns: object) -> str:
    """Return what a bundle's rule was measured to do, and whether another rule or a registry is used."""
    measured, rule = config.measured, str(steering)
    if not measured:
        return "not measured"
    other = "" if measured["steering"] == rule else f" (with {measured['steering']}; {rule} was not measured)"
    more = "" if takedowns is None else "; the takedown requests in force are not part of it"
    return f"{measured['result']}{other}{more}"


def _devices() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu_threads": torch.get_num_threads(),
        "gpus": gpus,
        "bfloat16_gpu": bool(gpus) and torch.cuda.is_bf16_supported(including_emulation=False),
        "mps": torch.backends.mps.is_available(),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
    }


def _parameters(experts: list[Any]) -> dict[str, int]:
    """Return the number of parameters of each neural auxiliary."""
    return {
        f"{name}_auxiliary": getattr(part, name).num_parameters()
        for part in experts
        for name in ("retain", "forget")
        if hasattr(getattr(part, name, None), "num_parameters")
    }


def diagnosis_text(content: dict[str, Any]) -> str:
    """Return the state of the installation and of the bundle in lines of text."""
    lines = []
    for section, values in content.items():
        lines += [section, *(f"  {name:<14}{_plain(value)}" for name, value in values.items())]
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    if value is None:
        return "not installed"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
