"""Bundles as models of vLLM: one composite model whose logits are already steered."""

from __future__ import annotations


def register() -> None:
    """Register bundles with vLLM, which calls this in each of its processes (entry point `vllm.general_plugins`)."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # pyright: ignore[reportMissingImports]

    import divdec.model  # noqa: F401  # registers the configuration with transformers
    from divdec.serving.vllm.configuration import EngineChecks

    # As text, so that only the processes that run the model import it.
    ModelRegistry.register_model("DivergenceForCausalLM", "divdec.serving.vllm.model:DivergenceForCausalLM")
    MODELS_CONFIG_MAP["DivergenceForCausalLM"] = EngineChecks
