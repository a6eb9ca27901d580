"""divdec: make a language model behave as if it had never seen a set of documents (Divergence Decoding).

Names load when they are first used: `import divdec` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.configuration import DivergenceConfig
    from divdec.decoding.cache import DivergenceCache
    from divdec.decoding.speculative import Speculation, SpeculationStatistics
    from divdec.experts.neural import NeuralPair
    from divdec.experts.protocol import Experts
    from divdec.model.bundle import write_bundle
    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.steering import Steering, steer_linear, steer_rank

__version__ = "0.1.0"

_MODULES = {
    "DivergenceCache": "divdec.decoding.cache",
    "DivergenceConfig": "divdec.configuration",
    "DivergenceForCausalLM": "divdec.model.modeling",
    "Experts": "divdec.experts.protocol",
    "NeuralPair": "divdec.experts.neural",
    "Speculation": "divdec.decoding.speculative",
    "SpeculationStatistics": "divdec.decoding.speculative",
    "Steering": "divdec.steering",
    "steer_linear": "divdec.steering",
    "steer_rank": "divdec.steering",
    "write_bundle": "divdec.model.bundle",
}

__all__ = [
    "DivergenceCache", "DivergenceConfig", "DivergenceForCausalLM", "Experts", "NeuralPair", "Speculation",
    "SpeculationStatistics", "Steering", "UsageError", "steer_linear", "steer_rank", "write_bundle",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'divdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
