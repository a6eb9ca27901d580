"""Experts for a target whose weights are not at hand: from a bundle, of which the target is not loaded, or from parts.

It fails closed: whatever is missing or does not fit is an error.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.experts.protocol import Experts
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.takedowns.live import Takedowns


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the provider's tokenizer and the experts lie, as folders or hub ids."""

    tokenizer: str
    """The provider's tokenizer: a checkpoint's folder, of which weights are not needed."""
    retain: str | None = None
    """q, which has not seen the forget set."""
    forget: str | None = None
    """p, which has."""
    ngram: str | None = None
    """Folder of an n-gram pair."""
    registry: str | None = None
    """Folder of a registry of takedown requests."""
    ngram_weight: float = 1.0
    """What the divergence of the n-grams is multiplied by."""
    bridge: bool = False
    """The auxiliaries have another tokenizer than the provider."""
    heal: bool = False
    """See `divdec.write_bundle`."""
    device: str = "cpu"
    """Where the auxiliaries run."""
    vocab_size: int | None = None
    """Width of the vocabulary that is steered; the experts' by default."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a `RemoteTarget` is made of, beside the provider."""

    tokenizer: PreTrainedTokenizerBase
    experts: Experts
    takedowns: Takedowns | None
    """The registry of takedown requests that is followed."""
    ends: tuple[int, ...]
    """Tokens that end an answer, the tokenizer's own first."""
    longest: int | None
    """Most tokens that the experts can read."""
    vocab_size: int
    """Width of the vocabulary that is steered."""


def of_bundle(bundle: str, device: str = "cpu", *, verify: bool = True) -> tuple[Sources, Steering]:
    """The experts and the rule that a bundle names; the target's weights need not be there.

    Raises:
        UsageError: it is no bundle, or a part of it is missing or has changed.
    """
    from divdec.model.checkpoint import CheckpointReference
    from divdec.model.configuration import AUXILIARIES
    from divdec.model.loading import find_bundle, read_config, weight_of

    folder = find_bundle(bundle)
    config = read_config(folder)
    places: dict[str, str] = {}
    for part in AUXILIARIES:
        if getattr(config, part) is not None:
            reference = CheckpointReference.from_dict(getattr(config, part), part)
            place = reference.resolve(folder, weights=True)
            if verify:
                reference.verify(place, part)
            places[part] = str(place)
    counted: dict[str, Any] = {name: getattr(config, name) or {} for name in ("ngram", "registry")}
    named = {name: str((folder / found["folder"]).resolve()) for name, found in counted.items() if found}
    bridge = config.bridge if isinstance(config.bridge, dict) else {}
    sources = Sources(
        tokenizer=str(folder),
        retain=places.get("retain_auxiliary"),
        forget=places.get("forget_auxiliary"),
        ngram=named.get("ngram"),
        registry=named.get("registry"),
        ngram_weight=weight_of(counted["ngram"], "ngram"),
        bridge=config.bridge is not None,
        heal=bool(bridge.get("heal", False)),
        device=device,
        vocab_size=config.vocab_size,
    )
    return sources, Steering.from_dict(config.steering or {})


def open_sources(sources: Sources) -> Opened:
    """Load tokenizer and experts.

    Raises:
        UsageError: a part is missing, corrupt or of another tokenizer, or there is nothing to steer with.
    """
    from divdec.experts.combined import CombinedExperts, NoExperts
    from divdec.experts.ngram_folder import describe_pair, load_pair
    from divdec.model.checkpoint import CheckpointReference, check_tokenizer, load_tokenizer, vocabulary_sha256
    from divdec.takedowns.folder import read_description
    from divdec.takedowns.live import Takedowns

    place = CheckpointReference.parse(sources.tokenizer).resolve(Path(), weights=False)
    tokenizer = load_tokenizer(place)
    digest = vocabulary_sha256(tokenizer)
    found: list[tuple[Experts, float]] = []
    longest = None
    if sources.retain is not None or sources.forget is not None:
        experts, longest = _pair(sources, place, tokenizer)
        found.append((experts, 1.0))
    if sources.ngram is not None:
        folder = Path(sources.ngram).expanduser()
        check_tokenizer(folder, describe_pair(folder)["tokenizer"], digest)
        found.append((load_pair(folder), sources.ngram_weight))
    takedowns = None
    if sources.registry is not None:
        folder = Path(sources.registry).expanduser()
        check_tokenizer(folder, read_description(folder)["tokenizer"], digest)
        takedowns = Takedowns(folder)
    if not found and takedowns is None:
        raise UsageError("nothing would steer the target: give a bundle, --retain and --forget, --ngram or --registry")
    if not found:
        assert takedowns is not None
        experts = NoExperts(takedowns.vocab_size)
    else:
        experts = found[0][0] if len(found) == 1 and found[0][1] == 1 else CombinedExperts(found)
    width = sources.vocab_size or min(part.vocab_size for part in (experts, takedowns) if part is not None)
    return Opened(tokenizer, experts, takedowns, _ends(place, tokenizer), longest, width)


def _pair(sources: Sources, tokenizer_place: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[Experts, int | None]:
    from divdec.bridge.bridge import BridgedPair
    from divdec.experts.neural import NeuralPair
    from divdec.model.checkpoint import (
        CheckpointReference,
        check_different,
        check_same_vocabulary,
        check_weights,
        load_model,
        load_tokenizer,
    )

    if sources.retain is None or sources.forget is None:
        raise UsageError("a pair is made of both: give --retain and --forget")
    references = {
        name: CheckpointReference.parse(text) for name, text in (("retain", sources.retain), ("forget", sources.forget))
    }
    check_different(references["retain"], references["forget"])
    places = {name: reference.resolve(Path(), weights=True) for name, reference in references.items()}
    for folder in places.values():
        check_weights(folder)
    tokenizers = {name: load_tokenizer(folder) for name, folder in places.items()}
    models = [load_model(folder, device_map=sources.device) for folder in places.values()]
    if sources.bridge:
        check_same_vocabulary(tokenizers, places)
        pair = BridgedPair(
            *models, target_tokenizer=tokenizer, auxiliary_tokenizer=tokenizers["retain"],
            target_width=len(tokenizer), heal=sources.heal,
        )  # fmt: skip
        return pair, None
    check_same_vocabulary({"provider": tokenizer, **tokenizers}, {"provider": tokenizer_place, **places})
    limits = [getattr(model.config, "max_position_embeddings", None) for model in models]
    return NeuralPair(*models), min((limit for limit in limits if limit), default=None)


def _ends(place: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    from transformers import GenerationConfig

    own = tokenizer.eos_token_id
    ends: Any = None
    if (place / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(place, local_files_only=True).eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    first = [own] if isinstance(own, int) else []
    if not first and not ends:
        raise UsageError(f"{place}: the tokenizer names no token that ends an answer")
    return tuple(dict.fromkeys([*first, *ends]))
