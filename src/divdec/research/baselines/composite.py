"""A causal language model made of a target and helpers: what the inference-time baselines yield.

Its logits leave it already changed, whether they are scored, generated from or differentiated. It knows nothing of
any method: each brings a `Decoding`. It fails closed: a part that is missing or changed is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from divdec.errors import FailedClosed, UsageError
from divdec.experts.combined import CombinedCache
from divdec.experts.neural import check_part, device_of, logit_width, stateful_types, uses_gradient_checkpointing
from divdec.fail_closed import check
from divdec.model.cache import DivergenceCache
from divdec.model.checkpoint import (
    CheckpointReference,
    check_weights,
    common_vocabulary_of,
    digests,
    load_config,
    load_model,
)
from divdec.model.checks import check_inputs, positions_of, refuse_unknown
from divdec.model.configuration import TARGET_FIELDS
from divdec.model.loading import REFUSED, WITHOUT_EFFECT
from divdec.model.modeling import causal_output
from divdec.research.baselines.composite_config import CompositeConfig
from divdec.runs import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TARGET = "target"
# What a configuration may name. A table, so that a file cannot choose what code is run.
DECODINGS = {
    "whp": "divdec.research.baselines.logits:WHP",
    "uld": "divdec.research.baselines.logits:ULD",
    "ucd": "divdec.research.baselines.logits:UCD",
    "guard": "divdec.research.baselines.guard:Guard",
    "eco": "divdec.research.baselines.eco:Eco",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """What one forward pass reads."""

    input_ids: Int[Tensor, "batch tokens"]
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None
    position_ids: Int[Tensor, "batch_or_one tokens"]
    logits_to_keep: int
    """How many positions are wanted, from the end; 0 for all."""


class Decoding(nn.Module):
    """How a method makes its logits; it holds target and helpers."""

    def __init__(self, models: Mapping[str, PreTrainedModel], options: Mapping[str, Any], folder: Path) -> None:
        """Take the parts.

        Args:
            models: the parts by name.
            options: as the method wrote them into the configuration.
            folder: where the method's own files lie.
        """
        super().__init__()
        self.models = nn.ModuleDict(models)

    def model(self, name: str) -> PreTrainedModel:
        """A part by name."""
        found = self.models[name]
        assert isinstance(found, PreTrainedModel)
        return found

    def new_caches(self) -> list[Cache]:
        """Empty caches, the target's first; all of them grow by one column a token."""
        raise NotImplementedError

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """The method's logits after each of the kept tokens, finite, and decided by what stands before alone.

        Args:
            step: the tokens since what the caches hold.
            caches: what `new_caches` made, or as many times None.
        """
        raise NotImplementedError


