"""Model sizes: parameters, from a configuration or from a number such as 8B."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_QUANTITY = 1e21  # no model and no volume is larger: the number is a typing error
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_NUMBER = re.compile(r"([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]?)", re.IGNORECASE)


def parse_quantity(value: float | int | str, name: str, least: float = 0.0) -> float:
    """Read a number with an optional unit: K, M, B (or G), T, such as '8B', '8e9' or 8e9.

    Raises:
        UsageError: the value is not a number, or not between `least` and `MAX_QUANTITY`; it names the option `name`.
    """
    match = _NUMBER.fullmatch(str(value).strip())
    number = float(match[1]) * UNITS[match[2].lower()] if match and match[2].lower() in UNITS else math.nan
    if not least <= number <= MAX_QUANTITY:
        wanted = f"of at least {least:g} " if least else ""
        limit = "" if least else ", not negative"
        limit += f", at most {MAX_QUANTITY:g}" if number > MAX_QUANTITY else ""
        raise UsageError(
            f"{name} is {value!r}; accepted: a number {wanted}such as 8B, 1.5M or 8e9 (units K, M, B, T){limit}"
        )
    return number


def is_quantity(value: float | int | str) -> bool:
    """Whether a value is meant as a number: it begins as a number does and contains no path separator."""
    text = str(value).strip()
    return bool(re.match(r"[+-]?\.?\d", text)) and not re.search(r"[/\\]", text)


def format_quantity(value: float | int) -> str:
    """Format a number with three digits and a unit: 8.03B, 131K, 12."""
    if value == 0:
        return "0"
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.3g}{letter}" if scaled < 999.5 else f"{scaled:,.0f}{letter}"
    return f"{value:.3g}"


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """The numbers that determine what a model costs."""

    name: str
    parameters: int
    """All parameters; tied embeddings count once."""
    mixture: bool = False
    """Whether a token passes through a part of the parameters only, a mixture of experts."""


def read_size(value: float | str, name: str) -> ModelSize:
    """Read a model's size from a number such as 8B, a folder with config.json, a config.json, or a hub id.

    A folder that is named like a number counts as a folder.

    Raises:
        UsageError: the value of the option `name` is none of these, or not a causal language model.
    """
    if is_quantity(value) and not Path(str(value)).is_dir():
        parameters = parse_quantity(value, name, least=1.0)
        return ModelSize(f"a model of {format_quantity(parameters)}", round(parameters))
    return measure_size(_load_config(str(value), name), str(value), name)


def measure_size(config: PreTrainedConfig, label: str, name: str = "model") -> ModelSize:
    """Count the parameters of a configuration's model, which is built on the meta device without weights.

    `label` is the name in the result; `name` is that of the option, for messages.

    Raises:
        UsageError: transformers has no causal language model for the configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # models of other kinds and broken configurations fail in many ways
        raise UsageError(
            f"{name} {label} gives no causal language model ({first_line(error)}); accepted: a number such as 8B, "
            "or the folder of a causal language model's config.json"
        ) from None
    return ModelSize(
        name=label,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        mixture=number_of_experts(config.get_text_config(decoder=True)) > 0,
    )


def number_of_experts(config: PreTrainedConfig) -> int:
    """Return the number of experts of a mixture, the largest where each modality has its own; 0 for other models."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = (getattr(config, name, None) or 0 for name in names)
    return max(max(count) if isinstance(count, list | tuple) else int(count) for count in counts)


def _load_config(path_or_id: str, name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    path = Path(path_or_id).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"{name} {path_or_id} has no config.json; give the folder of a model, or a number such as 8B")
    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else path_or_id, trust_remote_code=False)
    except Exception as error:  # a missing repository, no network, a broken file
        raise UsageError(
            f"{name} {path_or_id} is neither a number nor a model whose config.json can be read "
            f"({first_line(error)}); accepted: 8B, 8e9, a model's folder, or a hub id"
        ) from None
