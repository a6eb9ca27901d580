"""Teachers of a distillation: the steered model, or its most likely tokens in a file.

A cache stores the k most likely tokens at each labelled position, and the probability of the rest. The teacher then
reads the data once for any number of students and learning rates. The file records its inputs and is refused if they
differ. It reveals continuations of the forget set, so only its owner can read it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from divdec.data.formatting import Example
from divdec.errors import FailedClosed, UsageError
from divdec.training.distillation_loss import Direction, Pieces, divergence, lumped_divergence, predicting
from divdec.training.inputs import INDEX, Collator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

FILE = "teacher.safetensors"
HEADER = "divdec"
TENSORS = ("tokens", "log_probabilities", "log_rest", "starts")
PIECE_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Number of logits in a piece: 64 MB of float32 on a CPU, 512 MB on a GPU."""


def positions_per_piece(device: torch.device, vocab_size: int) -> int:
    """Default number of positions in a piece."""
    return max(1, PIECE_LOGITS.get(device.type, PIECE_LOGITS["cuda"]) // vocab_size)


@dataclasses.dataclass
class LiveTeacher:
    """A `Teacher` that runs the steered model on every batch."""

    model: DivergenceForCausalLM
    temperature: float
    direction: Direction
    positions: int | None = None
    """Positions in a piece; see `positions_per_piece`."""

    def to(self, device: torch.device) -> LiveTeacher:
        """See `Teacher.to`."""
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        return self

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """See `Teacher.pieces`."""

        def loss(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
            teacher_logits = teacher_logits.to(student_logits.device)
            return divergence(student_logits, teacher_logits, self.temperature, self.direction)

        for indices, logits in self.logits(batch):
            yield indices, functools.partial(loss, teacher_logits=logits)

    def figures(self, batch: Mapping[str, Tensor]) -> Pieces:
        """Functions that return T²·KL, the student's cross entropy and the teacher's."""
        labels = batch["labels"][:, 1:][predicting(batch["labels"])[:, :-1]]
        cross_entropy = functools.partial(nn.functional.cross_entropy, reduction="none")

        def figures(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
            teacher_logits, labels = teacher_logits.to(student_logits.device), labels.to(student_logits.device)
            kl = divergence(student_logits, teacher_logits, self.temperature, self.direction)
            losses = cross_entropy(student_logits.float(), labels), cross_entropy(teacher_logits, labels)
            return torch.stack([kl, *losses], dim=-1)

        for indices, logits in self.logits(batch):
            yield (indices, functools.partial(figures, teacher_logits=logits, labels=labels[indices.to(labels.device)]))

    def logits(self, batch: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Float[Tensor, "some vocab"]]]:
        """Yield indices of labelled positions, and the steered logits there.

        If the logits exceed one piece, the model reads a few columns at a time and continues from its cache.

        Raises:
            FailedClosed: the experts' divergence is not finite.
        """
        ids, attention, mask = batch["input_ids"], batch["attention_mask"], predicting(batch["labels"])
        columns = mask.any(dim=0).nonzero()[:, 0].tolist()
        if not columns:
            return
        indices = (mask.flatten().cumsum(dim=0) - 1).view_as(mask)
        first, end = columns[0], columns[-1] + 1
        positions = self.positions or positions_per_piece(self.model.device, self.model.vocab_size)
        width = max(1, positions // len(ids))
        cache = self.model.new_cache() if end - first > width else None
        steering, eligible = self.model.steering, self.model.steering.eligible(self.model.vocab_size)
        read = 0
        for start in range(first, end, width):
            stop = min(start + width, end)
            piece = mask[:, start:stop]
            # The student may run under autocast; the teacher keeps its own precision.
            with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
                target, added = self.model.components(
                    ids[:, read:stop], attention[:, :stop], None, cache, logits_to_keep=stop - start
                )
                where = piece.to(target.device)
                logits = steering.apply(target[where], added[where], eligible)
                del target, added
            read = stop
            if len(logits):
                yield indices[:, start:stop][piece], logits
            del logits


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The inputs of a cache, as digests."""

    bundle: str
    """Of the bundle's references: commits and SHA-256 of target and experts."""
    steering: str
    """Of the rule, its eligible vocabulary included."""
    forget_set: str
    """Of the records."""
    layout: str
    """Of the examples as tokens: chat template, system prompt, longest length."""
    temperature: float
    k: int
    format: int = 1


@dataclasses.dataclass
class CachedTeacher:
    """A `Teacher` whose distributions are read from a cache."""

    fingerprint: Fingerprint
    vocab_size: int
    tokens: Tensor
    """The k most likely tokens [labelled, k]; the positions of all examples are concatenated."""
    log_probabilities: Tensor
    """Their log-probabilities [labelled, k], float32, at the fingerprint's temperature."""
    log_rest: Tensor
    """Log-probability of all other tokens [labelled]."""
    starts: Tensor
    """Index of each example's first position [examples + 1]."""
    direction: Direction = "teacher-student"
    positions: int | None = None
    """Positions in a piece; see `positions_per_piece`."""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        """Set the device of the pieces; the whole cache stays on the CPU."""
        self.device = device

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """See `Teacher.pieces`; the loss is that of the lumped distributions, a lower bound.

        Raises:
            FailedClosed: the cached positions are not the batch's labelled positions.
        """
        spans = [tuple(self.starts[index : index + 2].tolist()) for index in batch[INDEX].tolist()]
        if [stop - start for start, stop in spans] != predicting(batch["labels"]).sum(dim=1).tolist():
            raise FailedClosed("the teacher cache holds other positions than these examples have; make it again")
        rows = torch.cat([torch.arange(start, stop) for start, stop in spans])
        positions = self.positions or positions_per_piece(self.device, self.vocab_size)
        for indices in torch.arange(len(rows)).split(positions):
            some = rows[indices]
            yield (
                indices.to(self.device),
                functools.partial(
                    lumped_divergence,
                    tokens=self.tokens[some].to(self.device).long(),
                    log_teacher=self.log_probabilities[some].to(self.device),
                    log_rest=self.log_rest[some].to(self.device),
                    vocab_size=self.vocab_size,
                    temperature=self.fingerprint.temperature,
                    direction=self.direction,
                ),
            )

    @property
    def mean_rest(self) -> float:
        """Mean probability of the lumped tokens, at the fingerprint's temperature."""
        return float(self.log_rest.double().exp().mean())


def write_cache(
    teacher: LiveTeacher,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    fingerprint: Fingerprint,
    path: Path,
    batch_size: int,
) -> None:
    """Run the teacher once on every example, and write the cache; the file appears only when it is complete.

    Its temperature and number of tokens are those of the fingerprint.
    """
    k, vocab_size = fingerprint.k, teacher.model.vocab_size
    check_k(k, vocab_size)
    starts = torch.tensor([0, *(sum(label >= 0 for label in example.labels[1:]) for example in examples)]).cumsum(dim=0)
    total = int(starts[-1])
    tokens = torch.empty((total, k), dtype=torch.int32)
    log_probabilities = torch.empty((total, k))
    log_rest = torch.full((total,), -math.inf)
    device = teacher.model.device
    with tqdm(total=len(examples), desc="teacher", unit="example", disable=None) as bar:
        for batch in Collator(tokenizer).batches(examples, range(len(examples)), batch_size, device):
            rows = torch.cat([torch.arange(*starts[index : index + 2].tolist()) for index in batch[INDEX].tolist()])
            for indices, logits in teacher.logits(batch):
                log_p = (logits.float() / fingerprint.temperature).log_softmax(dim=-1)
                best = log_p.topk(k, dim=-1)
                where = rows[indices.cpu()]
                tokens[where] = best.indices.cpu().int()
                log_probabilities[where] = best.values.cpu()
                if k < vocab_size:
                    log_rest[where] = log_p.scatter(-1, best.indices, -math.inf).logsumexp(dim=-1).cpu()
            bar.update(len(batch[INDEX]))
    header = json.dumps({"fingerprint": dataclasses.asdict(fingerprint), "vocab_size": vocab_size})
    content: dict[str, Tensor] = dict(zip(TENSORS, (tokens, log_probabilities, log_rest, starts), strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        save_file(content, Path(folder) / FILE, metadata={HEADER: header})
        (Path(folder) / FILE).chmod(0o600)
        (Path(folder) / FILE).replace(path)


def check_k(k: int, vocab_size: int) -> None:
    """Raise UsageError if k exceeds the vocabulary."""
    if k > vocab_size:
        raise UsageError(f"cache-teacher is {k}; the teacher's vocabulary has {vocab_size} tokens")


def check_cache(path: Path, expected: Fingerprint) -> int:
    """Check the header of a cache and return its vocabulary size.

    Raises:
        UsageError: the file is not a cache, or was made from other inputs; the message names the difference.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()[HEADER])
        fingerprint = Fingerprint(**header["fingerprint"])
        vocab_size = int(header["vocab_size"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{path} is not a teacher cache of this divdec; remove it, or name another folder (--teacher-cache)"
        ) from None
    for name, value in dataclasses.asdict(expected).items():
        if getattr(fingerprint, name) != value:
            raise UsageError(
                f"{path} was made for another {name.replace('_', ' ')} ({getattr(fingerprint, name)}, here {value}); "
                "remove it, or name another folder (--teacher-cache)"
            )
    return vocab_size


def load_cache(path: Path, fingerprint: Fingerprint, direction: Direction) -> CachedTeacher:
    """Load a cache whose tensors are memory-mapped; see `check_cache` for errors."""
    vocab_size = check_cache(path, fingerprint)
    tensors = load_file(path)
    return CachedTeacher(fingerprint, vocab_size, *(tensors[name] for name in TENSORS), direction=direction)
