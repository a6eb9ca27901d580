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
from divdec.experts.neural import stateful_types
from divdec.experts.protocol import holds_tokens
from divdec.model.modeling import DivergenceForCausalLM
from divdec.serving.engine.alone import Alone
from divdec.serving.engine.batch import Batch, Prefill, Told
from divdec.serving.engine.sequence import Running

PART = 512  # tokens of prompts that are read between two steps of the answers
SCORED = 1 << 24  # logits of prompts that are held at a time where all of them are wanted
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
        self._readings: list[Prefill] = []
        self._apart = _depends_on_others(model)
        self._groups: list[Group] = []
        self._told: Told = []

    @property
    def running(self) -> int:
        """How many sequences are being read or answered."""
        return sum(len(several.sequences) for several in [*self._groups, *self._readings])

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self._readings or self._groups)

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
        found += [sequence for several in (*self._readings, *self._groups) for sequence in several.sequences]
        self._groups, self._readings = [], []
        return found

    def _drop_cancelled(self) -> None:
        for sequence in [sequence for sequence in list(self.waiting) if sequence.cancelled]:
            self.waiting.remove(sequence)
        self._readings = [
            reading for reading in self._readings if not all(sequence.cancelled for sequence in reading.sequences)
        ]
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
        """Begin to read what waits longest, with others that fit beside it; short ones do not wait for a long one."""
        free = self._rows - self.running
        waiting = list(self.waiting)
        if self._readings:
            waiting = [sequence for sequence in waiting if len(sequence.tokens) <= self._part(sequence)]
        if free <= 0 or not waiting:
            return
        first = waiting[0]
        alone = not self._groups and len(self.waiting) == 1 and Alone.suits(first)
        chosen, texts = [first], {tuple(first.tokens)}
        for sequence in waiting[1:free]:
            together = {*texts, tuple(sequence.tokens)}  # a prompt with several answers is read once
            fits = len(together) == 1 or len(together) * max(map(len, together)) <= self._part(sequence, first)
            if not fits or sequence.suspect or first.suspect or self._apart:  # what failed is tried alone
                break
            chosen.append(sequence)
            texts = together
        for sequence in chosen:
            self.waiting.remove(sequence)
        self.counts.prompt_tokens += sum(len(sequence.prompt) for sequence in chosen if not sequence.answer)
        try:
            if alone and self._speculation is not None:
                self._groups.append(Alone(self._model, first, self._speculation, self._part(first)))
            else:
                self._readings.append(Prefill(self._model, chosen, self._part(*chosen)))
        except Exception as error:
            self._retry(chosen, error)

    def _part(self, *sequences: Running) -> int:
        """How many tokens of a prompt are read at a time."""
        if self._apart:
            return max(len(sequence.tokens) for sequence in sequences)
        all_wanted = any(sequence.wants_all for sequence in sequences)
        return max(1, min(PART, SCORED // self._model.vocab_size)) if all_wanted else PART

    def _read(self) -> None:
        for reading in list(self._readings):
            self.counts.steps += 1
            try:
                found = reading.step()
            except Exception as error:
                self._readings.remove(reading)
                self._retry(reading.sequences, error)
                continue
            if found is not None:
                self._readings.remove(reading)
                self._begin(*found)

    def _begin(self, told: Told, batch: Batch) -> None:
        """Go on with answers that have their first token, in one batch with the others where that can be."""
        self._groups.append(batch)
        self._tell(batch, told)
        for group in self._groups[:-1] if not self._apart else ():
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
            sequence.suspect = False
            self.counts.generated_tokens += len(piece.tokens)
            self._told.append((sequence, piece))
            if piece.finish_reason is not None:
                gone.append(sequence)
        if gone:
            self._drop(group, gone)

    def _retry(self, sequences: Sequence[Running], error: Exception) -> None:
        """Let each of several try alone: one that fails by itself is to blame."""
        if len(sequences) == 1:
            self._fail(sequences, error)
            return
        for sequence in reversed(sequences):
            sequence.suspect = True
            self.waiting.appendleft(sequence)

    def _fail(self, sequences: Sequence[Running], error: Exception) -> None:
        if not isinstance(error, UsageError | FailedClosed | Closing) and sequences:
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            error = FailedClosed("the model failed; nothing is answered unsteered")
        self._told += [(sequence, error) for sequence in sequences]


class Closing(Exception):
    """The engine is shutting down."""


def _depends_on_others(model: DivergenceForCausalLM) -> bool:
    """Whether an answer could be another with longer ones beside it, or if its prompt were read in parts.

    Some rotary embeddings choose their factors by the largest position of a pass. Recurrent states read padding, too,
    and their rows cannot leave a batch.
    """
    if stateful_types(model.target, model.experts) or not all(map(holds_tokens, model.new_cache().layers)):
        return True
    kinds = (str(getattr(module, "rope_type", "")) for module in model.modules())
    return any("longrope" in kind or "dynamic" in kind for kind in kinds)
