"""The distillation loss T²·KL, summed over a few positions of the vocabulary at a time.

With a vocabulary of 128,000 tokens one set of logits for 1,000 positions takes half a gigabyte, and the plain way to
write this loss holds some ten of them. Here a piece of the teacher's logits meets the same piece of the student's,
leaves its loss and its gradient, and is gone. It knows nothing of models: only of logits, states and a linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from divdec.data.formatting import IGNORED

Direction = Literal["teacher-student", "student-teacher"]
Judge = Callable[[Tensor], Tensor]
"""From the student's logits at some positions [some, vocab] to a figure for each: [some], or [some, figures]."""
Pieces = Iterable[tuple[Tensor, Judge]]
"""Places among the labelled positions [some], and what judges the student there; each place comes once."""

# How many logits a piece holds: 64 MB of float32 on a CPU, 512 MB on a GPU.
PIECE = {"cpu": 1 << 24, "cuda": 1 << 27}


def piece_positions(device: torch.device, vocab_size: int) -> int:
    """How many positions a piece has, where nobody says."""
    return max(1, PIECE.get(device.type, PIECE["cuda"]) // vocab_size)


def predicting(labels: Int[Tensor, "batch tokens"]) -> Bool[Tensor, "batch tokens"]:
    """The positions whose logits say how likely a labelled token is: one before it."""
    chosen = torch.zeros_like(labels, dtype=torch.bool)
    chosen[:, :-1] = labels[:, 1:] != IGNORED
    return chosen


def divergence(
    student_logits: Float[Tensor, "some width"],
    teacher_logits: Float[Tensor, "some vocab"],
    temperature: float,
    direction: Direction,
) -> Float[Tensor, " some"]:
    """T²·KL between σ(teacher/T) and σ(student/T) at each position (paper, section Model Distillation).

    Args:
        student_logits: of any floating dtype; what the student has beyond the teacher's vocabulary is left out.
        teacher_logits: steered, finite.
        temperature: T; the factor T² keeps the gradient's size when T changes (Hinton et al. 2015, section 2).
        direction: 'teacher-student' is KL(teacher ‖ student), 'student-teacher' KL(student ‖ teacher).

    Returns:
        In nats, float32.
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
    """The same where only k of the teacher's tokens are known one by one, and all others as one.

    Lumping tokens together can only make a KL smaller (the data-processing inequality; Cover and Thomas, Elements of
    Information Theory, section 2.8): this is a lower bound of `divergence`, and equal to it for k = vocab.

    Args:
        student_logits: of any floating dtype.
        tokens: the k tokens, by position.
        log_teacher: their log-probabilities under the teacher, at temperature T.
        log_rest: logarithm of the probability of all others; not read for k = vocab.
        vocab_size: the teacher's vocabulary.
        temperature: T.
        direction: see `divergence`.

    Returns:
        In nats, float32.
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


def streamed(
    states: Float[Tensor, "labelled width"],
    weight: Float[Tensor, "vocab width"] | None,
    bias: Float[Tensor, " vocab"] | None,
    pieces: Pieces,
) -> Float[Tensor, ""]:
    """Sum of what the pieces' judges say of the student's logits, with gradient.

    The gradients of states, weight and bias are computed at once, piece by piece, and only scaled in the backward
    pass. So neither side's logits are held for more than a piece, and neither is computed twice.

    Args:
        states: what the output layer reads at each labelled position; without `weight` the logits themselves.
        weight: the output layer's; under autocast it is applied in autocast's precision.
        bias: likewise.
        pieces: are gone through once.
    """
    return _Streamed.apply(states, weight, bias, pieces)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def measured(
    states: Float[Tensor, "labelled width"],
    weight: Float[Tensor, "vocab width"] | None,
    bias: Float[Tensor, " vocab"] | None,
    pieces: Pieces,
) -> Float[Tensor, " figures"]:
    """Sums of several figures over the labelled positions, without gradient; see `streamed`."""
    layer = _Layer(states, weight, bias)
    sums = [judge(layer.logits(states[places])).reshape(len(places), -1).sum(dim=0) for places, judge in pieces]
    return torch.stack(sums).sum(dim=0)


class _Layer:
    """A linear layer in the precision of its surroundings, or none."""

    def __init__(self, states: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        kind = states.device.type
        self.dtype = states.dtype if weight is None else weight.dtype
        if weight is not None and torch.is_autocast_enabled(kind):
            self.dtype = torch.get_autocast_dtype(kind)
        self.weight, self.bias = (None if tensor is None else tensor.to(self.dtype) for tensor in (weight, bias))

    def logits(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        return states if self.weight is None else linear(states, self.weight, self.bias)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None, pieces: Pieces) -> Tensor:
        layer = _Layer(states, weight, bias)
        wanted = ctx.needs_input_grad
        gradients = [
            torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and want else None
            for tensor, want in zip((states, weight, bias), wanted[:3], strict=True)
        ]
        of_states, of_weight, of_bias = gradients
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        # Autocast has had its say; here sums and exponentials are float32.
        with torch.autocast(states.device.type, enabled=False):
            for places, judge in pieces:
                some = states[places]
                logits = layer.logits(some)
                if not any(wanted):
                    total += judge(logits).sum()
                    continue
                with torch.enable_grad():
                    logits = logits.detach().requires_grad_()
                    loss = judge(logits).sum()
                    (slope,) = torch.autograd.grad(loss, logits)
                total += loss.detach()
                # logits = W·x + b: each side's gradient is the slope times the other side.
                if of_states is not None:
                    of_states[places] = (slope if layer.weight is None else slope @ layer.weight).float()
                if of_weight is not None:
                    of_weight += (slope.T @ some.to(slope.dtype)).float()
                if of_bias is not None:
                    of_bias += slope.float().sum(dim=0)
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
