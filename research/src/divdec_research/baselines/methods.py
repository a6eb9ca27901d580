"""Registry of the other unlearning methods. It does not import torch, so that `divdec baseline list` starts fast."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import divdec_research.baselines.settings as options
from divdec_research.registry import NameRegistry


@dataclasses.dataclass(frozen=True)
class Method:
    """An unlearning method; `divdec_research.baselines.run.build_method` applies it."""

    name: str
    """Name on the command line: 'npo'."""
    title: str
    """Name in the paper's table: 'NPO'."""
    kind: Literal["gradient", "inference"]
    """'gradient' writes an ordinary checkpoint; 'inference' leaves the target's weights and wraps it."""
    settings: type
    """A frozen dataclass of its options; every option has a default."""
    source: str
    """Authors, year, title and section or equation."""
    summary: str
    """One line for the list of methods."""

    @property
    def run_settings(self) -> type[options.BaselineSettings]:
        """Class of the run's options beside `settings`."""
        return options.HelpedSettings if self.kind == "inference" else options.BaselineSettings


_ALL = (
    Method(
        "grad-ascent", "GradAscent", "gradient", options.GradAscentSettings,
        "Jang et al. 2023, Knowledge Unlearning for Mitigating Privacy Risks in Language Models",
        "raise the loss on the forget set",
    ),
    Method(
        "grad-diff", "GradDiff", "gradient", options.GradDiffSettings,
        "Liu et al. 2022, Continual Learning and Private Unlearning; Maini et al. 2024, TOFU (GA-GDR)",
        "raise the loss on the forget set, lower it on the retain set",
    ),
    Method(
        "npo", "NPO", "gradient", options.NPOSettings,
        "Zhang et al. 2024, Negative Preference Optimization, the loss L_NPO",
        "gradient ascent whose weight falls as an answer becomes less likely than under the frozen target",
    ),
    Method(
        "simnpo", "SimNPO", "gradient", options.SimNPOSettings,
        "Fan et al. 2024, Simplicity Prevails: Rethinking Negative Preference Optimization, the loss of SimNPO",
        "NPO without a reference, on the mean log-probability of an answer",
    ),
    Method(
        "rmu", "RMU", "gradient", options.RMUSettings,
        "Li et al. 2024, The WMDP Benchmark, section 4.2",
        "steer hidden states of the forget set to a random vector",
    ),
    Method(
        "undial", "UNDIAL", "gradient", options.UNDIALSettings,
        "Dong et al. 2024, UNDIAL: Self-Distillation with Adjusted Logits, the adjusted teacher",
        "learn from the target with the memorised tokens' logits lowered",
    ),
    Method(
        "idk-dpo", "IdkDPO", "gradient", options.IdkDPOSettings,
        "Rafailov et al. 2023, Direct Preference Optimization, eq. 7; Maini et al. 2024, TOFU, Preference Optimization",
        'prefer "I don\'t know" to the true answer',
    ),
    Method(
        "whp", "WHP", "inference", options.WHPSettings,
        "Eldan and Russinovich 2023, Who's Harry Potter? Approximate Unlearning in LLMs, section 2.1",
        "subtract the increase in logits of a model that was fine-tuned further on the forget set",
    ),
    Method(
        "offset", "δ-Unlearning", "inference", options.OffsetSettings,
        "Huang et al. 2024, Offset Unlearning for Large Language Models, section 3",
        "add the logit offset of a small model, trained so that the ensemble forgets",
    ),
    Method(
        "uld", "ULD", "inference", options.ULDSettings,
        "Ji et al. 2024, Reversing the Forget-Retain Objectives, sections 3.1 and 3.2",
        "subtract the logits of a small assistant model that remembers only the forget set",
    ),
    Method(
        "ucd", "UCD", "inference", options.UCDSettings,
        "Suriyakumar, Sekhari and Wilson 2025, UCD: Unlearning in LLMs via Contrastive Decoding",
        "contrast a small model without the forget set with one that saw it, among plausible tokens",
    ),
    Method(
        "guard", "GUARD", "inference", options.GUARDSettings,
        "Deng et al. 2025, GUARD: Generation-time LLM Unlearning via Adaptive Restriction and Detection",
        "recognise prompts about the forget set and forbid the words of the answer",
    ),
    Method(
        "eco", "ECO", "inference", options.ECOSettings,
        "Liu et al. 2024, Large Language Model Unlearning via Embedding-Corrupted Prompts, section 3",
        "recognise prompts about the forget set and corrupt their embeddings",
    ),
    Method(
        "ngram-filter", "n-gram filter", "inference", options.NgramFilterSettings,
        "Ippolito et al. 2023, Preventing Generation of Verbatim Memorization in Language Models Gives a False Sense "
        "of Privacy, MemFree decoding",
        "never complete an n-gram of the forget answers",
    ),
    Method(
        "guardrail", "Guardrail", "inference", options.GuardrailSettings,
        "Thaker et al. 2024, Guardrail Baselines for Unlearning in LLMs",
        "forbid the topic in a system prompt, and refuse where an answer would tell a key phrase of the forget set",
    ),
    Method(
        "lunar", "LUNAR", "inference", options.LUNARSettings,
        "Shen et al. 2025, LLM Unlearning via Neural Activation Redirection, section 3",
        "change one projection so that the activations of forget prompts resemble those of unanswerable prompts",
    ),
)  # fmt: skip
METHODS = NameRegistry("method", ((method.name, method) for method in _ALL))
REFERENCES = {"target": "Target", "retrain": "Retrain"}
DIVDEC = {
    "linear": "Linear DD",
    "rank": "Rank DD",
    "distill": "Distill DD",
    # The same rules with auxiliaries of another recipe.
    "linear-paper": "Linear DD (paper)",
    "rank-paper": "Rank DD (paper)",
    "linear-matched": "Linear DD (matched)",
    "rank-matched": "Rank DD (matched)",
}
TITLES = {**REFERENCES, **DIVDEC, **{name: method.title for name, method in METHODS.items()}}
"""Names in the paper's tables, in their order."""
Kind = Literal["ours", "other", "reference"]


def kind_of(name: str) -> Kind:
    """Whether a name is of a reference, of Divergence Decoding or of another method."""
    return "reference" if name in REFERENCES else "ours" if name in DIVDEC else "other"


def method_of(settings: Any) -> Method:
    """Return the method of an instance of its settings."""
    return next(method for method in _ALL if method.settings is type(settings))
