"""What a bundle names, checked and ready for an engine that loads the weights itself. It knows nothing of vLLM."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.experts.forward import stateful_types
from divdec.model.checkpoint import load_config, load_model, load_tokenizer
from divdec.model.configuration import NO_RULE, DivergenceConfig
from divdec.model.loading import (
    find_bundle,
    load_ngrams,
    load_takedowns,
    places_of,
    read_config,
    weight_of,
)
from divdec.model.vocabularies import common_vocabulary, vocabulary_sha256, vocabulary_width
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from divdec.experts.combined import CombinedExperts
    from divdec.experts.correction import Correction

REGISTRY_VARIABLE = "DIVDEC_REGISTRY"


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What an operator can say of a bundle that an engine serves; none of it weakens the steering."""

    registry: str | None = None
    """Folder of a registry of takedown requests that is followed; where the bundle names one, it must be the same."""
    verify: bool = True
    """Compare the SHA-256 of every local weight file with the bundle's."""

    @classmethod
    def from_mapping(cls, given: Any) -> EngineOptions:
        """Read `additional_config["divdec"]`; the registry may also come from the environment (DIVDEC_REGISTRY).

        Raises:
            UsageError: an option is unknown or of the wrong type.
        """
        given = {} if given is None else given
        known = {field.name for field in dataclasses.fields(cls)} | {"parts"}
        if not isinstance(given, Mapping) or set(given) - known:
            raise UsageError(f"additional_config['divdec'] is {given!r}; accepted: 'registry' (a folder), 'verify'")
        registry = given.get("registry") or os.environ.get(REGISTRY_VARIABLE) or None
        verify = given.get("verify", True)
        if not isinstance(registry, str | None) or not isinstance(verify, bool):
            raise UsageError(f"additional_config['divdec'] is {given!r}; accepted: 'registry' (a folder), 'verify'")
        # The engine's processes may run elsewhere.
        return cls(None if registry is None else str(Path(registry).expanduser().absolute()), verify)


@dataclasses.dataclass(frozen=True)
class BundleParts:
    """A bundle whose parts exist and fit; no weights are in memory."""

    folder: Path
    config: DivergenceConfig
    places: Mapping[str, Path]
    """The checkpoint of each part, the target's first."""
    configs: Mapping[str, PreTrainedConfig]
    """The configuration of each part's language model."""
    counted: CombinedExperts | None
    """n-grams, which need nothing but the last tokens; None where the bundle names none."""
    takedowns: Correction | None
    """The registry that is followed, which needs no more."""

    @property
    def steering(self) -> Steering:
        """The rule."""
        return Steering.from_dict(self.config.steering or {})

    @property
    def context_length(self) -> int:
        """How many of the last tokens n-grams and registry look at; 0 without them."""
        counted: list[Any] = [*(() if self.counted is None else self.counted.parts), self.takedowns]
        return max((part.order - 1 for part in counted if part is not None), default=0)


def read_parts(name_or_path: str, revision: str | None, options: EngineOptions) -> BundleParts:
    """Find and check what a bundle names, as `DivergenceForCausalLM.from_pretrained` does.

    Args:
        name_or_path: a bundle's folder or hub id.
        revision: branch, tag or commit of a hub id.
        options: what the operator says.

    Raises:
        UsageError: a part is missing, has changed, is corrupt or does not fit the others, or the bundle is bridged.
        FailedClosed: the registry is damaged.
    """
    folder = find_bundle(name_or_path, revision)
    config = read_config(folder)
    if config.bridge is not None:
        raise UsageError(
            f"{folder}: auxiliaries with another tokenizer than the target's (bridge) cannot be served by vLLM; "
            "serve the bundle without --engine vllm"
        )
    if not config.steering:
        raise UsageError(f"{folder}: the bundle names no steering; write it again with `divdec bundle`")
    if type(config.vocab_size) is not int or config.vocab_size < 1:
        raise UsageError(f"{folder}: vocab_size is {config.vocab_size!r}; write the bundle again with `divdec bundle`")
    steering = Steering.from_dict(config.steering)
    steering.check_vocabulary(config.vocab_size)
    places = places_of(folder, config, options.verify, local_files_only=False)
    configs = {part: load_config(place) for part, place in places.items()}
    tokenizers = {part: load_tokenizer(place) for part, place in places.items()}
    widths = {part: vocabulary_width(part_config) for part, part_config in configs.items()}
    narrowest = common_vocabulary(widths, tokenizers, places)
    counted = _counted(folder, config, options, vocabulary_sha256(tokenizers["target"]))
    takedowns = load_takedowns(folder, config, None if options.registry is None else Path(options.registry))
    narrowest = min([narrowest, *(part.vocab_size for part in (counted, takedowns) if part is not None)])
    if steering.rule == "rank" and config.retain_auxiliary is None and counted is None:
        raise UsageError(NO_RULE)
    if narrowest != config.vocab_size:
        raise UsageError(
            f"{folder}: the bundle's common vocabulary has {config.vocab_size} tokens, that of its parts "
            f"{narrowest}; write the bundle again"
        )
    texts = {part: part_config.get_text_config(decoder=True) for part, part_config in configs.items()}
    for part, text in texts.items():
        if text is not configs[part]:
            raise UsageError(f"{part} ({places[part]}) is no plain language model; vLLM steers models of text alone")
    return BundleParts(folder, config, places, texts, counted, takedowns)


def check_whole(parts: BundleParts) -> None:
    """Refuse a recurrent model, and a checkpoint that lacks weights, which an engine might leave as memory had them.

    Only the headers of the files are read.

    Raises:
        UsageError: names a weight, or a model with a recurrent state, which was not tried.
    """
    for part, place in parts.places.items():
        try:
            model = load_model(place, device_map="meta")
        except UsageError as error:
            raise UsageError(f"{part}: {error}") from None
        if found := stateful_types(model):
            raise UsageError(
                f"{part} ({place}) has a recurrent state ({found[0]}), which was not tried on vLLM; serve it without"
            )


def head_size_of(config: PreTrainedConfig) -> int:
    """Size of a model's attention heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _counted(folder: Path, config: DivergenceConfig, options: EngineOptions, tokenizer: str) -> CombinedExperts | None:
    from divdec.experts.combined import CombinedExperts

    if config.ngram is None:
        return None
    if not isinstance(config.ngram, dict):
        raise UsageError(f"{folder}: ngram is {config.ngram!r}; write the bundle again")
    experts = load_ngrams(folder, config.ngram, tokenizer, options.verify)
    return CombinedExperts([(experts, weight_of(config.ngram, "ngram"))])
