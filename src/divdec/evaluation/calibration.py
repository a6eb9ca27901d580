"""Choosing rule and strength where there is no retrained model.

The retain auxiliary q has never seen the forget set. How well membership attacks tell the forget set from a holdout set
on q is therefore how well they would on a retrained model; the setting is taken whose steered model comes nearest.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import IGNORED, Example, Format, encode_records
from divdec.data.records import RecordSet, overlap
from divdec.errors import UsageError
from divdec.evaluation import attacks
from divdec.evaluation.layout import decoded
from divdec.evaluation.muse import continuation
from divdec.evaluation.privacy import attack_auc
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

UNSTEERED = Steering("linear", alpha=0.0)
ATTACKS = ("loss", "zlib", "min_k", "min_k_plus_plus")
SETS = ("forget", "retain", "holdout")


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting on the curve."""

    steering: Steering
    aucs: dict[str, float]
    """Area under the curve of each attack, forget against holdout; 1 means memorised."""
    distance: float
    """Mean absolute difference of the AUCs from those of q."""
    forget_probability: float
    """Mean length-normalised probability of the forget set's answers."""
    retain_probability: float
    """The same of the retain set's."""
    retain_drop: float
    """By what share retain probability fell below the target's; negative where it rose."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The curve, and the setting chosen."""

    points: tuple[Point, ...]
    reference: dict[str, float]
    """The AUCs of q."""
    chosen: Point
    within_bound: bool
    """Whether the chosen setting keeps the retain set; False where none does."""


def calibrate(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sets: dict[str, RecordSet],
    settings: Sequence[Steering],
    *,
    max_retain_drop: float = 0.02,
    form: Format = Format(),  # noqa: B008
    batch_size: int = 32,
    title: str | None = None,
) -> Calibration:
    """Choose among settings by one pass of target, q and p.

    Args:
        model: a steered model with a neural pair.
        tokenizer: its tokenizer.
        sets: 'forget', 'retain' and 'holdout', which no model has seen.
        settings: the candidates, mild before strong.
        max_retain_drop: largest share of retain probability that may be lost.
        form: how conversations are laid out.
        batch_size: sequences in a pass.
        title: what the progress bar is called; None shows none.

    Raises:
        UsageError: there is nothing to choose from, sets overlap, or an item cannot be scored.
    """
    if not settings:
        raise UsageError("there is no setting to choose from")
    if not 0 <= max_retain_drop < 1:
        raise UsageError(f"max_retain_drop is {max_retain_drop:g}; accepted: a share of 0 to 1, or a percentage")
    for name in ("retain", "holdout"):
        if shared := overlap(sets["forget"], sets[name]).records:
            raise UsageError(f"{shared} records of the forget set stand in the {name} set too; they must differ")
    q, own_tokenizer = _retain_auxiliary(model)
    examples = {name: _examples(sets[name], tokenizer, form) for name in SETS}
    flat = [example for name in SETS for example in examples[name]]
    own_flat = flat
    if own_tokenizer is not None:  # q reads the same texts as its own tokens
        own_flat = [example for name in SETS for example in _examples(sets[name], own_tokenizer, form)]
    texts = [decoded(tokenizer, [label for label in example.labels if label != IGNORED]) for example in flat]
    counts = [len(examples[name]) for name in SETS]

    swept = score_settings(model, flat, [UNSTEERED, *settings], moments=True, batch_size=batch_size, title=title)
    own = score(q, own_flat, moments=True, batch_size=batch_size)
    reference = _aucs(own, texts, counts)
    kept = _probability(swept[0], counts, "retain")
    points = tuple(
        _point(steering, scores, texts, counts, reference, kept)
        for steering, scores in zip(settings, swept[1:], strict=True)
    )
    within = [point for point in points if point.retain_drop <= max_retain_drop]
    if within:
        chosen = min(within, key=lambda point: point.distance)
    else:
        chosen = min(points, key=lambda point: point.retain_drop)
    return Calibration(points, reference, chosen, bool(within))


def _retain_auxiliary(model: DivergenceForCausalLM) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """q, and its tokenizer where that is another than the target's.

    Raises:
        UsageError: the model is steered without a neural pair.
    """
    for experts in getattr(model.experts, "parts", (model.experts,)):
        retain: Any = getattr(experts, "retain", None)
        if hasattr(retain, "forward"):
            return retain, getattr(experts, "auxiliary_tokenizer", None)
    raise UsageError(
        "calibrate measures against the retain auxiliary, and this bundle has none (n-grams or a registry steer it): "
        "compare settings with `divdec eval … --sweep`"
    )


def _point(
    steering: Steering,
    scores: Sequence[ItemScore],
    texts: Sequence[str],
    counts: Sequence[int],
    reference: dict[str, float],
    kept: float,
) -> Point:
    aucs = _aucs(scores, texts, counts)
    retain = _probability(scores, counts, "retain")
    return Point(
        steering,
        aucs,
        distance=statistics.fmean(abs(aucs[attack] - reference[attack]) for attack in ATTACKS),
        forget_probability=_probability(scores, counts, "forget"),
        retain_probability=retain,
        retain_drop=1 - retain / kept if kept else 0.0,
    )


def _aucs(scores: Sequence[ItemScore], texts: Sequence[str], counts: Sequence[int]) -> dict[str, float]:
    forget, _, holdout = _split(list(zip(scores, texts, strict=True)), counts)
    score_of = {
        "loss": lambda item, text: attacks.loss(item),
        "zlib": attacks.zlib_ratio,
        "min_k": lambda item, text: attacks.min_k(item),
        "min_k_plus_plus": lambda item, text: attacks.min_k_plus_plus(item),
    }
    return {
        attack: attack_auc(*([of(item, text) for item, text in group] for group in (forget, holdout)))
        for attack, of in score_of.items()
    }


def _probability(scores: Sequence[ItemScore], counts: Sequence[int], name: str) -> float:
    return statistics.fmean(item.probability for item in _split(scores, counts)[SETS.index(name)])


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    first, second = counts[0], counts[0] + counts[1]
    return [values[:first], values[first:second], values[second:]]


def _examples(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format) -> list[Example]:
    if records.kind == "text":
        return [continuation(record, tokenizer, form.max_length) for record in records]
    return encode_records(records.records, tokenizer, form)
