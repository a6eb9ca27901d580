"""Experts of a remote target, from a bundle without its target, and their shift of its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.checkpoint import check_same_vocabulary, load_model, load_tokenizer
from divdec.data.formatting import common_prefix_length
from divdec.decoding.cache import can_roll_back
from divdec.errors import UsageError, first_line
from divdec.experts.combined import NoExperts
from divdec.experts.protocol import Experts
from divdec.fail_closed import check_divergence, check_vocabulary
from divdec.model.loading import Bundle, load_experts
from divdec.passes import positions_of
from divdec.steering import Steering
from divdec.takedowns.correction import TakedownCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    @classmethod
    def load(cls, bundle: Bundle, device: str = "cpu") -> LoadedExperts:
        """Load the tokenizer and experts of a bundle that was opened without its target.

        Raises:
            UsageError: a part is missing, corrupt or of another tokenizer than the provider's.
            FailedClosed: the registry is damaged.
        """
        tokenizer = load_tokenizer(bundle.folder)
        checkpoints = {part: path for part, path in bundle.paths.items() if part not in bundle.adapters}
        bridged = bundle.config.bridge is not None
        if not bridged:
            tokenizers = {part: load_tokenizer(path) for part, path in checkpoints.items()}
            check_same_vocabulary({"provider": tokenizer, **tokenizers}, {"provider": bundle.folder, **checkpoints})
        models = {part: load_model(path, device_map=device) for part, path in checkpoints.items()}
        experts, takedowns = load_experts(bundle, models), bundle.load_takedowns()
        if experts is None:
            assert takedowns is not None, "nothing would steer the target"
            experts = NoExperts(takedowns.vocab_size)
        limits = [getattr(model.config, "max_position_embeddings", None) for model in models.values() if not bridged]
        width = min(part.vocab_size for part in (experts, takedowns) if part is not None)
        bundle.check_vocab_size([width, bundle.config.vocab_size])
        return cls(
            tokenizer, experts, takedowns, _find_eos_token_ids(bundle.folder, tokenizer),
            min((limit for limit in limits if limit), default=None), bundle.config.vocab_size,
        )  # fmt: skip


def _find_eos_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    from transformers import GenerationConfig

    ends: Any = None
    if (path / "generation_config.json").is_file():
        try:
            ends = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: generation_config.json cannot be read ({first_line(error)})") from None
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
        start = min(len(ids) - last, common_prefix_length(self._ids, list(ids)))
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
