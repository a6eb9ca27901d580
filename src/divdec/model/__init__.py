"""The steered language model: configuration, cache, model and bundle.

Importing this package registers the model type `divergence` with the Auto classes of transformers.
"""

from divdec.model.configuration import DivergenceConfig
from divdec.model.modeling import DivergenceForCausalLM

__all__ = ["DivergenceConfig", "DivergenceForCausalLM"]
