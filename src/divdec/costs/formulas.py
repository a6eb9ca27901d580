"""The paper's cost formulas as pure functions, in the order in which the paper has them.

They know numbers alone: N parameters of the target, n of each auxiliary, tokens, passes over data (epochs). A forward
pass costs two floating point operations (FLOPs) per parameter and token, a training step six (Kaplan et al. 2020;
paper, section Cost and Latency Analysis). Attention over the context is not among them; `roofline.py` counts it.
"""

from __future__ import annotations

import math
from typing import Literal

from divdec.errors import UsageError

Recipe = Literal["forget-retain", "full-retain"]
Teacher = Literal["paper", "live", "cached"]


def compute_increase(N: float, n: float) -> float:
    """2n/N, by which steering makes inference dearer: 2N → 2(N + 2n) (paper, section Cost and Latency Analysis).

    Raises:
        UsageError: a size is not above 0.
    """
    _above_zero(N=N, n=n)
    return 2 * n / N


def inference(N: float, n: float, tokens: float) -> float:
    """FLOPs of steered inference, 2(N + 2n)·I; with n = 0 those of the target or a student alone, 2N·I.

    Args:
        N: parameters of the target.
        n: parameters of each auxiliary.
        tokens: I, those of prompts and of answers.
    """
    return 2 * (N + 2 * n) * tokens


def auxiliary_training(
    n: float, epochs: float, retain_tokens: float, forget_tokens: float, recipe: Recipe = "forget-retain"
) -> float:
    """FLOPs of training both auxiliaries, 6·n·e_n·(d_retain + d_forget) (paper, appendix Steering vs Distilling).

    That is the recipe forget-retain (paper: MUSE), where each set is learned by one of the two. In full-retain (paper:
    TOFU) p learns both sets and q the retain set again: 6·n·e_n·(2·d_retain + d_forget).

    Args:
        n: parameters of each auxiliary.
        epochs: e_n, passes over the data.
        retain_tokens: d_retain.
        forget_tokens: d_forget.
        recipe: as in `divdec train`.
    """
    twice = 2 if recipe == "full-retain" else 1
    return 6 * n * epochs * (twice * retain_tokens + forget_tokens)


def distillation(N: float, n: float, epochs: float, forget_tokens: float, teacher: Teacher = "paper") -> float:
    """FLOPs of distilling the steered model into the target's size, (6N + 4n)·e_N·d_forget (same appendix).

    6N is the student's training step and 4n the two auxiliaries' forward passes. The teacher's third part, the frozen
    target, also reads every token, for 2N, which the paper's formula leaves out.

    Args:
        N: parameters of target and student.
        n: parameters of each auxiliary.
        epochs: e_N, passes over the forget set.
        forget_tokens: d_forget.
        teacher: 'paper' as printed; 'live' with the frozen target's pass, (8N + 4n)·e_N·d_forget, which is what
            `divdec distill` does; 'cached' where the teacher is asked once and not in every epoch
            (`divdec distill --cache-teacher`), (6N·e_N + 2N + 4n)·d_forget.
    """
    if teacher == "cached":
        return (6 * N * epochs + 2 * N + 4 * n) * forget_tokens
    return (6 * N + 4 * n + (2 * N if teacher == "live" else 0)) * epochs * forget_tokens


def break_even(N: float, n: float, epochs: float, forget_tokens: float, teacher: Teacher = "paper") -> float:
    """Tokens of inference from which on distilling costs less than steering (same appendix, last line).

    I = 3·N·e_N·d_forget/(2n) + e_N·d_forget for the paper's count of distillation: what distillation costs over the
    4n FLOPs that steering adds to every token. Training the auxiliaries stands on both sides and cancels.

    Args:
        N: parameters of target and student.
        n: parameters of each auxiliary.
        epochs: e_N, passes over the forget set.
        forget_tokens: d_forget.
        teacher: how distillation is counted, see `distillation`.

    Raises:
        UsageError: a size is not above 0.
    """
    _above_zero(N=N, n=n)
    if teacher == "paper":
        return 3 * N * epochs * forget_tokens / (2 * n) + epochs * forget_tokens
    return distillation(N, n, epochs, forget_tokens, teacher) / (4 * n)


def tokens_per_block(acceptance: float, block: int) -> float:
    """Tokens that one judged block gives, (1 − a^(γ+1))/(1 − a) (Leviathan et al. 2023, equation 1).

    Args:
        acceptance: a, the probability that a drafted token is kept, from 0 to 1.
        block: γ, drafted tokens to be judged.
    """
    if not 0 < acceptance < 1:
        return 1.0 if acceptance == 0 else block + 1.0
    return math.expm1((block + 1) * math.log(acceptance)) / (acceptance - 1)


def speculative_inference(N: float, n: float, tokens: float, acceptance: float, block: int) -> float:
    """FLOPs of steered inference by blocks: all three models read γ + 1 tokens for `tokens_per_block` that are kept.

    Args:
        N: parameters of the target.
        n: parameters of each auxiliary.
        tokens: those of the answers; a prompt is never drafted and costs `inference`.
        acceptance: see `tokens_per_block`.
        block: see `tokens_per_block`.
    """
    return inference(N, n, tokens) * (block + 1) / tokens_per_block(acceptance, block)


def _above_zero(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size > 0:
            raise UsageError(f"{name} is {size:g} parameters; accepted: a number above 0")
