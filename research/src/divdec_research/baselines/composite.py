"""A causal language model made of a target and helpers: the model that inference-time baselines write.

Its logits are always those of the method, whether scored, generated from or differentiated. Each method has a
`CompositeDecoding`. A missing or changed part is an error.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from divdec.checkpoint import (
    COMPOSITE,
    CheckpointReference,
    check_weights,
    common_vocabulary,
    digests,
    load_config,
    load_model,
    load_tokenizer,
    vocabulary_width,
)
from divdec.configuration import TARGET_FIELDS, RemoteCodeConfig
from divdec.decoding.cache import DivergenceCache
from divdec.errors import FailedClosed, UsageError
from divdec.experts.combined import CombinedCache
from divdec.fail_closed import check, check_inputs, check_vocabulary, refuse_unknown
from divdec.model.loading import REFUSED, WITHOUT_EFFECT
from divdec.model.modeling import ModelOfParts, causal_output
from divdec.passes import (
    check_part,
    length_of,
    logit_width,
    positions_of,
    stateful_types,
    uses_gradient_checkpointing,
)
from divdec.runs import file_sha256
from divdec_research.baselines.annotations import Job
from divdec_research.baselines.decoding import TARGET, CompositeDecoding, Step
from divdec_research.baselines.method import METHODS


class CompositeConfig(RemoteCodeConfig):
    """Configuration of `CompositeForCausalLM`.

    Attributes:
        method: the baseline's name, such as 'whp'.
        options: the decoding's options, as JSON values.
        parts: references of the checkpoints by name, the target's among them: `{"folder": …, "sha256": …}`.
        files: SHA-256 of the folder's files that decide the logits, by name.
        vocab_size: the common vocabulary of the parts.
        max_position_embeddings: the shortest context of the parts; None where none states one.
    """

    model_type = COMPOSITE
    model_class = "CompositeForCausalLM"
    model_module = "divdec_research.baselines.auto"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        method: str | None = None,
        options: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        vocab_size: int = 0,
        max_position_embeddings: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.method = method
        self.options = options
        self.parts = parts
        self.files = files
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class CompositeForCausalLM(ModelOfParts, GenerationMixin):
    """A baseline's target and helpers as a transformers model.

    Attributes:
        decoding: the method, with all parts.
    """

    config_class = CompositeConfig

    def __init__(self, config: CompositeConfig, decoding: CompositeDecoding | None = None) -> None:
        if decoding is None:
            raise UsageError("this model is made of several checkpoints; load it with from_pretrained(FOLDER)")
        super().__init__(config)
        self.decoding = decoding
        helpers = {name: value for name, value in vars(decoding).items() if isinstance(value, nn.Module)}
        self.parts = nn.ModuleDict({**decoding.models, **helpers})
        self.vocab_size = config.vocab_size
        self.generation_config = copy.deepcopy(self.target.generation_config)
        self.post_init()

    @property
    def _is_stateful(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(stateful_types(self.parts))

    @property
    def target(self) -> PreTrainedModel:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The unmodified target."""
        return self.decoding.models[TARGET]

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, verify: bool = True, **kwargs: Any
    ) -> Any:
        """Load a folder that `write_composite` wrote.

        Returns:
            The model; with `output_loading_info` also a dictionary of empty lists.

        Raises:
            UsageError: a part or file is missing, corrupt, changed or does not fit.
        """
        folder = Path(pretrained_model_name_or_path).expanduser()
        config = kwargs.pop("config", None)
        if not isinstance(config, CompositeConfig):
            config = load_config(folder)
        # Only registered methods: a configuration file must not choose what code runs.
        method = METHODS.get(str(getattr(config, "method", None)))
        if not isinstance(config, CompositeConfig) or not config.parts or method is None or method.decoding is None:
            raise UsageError(f"{folder} holds no known baseline; create it again with `divdec baseline`")
        loading_info = kwargs.pop("output_loading_info", False)
        for name in (*WITHOUT_EFFECT, "local_files_only", "revision"):
            kwargs.pop(name, None)
        for name in REFUSED:
            if kwargs.pop(name, None):
                raise UsageError(f"{name} has no meaning for a model made of several checkpoints; leave it out")
        models = {}
        for name, fields in config.parts.items():
            reference = CheckpointReference.from_dict(fields, name)
            path = reference.resolve(folder, weights=True)
            check_weights(path)
            if verify:
                reference.verify(path, name)
            models[name] = load_model(path, **kwargs).eval()
            check_part(name, models[name])
        for name, sha256 in (config.files or {}).items():
            if not (folder / name).is_file() or (verify and file_sha256(folder / name) != sha256):
                raise UsageError(f"{folder / name} is missing or has changed; create the baseline again")
        if min(logit_width(model) for model in models.values()) != config.vocab_size:
            raise UsageError(f"{folder}: the configuration has another vocabulary size than the parts; create it again")
        decoding = method.decoding(models, config.options or {}, folder)
        model = cls(config, decoding).eval()
        model.name_or_path = str(folder)
        empty: dict[str, Any] = {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        return (model, empty | {"error_msgs": []}) if loading_info else model

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Refuse: a composite is saved by copying its folder, which refers to checkpoints."""
        raise UsageError("a baseline made of several checkpoints cannot be saved from memory; keep its folder")

    def new_cache(self) -> DivergenceCache:
        """Create an empty cache for all parts."""
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
        """Compute the method's logits after every token (or after the last `logits_to_keep`).

        The arguments are those of `DivergenceForCausalLM.forward`, with a cache of `new_cache`.

        Raises:
            UsageError: an argument is not supported.
            FailedClosed: a logit is not finite.
        """
        refuse_unknown(input_ids, kwargs)
        assert input_ids is not None
        cache = self._own_cache(past_key_values)
        if cache is None and (use_cache or (use_cache is None and not uses_gradient_checkpointing(self))):
            cache = self.new_cache()
        past_length = cache.check_length() if cache is not None else 0
        check_inputs(input_ids, attention_mask, past_length)
        if input_ids.device.type == "cpu":
            check_vocabulary(input_ids, self.vocab_size)
        if position_ids is None:
            position_ids = positions_of(input_ids, attention_mask, past_length)
        if cache is None:
            caches: list[Cache | None] = [None] * len(self.decoding.new_caches())
        else:
            assert isinstance(cache.experts, CombinedCache)
            caches = [cache.target, *cache.experts.caches]
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


class PrefixCache(DynamicCache):
    """A cache of the target that holds the tokens of a prefix before those of each row."""

    def __init__(self, target: PreTrainedModel, prefix: int) -> None:
        super().__init__(config=target.config.get_text_config(decoder=True))
        self.prefix = prefix

    @property
    def lengths(self) -> list[int]:
        """Number of tokens without the prefix."""
        return [max(length_of(self) - self.prefix, 0)]


def write_composite(job: Job, output: Path, method: str, options: Mapping[str, Any], **helpers: Path) -> None:
    """Write a folder that `CompositeForCausalLM.from_pretrained` loads; it refers to the parts by path and digest.

    Args:
        job: gives the target and its tokenizer.
        output: a folder that exists; safetensors and JSON files in it belong to the method.
        method: name of a registered method with a decoding.
        options: options of the decoding, as JSON values.
        **helpers: the other checkpoints by name.

    Raises:
        UsageError: a part has other tokens than the target, or no readable weights.
    """
    parts = {TARGET: job.target, **helpers}
    for path in parts.values():
        check_weights(path)
    configs = {name: load_config(path) for name, path in parts.items()}
    texts = [config.get_text_config(decoder=True) for config in configs.values()]
    contexts = [length for text in texts if (length := getattr(text, "max_position_embeddings", None)) is not None]
    file_names = sorted(path.name for pattern in ("*.safetensors", "*.json") for path in output.glob(pattern))
    references = {}
    for name, path in parts.items():
        folder = Path(os.path.relpath(path.resolve(), output.resolve())).as_posix()
        references[name] = CheckpointReference(folder=folder, sha256=digests(path)).to_dict()
    config = CompositeConfig(
        method=method,
        options=dict(options),
        parts=references,
        files={name: file_sha256(output / name) for name in file_names},
        vocab_size=common_vocabulary_of(parts),
        max_position_embeddings=min(contexts, default=None),
        **{name: value for name in TARGET_FIELDS if (value := getattr(texts[0], name, None)) is not None},
    )
    job.tokenizer.save_pretrained(output)
    config.save_pretrained(output)


def common_vocabulary_of(paths: Mapping[str, Path]) -> int:
    """Return the width of the vocabulary that checkpoints share, by part; see `common_vocabulary`."""
    widths = {part: vocabulary_width(load_config(path)) for part, path in paths.items()}
    return common_vocabulary(widths, {part: load_tokenizer(path) for part, path in paths.items()}, paths)


def _check_finite(
    logits: Float[Tensor, "batch kept vocab"], attention_mask: Int[Tensor, "batch past_and_tokens"] | None
) -> None:
    finite = logits.detach().isfinite().all(dim=-1)
    if attention_mask is not None:
        # Logits after a padding token are never read.
        finite = finite | (attention_mask[:, -logits.shape[1] :] == 0).to(finite.device)
    check(finite.all(), "a logit of the baseline is not finite (a helper overflowed); nothing is answered")
