"""Types for annotations, which are never evaluated: only type checkers wait for torch to be imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor, nn
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from divdec.data.formatting import Example, Format
    from divdec_research.baselines.job import Job

    Batch = Mapping[str, Tensor]
    Labels = Int[Tensor, "batch tokens"]
    Logits = Float[Tensor, "*positions vocab"]
    Loss = Float[Tensor, ""]
    PerSequence = Float[Tensor, " batch"]
else:
    nn = Bool = Float = Int = Tensor = Cache = PreTrainedModel = PreTrainedTokenizerBase = object
    Example = Format = Job = Batch = Labels = Logits = Loss = PerSequence = object
