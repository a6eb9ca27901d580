"""Options of `divdec cost`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from divdec.costs.model_size import parse_quantity
from divdec.errors import UsageError
from divdec.options import OutputFile

WIDTHS = {"float8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
FORMATS = (".svg", ".png")
MOST = 1_000_000  # epochs, requests, drafted tokens, microseconds: a larger number is a typing error


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostSettings(OutputFile):
    """A deployment: models, data, volume and device."""

    target: float | str
    """P: a number of parameters such as 8B or 8e9, a folder with config.json (weights are not needed), or a hub id."""
    aux: float | str
    """Each of the two auxiliaries: a number, a folder, or a hub id."""
    forget_tokens: float | str
    """Size of the forget set in tokens, such as 1M."""
    retain_tokens: float | str = 0.0
    """Size of the retain set in tokens."""
    volume: float | str | None = None
    """Tokens that the model reads and writes before the forget set changes or the model is replaced, such as 1B."""
    epochs: float = 10.0
    """Epochs of the auxiliaries' training and of distillation."""
    distill_epochs: float | None = None
    """Epochs of distillation, if different."""
    recipe: Literal["forget-retain", "full-retain"] = "forget-retain"
    """Recipe of `divdec train`: the formula counts 'forget-retain'; 'full-retain' reads the retain set twice."""
    embeddings: Literal["counted", "uncounted"] = "counted"
    """Whether N and n include embeddings and output layer; numbers such as 8B are used as given."""
    verbatim: bool = False
    """Only verbatim text must be forgotten, so that n-grams suffice."""
    dtype: Literal["float8", "bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights, keys and values."""
    context: float | str = 2048.0
    """Context length in tokens, for cache and attention."""
    requests: int = 1
    """Requests decoded together."""
    device: str = "h100"
    """Device of the latency prediction: a100, h100, h200, b200, or 'measured' for this machine."""
    layer_microseconds: float | None = None
    """Fixed cost of a layer, in place of the device's own; eager PyTorch takes far more."""
    acceptance: float | None = None
    """Measured acceptance rate of drafted tokens (`generate --statistics`); adds the cost of speculation."""
    draft_length: int = 4
    """Tokens per draft, with --acceptance."""

    def __post_init__(self) -> None:
        for name, least in (("forget_tokens", 1.0), ("retain_tokens", 0.0), ("context", 1.0)):
            parse_quantity(getattr(self, name), name.replace("_", "-"), least)
        if self.volume is not None:
            parse_quantity(self.volume, "volume")
        for name in ("epochs", "distill_epochs", "layer_microseconds"):
            value = getattr(self, name)
            least = 0 if name == "layer_microseconds" else math.ulp(0.0)
            if value is not None and not least <= value <= MOST:
                wanted = "of at least 0" if not least else "above 0"
                raise UsageError(
                    f"{name.replace('_', '-')} is {value:g}; accepted: a number {wanted}, at most {MOST:,}"
                )
        for name in ("requests", "draft_length"):
            if not 1 <= getattr(self, name) <= MOST:
                option = name.replace("_", "-")
                raise UsageError(
                    f"{option} is {getattr(self, name)}; accepted: a whole number of at least 1, at most {MOST:,}"
                )
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise UsageError(f"acceptance is {self.acceptance:g}; accepted: a probability from 0 to 1")
        if self.output is not None and Path(self.output).suffix.lower() not in FORMATS:
            raise UsageError(f"output is {self.output!r}; accepted: a file whose name ends in {' or '.join(FORMATS)}")
