"""All methods in the order of the paper's tables; importing this module registers them."""

from __future__ import annotations

from typing import Literal

from divdec_research.baselines.methods import (  # isort: skip  # noqa: F401  in the order of the paper's tables
    grad_ascent, grad_diff, npo, simnpo, rmu, undial, idk_dpo,
    whp, offset, uld, ucd, guard, eco, ngram_filter, guardrail, lunar,
)  # fmt: skip
from divdec_research.baselines.method import METHODS

REFERENCES = {"target": "Target", "retrain": "Retrain"}
DIVDEC = {"linear": "Linear DD", "rank": "Rank DD", "distill": "Distill DD"}
TITLES = {**REFERENCES, **DIVDEC, **{name: method.title for name, method in METHODS.items()}}
"""Names in the paper's tables, in their order."""
Kind = Literal["ours", "other", "reference"]


def kind_of(name: str) -> Kind:
    """Whether a name is of a reference, of Divergence Decoding or of another method."""
    return "reference" if name in REFERENCES else "ours" if name in DIVDEC else "other"
