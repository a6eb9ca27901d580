"""A pair of auxiliaries with another tokenizer than the target's (paper, section 3.1).

At every one of the target's tokens the auxiliaries have read exactly the text up to there, tokenised as they would
tokenise it; so what is scored token by token is what generation uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from divdec.bridge.bridge_cache import BridgeCache, BridgeLayer, PairMemo, keeps_memo
from divdec.bridge.common_prefix import common_length
from divdec.bridge.context import Context, ContextReader, View
from divdec.bridge.divergence import Divergence
from divdec.errors import UsageError
from divdec.experts.neural import check_part, device_of, logit_width, same_weights, uses_gradient_checkpointing
from divdec.experts.protocol import own_cache
from divdec.experts.token_cache import PADDING
from divdec.runs import cache_folder

# Positions whose last words are tokenised differently at the end of the text are answered this many at a time,
# fewer when what they have read is long: their keys and values are copied.
_ROWS, _SLOTS = 64, 1 << 15


class BridgedPair(nn.Module):
    """Retain auxiliary q and forget auxiliary p, which share a tokenizer of their own.

    Args:
        retain: retain auxiliary, q.
        forget: forget auxiliary, p.
        target_tokenizer: the target's tokenizer.
        auxiliary_tokenizer: that of both auxiliaries.
        target_width: number of logits that the target gives.
        heal: let the auxiliaries go back over their last token where it could become a longer one.
        center: what counts as no divergence. `median`: what most tokens have; `log_softmax`: the same probability;
            `none`: the difference of the logits as they are.
        cache_dir: where vocabulary maps are kept; divdec's cache folder by default.

    Raises:
        UsageError: the auxiliaries are the same model, or a tokenizer does not fit or does not say which bytes its
            tokens stand for.
    """

    def __init__(
        self,
        retain: PreTrainedModel,
        forget: PreTrainedModel,
        *,
        target_tokenizer: Any,
        auxiliary_tokenizer: Any,
        target_width: int,
        heal: bool = False,
        center: Literal["median", "none", "log_softmax"] = "median",
        cache_dir: Path | None = None,
    ) -> None:
        super().__init__()
        check_part("retain auxiliary", retain)
        check_part("forget auxiliary", forget)
        if retain is forget or same_weights(retain, forget):
            raise UsageError("retain auxiliary and forget auxiliary are the same model: nothing would be forgotten")
        self.retain = retain
        self.forget = forget
        self.auxiliary_tokenizer = auxiliary_tokenizer
        self.vocab_size = target_width
        self.heal = heal
        self._reader = ContextReader(target_tokenizer, auxiliary_tokenizer)
        width = min(logit_width(retain), logit_width(forget))
        known = len(self._reader.auxiliary.bytes)
        if known > width:
            raise UsageError(
                f"the auxiliaries' tokenizer has {known} tokens, but they have logits for {width}: give the tokenizer "
                "that they were trained with"
            )
        self._divergence = Divergence(
            target_tokenizer,
            self._reader.auxiliary,
            target_width,
            center=center,
            folder=cache_dir or cache_folder() / "vocabulary_maps",
        )
        self.map = self._divergence.map(False, False)
        self._limit = min((limit for model in (retain, forget) if (limit := _max_positions(model))), default=None)
        self._keeps = all(
            keeps_memo(model, "position_ids" in inspect.signature(type(model).forward).parameters)
            for model in (retain, forget)
        )

    def new_cache(self) -> BridgeCache:
        """An empty cache, as long as the target's."""
        return BridgeCache()

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """ℓ_q − ℓ_p over the target's vocabulary; see `divdec.experts.protocol.Experts.divergence`.

        Raises:
            UsageError: a text has more tokens, to the auxiliaries, than they have positions.
        """
        held = own_cache(cache, BridgeCache)
        layer = BridgeLayer() if held is None else held.layer
        tokens = layer.extend(input_ids, attention_mask)
        if layer.memo is None:
            layer.contexts = [Context(self._reader) for _ in tokens]
            layer.memo = PairMemo(
                (self.retain, self.forget), len(tokens), self._keeps and not uses_gradient_checkpointing(self)
            )
        kept = min(logits_to_keep or input_ids.shape[1], input_ids.shape[1])
        places: list[tuple[int, int]] = []  # row and column of each view
        views: list[View] = []
        for row, context in enumerate(layer.contexts):
            real = tokens[row] != PADDING
            counts = real.cumsum(0)[-kept:].tolist()
            columns = [column for column in range(kept) if real[-kept:][column]]
            views += context.views(tokens[row][real].tolist(), [counts[column] for column in columns])
            places += [(row, column) for column in columns]
        self._check_length(views)
        result = torch.zeros(len(tokens), kept, self.vocab_size, device=self._device)
        rows = [row for row, _ in places]
        for chosen, retain, forget in self._logits(layer.memo, rows, views):
            found = self._divergence(retain, forget, [views[place] for place in chosen], self.heal)
            where = torch.tensor([places[place] for place in chosen], device=result.device)
            result[where[:, 0], where[:, 1]] = found.to(result.device)
        return result

    @property
    def _device(self) -> torch.device:
        return device_of(self.retain)

    def _check_length(self, views: Sequence[View]) -> None:
        longest = max((len(view.ids) for view in views), default=0)
        if self._limit is not None and longest > self._limit:
            raise UsageError(
                f"the text has {longest} tokens in the auxiliaries' tokenizer, which have {self._limit} positions; "
                "shorten it, or take auxiliaries with more"
            )

    def _logits(
        self, memo: PairMemo, rows: Sequence[int], views: Sequence[View]
    ) -> Iterator[tuple[list[int], Float[Tensor, "views back width"], Float[Tensor, "views back width"]]]:
        """The logits that each view needs: after its last token, and with healing also before it.

        A view whose tokens are the beginning of what is read at the row's last position is answered together with
        that; the others go on from what they have in common with it.

        Yields:
            Some views' places, and both models' logits for them.
        """
        back = 2 if self.heal else 1
        held = memo.ids
        last = {row: view.ids for row, view in zip(rows, views, strict=True)}
        kept = [len(ids) for ids in held]
        added: list[list[int]] = [[] for _ in held]
        for row, ids in last.items():
            kept[row] = min(common_length(held[row], ids), max(len(ids) - back, 0))
        together, apart = [], []
        for place, (row, view) in enumerate(zip(rows, views, strict=True)):
            if common_length(view.ids, last[row]) == len(view.ids):
                together.append(place)
                kept[row] = min(kept[row], max(len(view.ids) - back, 0))
            else:
                apart.append(place)
        for row, ids in last.items():
            added[row] = ids[kept[row] :]
        if not views:
            return
        columns = max(len(last[rows[place]]) - len(views[place].ids) for place in together) + back
        columns = min(columns, max(map(len, added)))
        retain, forget = memo.feed(kept, added, columns)
        columns = retain.shape[1]
        for start in range(0, len(together), _ROWS):
            chosen = together[start : start + _ROWS]
            ends = [columns - 1 - len(last[rows[place]]) + len(views[place].ids) for place in chosen]
            where = [rows[place] for place in chosen]
            yield chosen, _picked(retain, where, ends, back), _picked(forget, where, ends, back)
        del retain, forget
        for chosen in _chunks(apart, views):
            lengths = [
                min(common_length(memo.ids[rows[place]], views[place].ids), max(len(views[place].ids) - back, 0))
                for place in chosen
            ]
            fork = memo.fork([rows[place] for place in chosen], lengths)
            tails = [views[place].ids[length:] for place, length in zip(chosen, lengths, strict=True)]
            found = fork.feed(lengths, tails, min(back, max(map(len, tails))))
            ends = [found[0].shape[1] - 1] * len(chosen)
            where = range(len(chosen))
            yield chosen, _picked(found[0], where, ends, back), _picked(found[1], where, ends, back)


def _picked(
    logits: Float[Tensor, "rows kept width"], rows: Sequence[int], ends: Sequence[int], back: int
) -> Float[Tensor, "views back width"]:
    """The logits at the given columns and, where two are wanted, before them."""
    columns = torch.tensor([[max(end - step, 0) for step in reversed(range(back))] for end in ends])
    index = torch.tensor(list(rows))[:, None]
    return logits[index.to(logits.device), columns.to(logits.device)]


def _chunks(places: list[int], views: Sequence[View]) -> Iterator[list[int]]:
    """Views of similar length together, as many as may be copied at a time."""
    chunk: list[int] = []
    for place in sorted(places, key=lambda place: len(views[place].ids)):
        if chunk and (len(chunk) == _ROWS or (len(chunk) + 1) * len(views[place].ids) > _SLOTS):
            yield chunk
            chunk = []
        chunk.append(place)
    if chunk:
        yield chunk


def _max_positions(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
