"""The registered methods: import `methods` and `find` from here, so that all methods are registered.

Each implementation is imported when a model is built, so that this module stays torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import divdec.research.baselines.settings as options
from divdec.research.baselines.registry import BuiltModel, Method, find, methods, register

if TYPE_CHECKING:
    from pathlib import Path

    from divdec.research.baselines.job import Job

__all__ = ["find", "methods"]


def _gradient(job: Job, settings: Any, output: Path) -> BuiltModel:
    from divdec.research.baselines.gradient import train_gradient_method

    return train_gradient_method(job, settings, output)


def _rmu(job: Job, settings: Any, output: Path) -> BuiltModel:
    from divdec.research.baselines.rmu import train_rmu

    return train_rmu(job, settings, output)


def _logits(job: Job, settings: Any, output: Path) -> BuiltModel:
    from divdec.research.baselines.logits import build_logit_method

    return build_logit_method(job, settings, output)


def _guard(job: Job, settings: Any, output: Path) -> BuiltModel:
    from divdec.research.baselines.guard import build_guard

    return build_guard(job, settings, output)


def _eco(job: Job, settings: Any, output: Path) -> BuiltModel:
    from divdec.research.baselines.eco import build_eco

    return build_eco(job, settings, output)


def _lunar(job: Job, settings: Any, output: Path) -> BuiltModel:
    from divdec.research.baselines.lunar import build_lunar

    return build_lunar(job, settings, output)


register(Method(
    "grad-ascent", "GradAscent", "gradient", options.GradAscentSettings,
    "Jang et al. 2023, Knowledge Unlearning for Mitigating Privacy Risks in Language Models",
    "raise the loss on the forget set", _gradient,
))  # fmt: skip
register(Method(
    "grad-diff", "GradDiff", "gradient", options.GradDiffSettings,
    "Liu et al. 2022, Continual Learning and Private Unlearning; Maini et al. 2024, TOFU (GA-GDR)",
    "raise the loss on the forget set, lower it on the retain set", _gradient,
))  # fmt: skip
register(Method(
    "npo", "NPO", "gradient", options.NPOSettings,
    "Zhang et al. 2024, Negative Preference Optimization, the loss L_NPO",
    "gradient ascent that ceases where an answer is unlikely enough, beside the frozen target", _gradient,
))  # fmt: skip
register(Method(
    "simnpo", "SimNPO", "gradient", options.SimNPOSettings,
    "Fan et al. 2024, Simplicity Prevails: Rethinking Negative Preference Optimization, the loss of SimNPO",
    "NPO without a reference, on the mean log-probability of an answer", _gradient,
))  # fmt: skip
register(Method(
    "rmu", "RMU", "gradient", options.RMUSettings,
    "Li et al. 2024, The WMDP Benchmark, section 4.2",
    "steer hidden states of the forget set to a random vector", _rmu,
))  # fmt: skip
register(Method(
    "undial", "UNDIAL", "gradient", options.UNDIALSettings,
    "Dong et al. 2024, UNDIAL: Self-Distillation with Adjusted Logits, the adjusted teacher",
    "learn from the target with the memorised tokens' logits lowered", _gradient,
))  # fmt: skip
register(Method(
    "idk-dpo", "IdkDPO", "gradient", options.IdkDPOSettings,
    "Rafailov et al. 2023, Direct Preference Optimization, eq. 7; Maini et al. 2024, TOFU, Preference Optimization",
    'prefer "I don\'t know" to the true answer', _gradient,
))  # fmt: skip
register(Method(
    "whp", "WHP", "inference", options.WHPSettings,
    "Eldan and Russinovich 2023, Who's Harry Potter? Approximate Unlearning in LLMs, section 2.1",
    "subtract what a model raises that was fine-tuned further on the forget set", _logits,
))  # fmt: skip
register(Method(
    "offset", "δ-Unlearning", "inference", options.OffsetSettings,
    "Huang et al. 2024, Offset Unlearning for Large Language Models, section 3",
    "add the offset of a small model that was trained to make the ensemble forget", _logits,
))  # fmt: skip
register(Method(
    "uld", "ULD", "inference", options.ULDSettings,
    "Ji et al. 2024, Reversing the Forget-Retain Objectives, sections 3.1 and 3.2",
    "subtract a small assistant that knows the forget set and nothing else", _logits,
))  # fmt: skip
register(Method(
    "ucd", "UCD", "inference", options.UCDSettings,
    "Suriyakumar, Sekhari and Wilson 2025, UCD: Unlearning in LLMs via Contrastive Decoding",
    "contrast a small model without the forget set with one that saw it, among plausible tokens", _logits,
))  # fmt: skip
register(Method(
    "guard", "GUARD", "inference", options.GUARDSettings,
    "Deng et al. 2025, GUARD: Generation-time LLM Unlearning via Adaptive Restriction and Detection",
    "recognise prompts about the forget set and forbid the words of the answer", _guard,
))  # fmt: skip
register(Method(
    "eco", "ECO", "inference", options.ECOSettings,
    "Liu et al. 2024, Large Language Model Unlearning via Embedding-Corrupted Prompts, section 3",
    "recognise prompts about the forget set and corrupt their embeddings", _eco,
))  # fmt: skip
register(Method(
    "lunar", "LUNAR", "inference", options.LUNARSettings,
    "Shen et al. 2025, LLM Unlearning via Neural Activation Redirection, section 3",
    "change one projection so that forget prompts look like those the model cannot answer", _lunar,
))  # fmt: skip
