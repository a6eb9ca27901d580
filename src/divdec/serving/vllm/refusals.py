"""What of vLLM a steered model does not work with, or was never tried with: refused before anything is loaded.

vLLM calls `EngineChecks` when its configuration is complete, in the process that the user started.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from divdec.errors import UsageError
from divdec.serving.vllm.parts import BundleParts, EngineOptions, check_whole, read_parts

# Where vLLM keeps a setting, the values that are accepted, and the option that an operator knows it by.
SETTINGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("parallel_config.pipeline_parallel_size", (1,), "--pipeline-parallel-size"),
    ("parallel_config.data_parallel_size", (1,), "--data-parallel-size"),
    ("parallel_config.prefill_context_parallel_size", (1,), "--prefill-context-parallel-size"),
    ("parallel_config.decode_context_parallel_size", (1,), "--decode-context-parallel-size"),
    ("parallel_config.enable_expert_parallel", (False,), "--enable-expert-parallel"),
    ("parallel_config.enable_dbo", (False,), "--enable-dbo"),
    ("parallel_config.nnodes", (1,), "--nnodes"),
    ("parallel_config.distributed_executor_backend", (None, "mp", "uni"), "--distributed-executor-backend"),
    ("parallel_config.worker_extension_cls", ("",), "--worker-extension-cls"),
    ("model_config.runner_type", ("generate",), "--runner"),
    ("model_config.convert_type", ("none",), "--convert"),
    ("model_config.model_impl", ("auto", "vllm"), "--model-impl"),
    ("model_config.quantization", (None,), "--quantization"),
    ("model_config.hf_overrides", ({}, None), "--hf-overrides"),
    ("model_config.enable_prompt_embeds", (False,), "--enable-prompt-embeds"),
    ("model_config.enable_sleep_mode", (False,), "--enable-sleep-mode"),
    ("model_config.logits_processors", (None, []), "--logits-processors"),
    ("load_config.load_format", ("auto", "hf", "safetensors"), "--load-format"),
    ("cache_config.cache_dtype", ("auto",), "--kv-cache-dtype"),
    ("cache_config.kv_sharing_fast_prefill", (False,), "--kv-sharing-fast-prefill"),
    ("lora_config", (None,), "--enable-lora"),
    ("kv_transfer_config", (None,), "--kv-transfer-config"),
    ("ec_transfer_config", (None,), "--ec-transfer-config"),
    ("weight_transfer_config", (None,), "--weight-transfer-config"),
    ("speculative_config.method", ("draft_model", "ngram"), "--speculative-config (method)"),
    ("speculative_config.rejection_sample_method", ("standard",), "--speculative-config (rejection_sample_method)"),
    ("speculative_config.use_heterogeneous_vocab", (False,), "--speculative-config (use_heterogeneous_vocab)"),
    ("speculative_config.parallel_drafting", (False,), "--speculative-config (parallel_drafting)"),
    ("watermark_config", (None,), "--watermark-config"),
    ("diffusion_config", (None,), "--diffusion-config"),
    ("engram_config", (None,), "--engram-config"),
    ("aux_output_config.enabled", (False,), "--enable-return-routed-experts"),
)
# What would let clients call the engine's own methods, load weights or send it pickled objects.
VARIABLES = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION")
ABSENT = object()


class EngineChecks:
    """vLLM's hook for models that have something to say about its configuration."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing: the configuration is not complete yet."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what cannot be served, and hand the operator's choice on to the engine's processes.

        Raises:
            UsageError: one line on what was given, what is accepted and what to do.
        """
        check_settings(vllm_config)
        given = vllm_config.additional_config
        if not isinstance(given, dict):
            raise UsageError(f"additional_config is a {type(given).__name__}; accepted: a mapping")
        options = EngineOptions.from_mapping(given.get("divdec"))
        model_config = vllm_config.model_config
        parts = read_parts(model_config.model, model_config.revision, options)
        check_parts(parts, vllm_config)
        check_whole(parts)
        # It goes to the workers, and into the key by which vLLM keeps compiled code: that of other auxiliaries, or of
        # another memory, must not be taken for this one's.
        shapes = {part: config.to_dict() for part, config in parts.configs.items()} | {"counted": parts.context_length}
        digest = hashlib.sha256(json.dumps(shapes, sort_keys=True, default=str).encode()).hexdigest()
        given["divdec"] = {"registry": options.registry, "verify": options.verify, "parts": digest}


def check_settings(vllm_config: Any) -> None:
    """Refuse features of vLLM under which a steered model was not shown to be steered.

    Raises:
        UsageError: names the option.
    """
    for path, accepted, option in SETTINGS:
        value = vllm_config
        for name in path.split("."):
            value = None if value is None else getattr(value, name, ABSENT)
            if value is ABSENT or (value is None and name != path.rsplit(".", 1)[-1]):
                value = ABSENT
                break
        if value is not ABSENT and not any(value == one for one in accepted):
            raise UsageError(
                f"{option} is {_shown(value)}, with which a steered model is not served by vLLM; accepted: "
                f"{', '.join(_shown(one) for one in accepted)}; leave the option out"
            )
    for name in VARIABLES:
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            raise UsageError(f"{name} is set: clients could reach past the steering; unset it")
    model_config = vllm_config.model_config
    if model_config.tokenizer not in (None, model_config.model):
        raise UsageError(
            f"--tokenizer is {model_config.tokenizer!r}; accepted: the bundle's own tokenizer; leave the option out"
        )


def check_parts(parts: BundleParts, vllm_config: Any) -> None:
    """Refuse models that vLLM would run otherwise than transformers, or not at all.

    Raises:
        UsageError: names the part.
    """
    model_config, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    longest, length = parts.config.max_position_embeddings, model_config.max_model_len
    if longest is not None and length > longest:
        raise UsageError(f"--max-model-len is {length}; accepted: at most {longest}, the shortest context of the parts")
    if parts.takedowns is not None and ranks > 1:
        raise UsageError(
            f"--tensor-parallel-size is {ranks} with a registry of takedown requests; accepted: 1, as ranks could "
            "read different states of it"
        )
    for part, config in parts.configs.items():
        named = f"{part} ({parts.places[part]})"
        architectures = config.architectures or []
        known = [name for name in architectures if name in model_config.registry.get_supported_archs()]
        if not known or config.model_type == "divergence":
            raise UsageError(
                f"{named} is a {', '.join(architectures)}, which vLLM does not know; serve it without vLLM"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise UsageError(f"{named} is quantised, which was not tried on vLLM; accepted: plain weights")
        window = getattr(config, "sliding_window", None)
        if window is not None and getattr(config, "use_sliding_window", True) and window < length:
            raise UsageError(
                f"{named} attends to the last {window} tokens only, and contexts have up to {length}; give "
                f"--max-model-len {window} or less"
            )
        _check_ranks(named, config, ranks)


def _check_ranks(named: str, config: Any, ranks: int) -> None:
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or (shared % ranks and ranks % shared):
        raise UsageError(
            f"--tensor-parallel-size is {ranks}, but {named} has {heads} attention heads and {shared} of keys and "
            "values, which cannot be split so; give a number that divides them"
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list | str | int | float) or value is None:
        return repr(value)
    return f"a {type(value).__name__}"
