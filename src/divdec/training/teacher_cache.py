"""A teacher's answers on disk: the k most likely tokens at each labelled position, and the probability of the rest.

The teacher then reads the data once for any number of students and learning rates. The file records its inputs and is
refused if they differ. It reveals continuations of the forget set, so only its owner can read it.
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
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from divdec.data.formatting import Example
from divdec.errors import FailedClosed, UsageError
from divdec.training.distillation_loss import Direction, Pieces, lumped_divergence, positions_per_piece, predicting
from divdec.training.inputs import INDEX, Collator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.training.distillation_loss import LiveTeacher

FILE = "teacher.safetensors"
HEADER = "divdec"
TENSORS = ("tokens", "log_probabilities", "log_rest", "starts")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The inputs of a cache."""

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
    format: int = 1


@dataclasses.dataclass
class CachedTeacher:
    """A teacher whose answers are read from a cache; see `divdec.training.distillation_loss.Teacher`."""

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
        """Set the device of the pieces; the whole stays where it is."""
        self.device = device

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """T²·KL of the lumped distributions, a lower bound; `batch` has the `index` of each example.

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

    Args:
        teacher: on the device where it computes.
        tokenizer: for padding.
        examples: in the order of the `index` of batches.
        fingerprint: written into the file; it has k and the temperature.
        path: the file.
        batch_size: sequences in a forward pass.
    """
    k, vocab_size = fingerprint.k, teacher.model.vocab_size
    check_k(k, vocab_size)
    starts = torch.tensor([0, *(sum(label >= 0 for label in one.labels[1:]) for one in examples)]).cumsum(dim=0)
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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(content, temporary, metadata={HEADER: header})
        Path(temporary).chmod(0o600)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
