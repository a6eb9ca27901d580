"""The steered language model, its checkpoints and bundles.

Importing this package registers the model type `divergence` with the Auto classes of transformers.
"""

from divdec.configuration import DivergenceConfig
from divdec.model.modeling import DivergenceForCausalLM

__all__ = ["DivergenceConfig", "DivergenceForCausalLM"]
