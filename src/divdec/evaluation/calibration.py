"""`divdec calibrate`: measure a bundle, choose its rule, and write the rule into it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.data.formatting import Format
from divdec.data.records import read_records
from divdec.errors import UsageError
from divdec.evaluation.choice import FULL_ALPHAS, RuleChoice, choose_rule
from divdec.evaluation.run import parse_sweep
from divdec.evaluation.settings import CalibrationSettings
from divdec.experts.combined import check_rule
from divdec.model.bundle import TRAINING, rewrite_steering
from divdec.model.loading import Bundle
from divdec.options import read_template_kwargs
from divdec.runs import read_json
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

SWEEP = ("linear:0.25,0.5,0.75,1,1.25,1.5,1.75,2,2.5,3,4", "rank:1,2,5,10,20,50,100,200,500")
"""The default candidates of `--reference q`, mild before strong."""


def calibrate_bundle(
    settings: CalibrationSettings, load: Callable[[], tuple[DivergenceForCausalLM, PreTrainedTokenizerBase]]
) -> tuple[RuleChoice, bool]:
    """Measure the settings of a sweep, choose one, and write it into the bundle if that is asked for.

    Returns:
        The measured settings, and whether the best of them was written.

    Raises:
        UsageError: a set cannot be read, a setting does not fit the bundle, or the bundle does not load or cannot be
            written to.
    """
    if settings.write and not os.access(Path(settings.bundle).expanduser(), os.W_OK):
        raise UsageError(f"--write: bundle {settings.bundle} is no folder that may be written to; copy it")
    form = Format(
        system_prompt=settings.system_prompt,
        max_length=settings.max_length,
        chat_template_kwargs=read_template_kwargs(settings.chat_template_kwargs),
    )
    sweep = settings.sweep or (SWEEP if settings.reference == "q" else ())
    candidates = parse_sweep(sweep) if sweep else None
    sets = {name: read_records(source, limit=settings.limit) for name, source in settings.sets().items()}
    model, tokenizer = load()
    model.takedowns = None  # the figures are of the rule: requests come and go
    if candidates is not None:
        candidates = _fitting(candidates, model, keep_all=bool(settings.sweep))
    choice = choose_rule(
        model, tokenizer, sets, candidates, min_retain=1 - settings.retain_drop(), max_records=None,
        refuses=_learned_to_refuse(settings.bundle, model.steering), form=form, batch_size=settings.batch_size,
        progress=True,
    )  # fmt: skip
    written = settings.write and not choice.faults
    if written:
        rewrite_steering(settings.bundle, choice.best.steering, str(choice))
    return choice, written


def _learned_to_refuse(bundle: str, rule: Steering) -> bool:
    """Whether q was trained with `--recipe refusal`; its rule shows it if its files do not say."""
    q = Bundle.open(bundle, verify=False, target=False).paths.get("retain_auxiliary")
    trained = {} if q is None or not (q / TRAINING).is_file() else read_json(q / TRAINING, dict)
    return trained["recipe"] == "refusal" if "recipe" in trained else rule.full and rule.alpha > FULL_ALPHAS[0]


def _fitting(candidates: Sequence[Steering], model: DivergenceForCausalLM, *, keep_all: bool) -> list[Steering]:
    """Return candidates with the bundle's eligible vocabulary; those of the default that do not fit it are left out."""
    vocabulary = model.steering.vocabulary
    candidates = [dataclasses.replace(candidate, vocabulary=vocabulary) for candidate in candidates]
    if not keep_all:  # vocabularies may be smaller than the largest k of the default
        size = len(vocabulary or range(model.vocab_size))
        candidates = [candidate for candidate in candidates if candidate.rule == "linear" or candidate.k < size]
    for candidate in candidates:
        candidate.check_vocabulary(model.vocab_size)
        if candidate.margin is not None:
            check_rule(candidate, model.experts)
    return candidates
