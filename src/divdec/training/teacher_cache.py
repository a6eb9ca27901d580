"""A teacher's answers on disk: at each labelled position its k likeliest tokens and the mass of all others.

One pass of the teacher then serves any number of students and learning rates. The file says what it was made from,
and is refused where that differs. It knows nothing of students.

What it holds are continuations of the forget set: whoever must not have the one must not have the other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from divdec.data.formatting import Example
from divdec.errors import FailedClosed, UsageError
from divdec.runs import settings_hash
from divdec.training.distillation_loss import Direction, Pieces, lumped_divergence, piece_positions, predicting
from divdec.training.objective import INDEX, Collator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.training.distillation_objective import LiveTeacher

FILE = "teacher.safetensors"
HEADER = "divdec"
FORMAT = 1
TENSORS = ("tokens", "log_probabilities", "log_rest", "starts")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """All that decides what a cache holds."""

    bundle: str
    """Digest of the bundle's references: commits and SHA-256 of target and experts."""
    steering: str
    """Digest of the rule, its eligible vocabulary included."""
    forget_set: str
    """SHA-256 of the records."""
    layout: str
    """Digest of the examples as tokens: chat template, system prompt, longest length."""
    temperature: float
    k: int
    format: int = FORMAT

    @property
    def name(self) -> str:
        """Twelve hexadecimal digits that name it."""
        return settings_hash(self)


def layout_of(examples: Sequence[Example]) -> str:
    """Digest of examples as tokens."""
    return settings_hash([(example.input_ids, example.labels) for example in examples])


@dataclasses.dataclass
class CachedTeacher:
    """A teacher that was asked before; see `divdec.training.distillation_objective.Teacher`."""

    fingerprint: Fingerprint
    vocab_size: int
    tokens: Tensor
    """The k likeliest tokens [labelled, k], all examples' positions one after the other."""
    log_probabilities: Tensor
    """Theirs [labelled, k], float32, at the fingerprint's temperature."""
    log_rest: Tensor
    """Logarithm of the mass of all other tokens [labelled]."""
    starts: Tensor
    """Where each example's positions begin [examples + 1]."""
    direction: Direction = "teacher-student"
    positions: int | None = None
    """How many positions a piece has; by default what memory allows."""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        """Remember where pieces go; the whole stays where it is."""
        self.device = device

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """T²·KL of the lumped distributions, a lower bound of the true one; `batch` says by `index` whose they are.

        Raises:
            FailedClosed: the batch's labelled positions are not those that were cached.
        """
        spans = [tuple(self.starts[place : place + 2].tolist()) for place in batch[INDEX].tolist()]
        if [stop - start for start, stop in spans] != predicting(batch["labels"]).sum(dim=1).tolist():
            raise FailedClosed("the teacher cache holds other positions than these examples have; make it again")
        rows = torch.cat([torch.arange(start, stop) for start, stop in spans])
        positions = self.positions or piece_positions(self.device, self.vocab_size)
        for places in torch.arange(len(rows)).split(positions):
            some = rows[places]
            yield (
                places.to(self.device),
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
        """Mean probability of what is lumped together, at the fingerprint's temperature."""
        return float(self.log_rest.double().exp().mean())


def ask_teacher(
    teacher: LiveTeacher,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    fingerprint: Fingerprint,
    path: Path,
    batch_size: int,
) -> None:
    """Let the teacher read every example once, and write the cache; the file is there whole or not at all.

    Args:
        teacher: on the device where it is to compute.
        tokenizer: for padding.
        examples: in the order in which batches will index them.
        fingerprint: what the file is to say of itself; k and the temperature are taken from it.
        path: the file.
        batch_size: sequences in a pass.
    """
    k, vocab_size = fingerprint.k, teacher.model.vocab_size
    check_k(k, vocab_size)
    counts = [sum(label >= 0 for label in example.labels[1:]) for example in examples]
    starts = torch.tensor([0, *counts]).cumsum(dim=0)
    total = int(starts[-1])
    tokens = torch.empty((total, k), dtype=torch.int32)
    log_probabilities = torch.empty((total, k))
    log_rest = torch.full((total,), -math.inf)
    collator = Collator(tokenizer)
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].input_ids))
    with tqdm(total=len(examples), desc="teacher", unit="example", disable=None) as bar:
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = collator([dataclasses.asdict(examples[place]) for place in chosen])
            batch = {name: tensor.to(teacher.model.device) for name, tensor in batch.items()}
            rows = torch.cat([torch.arange(int(starts[place]), int(starts[place + 1])) for place in chosen])
            for places, logits in teacher.logits(batch):
                log_p = (logits.float() / fingerprint.temperature).log_softmax(dim=-1)
                best = log_p.topk(k, dim=-1)
                where = rows[places.cpu()]
                tokens[where] = best.indices.cpu().int()
                log_probabilities[where] = best.values.cpu()
                if k < vocab_size:
                    log_rest[where] = log_p.scatter(-1, best.indices, -math.inf).logsumexp(dim=-1).cpu()
            bar.update(len(chosen))
    header = {"fingerprint": dataclasses.asdict(fingerprint), "vocab_size": vocab_size}
    content: dict[str, Tensor] = dict(zip(TENSORS, (tokens, log_probabilities, log_rest, starts), strict=True))
    _write(path, content, {HEADER: json.dumps(header)})


def check_k(k: int, vocab_size: int) -> None:
    """Refuse to keep more tokens than there are.

    Raises:
        UsageError: k is larger than the vocabulary.
    """
    if k > vocab_size:
        raise UsageError(f"cache-teacher is {k}; the teacher's vocabulary has {vocab_size} tokens")


def check_belongs(path: Path, fingerprint: Fingerprint) -> None:
    """Refuse a cache that was made from something else; only its header is read.

    Raises:
        UsageError: it is not readable, or names what differs.
    """
    _read_header(path, fingerprint)


def load_cache(path: Path, fingerprint: Fingerprint, direction: Direction) -> CachedTeacher:
    """Read a cache; its tensors are mapped from the file, not copied.

    Raises:
        UsageError: see `check_belongs`.
    """
    vocab_size = _read_header(path, fingerprint)
    tensors = load_file(path)
    return CachedTeacher(fingerprint, vocab_size, *(tensors[name] for name in TENSORS), direction=direction)


def _read_header(path: Path, wanted: Fingerprint) -> int:
    """The vocabulary that a cache speaks of, once it is the one that is wanted."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()[HEADER])
        found = Fingerprint(**header["fingerprint"])
        vocab_size = int(header["vocab_size"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{path} is not a teacher cache of this divdec; remove it, or name another folder (--teacher-cache)"
        ) from None
    differing = [field.name for field in dataclasses.fields(Fingerprint) if _of(found, field) != _of(wanted, field)]
    if differing:
        name = differing[0]
        raise UsageError(
            f"{path} was made for another {name.replace('_', ' ')} ({getattr(found, name)}, here "
            f"{getattr(wanted, name)}); remove it, or name another folder (--teacher-cache)"
        )
    return vocab_size


def _of(fingerprint: Fingerprint, field: dataclasses.Field[Any]) -> Any:
    return getattr(fingerprint, field.name)


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        # mkstemp lets only its owner read the file, and so it stays: it tells what the forget set says.
        save_file(tensors, temporary, metadata=metadata)
        Path(temporary).chmod(0o600)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
