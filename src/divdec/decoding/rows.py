"""The sequences of a batch that grow at different speeds, shown to processors and criteria as `generate` would.

It knows nothing of models or drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, StoppingCriteriaList

from divdec.decoding.processors import keep_suppressed

# What looks at the scores alone, so that all positions can be processed at once.
_CONTEXT_FREE = frozenset(
    getattr(transformers, name)
    for name in (
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
        "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
)  # fmt: skip


class Rows:
    """Prompts and what has been generated for each, one row a sequence.

    Attributes:
        ids: prompts as given (left-padded), then generated tokens; padding where there is none yet.
        lengths: how many columns of each row are filled.
    """

    def __init__(self, input_ids: Int[Tensor, "batch tokens"], max_length: int, padding: int) -> None:
        self.ids, self.prompt_length = input_ids, input_ids.shape[1]
        self.lengths = [self.prompt_length] * len(input_ids)
        self._max_length, self._padding = max_length, padding
        self._make_room(self.prompt_length + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def last(self, rows: Sequence[int]) -> Int[Tensor, "rows 1"]:
        """The newest token of each row."""
        ends = torch.tensor([self.lengths[row] - 1 for row in rows], device=self.ids.device)
        return self.ids[torch.tensor(rows, device=self.ids.device), ends][:, None]

    def write(self, rows: Sequence[int], tokens: Int[Tensor, "rows columns"], offset: int = 0) -> None:
        """Put tokens behind each row, `offset` after its end, without making it longer."""
        self._make_room(max(self.lengths[row] for row in rows) + offset + tokens.shape[1])
        for place, row in enumerate(rows):
            start = self.lengths[row] + offset
            self.ids[row, start : start + tokens.shape[1]] = tokens[place]

    def extend(self, row: int, tokens: Int[Tensor, " tokens"], written: int) -> None:
        """Make a row longer, and clear what was put behind it before (`written` columns)."""
        start, end = self.lengths[row], self.lengths[row] + len(tokens)
        self._make_room(end)
        self.ids[row, start : start + written] = self._padding
        self.ids[row, start:end] = tokens
        self.lengths[row] = end

    def cut(self, row: int, length: int) -> None:
        """Make a row as short as this, if it is longer."""
        self.ids[row, length : self.lengths[row]] = self._padding
        self.lengths[row] = min(length, self.lengths[row])

    def texts(self, chosen: Sequence[int], length: int) -> Int[Tensor, "batch length"]:
        """The whole batch at a length that the chosen rows have.

        Others may be shorter: in their place a text is shown that there is.
        """
        texts = self.ids[:, :length]
        if len(chosen) == len(texts):
            return texts
        shown = [row if row in chosen or self.lengths[row] >= length else chosen[0] for row in range(len(texts))]
        return texts[torch.tensor(shown, device=texts.device)]

    def _make_room(self, length: int) -> None:
        # In steps: the longest answer that may come is often far longer than the one that does.
        columns = self.ids.shape[1]
        if length > columns:
            wanted = min(max(length, 2 * columns, columns + 64), max(self._max_length, length))
            more = self.ids.new_full((len(self.lengths), wanted - columns), self._padding)
            self.ids = torch.cat([self.ids, more], dim=1)


class Processors:
    """Logits processors, each given the whole batch at one length as `generate` would."""

    def __init__(self, processors: LogitsProcessorList, rows: Rows) -> None:
        # Each as it is: whether a token is left is asked of those that are kept alone (`divdec.sampling`).
        self._processors: Any = LogitsProcessorList(map(self._by_row, processors))
        self._rows = rows
        self._chosen: Sequence[int] = ()
        self.reads_tokens = any(type(processor) not in _CONTEXT_FREE for processor in processors)

    def __call__(
        self,
        rows: Sequence[int],
        logits: Float[Tensor, "rows block vocab"],
        offset: int = 0,
        drafts: Int[Tensor, "rows block"] | None = None,
    ) -> Float[Tensor, "rows block vocab"]:
        """Scores for the tokens that come next in these rows.

        Args:
            rows: which.
            logits: steered, before each token of a block.
            offset: how far the block begins after each row's end.
            drafts: the block's tokens, which stand behind the rows. What follows one that is ruled out is never kept,
                and is not shown to processors: they may know texts that cannot be.
        """
        if not self._processors:
            return logits
        if not self.reads_tokens:
            flat = logits.flatten(0, 1)
            return self._processed(self._rows.ids[:1, :1].expand(len(flat), 1), flat.clone()).view_as(logits)
        found = logits.clone()
        impossible: set[int] = set()
        lengths = [self._rows.lengths[row] + offset for row in rows]
        whole = logits.new_zeros(len(self._rows), logits.shape[-1])
        for length in range(min(lengths), max(lengths) + logits.shape[1]):
            here = [(place, row, length - lengths[place]) for place, row in enumerate(rows)]
            here = [item for item in here if 0 <= item[2] < logits.shape[1] and item[0] not in impossible]
            if not here:
                continue
            places, chosen, columns = (list(column) for column in zip(*here, strict=True))
            given = whole.clone()
            given[chosen] = logits[places, columns]
            self._chosen = chosen
            found[places, columns] = self._processed(self._rows.texts(chosen, length), given)[chosen]
            if drafts is not None:
                proposed = found[places, columns].gather(1, drafts[places, columns].clamp(min=0)[:, None])
                ruled_out = (proposed[:, 0] == -torch.inf) | (drafts[places, columns] < 0)
                impossible |= {place for place, out in zip(places, ruled_out.tolist(), strict=True) if out}
        return found

    def _processed(
        self, texts: Int[Tensor, "some tokens"], scores: Float[Tensor, "some vocab"]
    ) -> Float[Tensor, "some vocab"]:
        suppressed = scores == -torch.inf
        return keep_suppressed(self._processors(texts, scores), suppressed)

    def _by_row(self, processor: Any) -> Any:
        """Ask `prefix_allowed_tokens_fn` about the chosen rows alone, which show their own text."""
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda row, text: allowed(row, text) if row in self._chosen else [0], 1)


class Criteria:
    """Stopping criteria, each asked at every length, with the whole batch, as `generate` would."""

    def __init__(self, criteria: StoppingCriteriaList, rows: Rows) -> None:
        self._criteria = criteria
        self._rows = rows

    def stops(self, starts: dict[int, int], scores: Sequence[Tensor] | None) -> dict[int, int]:
        """The length at which each row is done, of those that are.

        Args:
            starts: the rows that are asked about, and how long each was when it was last asked about.
            scores: the scores so far, one tensor a position, as criteria may want them.
        """
        found: dict[int, int] = {}
        ends = {row: self._rows.lengths[row] for row in starts}
        for length in range(min(starts.values()) + 1, max(ends.values()) + 1):
            here = [row for row, start in starts.items() if start < length <= ends[row] and row not in found]
            if here:
                known = tuple(scores[: length - self._rows.prompt_length]) if scores is not None else None
                done = self._criteria(self._rows.texts(here, length), known).tolist()  # pyright: ignore[reportArgumentType]
                found |= {row: length for row in here if done[row]}
        return found
