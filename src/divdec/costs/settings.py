"""What `divdec cost` is asked. It knows nothing of torch, so that `--help` is instant."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from divdec.costs.quantities import parse_quantity
from divdec.errors import UsageError

WIDTHS = {"float8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
FORMATS = (".svg", ".png")
MOST = 1_000_000  # epochs, requests, drafted tokens, microseconds: beyond it somebody mistyped


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostSettings:
    """A deployment: its models, its data, how much is asked of it, and on what it runs."""

    target: float | str
    """P: a number of parameters such as 8B or 8e9, a folder with config.json (weights are not needed), or a hub id."""
    aux: float | str
    """Each of the two auxiliaries, likewise."""
    forget_tokens: float | str
    """Size of the forget set in tokens, such as 1M."""
    retain_tokens: float | str = 0.0
    """Size of the retain set in tokens."""
    volume: float | str | None = None
    """Tokens that the model will read and write before the forget set changes or the model is replaced, such as 1B."""
    epochs: float = 10.0
    """Passes over the data, of the auxiliaries' training and of distillation."""
    distill_epochs: float | None = None
    """Passes over the forget set in distillation, where they are others."""
    recipe: Literal["forget-retain", "full-retain"] = "forget-retain"
    """What the auxiliaries learn, as in `divdec train`: 'forget-retain' is what the paper's formula counts,
    'full-retain' trains on the retain set twice."""
    embeddings: Literal["counted", "uncounted"] = "counted"
    """Whether N and n of the formulas hold embeddings and output layer; numbers such as 8B are taken as they are."""
    verbatim: bool = False
    """What is to be forgotten is texts word for word and not what they say; n-grams then do."""
    dtype: Literal["float8", "bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights, keys and values."""
    context: float | str = 2048.0
    """Tokens that a request has before the one that is predicted; for the cache and for attention."""
    requests: int = 1
    """Requests that are decoded together."""
    device: str = "h100"
    """What latency is predicted for: a100, h100, h200, b200, or 'measured', which measures this machine."""
    layer_microseconds: float | None = None
    """What it costs to begin a layer, in place of the device's own figure; eager PyTorch takes far more."""
    acceptance: float = 0.8
    """Probability that a drafted token is kept, for speculative steering."""
    block: int = 4
    """Tokens drafted at a time."""
    output: str | None = None
    """File for the plot of cost against volume, .svg or .png."""
    overwrite: bool = False
    """Replace an earlier plot."""

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
        for name in ("requests", "block"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UsageError(
                    f"{name} is {getattr(self, name)}; accepted: a whole number of at least 1, at most {MOST:,}"
                )
        if not 0 <= self.acceptance <= 1:
            raise UsageError(f"acceptance is {self.acceptance:g}; accepted: a probability from 0 to 1")
        if self.output is not None and Path(self.output).suffix.lower() not in FORMATS:
            raise UsageError(f"output is {self.output!r}; accepted: a file whose name ends in {' or '.join(FORMATS)}")

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return WIDTHS[self.dtype]
