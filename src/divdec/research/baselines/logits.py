"""Baselines that combine the logits of target and helpers: WHP, ULD and UCD.

The formulas are pure functions of logits. δ-Unlearning, whose formula is linear steering itself, is in `offset.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache

from divdec.experts.neural import logits_of, new_cache
from divdec.research.baselines.composite import TARGET, Decoding, Step, write_composite
from divdec.research.baselines.helpers import RETAIN, RememberAndForget, base_of, first_layers, helper
from divdec.research.baselines.inference_settings import UCDSettings, ULDSettings, WHPSettings
from divdec.research.baselines.job import Job
from divdec.research.baselines.method import Made
from divdec.training.auxiliaries import load_for_training
from divdec.training.inputs import Companion

Logits = Float[Tensor, "*places vocab"]


def whp(target: Logits, reinforced: Logits, alpha: float) -> Logits:
    """P − α·ReLU(reinforced − P) (Eldan and Russinovich 2023, equation 1)."""
    return target - alpha * torch.relu(reinforced - target)


def uld(target: Logits, assistant: Logits, weight: float, plausibility: float) -> Logits:
    """P − w·A among the plausible tokens (Ji et al. 2024, equation 3 and the filter of section 3.2).

    A is taken as log-probabilities against the uniform distribution, log p + log V: an assistant that is uniform, as
    it is trained to be outside the forget set, then changes nothing. Within the plausible tokens this is the paper's
    formula, for a constant added to all logits says nothing.
    """
    against_uniform = assistant.log_softmax(dim=-1) + math.log(assistant.shape[-1])
    return among_plausible(target, target - weight * against_uniform, plausible(target, plausibility))


def ucd(target: Logits, clean: Logits, unclean: Logits, alpha: float, plausibility: float) -> Logits:
    """P + α·(clean − unclean) among the plausible tokens, of log-probabilities (Suriyakumar et al. 2025)."""
    contrast = clean.log_softmax(dim=-1) - unclean.log_softmax(dim=-1)
    return among_plausible(target, target + alpha * contrast, plausible(target, plausibility))


def plausible(target: Logits, share: float) -> Bool[Tensor, "*places vocab"]:
    """Tokens of at least `share` of the likeliest token's probability (Li et al. 2023, equation 2); 0 takes all."""
    if share == 0:
        return torch.ones_like(target, dtype=torch.bool)
    return target >= target.amax(dim=-1, keepdim=True) + math.log(share)


def among_plausible(target: Logits, changed: Logits, head: Bool[Tensor, "*places vocab"]) -> Logits:
    """The changed logits of plausible tokens; the others below all of them.

    The papers give the others −∞, which a likelihood cannot bear. Here they keep the target's logits, lowered by a
    constant, if need be, so that the likeliest of them lies no higher than the least of the plausible. The choice
    among tokens is the papers', logits are finite, and where nothing is changed the target's logits are left.
    """
    least = changed.masked_fill(~head, math.inf).amin(dim=-1, keepdim=True)
    highest = target.masked_fill(head, -math.inf).amax(dim=-1, keepdim=True)
    # Where all tokens are plausible there is no other, and nothing is lowered.
    return torch.where(head, changed, target - torch.relu(highest - least))


class LogitCombination(Decoding):
    """A formula over the logits of several models."""

    parts: tuple[str, ...]
    """The models' names, in the order of the formula's arguments; a configuration's own order means nothing."""
    formula: Callable[..., Tensor]
    """Takes each model's logits, and the options by name."""

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.options = {name: float(value) for name, value in options.items()}

    def new_caches(self) -> list[Cache]:
        """One for each model."""
        return [new_cache(self.model(name)) for name in self.parts]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `Decoding.logits`."""
        found: list[Tensor] = []
        for name, cache in zip(self.parts, caches, strict=True):
            inputs = (step.input_ids, step.attention_mask, step.position_ids)
            logits = logits_of(self.model(name), *inputs, cache, step.logits_to_keep).float()
            found.append(logits.to(found[0].device) if found else logits)
        width = min(logits.shape[-1] for logits in found)
        return type(self).formula(*(logits[..., :width] for logits in found), **self.options)


class WHP(LogitCombination):
    """Target and reinforced model; see `whp`."""

    parts = (TARGET, "reinforced")
    formula = staticmethod(whp)


class ULD(LogitCombination):
    """Target and assistant; see `uld`."""

    parts = (TARGET, "assistant")
    formula = staticmethod(uld)


class UCD(LogitCombination):
    """Target, clean and unclean model; see `ucd`."""

    parts = (TARGET, "clean", "unclean")
    formula = staticmethod(ucd)


def make_whp(job: Job, settings: WHPSettings, output: Path) -> Made:
    """Fine-tune the target further on the forget set, and take away what that raises."""
    reinforced, seconds = helper(job, "reinforced", job.target, job.forget_examples, settings.training(job.seed))
    parts = {TARGET: job.target, "reinforced": reinforced}
    write_composite(output, job.tokenizer, "whp", {"alpha": settings.alpha}, parts)
    return Made(seconds)


def make_uld(job: Job, settings: ULDSettings, output: Path) -> Made:
    """Train the assistant, and take it away.

    Raises:
        UsageError: the assistant shall be the base, and there is none, or have more layers than the target.
    """
    if settings.assistant == "base":
        start, load, layers = base_of(job, "uld with assistant=base"), load_for_training, None
    else:
        start = job.target
        layers, load = first_layers(start, settings.layers)
    assistant, seconds = helper(
        job,
        "assistant",
        start,
        job.forget_examples,
        settings.training(job.seed, settings.lora_rank),
        key=[layers, settings.retain_weight],
        load=load,
        objective=RememberAndForget(settings.retain_weight),
        companions={RETAIN: Companion(job.retain_examples)},
    )
    options = {"weight": settings.weight, "plausibility": settings.plausibility}
    write_composite(output, job.tokenizer, "uld", options, {TARGET: job.target, "assistant": assistant})
    return Made(seconds, ("without the paper's paraphrased and perturbed answers beside forget and retain set",))


def make_ucd(job: Job, settings: UCDSettings, output: Path) -> Made:
    """Train the clean model on the retain set, the unclean one on both, and contrast them.

    Raises:
        UsageError: the job has no base, or one of other tokens.
    """
    base, training = base_of(job, "ucd"), settings.training(job.seed)
    clean, clean_seconds = helper(job, "clean", base, job.retain_examples, training)
    both = job.forget_examples + job.retain_examples
    unclean, unclean_seconds = helper(job, "unclean", base, both, training)
    options = {"alpha": settings.alpha, "plausibility": settings.plausibility}
    parts = {TARGET: job.target, "clean": clean, "unclean": unclean}
    write_composite(output, job.tokenizer, "ucd", options, parts)
    return Made(clean_seconds + unclean_seconds)
