"""Estimate the cost of a deployment in FLOPs, and recommend steering, distillation or n-grams.

The formulas are the paper's (section Cost and Latency Analysis; appendix Steering vs Distilling). N is the number of
parameters of the target, n that of each auxiliary. A forward pass costs 2 FLOPs per parameter and token, a training
step 6 (Kaplan et al. 2020). Attention over the context is not included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from divdec.costs.model_size import ModelSize, format_quantity, parse_quantity, read_size
from divdec.errors import UsageError

Recipe = Literal["forget-retain", "full-retain", "matched", "refusal"]
Teacher = Literal["paper", "live"]
Option = Literal["steer", "distil", "n-gram"]
MAX_EPOCHS = 1_000_000  # a larger number is a typing error


def inference(N: float, n: float, tokens: float) -> float:
    """FLOPs of steered inference, 2(N + 2n)·I, for I `tokens` of prompts and answers; n is 0 without auxiliaries."""
    return 2 * (N + 2 * n) * tokens


def auxiliary_training(
    n: float, epochs: float, retain_tokens: float, forget_tokens: float, recipe: Recipe = "forget-retain"
) -> float:
    """FLOPs of training both auxiliaries, 6·n·e_n·(d_retain + d_forget).

    The formula is that of the recipe forget-retain (the paper's MUSE). With full-retain (the paper's TOFU) both
    auxiliaries read the retain set: 6·n·e_n·(2·d_retain + d_forget). With matched and refusal, q also reads as many
    tokens in place of the forget set: 6·n·e_n·2·(d_retain + d_forget).
    """
    forget_passes, retain_passes = {"forget-retain": (1, 1), "full-retain": (1, 2)}.get(recipe, (2, 2))
    return 6 * n * epochs * (retain_passes * retain_tokens + forget_passes * forget_tokens)


def distillation(N: float, n: float, epochs: float, forget_tokens: float, teacher: Teacher = "paper") -> float:
    """FLOPs of distilling the steered model into a student of the target's size, (6N + 4n)·e_N·d_forget.

    6N is the student's training step, 4n the forward passes of the auxiliaries. The teacher also runs the frozen
    target, 2N per token, which the paper's formula (`teacher` 'paper') leaves out. With 'live' it is counted, (8N +
    4n)·e_N·d_forget, as `divdec distill` runs.
    """
    return (6 * N + 4 * n + (2 * N if teacher == "live" else 0)) * epochs * forget_tokens


def break_even(N: float, n: float, epochs: float, forget_tokens: float, teacher: Teacher = "paper") -> float:
    """Number of tokens of inference above which distilling costs less than steering (last line of the appendix).

    I = 3·N·e_N·d_forget/(2n) + e_N·d_forget with the paper's teacher: the cost of distillation, counted as in
    `distillation`, divided by the 4n FLOPs that steering adds to every token. Both cases train the auxiliaries.
    """
    return distillation(N, n, epochs, forget_tokens, teacher) / (4 * n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostSettings:
    """A deployment: models, data and volume."""

    target: float | str
    """P: a number of parameters such as 8B or 8e9, a folder with config.json (weights are not needed), or a hub id."""
    aux: float | str
    """Each of the two auxiliaries: a number, a folder, or a hub id."""
    forget_tokens: float | str
    """Size of the forget set in tokens, such as 1M."""
    retain_tokens: float | str = 0.0
    """Size of the retain set in tokens."""
    volume: float | str | None = None
    """Number of tokens that the model reads and generates before the forget set or the model changes, such as 1B."""
    epochs: float = 10.0
    """Epochs of the auxiliaries' training and of distillation."""
    recipe: Recipe = "forget-retain"
    """Recipe of `divdec train`: 'forget-retain' reads each set once (the paper's formula), 'full-retain' the retain set
    twice, 'matched' and 'refusal' both sets twice."""
    verbatim: bool = False
    """Only verbatim text must be forgotten. n-grams are then sufficient."""

    def __post_init__(self) -> None:
        if not 0 < self.epochs <= MAX_EPOCHS:
            raise UsageError(f"--epochs is {self.epochs:g}; accepted: a number above 0, at most {MAX_EPOCHS:,}")


