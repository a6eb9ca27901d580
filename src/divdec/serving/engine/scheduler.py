"""Who is read and who goes on: requests join and leave the batch at the boundaries of its steps.

It knows nothing of threads or clients.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence

from divdec.decoding.speculative import Speculation
from divdec.errors import FailedClosed, UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.serving.engine.alone import Alone
from divdec.serving.engine.batch import Batch, Prefill, Told
from divdec.serving.engine.sequence import Running

PART = 512  # tokens of prompts that are read between two steps of the answers
SCORED = 1 << 24  # logits of prompts that are held at a time where all of them are wanted
TRIES = 3  # passes with a sequence in them that may fail before it does, though it could be another's fault
Group = Batch | Alone  # sequences that share a cache
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Counts:
    """What has been done so far."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    """Forward passes."""


class Scheduler:
    """Sequences that wait, those that are being read, and those that are being answered."""

    def __init__(self, model: DivergenceForCausalLM, rows: int, speculation: Speculation | None) -> None:
        self.counts = Counts()
        self._model, self._rows, self._speculation = model, rows, speculation
        # Filled by other threads: a deque's append and popleft are atomic.
        self.waiting: collections.deque[Running] = collections.deque()
        self._reading: Prefill | None = None
        self._groups: list[Group] = []
        self._told: Told = []

    @property
    def running(self) -> int:
        """How many sequences are being read or answered."""
        reading = self._reading
        return sum(len(group.sequences) for group in list(self._groups)) + (len(reading.sequences) if reading else 0)

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self._reading or self._groups)

    def step(self) -> Told:
        """Read a part of a prompt, and go on with every answer."""
        try:
            self._drop_cancelled()
            self._admit()
            self._read()
            for group in list(self._groups):
                self._advance(group)
        except Exception as error:  # of this class itself: whoever waits must hear of it
            _log.exception("the scheduler failed")
            self._fail(self._take_all(), error)
        self._groups = [group for group in self._groups if group.sequences]
        return self._take_told()

    def end(self, error: Exception) -> Told:
        """Give everybody an error."""
        self._fail(self._take_all(), error)
        return self._take_told()

    def _take_told(self) -> Told:
        told, self._told = self._told, []
        return told

    def _take_all(self) -> list[Running]:
        found = [self.waiting.popleft() for _ in range(len(self.waiting))]
        found += self._reading.sequences if self._reading else []
        found += [sequence for group in self._groups for sequence in group.sequences]
        self._groups, self._reading = [], None
        return found

    def _drop_cancelled(self) -> None:
        for sequence in [sequence for sequence in list(self.waiting) if sequence.cancelled]:
            self.waiting.remove(sequence)
        if self._reading and all(sequence.cancelled for sequence in self._reading.sequences):
            self._reading = None
        for group in self._groups:
            self._drop(group, [sequence for sequence in group.sequences if sequence.cancelled])
        self._groups = [group for group in self._groups if group.sequences]

    def _drop(self, group: Group, gone: Sequence[Running]) -> None:
        kept = [sequence for sequence in group.sequences if not any(sequence is other for other in gone)]
        try:
            group.drop(gone)
        except Exception as error:
            group.sequences = []
            self._retry(kept, error)

    def _admit(self) -> None:
        """Begin to read what waits longest, with others that fit beside it."""
        free = self._rows - self.running
        if self._reading is not None or free <= 0 or not self.waiting:
            return
        waiting = list(self.waiting)
        first = waiting[0]
        alone = not self._groups and len(waiting) == 1 and Alone.suits(first)
        chosen, longest = [first], len(first.tokens)
        for sequence in waiting[1:free]:
            longest = max(longest, len(sequence.tokens))
            fits = longest * (len(chosen) + 1) <= min(self._part(first), self._part(sequence))
            if not fits or sequence.failures or first.failures:  # what failed is tried alone
                break
            chosen.append(sequence)
        for _ in chosen:
            self.waiting.popleft()
        self.counts.prompt_tokens += sum(len(sequence.prompt) for sequence in chosen if not sequence.failures)
        try:
            if alone and self._speculation is not None:
                self._groups.append(Alone(self._model, first, self._speculation))
            else:
                self._reading = Prefill(self._model, chosen, self._part(first))
        except Exception as error:
            self._retry(chosen, error)

    def _part(self, sequence: Running) -> int:
        """How many tokens of a prompt are read at a time."""
        return max(1, min(PART, SCORED // self._model.vocab_size)) if sequence.wants_all else PART

    def _read(self) -> None:
        if (reading := self._reading) is None:
            return
        self.counts.steps += 1
        try:
            found = reading.step()
        except Exception as error:
            self._reading = None
            self._retry(reading.sequences, error)
            return
        if found is None:
            return
        self._reading = None
        told, batch = found
        self._groups.append(batch)
        self._tell(batch, told)
        for group in self._groups[:-1]:
            if isinstance(group, Batch) and group.is_open and batch.is_open and group.sequences and batch.sequences:
                self._groups.remove(batch)
                sequences = [*group.sequences, *batch.sequences]
                try:
                    group.join(batch)
                except Exception as error:
                    group.sequences = []
                    self._retry(sequences, error)
                return

    def _advance(self, group: Group) -> None:
        if not group.sequences:
            return
        self.counts.steps += 1
        sequences = list(group.sequences)
        try:
            told = group.step()
        except Exception as error:
            # What the cache holds is not known: who is not to blame is read anew, each by itself.
            group.sequences = []
            self._retry(sequences, error)
            return
        self._tell(group, told)

    def _tell(self, group: Group, told: Told) -> None:
        """Keep what was answered, and let those leave whose answer is whole or failed."""
        gone = []
        for sequence, piece in told:
            if isinstance(piece, Exception):
                self._fail([sequence], piece)
                gone.append(sequence)
                continue
            self.counts.generated_tokens += len(piece.tokens)
            self._told.append((sequence, piece))
            if piece.finish_reason is not None:
                gone.append(sequence)
        if gone:
            self._drop(group, gone)

    def _retry(self, sequences: Sequence[Running], error: Exception) -> None:
        """Let each of several try alone: one that fails by itself is to blame."""
        for sequence in sequences:
            sequence.failures += 1
        blamed = [sequence for sequence in sequences if len(sequences) == 1 or sequence.failures >= TRIES]
        self._fail(blamed, error)
        for sequence in reversed(sequences):
            if not any(sequence is other for other in blamed):
                self.waiting.appendleft(sequence)

    def _fail(self, sequences: Sequence[Running], error: Exception) -> None:
        if not isinstance(error, UsageError | FailedClosed | Closing) and sequences:
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            error = FailedClosed("the model failed; nothing is answered unsteered")
        self._told += [(sequence, error) for sequence in sequences]


class Closing(Exception):
    """The engine is shutting down."""
