"""Experts of a remote target, from a bundle (without its target) or from checkpoints, and their shift of its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.checkpoint import (
    CheckpointReference,
    adapter_base,
    check_different,
    check_same_vocabulary,
    check_tokenizer,
    check_weights,
    digests,
    is_adapter,
    load_model,
    load_tokenizer,
    vocabulary_sha256,
)
from divdec.decoding.cache import can_roll_back
from divdec.errors import UsageError
from divdec.experts.combined import CombinedExperts, NoExperts
from divdec.experts.protocol import Experts
from divdec.fail_closed import check_divergence, check_vocabulary
from divdec.passes import positions_of
from divdec.runs import file_sha256
from divdec.steering import Steering
from divdec.takedowns.correction import TakedownCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    device: str = "cpu"
    """Device of the auxiliaries."""
    vocab_size: int | None = None
    """Size of the steered vocabulary; the experts' by default."""
    base: str | None = None
    """Checkpoint that both auxiliaries adapt, if they are LoRA adapters."""


@dataclasses.dataclass(frozen=True)
class LoadedExperts:
    """Parts of a `RemoteTarget` besides the provider."""

    tokenizer: PreTrainedTokenizerBase
    experts: Experts
    takedowns: TakedownCorrection | None
    """Registry of takedown requests to follow."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer, the tokenizer's own first."""
    max_length: int | None
    """Most tokens that the experts can read."""
    vocab_size: int
    """Size of the steered vocabulary, padding included. A rank rule counts all of it."""


def sources_from_bundle(bundle: str, device: str = "cpu") -> tuple[ExpertSources, Steering]:
    """Return the experts and the rule of a bundle; the target's weights are not needed.

    Raises:
        UsageError: the folder is no bundle, or a part of it is missing or has changed.
    """
    from divdec.configuration import AUXILIARIES, BASE
    from divdec.model.loading import find_bundle, read_config, weight_of

    folder = find_bundle(bundle)
    config = read_config(folder)
    paths: dict[str, str] = {}
    for name in (*AUXILIARIES, BASE):
        if getattr(config, name) is not None:
            reference = CheckpointReference.from_dict(getattr(config, name), name)
            path = reference.resolve(folder, weights=True)
            reference.verify(path, name)
            paths[name] = str(path)
    counted: dict[str, Any] = {name: getattr(config, name) or {} for name in ("ngram", "registry")}
    folders = {name: str((folder / fields["folder"]).resolve()) for name, fields in counted.items() if fields}
    sources = ExpertSources(
        str(folder), paths.get("retain_auxiliary"), paths.get("forget_auxiliary"), folders.get("ngram"),
        folders.get("registry"), weight_of(counted["ngram"], "ngram"), config.bridge is not None,
        device, config.vocab_size, paths.get(BASE),
    )  # fmt: skip
    return sources, Steering.from_dict(config.steering or {})


def load_experts(sources: ExpertSources) -> LoadedExperts:
    """Load tokenizer and experts.

    Raises:
        UsageError: a part is missing, corrupt or of another tokenizer, or there is nothing to steer with.
    """
    from divdec.experts.ngram_fit import describe_pair, load_pair

    path = CheckpointReference.parse(sources.tokenizer).resolve(Path(), weights=False)
    tokenizer = load_tokenizer(path)
    digest = vocabulary_sha256(tokenizer)
    pairs: list[tuple[Experts, float]] = []
    longest, takedowns = None, None
    if sources.retain is not None or sources.forget is not None:
        experts, longest = _load_pair(sources, path, tokenizer)
        pairs.append((experts, 1.0))
    if sources.ngram is not None:
        folder = Path(sources.ngram).expanduser()
        check_tokenizer(folder, describe_pair(folder)["tokenizer"], digest)
        pairs.append((load_pair(folder), sources.ngram_weight))
    if sources.registry is not None:
        folder = Path(sources.registry).expanduser()
        takedowns = TakedownCorrection(folder)
        check_tokenizer(folder, takedowns.tokenizer_sha256, digest)
    if pairs:
        experts = pairs[0][0] if len(pairs) == 1 and pairs[0][1] == 1 else CombinedExperts(pairs)
    elif takedowns is not None:
        experts = NoExperts(takedowns.vocab_size)
    else:
        raise UsageError(
            "nothing would steer the target: give a bundle, --retain-auxiliary and --forget-auxiliary, --ngram or "
            "--registry"
        )
    width = sources.vocab_size or min(part.vocab_size for part in (experts, takedowns) if part is not None)
    return LoadedExperts(tokenizer, experts, takedowns, _find_eos_token_ids(path, tokenizer), longest, width)


def source_digests(sources: ExpertSources, loaded: LoadedExperts) -> dict[str, Any]:
    """Return digests of everything that decides the shift of the logits, for the fingerprint of a run.

    The registry's is that of its present state.
    """
    from divdec.experts.ngram_fit import DESCRIPTION

    tokenizer = CheckpointReference.parse(sources.tokenizer).resolve(Path(), weights=False)
    auxiliaries = [
        CheckpointReference.parse(text).resolve(Path(), weights=True)
        for text in (sources.retain, sources.forget, sources.base)
        if text is not None
    ]
    return {
        **dataclasses.asdict(dataclasses.replace(sources, device="cpu")),
        "tokenizer files": digests(tokenizer, weights=False),
        "auxiliaries' files": [digests(folder) for folder in auxiliaries],
        "ngram files": None if sources.ngram is None else file_sha256(Path(sources.ngram).expanduser() / DESCRIPTION),
        "registry state": None if loaded.takedowns is None else loaded.takedowns.state_digest(),
        "end of answers": loaded.eos_token_ids,
    }


