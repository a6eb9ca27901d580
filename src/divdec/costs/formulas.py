"""The paper's cost formulas (section Cost and Latency Analysis; appendix Steering vs Distilling).

N is the number of parameters of the target, n that of each auxiliary. A forward pass costs 2 FLOPs per parameter and
token, a training step 6 (Kaplan et al. 2020). Attention over the context is not included.
"""

from __future__ import annotations

from typing import Literal

from divdec.errors import UsageError

Recipe = Literal["forget-retain", "full-retain", "matched", "refusal"]
Teacher = Literal["paper", "live"]


def compute_increase(N: float, n: float) -> float:
    """Relative compute increase of steering, 2n/N.

    Raises:
        UsageError: a size is not above 0.
    """
    _check_positive(N=N, n=n)
    return 2 * n / N


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

    I = 3·N·e_N·d_forget/(2n) + e_N·d_forget: the cost of distillation, counted as in `distillation`, divided by the 4n
    FLOPs that steering adds to every token. The auxiliaries are trained in both cases.

    Raises:
        UsageError: a size is not above 0.
    """
    _check_positive(N=N, n=n)
    if teacher == "paper":
        return 3 * N * epochs * forget_tokens / (2 * n) + epochs * forget_tokens
    return distillation(N, n, epochs, forget_tokens, teacher) / (4 * n)


def _check_positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size > 0:
            raise UsageError(f"{name} is {size:g} parameters; accepted: a number above 0")