class CompositeForCausalLM(PreTrainedModel, GenerationMixin):
    """A baseline's target and helpers as a transformers model.

    Attributes:
        decoding: the method, with all parts.
    """

    config_class = CompositeConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: CompositeConfig, decoding: Decoding | None = None) -> None:
        if decoding is None:
            raise UsageError(
                "this model is made of checkpoints, not of a configuration alone: use from_pretrained(FOLDER)"
            )
        super().__init__(config)
        self.decoding = decoding
        self.vocab_size = config.vocab_size
        self.generation_config = copy.deepcopy(self.target.generation_config)
        self._cache_owner = uuid.uuid4().hex
        self.post_init()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache_owner = uuid.uuid4().hex  # a copy, or unpickled: what the original has read is not this model's

    @property
    def _is_stateful(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(stateful_types(self.decoding))

    @property
    def device(self) -> torch.device:
        """Where tokens are wanted: the target's device, also where its weights are offloaded."""
        return device_of(self.target)

    @property
    def target(self) -> PreTrainedModel:
        """The model that is changed; what it answers alone is not."""
        return self.decoding.model(TARGET)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, verify: bool = True, **kwargs: Any
    ) -> Any:
        """Load what `write_composite` wrote.

        Args:
            pretrained_model_name_or_path: the folder.
            verify: compare every file with its SHA-256.
            **kwargs: what `AutoModelForCausalLM.from_pretrained` takes, for all parts.

        Returns:
            The model, or with `output_loading_info` the model and what was missing: nothing ever is.

        Raises:
            UsageError: a part or file is missing, corrupt, changed or does not fit.
        """
        folder = Path(pretrained_model_name_or_path).expanduser()
        config = kwargs.pop("config", None)
        if not isinstance(config, CompositeConfig):
            config = load_config(folder)
        if not isinstance(config, CompositeConfig) or config.method not in DECODINGS or not config.parts:
            raise UsageError(f"{folder} holds no baseline that is known; make it again with `divdec baseline`")
        informed = kwargs.pop("output_loading_info", False)
        for name in (*WITHOUT_EFFECT, "local_files_only", "revision"):
            kwargs.pop(name, None)
        for name in REFUSED:
            if kwargs.pop(name, None):
                raise UsageError(f"{name} has no meaning for a model made of several checkpoints; leave it out")
        models = {part: _load_part(folder, part, fields, verify, kwargs) for part, fields in config.parts.items()}
        for name, sha256 in (config.files or {}).items():
            if not (folder / name).is_file() or (verify and file_sha256(folder / name) != sha256):
                raise UsageError(f"{folder / name} is missing or has changed; make the baseline again")
        if min(logit_width(model) for model in models.values()) != config.vocab_size:
            raise UsageError(f"{folder}: the parts' common vocabulary is not that of the configuration; make it again")
        model = cls(config, decoding_of(config, models, folder)).eval()
        model.name_or_path = str(folder)
        nothing: dict[str, Any] = {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        return (model, nothing | {"error_msgs": []}) if informed else model

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Refused: the folder that it was loaded from refers to checkpoints, and is all there is to save."""
        raise UsageError("a baseline made of several checkpoints cannot be saved from memory; keep its folder")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Do nothing: the folder carries its own file for `trust_remote_code`."""

    def new_cache(self) -> DivergenceCache:
        """An empty cache for all parts."""
        first, *others = self.decoding.new_caches()
        return DivergenceCache(first, CombinedCache(others), self._cache_owner)

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"] | None = None,
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "batch tokens"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """The method's logits after every token (or after the last `logits_to_keep`).

        The arguments are those of `DivergenceForCausalLM.forward`, with a cache of `new_cache`.

        Raises:
            UsageError: the parts cannot be given what is asked for.
            FailedClosed: a logit is not finite.
        """
        refuse_unknown(input_ids, kwargs)
        assert input_ids is not None
        cache = self._own_cache(past_key_values)
        if cache is None and (use_cache or (use_cache is None and not uses_gradient_checkpointing(self))):
            cache = self.new_cache()
        past_length = cache.check_length() if cache is not None else 0
        check_inputs(input_ids, attention_mask, past_length)
        if position_ids is None:
            position_ids = positions_of(input_ids, attention_mask, past_length)
        caches = [None] * len(self.decoding.new_caches()) if cache is None else _parts_of(cache)
        step = Step(input_ids, attention_mask, position_ids, logits_to_keep)
        logits = self.decoding.logits(step, caches)[..., : self.vocab_size]
        if cache is not None and cache.check_length() != past_length + input_ids.shape[1]:
            raise FailedClosed("a part of the baseline did not keep the tokens in its cache")
        _check_finite(logits, attention_mask)
        return causal_output(self, logits, cache, labels, logits_to_keep, kwargs)

    def _own_cache(self, cache: Cache | None) -> DivergenceCache | None:
        if cache is None:
            return None
        if not isinstance(cache, DivergenceCache) or cache.owner != self._cache_owner:
            raise UsageError("past_key_values must come from this model's new_cache(), which holds every part's")
        return cache

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get("past_key_values") is not None:
            self._own_cache(model_kwargs["past_key_values"])
        elif generation_config.use_cache is not False:
            if generation_config.cache_implementation not in (None, "dynamic"):
                raise UsageError(
                    f"cache_implementation={generation_config.cache_implementation!r} is not offered here; "
                    "accepted: 'dynamic'"
                )
            model_kwargs["past_key_values"] = cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def init_weights(self) -> None:
        """Nothing: the parts come with their weights."""

    def get_input_embeddings(self) -> nn.Module:
        """The target's input embeddings."""
        return self.target.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """None: no single matrix gives these logits."""
        return None


def decoding_of(config: CompositeConfig, models: Mapping[str, PreTrainedModel], folder: Path) -> Decoding:
    """The method that a configuration names, with its parts."""
    module, _, name = DECODINGS[str(config.method)].partition(":")
    return getattr(importlib.import_module(module), name)(models, config.options or {}, folder)


def write_composite(
    output: Path,
    tokenizer: PreTrainedTokenizerBase,
    method: str,
    options: Mapping[str, Any],
    parts: Mapping[str, Path],
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; the parts stay where they are.

    Args:
        output: a folder that exists; safetensors and JSON files that are in it already belong to the method.
        tokenizer: the target's.
        method: a key of `DECODINGS`.
        options: what the method's `Decoding` is told, as JSON values.
        parts: the checkpoints by name, the target first.

    Raises:
        UsageError: a part has other tokens than the target, or no readable weights.
    """
    for place in parts.values():
        check_weights(place)
    configs = {part: load_config(place) for part, place in parts.items()}
    texts = [config.get_text_config(decoder=True) for config in configs.values()]
    contexts = [length for text in texts if (length := getattr(text, "max_position_embeddings", None)) is not None]
    own = sorted(path.name for pattern in ("*.safetensors", "*.json") for path in output.glob(pattern))
    config = CompositeConfig(
        method=method,
        options=dict(options),
        parts={part: _reference(place, output) for part, place in parts.items()},
        files={name: file_sha256(output / name) for name in own},
        vocab_size=common_vocabulary_of(parts),
        max_position_embeddings=min(contexts, default=None),
        **{name: value for name in TARGET_FIELDS if (value := getattr(texts[0], name, None)) is not None},
    )
    tokenizer.save_pretrained(output)
    config.save_pretrained(output)


def _reference(place: Path, output: Path) -> dict[str, Any]:
    folder = Path(os.path.relpath(place.resolve(), output.resolve())).as_posix()
    return CheckpointReference(folder=folder, sha256=digests(place)).to_dict()


def _load_part(folder: Path, part: str, fields: Any, verify: bool, options: Mapping[str, Any]) -> PreTrainedModel:
    reference = CheckpointReference.from_dict(fields, part)
    place = reference.resolve(folder, weights=True)
    check_weights(place)
    if verify:
        reference.verify(place, part)
    model = load_model(place, **options).eval()
    check_part(part, model)
    return model


def _parts_of(cache: DivergenceCache) -> list[Cache | None]:
    assert isinstance(cache.experts, CombinedCache)
    return [cache.target, *cache.experts.caches]


def _check_finite(
    logits: Float[Tensor, "batch kept vocab"], attention_mask: Int[Tensor, "batch past_and_tokens"] | None
) -> None:
    finite = logits.detach().isfinite().all(dim=-1)
    if attention_mask is not None:
        # What stands after a padding token is read by nobody and may be anything.
        finite = finite | (attention_mask[:, -logits.shape[1] :] == 0).to(finite.device)
    check(finite.all(), "a logit of the baseline is not finite (a helper overflowed); nothing is answered")


AutoModelForCausalLM.register(CompositeConfig, CompositeForCausalLM, exist_ok=True)