def _load_pair(
    sources: ExpertSources, tokenizer_path: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[Experts, int | None]:
    """Load the auxiliaries, and return them with the most tokens that they can read."""
    from divdec.bridge.pair import BridgedPair
    from divdec.experts.adapters import AdapterPair
    from divdec.experts.neural import NeuralPair

    if sources.retain is None or sources.forget is None:
        raise UsageError("a pair is made of both: give --retain-auxiliary and --forget-auxiliary")
    references = [CheckpointReference.parse(text) for text in (sources.retain, sources.forget)]
    check_different(*references)
    paths = {
        name: reference.resolve(Path(), weights=True)
        for name, reference in zip(("retain", "forget"), references, strict=True)
    }
    base = sources.base or (adapter_base(paths["retain"]) if is_adapter(paths["retain"]) else None)
    checkpoints = paths
    if base is not None:
        checkpoints = {"base": CheckpointReference.parse(base).resolve(Path(), weights=True)}
    for folder in checkpoints.values():
        check_weights(folder)
    tokenizers = {name: load_tokenizer(folder) for name, folder in checkpoints.items()}
    models = [load_model(folder, device_map=sources.device) for folder in checkpoints.values()]
    pair = NeuralPair(*models) if base is None else AdapterPair.load(models[0], paths["retain"], paths["forget"])
    if sources.bridge:
        check_same_vocabulary(tokenizers, checkpoints)
        bridged = BridgedPair(
            pair.retain, pair.forget, target_tokenizer=tokenizer, auxiliary_tokenizer=next(iter(tokenizers.values())),
            target_width=len(tokenizer),
        )  # fmt: skip
        return bridged, None
    check_same_vocabulary({"provider": tokenizer, **tokenizers}, {"provider": tokenizer_path, **checkpoints})
    limits = [getattr(model.config, "max_position_embeddings", None) for model in models]
    return pair, min((limit for limit in limits if limit), default=None)


def _find_eos_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    from transformers import GenerationConfig

    ends: Any = None
    if (path / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    if isinstance(tokenizer.eos_token_id, int):
        ends.insert(0, tokenizer.eos_token_id)
    if not ends:
        raise UsageError(f"{path}: the tokenizer names no token that ends an answer")
    return tuple(dict.fromkeys(ends))


class SteeringContext:
    """The experts' cache of one sequence, which grows and is sometimes shortened."""

    def __init__(self, loaded: LoadedExperts, steering: Steering) -> None:
        """Start with an empty sequence; a registry is followed in its present state."""
        self._loaded, self._steering = loaded, steering
        self._size = min(loaded.vocab_size, len(loaded.tokenizer))
        self._eligible = steering.eligible(loaded.vocab_size)
        self._cache = loaded.experts.new_cache()
        self._takedown_cache = None if loaded.takedowns is None else loaded.takedowns.new_cache()
        self._ids: list[int] = []

    @torch.inference_mode()
    def logit_shift(self, ids: Sequence[int], last: int = 1) -> Float[Tensor, "last vocab"]:
        """Return what the rule adds to the target's logits after each of the last tokens, in float64.

        Args:
            ids: the whole sequence.
            last: number of positions, from the end.

        Raises:
            UsageError: the sequence is longer than the experts can read.
            FailedClosed: the divergence is not finite.
        """
        longest, width = self._loaded.max_length, self._loaded.vocab_size
        if longest is not None and len(ids) > longest:
            raise UsageError(f"{len(ids)} tokens are too many for {longest} positions of the auxiliaries")
        pairs = enumerate(zip(ids, self._ids, strict=False))
        common = next((index for index, pair in pairs if pair[0] != pair[1]), len(self._ids))
        start = min(len(ids) - last, common)
        self._crop(start)
        new = torch.tensor([list(ids[start:])])
        check_vocabulary(new, width, "the text")
        self._ids = list(ids)
        divergence = self._loaded.experts.divergence(new, None, positions_of(new, None, start), self._cache, last)
        divergence = divergence[0, :, :width].cpu()
        check_divergence(divergence)
        correction = torch.zeros_like(divergence)
        if (takedowns := self._loaded.takedowns) is not None:
            correction = takedowns.correction(new, None, self._takedown_cache, last)[0, :, :width].cpu()
            check_divergence(correction)
        return self._steering.apply(correction, divergence, self._eligible)[:, : self._size].double()

    def _crop(self, length: int) -> None:
        removed = len(self._ids) - length
        if removed and self._takedown_cache is not None:
            self._takedown_cache.crop(-removed)
        if removed and all(map(can_roll_back, self._cache.layers)):
            self._cache.crop(-removed)
        elif removed:  # a sliding window or a recurrent state: the sequence is read anew
            self._cache = self._loaded.experts.new_cache()
            if length:
                ids = torch.tensor([self._ids[:length]])
                self._loaded.experts.divergence(ids, None, positions_of(ids, None, 0), self._cache, 1)
        self._ids = self._ids[:length]