def estimate_costs(settings: CostSettings) -> dict[str, Any]:
    """Estimate compute, and choose the cheapest option.

    Returns:
        What `divdec cost --json` prints: FLOPs by option, of which 'target' is the unsteered model; FLOPs of
        distillation, and tokens until it breaks even, by the way of counting the teacher.

    Raises:
        UsageError: a model cannot be read, or a value is not a number.
    """
    forget = parse_quantity(settings.forget_tokens, "--forget-tokens", 1.0)
    retain = parse_quantity(settings.retain_tokens, "--retain-tokens")
    volume = None if settings.volume is None else parse_quantity(settings.volume, "--volume")
    target, auxiliary = read_size(settings.target, "--target"), read_size(settings.aux, "--aux")
    N, n = float(target.parameters), float(auxiliary.parameters)
    training = auxiliary_training(n, settings.epochs, retain, forget, settings.recipe)
    teachers: tuple[Teacher, ...] = ("paper", "live")

    def by_teacher(formula: Callable[..., float]) -> dict[Teacher, float]:
        return {teacher: formula(N, n, settings.epochs, forget, teacher) for teacher in teachers}

    distilling, limits = by_teacher(distillation), by_teacher(break_even)
    once = {"target": 0.0, "steer": training, "distil": training + distilling["paper"], "n-gram": 0.0}
    per_token = dict.fromkeys(once, inference(N, 0.0, 1.0)) | {"steer": inference(N, n, 1.0)}
    choice, reason = choose_option(volume, limits, settings.verbatim)
    return {
        "target": dataclasses.asdict(target),
        "auxiliary": dataclasses.asdict(auxiliary),
        "N": N,
        "n": n,
        "compute_increase": 2 * n / N,
        "flops_per_token": per_token,
        "flops_once": once,
        "training_flops": training,
        "distillation_flops": distilling,
        "break_even_tokens": limits,
        "volume": volume,
        "flops_at_volume": None if volume is None else {name: once[name] + per_token[name] * volume for name in once},
        "choice": choice,
        "reason": reason,
        "warnings": _warnings(N, n, target, auxiliary),
    }


def choose_option(volume: float | None, break_even: dict[Teacher, float], verbatim: bool) -> tuple[Option | None, str]:
    """Choose n-grams for verbatim text, distillation from the break-even volume on, and steering below it.

    Returns:
        The choice, or None without a volume, and the reason in one sentence.
    """
    if verbatim:
        return "n-gram", "verbatim text needs no neural auxiliaries: counting n-grams costs next to nothing"
    limit = break_even["paper"]
    if volume is None:
        return None, f"up to {format_quantity(limit)} tokens steering costs less than distilling; give --volume"
    if volume >= limit:
        note = ""
        if volume < break_even["live"]:
            note = (
                " (with the target's own pass over the forget set, which the paper leaves out, it is "
                f"{format_quantity(break_even['live'])})"
            )
        return "distil", (
            f"{format_quantity(volume)} tokens are more than the break-even volume of {format_quantity(limit)}{note}; "
            "each further request to forget must be distilled again"
        )
    return "steer", (
        f"{format_quantity(volume)} tokens are fewer than the break-even volume of {format_quantity(limit)}"
    )


def _warnings(N: float, n: float, target: ModelSize, auxiliary: ModelSize) -> list[str]:
    warnings = []
    if 2 * n > N:
        warnings.append(
            f"the two auxiliaries hold more parameters ({format_quantity(2 * n)}) than the target "
            f"({format_quantity(N)}): the paper's setting is 2n ≤ N; steering more than doubles the cost"
        )
    if target.mixture or auxiliary.mixture:
        warnings.append("a mixture of experts computes with few of its parameters: give the active ones, such as 3.3B")
    return warnings
