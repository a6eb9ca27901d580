"""Loading experts and tokenizer for a remote target, from a bundle (without its target) or from checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.experts.protocol import Experts
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.takedowns.correction import TakedownCorrection


@dataclasses.dataclass(frozen=True)
class ExpertSources:
    """Provider's tokenizer and experts, as folders or hub ids."""

    tokenizer: str
    """The provider's tokenizer: a checkpoint, whose weights are not needed."""
    retain: str | None = None
    """q, the auxiliary that has not seen the forget set."""
    forget: str | None = None
    """p, the auxiliary that has."""
    ngram: str | None = None
    """Folder of an n-gram pair."""
    registry: str | None = None
    """Folder of a registry of takedown requests."""
    ngram_weight: float = 1.0
    """Weight of the n-grams' divergence."""
    bridge: bool = False
    """The auxiliaries have another tokenizer than the provider."""
    token_healing: bool = False
    """See `divdec.write_bundle`."""
    device: str = "cpu"
    """Device of the auxiliaries."""
    vocab_size: int | None = None
    """Size of the steered vocabulary; the experts' by default."""


@dataclasses.dataclass(frozen=True)
class LoadedExperts:
    """What a `RemoteTarget` needs besides the provider."""

    tokenizer: PreTrainedTokenizerBase
    experts: Experts
    takedowns: TakedownCorrection | None
    """Registry of takedown requests to follow."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer, the tokenizer's own first."""
    max_length: int | None
    """Most tokens that the experts can read."""
    vocab_size: int
    """Size of the steered vocabulary."""


def sources_from_bundle(bundle: str, device: str = "cpu", *, verify: bool = True) -> tuple[ExpertSources, Steering]:
    """Return the experts and the rule of a bundle; the target's weights are not needed.

    Raises:
        UsageError: the folder is no bundle, or a part of it is missing or has changed.
    """
    from divdec.model.checkpoint import CheckpointReference
    from divdec.model.configuration import AUXILIARIES
    from divdec.model.loading import find_bundle, read_config, weight_of

    folder = find_bundle(bundle)
    config = read_config(folder)
    paths: dict[str, str] = {}
    for part in AUXILIARIES:
        if getattr(config, part) is not None:
            reference = CheckpointReference.from_dict(getattr(config, part), part)
            path = reference.resolve(folder, weights=True)
            if verify:
                reference.verify(path, part)
            paths[part] = str(path)
    counted: dict[str, Any] = {name: getattr(config, name) or {} for name in ("ngram", "registry")}
    named = {name: str((folder / pairs["folder"]).resolve()) for name, pairs in counted.items() if pairs}
    bridge = config.bridge if isinstance(config.bridge, dict) else {}
    sources = ExpertSources(
        tokenizer=str(folder),
        retain=paths.get("retain_auxiliary"),
        forget=paths.get("forget_auxiliary"),
        ngram=named.get("ngram"),
        registry=named.get("registry"),
        ngram_weight=weight_of(counted["ngram"], "ngram"),
        bridge=config.bridge is not None,
        token_healing=bool(bridge.get("token_healing", False)),
        device=device,
        vocab_size=config.vocab_size,
    )
    return sources, Steering.from_dict(config.steering or {})


def load_experts(sources: ExpertSources) -> LoadedExperts:
    """Load tokenizer and experts.

    Raises:
        UsageError: a part is missing, corrupt or of another tokenizer, or there is nothing to steer with.
    """
    from divdec.experts.combined import CombinedExperts, NoExperts
    from divdec.experts.ngram_fit import describe_pair, load_pair
    from divdec.model.checkpoint import CheckpointReference, check_tokenizer, load_tokenizer, vocabulary_sha256
    from divdec.takedowns.correction import TakedownCorrection

    path = CheckpointReference.parse(sources.tokenizer).resolve(Path(), weights=False)
    tokenizer = load_tokenizer(path)
    digest = vocabulary_sha256(tokenizer)
    pairs: list[tuple[Experts, float]] = []
    longest = None
    if sources.retain is not None or sources.forget is not None:
        experts, longest = _load_pair(sources, path, tokenizer)
        pairs.append((experts, 1.0))
    if sources.ngram is not None:
        folder = Path(sources.ngram).expanduser()
        check_tokenizer(folder, describe_pair(folder)["tokenizer"], digest)
        pairs.append((load_pair(folder), sources.ngram_weight))
    takedowns = None
    if sources.registry is not None:
        folder = Path(sources.registry).expanduser()
        takedowns = TakedownCorrection(folder)
        check_tokenizer(folder, takedowns.tokenizer_sha256, digest)
    if not pairs and takedowns is None:
        raise UsageError("nothing would steer the target: give a bundle, --retain and --forget, --ngram or --registry")
    if not pairs:
        assert takedowns is not None
        experts = NoExperts(takedowns.vocab_size)
    else:
        experts = pairs[0][0] if len(pairs) == 1 and pairs[0][1] == 1 else CombinedExperts(pairs)
    width = sources.vocab_size or min(part.vocab_size for part in (experts, takedowns) if part is not None)
    return LoadedExperts(tokenizer, experts, takedowns, _find_eos_token_ids(path, tokenizer), longest, width)


def _load_pair(
    sources: ExpertSources, tokenizer_path: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[Experts, int | None]:
    from divdec.bridge.pair import BridgedPair
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
    paths = {name: reference.resolve(Path(), weights=True) for name, reference in references.items()}
    for folder in paths.values():
        check_weights(folder)
    tokenizers = {name: load_tokenizer(folder) for name, folder in paths.items()}
    models = [load_model(folder, device_map=sources.device) for folder in paths.values()]
    if sources.bridge:
        check_same_vocabulary(tokenizers, paths)
        pair = BridgedPair(
            *models, target_tokenizer=tokenizer, auxiliary_tokenizer=tokenizers["retain"],
            target_width=len(tokenizer), token_healing=sources.token_healing,
        )  # fmt: skip
        return pair, None
    check_same_vocabulary({"provider": tokenizer, **tokenizers}, {"provider": tokenizer_path, **paths})
    limits = [getattr(model.config, "max_position_embeddings", None) for model in models]
    return NeuralPair(*models), min((limit for limit in limits if limit), default=None)


def _find_eos_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    from transformers import GenerationConfig

    own = tokenizer.eos_token_id
    ends: Any = None
    if (path / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    first = [own] if isinstance(own, int) else []
    if not first and not ends:
        raise UsageError(f"{path}: the tokenizer names no token that ends an answer")
    return tuple(dict.fromkeys([*first, *ends]))
