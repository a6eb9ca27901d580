"""The distillation loss T²·KL, computed for a few positions at a time, as an objective of fine-tuning.

With a vocabulary of 128,000 tokens the logits of 1,000 positions take half a gigabyte, and the usual form of this loss
holds about ten copies. Here the loss and its gradient are computed piece by piece, and each piece is released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from divdec.data.formatting import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Direction = Literal["teacher-student", "student-teacher"]
Pieces = Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]
"""Indices of some labelled positions, and a function from the student's logits there to one loss, or several figures,
for each. Every labelled position is in one piece."""


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
    return temperature**2 * _kl(log_teacher, log_student, direction)


def lumped_divergence(
    student_logits: Float[Tensor, "some width"],
    tokens: Int[Tensor, "some k"],
    log_teacher: Float[Tensor, "some k"],
    log_rest: Float[Tensor, " some"],
    vocab_size: int,
    temperature: float,
    direction: Direction,
) -> Float[Tensor, " some"]:
    """T²·KL from the teacher's probabilities of k tokens, with all other tokens lumped into one outcome.

    This is a lower bound of `divergence`, and equal to it for k = vocab: lumping can only make a KL smaller (the
    data-processing inequality; Cover and Thomas, Elements of Information Theory, section 2.8).

    Args:
        student_logits: of any floating dtype.
        tokens: the k tokens of each position.
        log_teacher: their log-probabilities under the teacher, at temperature T.
        log_rest: log-probability of all other tokens; not used for k = vocab.
        vocab_size: size of the teacher's vocabulary.
        temperature: T.
        direction: see `divergence`.
    """
    log_student = (student_logits[..., :vocab_size].float() / temperature).log_softmax(dim=-1)
    known = log_student.gather(-1, tokens)
    if tokens.shape[-1] < vocab_size:
        rest = log_student.scatter(-1, tokens, -math.inf).logsumexp(dim=-1, keepdim=True)
        known = torch.cat([known, rest], dim=-1)
        log_teacher = torch.cat([log_teacher, log_rest[:, None]], dim=-1)
    return temperature**2 * _kl(log_teacher, known, direction)


def _kl(
    log_teacher: Float[Tensor, "some outcomes"], log_student: Float[Tensor, "some outcomes"], direction: Direction
) -> Float[Tensor, " some"]:
    """KL(p ‖ q) = Σ p·(log p − log q)."""
    p, q = (log_teacher, log_student) if direction == "teacher-student" else (log_student, log_teacher)
    return (p.exp() * (p - q)).sum(dim=-1)


@runtime_checkable
class Teacher(Protocol):
    """Source of the loss at the labelled positions of a batch."""

    def to(self, device: torch.device) -> object:
        """Move the models and tensors of the teacher."""
        ...

    def pieces(self, batch: Mapping[str, Tensor]) -> Pieces:
        """Functions that return T²·KL, one piece at a time; `batch` has the `index` of each example."""
        ...


@dataclasses.dataclass
class Distillation:
    """Mean of T²·KL between teacher and student over the labelled tokens: an `Objective`."""

    teacher: Teacher
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

        def cross_entropy(logits: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.float(), labels.to(logits.device), reduction="none")

        everything = [(torch.arange(len(labels), device=labels.device), cross_entropy)]
        total = sum_over_positions(model, self.head, batch, everything).sum()
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
