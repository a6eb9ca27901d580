"""How a provider is steered. It does not import torch, so that `divdec --help` starts fast."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from divdec.options import RARE, check_at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """How a provider is steered."""

    block: int = 1
    """Number of tokens per request. divdec keeps the tokens for which the steered choice is proved to be the same."""
    bias_entries: Annotated[int, RARE] = 300
    """Maximum number of logit_bias entries that the provider accepts."""
    tries: Annotated[int, RARE] = 4
    """Maximum number of requests per token. With 1, every answer is accepted and its error bound is reported."""

    def __post_init__(self) -> None:
        for name in ("block", "tries", "bias_entries"):
            check_at_least(name, getattr(self, name), 1)
