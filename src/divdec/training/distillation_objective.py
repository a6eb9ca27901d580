"""Distillation as an objective of fine-tuning: a frozen teacher, and a student of which only labelled positions count.

It knows nothing of files, nor of what the teacher is steered away from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from divdec.training.distillation_loss import Direction, Pieces, divergence, piece_positions, predicting, streamed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.model.modeling import DivergenceForCausalLM


@runtime_checkable
class Teacher(Protocol):
    """Judges a student at the labelled positions of a batch."""

    def to(self, device: torch.device) -> object:
        """Move what it computes with."""
        ...

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """T²·KL at every labelled position, a piece at a time; see `divdec.training.distillation_loss`."""
        ...


@dataclasses.dataclass
class LiveTeacher:
    """The steered model itself, which reads every batch."""

    model: DivergenceForCausalLM
    temperature: float
    direction: Direction
    positions: int | None = None
    """How many positions a piece has; by default what memory allows."""

    def to(self, device: torch.device) -> LiveTeacher:
        """Move target and experts."""
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        return self

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """See `Teacher.pieces`."""
        for places, logits in self.logits(batch):
            yield (
                places,
                functools.partial(
                    _judged, teacher_logits=logits, temperature=self.temperature, direction=self.direction
                ),
            )

    def logits(self, batch: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Float[Tensor, "some vocab"]]]:
        """Steered logits at the labelled positions: places among them, and the logits there.

        The batch is read a few columns at a time where its logits would be more than a piece, each part going on
        from the cache of those before, so that this works for experts of every kind.

        Raises:
            FailedClosed: the experts gave a divergence that is not finite.
        """
        ids, mask, chosen = batch["input_ids"], batch["attention_mask"], predicting(batch["labels"])
        columns = chosen.any(dim=0).nonzero()[:, 0].tolist()
        if not columns:
            return
        places = (chosen.flatten().cumsum(dim=0) - 1).view_as(chosen)
        first, end = columns[0], columns[-1] + 1
        positions = self.positions or piece_positions(self.model.device, self.model.vocab_size)
        width = max(1, positions // len(ids))
        cache = self.model.new_cache() if end - first > width else None
        steering, eligible = self.model.steering, self.model.steering.eligible(self.model.vocab_size)
        read = 0
        for start in range(first, end, width):
            stop = min(start + width, end)
            here = chosen[:, start:stop]
            # The student may run under autocast; the teacher answers in its own precision, as it does elsewhere.
            with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
                target, added = self.model.components(
                    ids[:, read:stop], mask[:, :stop], None, cache, logits_to_keep=stop - start
                )
                where = here.to(target.device)
                logits = steering.apply(target[where], added[where], eligible)
                del target, added
            read = stop
            if len(logits):
                yield places[:, start:stop][here], logits
            del logits


def _judged(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, direction: Direction
) -> Float[Tensor, " some"]:
    return divergence(student_logits, teacher_logits.to(student_logits.device), temperature, direction)


@dataclasses.dataclass
class Distillation:
    """T²·KL between teacher and student, meant over the labelled tokens: an `Objective`.

    Where the student's output layer is a plain linear one, that layer does not compute logits while the loss runs: in
    its place stands `streamed`, so that whoever wraps the model (DDP, FSDP, peft, accelerate's autocast) sees an
    ordinary forward pass with ordinary use of the layer's weights. Other students give all their logits.
    """

    teacher: Teacher
    head: nn.Linear | None
    """The student's output layer, from `plain_head`; None takes whole logits."""
    counts_tokens = True

    def to(self, device: torch.device) -> None:
        """Move the teacher."""
        self.teacher.to(device)

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """See `divdec.training.objective.Objective.loss`."""
        total = through_head(model, self.head, batch, self.teacher.pieces(batch), streamed).sum()
        return total / (predicting(batch["labels"]).sum() if labelled is None else labelled)


def through_head(
    model: PreTrainedModel,
    head: nn.Linear | None,
    batch: Mapping[str, Tensor],
    pieces: Pieces,
    reduce: Callable[[Tensor, Tensor | None, Tensor | None, Pieces], Tensor],
) -> Float[Tensor, " figures"]:
    """Run the student, and reduce its logits at the labelled positions piece by piece.

    Args:
        model: the student, perhaps wrapped.
        head: its output layer, or None.
        batch: `input_ids`, `attention_mask` and `labels` [batch, tokens].
        pieces: what the labelled positions are judged by.
        reduce: `streamed` or `measured`.

    Raises:
        RuntimeError: the model's forward pass did not end in its output layer.
    """
    chosen = predicting(batch["labels"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"use_cache": False}
    # DataParallel runs copies of the layer on other devices, which this one's weights are not on.
    if head is None or isinstance(model, nn.DataParallel):
        logits: Tensor = model(**inputs).logits
        return reduce(logits[chosen.to(logits.device)], None, None, pieces).reshape(-1)
    runs = 0

    def instead(hidden: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        found = reduce(hidden[chosen.to(hidden.device)], head.weight, head.bias, pieces)
        return found.reshape(1, 1, -1)

    with _standing_in(head, instead):
        found = model(**inputs).logits
    if runs != 1:
        raise RuntimeError(f"the student's output layer ran {runs} times in a pass; it must run once")
    return found.reshape(-1)


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """A model's output layer where the model's logits are what that layer gives and no more, else None.

    Some architectures scale or cap their logits afterwards (Gemma 2, Cohere, Granite), under settings of many names;
    so it is tried out, with a number that none of them would leave as it is.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    mark = torch.full((1, 1, 1), 1234.5, device=head.weight.device)
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    try:
        with _standing_in(head, lambda hidden: mark), torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except Exception:
        return None  # whatever it does with a single number, it does something
    return head if torch.equal(logits.float(), mark) else None


@contextlib.contextmanager
def _standing_in(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module run another forward, within its own call: hooks that gather its weights still run."""
    own: dict[str, Any] = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            own.pop("forward", None)
        else:
            own["forward"] = before


def figures_at(teacher: LiveTeacher, batch: Mapping[str, Tensor]) -> Pieces:
    """Three figures at every labelled position, for `measured`.

    T²·KL, the student's cross entropy and the teacher's cross entropy, in nats.
    """
    labels = batch["labels"][:, 1:][predicting(batch["labels"])[:, :-1]]
    for places, logits in teacher.logits(batch):
        yield (
            places,
            functools.partial(_figures, teacher_logits=logits, labels=labels[places.to(labels.device)], how=teacher),
        )


def _figures(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, how: LiveTeacher
) -> Float[Tensor, "some figures"]:
    cross_entropy = functools.partial(nn.functional.cross_entropy, reduction="none")
    labels = labels.to(student_logits.device)
    teacher_logits = teacher_logits.to(student_logits.device)
    return torch.stack(
        [
            divergence(student_logits, teacher_logits, how.temperature, how.direction),
            cross_entropy(student_logits.float(), labels),
            cross_entropy(teacher_logits, labels),
        ],
        dim=-1,
    )
