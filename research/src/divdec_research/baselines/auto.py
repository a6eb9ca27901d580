"""Register the inference-time baselines with transformers' Auto classes; import this before loading a baseline."""

from transformers import AutoConfig, AutoModelForCausalLM

from divdec.checkpoint import COMPOSITE
from divdec_research.baselines import table  # noqa: F401  each method registers its decoding
from divdec_research.baselines.composite import CompositeConfig, CompositeForCausalLM

AutoConfig.register(COMPOSITE, CompositeConfig, exist_ok=True)
AutoModelForCausalLM.register(CompositeConfig, CompositeForCausalLM, exist_ok=True)
