"""The distillation loss T²·KL, computed for a few positions at a time, as an objective of fine-tuning.

With a vocabulary of 128,000 tokens the logits of 1,000 positions take half a gigabyte, and the usual form of this loss
holds about ten copies. Here the loss and its gradient are computed piece by piece, and each piece is released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from divdec.data.formatting import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.model.modeling import DivergenceForCausalLM

Direction = Literal["teacher-student", "student-teacher"]
Pieces = Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]
"""Indices of some labelled positions, and a function from the student's logits there to one loss, or several figures,
for each. Every labelled position is in one piece."""
PIECE_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Number of logits in a piece: 64 MB of float32 on a CPU, 512 MB on a GPU."""


def positions_per_piece(device: torch.device, vocab_size: int) -> int:
    """Default number of positions in a piece."""
    return max(1, PIECE_LOGITS.get(device.type, PIECE_LOGITS["cuda"]) // vocab_size)


def predicting(labels: Int[Tensor, "batch tokens"]) -> Bool[Tensor, "batch tokens"]:
    """Mask of the positions whose logits predict a labelled token: one before it."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORED
    return mask


def divergence(
    student_logits: Float[Tensor, "some width"],
    teacher_logits: Float[Tensor, "some vocab"],
    temperature: float,
    direction: Direction,
) -> Float[Tensor, " some"]:
    """T²·KL between σ(teacher/T) and σ(student/T) at each position, in nats (paper, section Model Distillation).

    Args:
        student_logits: of any floating dtype; columns beyond the teacher's vocabulary are ignored.
        teacher_logits: steered, finite.
        temperature: T; the factor T² keeps the gradient's size when T changes (Hinton et al. 2015, section 2).
        direction: 'teacher-student' is KL(teacher ‖ student), 'student-teacher' KL(student ‖ teacher).
    """
    student_logits = student_logits[..., : teacher_logits.shape[-1]]
    log_student = (student_logits.float() / temperature).log_softmax(dim=-1)
    log_teacher = (teacher_logits.float() / temperature).log_softmax(dim=-1)
    p, q = (log_teacher, log_student) if direction == "teacher-student" else (log_student, log_teacher)
    return temperature**2 * (p.exp() * (p - q)).sum(dim=-1)  # KL(p ‖ q)


@dataclasses.dataclass
class SteeredTeacher:
    """Runs the steered model on every batch, for the loss at its labelled positions."""

    model: DivergenceForCausalLM
    temperature: float
    direction: Direction
    positions: int | None = None
    """Positions in a piece; see `positions_per_piece`."""

    def to(self, device: torch.device) -> SteeredTeacher:
        """Move the models of the teacher."""
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        return self

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """Functions that return T²·KL, one piece at a time."""

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
        read = 0
        for start in range(first, end, width):
            stop = min(start + width, end)
            piece = mask[:, start:stop]
            # The student may run under autocast; the teacher keeps its own precision.
            with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
                _, target, added = self.model.components(
                    ids[:, read:stop], attention[:, :stop], None, cache, logits_to_keep=stop - start
                )
                where = piece.to(target.device)
                logits = self.model.steer(target[where], added[where])
                del target, added
            read = stop
            if len(logits):
                yield indices[:, start:stop][piece], logits
            del logits


@dataclasses.dataclass
class Distillation:
    """Mean of T²·KL between teacher and student over the labelled tokens: an `Objective`."""

    teacher: SteeredTeacher
    head: nn.Linear | None
    """The student's output layer, from `plain_head`; None computes the student's logits as a whole."""
    counts_tokens = True

    def to(self, device: torch.device) -> None:
        """Move the teacher."""
        self.teacher.to(device)

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """See `divdec.training.fine_tuning.Objective.loss`."""
        total = sum_over_positions(model, self.head, batch, self.teacher.pieces(batch)).sum()
        return total / (predicting(batch["labels"]).sum() if labelled is None else labelled)


@dataclasses.dataclass
class LabelledCrossEntropy:
    """Mean cross entropy of the labelled tokens: an `Objective` that computes no logits for prompts.

    With a vocabulary of 50,000 tokens the output layer is half of a small model's work.
    """

    head: nn.Linear | None
    """The model's output layer, from `plain_head`."""
    counts_tokens = True

    def to(self, device: torch.device) -> None:
        """Do nothing: there are no tensors."""

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """See `divdec.training.fine_tuning.Objective.loss`."""
        labels = batch["labels"][:, 1:][predicting(batch["labels"])[:, :-1]]

        def cross_entropy(logits: Tensor, some: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.float(), labels[some].to(logits.device), reduction="none")

        # Long texts at once, with a vocabulary of 152,000, took more than 20 GB.
        size = max(1, len(labels) if self.head is None else PIECE_LOGITS["cuda"] // self.head.out_features)
        pieces = torch.arange(len(labels), device=labels.device).split(size)
        losses = [(some, functools.partial(cross_entropy, some=some)) for some in pieces]
        total = sum_over_positions(model, self.head, batch, losses).sum()
        return total / (len(labels) if labelled is None else labelled)


def sum_over_positions(
    model: PreTrainedModel, head: nn.Linear | None, batch: Mapping[str, Tensor], pieces: Pieces
) -> Float[Tensor, " figures"]:
    """Run the student, and sum a function of its logits over the labelled positions, piece by piece.

    The sum replaces the forward of the output layer. So every wrapper of the model (DDP, FSDP, peft, accelerate's
    autocast) sees an ordinary forward pass that uses the layer's weights.

    Args:
        model: the student; it may be wrapped.
        head: its output layer, or None.
        batch: `input_ids`, `attention_mask` and `labels` [batch, tokens].
        pieces: functions of the student's logits; where gradients are enabled, of one figure for each position.

    Raises:
        RuntimeError: the model did not call its output layer exactly once.
    """
    reduce: Callable[..., Tensor] = _PiecewiseLoss.apply if torch.is_grad_enabled() else _sum_figures  # pyright: ignore[reportAssignmentType]
    mask = predicting(batch["labels"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"use_cache": False}
    # DataParallel runs copies of the layer on other devices, without access to the weights of this one.
    if head is None or isinstance(model, nn.DataParallel):
        logits: Tensor = model(**inputs).logits
        return reduce(logits[mask.to(logits.device)], None, None, pieces).reshape(-1)
    calls = 0

    def forward(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return reduce(hidden[mask.to(hidden.device)], head.weight, head.bias, pieces).reshape(1, 1, -1)

    with _replaced_forward(head, forward):
        output = model(**inputs).logits
    if calls != 1:
        raise RuntimeError(f"the student's output layer ran {calls} times in a pass; it must run once")
    return output.reshape(-1)


def _sum_figures(states: Tensor, weight: Tensor | None, bias: Tensor | None, pieces: Pieces) -> Tensor:
    sums = [
        figures(_logits(states[indices], weight, bias)).reshape(len(indices), -1).sum(dim=0)
        for indices, figures in pieces
    ]
    return torch.stack(sums).sum(dim=0)


def _logits(states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return states if weight is None else linear(states, weight, bias)


class _PiecewiseLoss(torch.autograd.Function):
    """Sum of all pieces' losses; states [labelled, width] are inputs of the output layer, or logits without a weight.

    The forward pass computes the gradients piece by piece with the loss, and the backward pass only scales them. So the
    logits of both models are held for one piece only, and never computed twice.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None, pieces: Pieces) -> Tensor:
        gradients = [
            torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and needed else None
            for tensor, needed in zip((states, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        states_gradient, weight_gradient, bias_gradient = gradients
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        for indices, losses in pieces:
            inputs = states[indices]
            logits = _logits(inputs, weight, bias)
            # Autocast applies to the products; sums and exponentials are float32.
            with torch.enable_grad(), torch.autocast(states.device.type, enabled=False):
                logits = logits.detach().requires_grad_()
                loss = losses(logits).sum()
                (slope,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            # logits = W·x + b: the gradient of each side is the slope times the other side.
            if states_gradient is not None:
                states_gradient[indices] = (slope if weight is None else slope @ weight).float()
            if weight_gradient is not None:
                weight_gradient += (slope.T @ inputs).float()
            if bias_gradient is not None:
                bias_gradient += slope.float().sum(dim=0)
        ctx.gradients = gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (states, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("the loss was taken backwards before: its gradients are gone")
        gradients, ctx.gradients = ctx.gradients, None
        return *(
            None if gradient is None else gradient.mul_(slope).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ), None


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the output layer if the model's logits are exactly its output, else None.

    Some architectures scale or cap their logits afterwards (Gemma 2, Cohere, Granite), under settings of many names.
    So the function runs the model with a number in place of the logits, which none of them leaves unchanged.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    mark = torch.full((1, 1, 1), 1234.5, device=head.weight.device)
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    try:
        with _replaced_forward(head, lambda hidden: mark), torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except Exception:
        return None  # the model cannot process a single number, so it changes its logits
    return head if torch.equal(logits.float(), mark) else None


@contextlib.contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace a module's forward; hooks of the module, such as those that gather its weights, still run."""
    attributes: dict[str, Any] = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = before
