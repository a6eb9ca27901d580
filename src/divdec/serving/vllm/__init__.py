"""Bundles as models of vLLM: steered logits from vLLM's engine, with its paged cache, batching and parallelism.

The target, both auxiliaries and the counting experts are one composite model (`model.py`) whose logits leave it already
steered: whatever of vLLM reads logits reads steered ones. Nothing here is imported before vLLM, or a server, asks.
"""

from __future__ import annotations


def register() -> None:
    """Make vLLM know bundles; it calls this in each of its processes (entry point `vllm.general_plugins`)."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # pyright: ignore[reportMissingImports]

    from divdec._registration import register_config
    from divdec.serving.vllm.refusals import EngineChecks

    register_config()
    # As text, so that only the processes that run it load it.
    ModelRegistry.register_model("DivergenceForCausalLM", "divdec.serving.vllm.model:DivergenceForCausalLM")
    MODELS_CONFIG_MAP["DivergenceForCausalLM"] = EngineChecks
