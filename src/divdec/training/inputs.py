"""Inputs of training runs: checkpoints and record sets, checked before a model is loaded, and batches of examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from divdec.checkpoint import CheckpointReference, check_plain, check_weights, load_config
from divdec.data.formatting import IGNORED, Example, Format, count_cut, encode_set, padded, padding_id
from divdec.data.records import RecordSet, overlap
from divdec.errors import FailedClosed, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX = "index"
"""The column of a batch that holds the indices of its examples."""
GROUPED_BATCHES = 4
"""Number of batches that are sorted by length together. It is small, so that batches stay mixed: with a small data set
sorted as a whole the same wordings share a batch in every epoch, and models learn worse."""

Report = Callable[[str], None]
T = TypeVar("T")


def join_processes(report: Report) -> tuple[PartialState, Report]:
    """Join the processes of this run, one or many; only the main process reports."""
    # accelerate joins CPU processes only if it is told that there is no accelerator; the first call decides.
    # The others wait while the main process measures, longer than NCCL's 10 minutes; if it dies, a launcher ends them.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    return state, report if state.is_main_process else lambda line: None


def on_main(work: Callable[[], T]) -> T:
    """Do work in the main process of those that joined, and return its result, or raise its error, in all of them."""
    state = PartialState()
    if state.num_processes == 1:
        return work()
    result, error = None, None
    if state.is_main_process:
        try:
            result = work()
        except Exception as raised:
            error = raised
    # Not every error can be pickled; ours can.
    sent = error if error is None or isinstance(error, UsageError | FailedClosed) else RuntimeError(repr(error))
    gathered: list[Any] = [None] * state.num_processes
    dist.all_gather_object(gathered, (result, sent))
    result, sent = gathered[0]
    if sent is not None:
        raise error or sent
    return result


def resolve_trainable(reference: str, role: str) -> Path:
    """Resolve a checkpoint that can be trained; messages call it by its role.

    Raises:
        UsageError: it does not exist, holds no weights, or consists of several checkpoints.
    """
    folder = CheckpointReference.parse(reference).resolve(Path(), weights=True)
    check_plain(folder, role)
    check_weights(folder)
    return folder


def limit_length(max_length: int, model: Path, report: Report) -> int:
    """Return `max_length`, or the number of positions of the model if that is smaller."""
    positions = getattr(load_config(model).get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None or max_length <= positions:
        return max_length
    report(f"note: sequences are cut to {positions} tokens, the longest that {model.name} was built for")
    return positions


def report_set(role: str, records: RecordSet, report: Report) -> None:
    """Report size, kind and source of a set."""
    blank = f", {records.blank} blank ones left out" if records.blank else ""
    report(f"{role} set: {len(records)} {records.kind} records from {records.name}{blank}")
    if earlier := sum(any(turn.role == "assistant" for turn in record.messages) for record in records):
        report(f"warning: of {earlier} conversations only the last answer is used; give one record for each answer")


def report_sets(forget: RecordSet, retain: RecordSet, consequence: str, report: Report) -> None:
    """Report both sets, and warn about records that they share, with the `consequence`.

    Raises:
        UsageError: both hold the same records.
    """
    report_set("forget", forget, report)
    report_set("retain", retain, report)
    if forget.sha256 == retain.sha256:
        raise UsageError("forget set and retain set hold the same records: nothing would be left to forget")
    shared = overlap(forget, retain)
    if shared.records or shared.prompts:
        report(
            f"warning: {shared.records} of {len(forget)} forget records stand in the retain set too "
            f"({shared.prompts} share a prompt): {consequence}"
        )


def report_cut(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format, report: Report) -> None:
    """Warn about records that are cut to the maximum length; plain texts are split instead."""
    if records.kind != "text" and (cut := count_cut(records.records, tokenizer, form)):
        report(f"warning: {cut} records of {records.name} are cut to {form.max_length} tokens (--max-length)")


def encode(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format, report: Report) -> list[Example]:
    """Encode a set as tokens, with a warning about records that are cut."""
    report_cut(records, tokenizer, form, report)
    return encode_set(records, tokenizer, form)


def sample_indices(count: int, size: int, seed: int) -> list[int]:
    """Return at most `size` of the indices below `count`, drawn by seed; all in order if there are no more."""
    if count <= size:
        return list(range(count))
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist()


def sample_examples(examples: Sequence[Example], size: int, seed: int) -> Sequence[Example]:
    """Return at most `size` of the examples, drawn by seed."""
    return [examples[index] for index in sample_indices(len(examples), size, seed)]


@dataclasses.dataclass(frozen=True)
class Companion:
    """A second set of examples; each batch holds one of them for each of its training examples."""

    examples: Sequence[Example]
    drawn: bool = True
    """Draw companions at random in each epoch, all equally often; False pairs equal indices."""


class ExampleDataset(Dataset[dict[str, Any]]):
    """Training examples, each with a companion of each kind that seed and epoch determine."""

    def __init__(self, examples: Sequence[Example], companions: Mapping[str, Companion], seed: int) -> None:
        for name, companion in companions.items():
            if not companion.examples:
                raise UsageError(f"the {name} set is empty; this method needs one")
            if not companion.drawn and len(companion.examples) != len(examples):
                raise UsageError(f"there are {len(companion.examples)} {name} examples for {len(examples)}")
        self.examples = examples
        self.companions = dict(companions)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the companions of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch + 50_021)
        count = len(self.examples)
        self._indices: dict[str, Sequence[int]] = dict.fromkeys(self.companions, range(count))
        for name, companion in self.companions.items():
            if companion.drawn:
                available = len(companion.examples)
                rounds = [torch.randperm(available, generator=generator) for _ in range(-(-count // available))]
                self._indices[name] = torch.cat(rounds)[:count].tolist()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {INDEX: index, **dataclasses.asdict(self.examples[index])}
        for name, companion in self.companions.items():
            example = companion.examples[self._indices[name][index]]
            row |= {f"{name}_{field}": value for field, value in dataclasses.asdict(example).items()}
        return row


class Collator:
    """Pads examples and companions on the right to the longest of each.

    The tokenizer may lack a padding token, and its `padding_side` has no effect: on the left, padding would move tokens
    of models with absolute positions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, companions: Sequence[str] = ()) -> None:
        self._padding = padding_id(tokenizer)
        self._companions = tuple(companions)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the rows as a batch; see `Objective.loss`."""
        batch = {INDEX: torch.tensor([row[INDEX] for row in rows])} if INDEX in rows[0] else {}
        for prefix in ("", *(f"{name}_" for name in self._companions)):
            ids, labels = ([row[prefix + name] for row in rows] for name in ("input_ids", "labels"))
            batch |= {
                f"{prefix}input_ids": padded(ids, self._padding),
                f"{prefix}attention_mask": padded([[1] * len(row) for row in ids], 0),
                f"{prefix}labels": padded(labels, IGNORED),
            }
        return batch

    def batches(
        self, examples: Sequence[Example], indices: Sequence[int], batch_size: int, device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """Yield batches of the examples at `indices`, ordered by length, for passes without training."""
        order = sorted(indices, key=lambda index: len(examples[index].input_ids))
        for start in range(0, len(order), batch_size):
            batch = self(
                [{INDEX: index, **dataclasses.asdict(examples[index])} for index in order[start : start + batch_size]]
            )
            yield {name: tensor.to(device) for name, tensor in batch.items()}


def model_inputs(batch: Mapping[str, Tensor], companion: str = "") -> dict[str, Tensor]:
    """Select input_ids, attention_mask and labels of a batch's examples, or of one companion."""
    prefix = f"{companion}_" if companion else ""
    return {name: batch[prefix + name] for name in ("input_ids", "attention_mask", "labels")}


class LengthGroupedSampler(Sampler[int]):
    """Batches of similar length in an order that only seed and epoch determine.

    The length-grouped sampler of transformers draws from torch's global state: a run that is resumed within an epoch
    would repeat some examples of that epoch and miss others. It also orders batches from long to short.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, seed: int, on_epoch: Callable[[int], object] = lambda epoch: None
    ) -> None:
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.on_epoch = on_epoch

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch; accelerate calls this before each epoch."""
        self.epoch = epoch
        self.on_epoch(epoch)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        batches: list[list[int]] = []
        for group in order.split(GROUPED_BATCHES * self.batch_size):
            by_length = group[self.lengths[group].argsort(stable=True)]
            batches += [batch.tolist() for batch in by_length.split(self.batch_size)]
        # The batch that is not full must come last: the stream is cut into batches of equal size.
        full = [batch for batch in batches if len(batch) == self.batch_size]
        rest = [batch for batch in batches if len(batch) < self.batch_size]
        shuffled = [full[index] for index in torch.randperm(len(full), generator=generator).tolist()]
        return iter([index for batch in (*shuffled, *rest) for index in batch])
