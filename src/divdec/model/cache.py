"""One cache for target, experts and takedowns together: what is done to it is done to all of them, or to none."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache

from divdec.errors import FailedClosed, UsageError
from divdec.experts.fixed_cache import FixedCache
from divdec.experts.forward import length_of, lengths_of
from divdec.experts.shifting import can_roll_back, can_shift, holds_tokens, take_columns


class DivergenceCache(Cache):
    """The caches of target, experts and takedowns, of equal length at all times.

    Its layers are those of its parts, so that reordering, repeating and selecting by batch, resetting and
    cropping reach every model. `owner` tells steered models apart: the keys and values of one mean nothing to
    another, nor to a copy of it, which may be changed.
    """

    def __init__(self, target: Cache, experts: Cache, owner: str, takedowns: Cache | None = None) -> None:
        super().__init__(layers=[*target.layers, *experts.layers, *(takedowns.layers if takedowns else ())])
        self.owner = owner
        self.target = target
        self.experts = experts
        self.takedowns = takedowns
        self.lent: list[FixedCache] = []
        """Parts that go to the next answer once this one is given, as nobody else holds them."""

    def check_length(self) -> int:
        """The number of tokens held.

        Raises:
            FailedClosed: the parts hold different numbers of tokens; the divergence would then belong to
                another context than the target's logits.
        """
        lengths = [length_of(self.target), *lengths_of(self.experts)]
        if self.takedowns is not None:
            lengths.append(length_of(self.takedowns))
        if len(set(lengths)) > 1:
            raise FailedClosed(
                f"the caches of target and experts hold different numbers of tokens {lengths}: "
                "change them only through DivergenceCache"
            )
        return lengths[0]

    def check_rows(self, rows: int) -> None:
        """Refuse to go on with another number of sequences than the cache holds.

        Raises:
            UsageError: names both numbers.
        """
        states = (getattr(layer, "keys", None) for layer in self.target.layers)
        held = next((len(keys) for keys in states if isinstance(keys, torch.Tensor) and keys.numel()), rows)
        if held != rows:
            raise UsageError(
                f"past_key_values holds {held} sequences, and {rows} are to go on from it (beams and "
                "num_return_sequences included); give as many, or repeat them with batch_repeat_interleave()"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens held, by every layer."""
        return self.check_length()

    @property
    def is_compileable(self) -> bool:
        """No: parts are compiled, each by itself (`divdec.experts.compiled`), and never what joins and checks them."""
        return False

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last tokens (given as transformers does, as a negative number) from every part.

        Raises:
            RuntimeError: one part cannot be rolled back; nothing has then been removed from any.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding of transformers 5.17 gives a tensor
        if tokens_to_remove > 0:
            raise RuntimeError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if tokens_to_remove and not all(can_roll_back(layer) for layer in self.layers):
            raise RuntimeError(
                "the cache of one part (a sliding window or recurrent state) cannot be rolled back; "
                "call activate_past_recording() before the tokens are added"
            )
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row.

        Raises:
            RuntimeError: one part keeps a state whose rows this does not reach.
        """
        self._check_rows()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows.

        Raises:
            RuntimeError: one part keeps a state whose rows this does not reach.
        """
        self._check_rows()
        super().batch_select_indices(indices)

    def _check_rows(self) -> None:
        if not all(map(holds_tokens, self.layers)):
            raise RuntimeError("the cache of one part keeps a recurrent state, whose rows cannot be selected")

    @property
    def can_shift_rows(self) -> bool:
        """Whether a different number of tokens can be removed from each row."""
        return all(can_shift(layer) for layer in self.layers)

    def shift_rows(self, shifts: Int[Tensor, " batch"], padding: int) -> None:
        """Move each row's tokens to the right, over its last ones, which are lost; the rows still end together.

        What is then at the left of a row that was moved is padding: the mask must say so.

        Args:
            shifts: how many tokens each row loses at its end.
            padding: how many columns are dropped at the left of all rows.

        Raises:
            RuntimeError: one part cannot do that; nothing has then been moved in any.
        """
        if not self.can_shift_rows:
            raise RuntimeError("the cache of one part cannot lose a different number of tokens of each row")
        length = self.check_length()
        columns = torch.arange(padding, length, device=shifts.device)[None] - shifts[:, None]
        columns = columns.clamp(min=0)
        for layer in self.layers:
            take_columns(layer, columns)
