"""Choosing rule and strength where there is no retrained model.

The retain auxiliary q has never seen the forget set. How well membership attacks tell the forget set from a holdout set
on q is therefore how well they would on a retrained model; the setting is taken whose steered model comes nearest.

The nearest of many may still be far. So the choice is held against what is needed too: q's own figures, and how many
questions about the forget set the steered model still answers (`Calibration.faults`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import IGNORED, Example, Format, encode_records
from divdec.data.records import Record, RecordSet, overlap
from divdec.errors import UsageError
from divdec.evaluation import attacks
from divdec.evaluation.generation import answers
from divdec.evaluation.judges import StringJudge
from divdec.evaluation.layout import decoded
from divdec.evaluation.leak import question_of
from divdec.evaluation.muse import continuation
from divdec.evaluation.privacy import attack_auc
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

UNSTEERED = Steering("linear", alpha=0.0)
NEAR = 0.1
"""Largest mean difference from q's AUCs. For the demo's pairs the settings at which at most 3 % of the facts leak lie
within 0.1; one step of 0.25 beyond the right α adds 0.15."""
CLOSE = 0.02
"""Differences of AUCs that make no difference."""
TOLD = 0.05
"""By what share of the questions the steered model may tell more than q does, which guesses."""
MOST_ASKED = 100
"""Questions that are asked, of a forget set that has more."""
MOST_OTHERS = 3
"""Settings that are asked besides the nearest to q, where that tells too much."""
MOST_ROUNDS = 4
"""How often a sweep is extended or refined."""
MOST_ALPHA = 16.0
"""Largest α that a sweep is extended to."""
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
    excess: float
    """Mean difference: above 0 the forget set still shows as learned, below 0 it shows as denied."""
    forget_probability: float
    """Mean length-normalised probability of the forget set's answers."""
    retain_probability: float
    """The same of the retain set's."""
    retain_drop: float
    """By what share retain probability fell below the target's; negative where it rose."""


@dataclasses.dataclass(frozen=True)
class Told:
    """Questions about the forget set, answered greedily."""

    asked: int
    steered: int
    """Answers of the steered model that tell what the true answer tells, by `StringJudge`."""
    retain_auxiliary: int
    """The same of q, which can only guess."""

    @property
    def too_many(self) -> bool:
        """Whether the steered model tells clearly more than q guesses."""
        return self.steered - self.retain_auxiliary > TOLD * self.asked


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The curve, the setting chosen, and what speaks against it."""

    points: tuple[Point, ...]
    reference: dict[str, float]
    """The AUCs of q."""
    chosen: Point
    told: Told | None
    """What the chosen setting answers; None where the forget set is plain text, which asks nothing."""
    faults: tuple[str, ...]
    """Why the choice may not forget, or not enough, a sentence each; empty where nothing was found."""


def calibrate(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sets: dict[str, RecordSet],
    settings: Sequence[Steering],
    *,
    max_retain_drop: float = 0.02,
    extend: bool = False,
    form: Format = Format(),  # noqa: B008
    batch_size: int = 32,
    title: str | None = None,
) -> Calibration:
    """Choose among settings by one pass of target, q and p; answer questions with the choice.

    Args:
        model: a steered model with a neural pair; it is left with the chosen setting.
        tokenizer: its tokenizer.
        sets: 'forget', 'retain' and 'holdout', which no model has seen.
        settings: the candidates.
        max_retain_drop: largest share of retain probability that may be lost.
        extend: try further settings where the best is the first or last of its rule, and between two where it is far
            from q; each round costs another pass.
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
    reference = _aucs(score(q, own_flat, moments=True, batch_size=batch_size), texts, counts)

    def measure(some: Sequence[Steering]) -> list[Point]:
        swept = score_settings(model, flat, [UNSTEERED, *some], moments=True, batch_size=batch_size, title=title)
        kept = _probability(swept[0], counts, "retain")
        return [
            _point(steering, scores, texts, counts, reference, kept)
            for steering, scores in zip(some, swept[1:], strict=True)
        ]

    points = measure(settings)
    for _ in range(MOST_ROUNDS if extend else 0):
        further = _further(points, _nearest(points, max_retain_drop), model.vocab_size)
        if not further:
            break
        points += measure(further)
        points.sort(key=lambda point: (point.steering.rule, _strength(point.steering)))
    chosen = _nearest(points, max_retain_drop)

    told = None
    if sets["forget"].kind != "text":
        asked = sets["forget"].records[:: -(-len(sets["forget"]) // MOST_ASKED)]
        of_q = _leaks(q, own_tokenizer or tokenizer, asked, form, batch_size)
        # Of those that are near enough, the nearest that tells no more than q does, where there is one.
        near = [point for point in points if point.retain_drop <= max_retain_drop and point.distance <= NEAR]
        others = sorted((point for point in near if point is not chosen), key=lambda point: point.distance)
        for point in [chosen, *others[:MOST_OTHERS]]:
            model.steering = dataclasses.replace(point.steering, fill="hard")
            found = Told(len(asked), _leaks(model, tokenizer, asked, form, batch_size), of_q)
            if told is None or not found.too_many:
                chosen, told = point, found
            if not found.too_many:
                break
    model.steering = dataclasses.replace(chosen.steering, fill="hard")
    faults = _faults(points, chosen, max_retain_drop, told)
    return Calibration(tuple(points), reference, chosen, told, tuple(faults))


def _nearest(points: Sequence[Point], max_retain_drop: float) -> Point:
    within = [point for point in points if point.retain_drop <= max_retain_drop]
    if within:
        # AUCs of 1 are all alike: the forget set's probability then says which setting is on the way.
        return min(within, key=lambda p: (round(p.distance, 3), math.copysign(p.forget_probability, p.excess)))
    return min(points, key=lambda point: point.retain_drop)


def _strength(steering: Steering) -> float:
    return steering.alpha if steering.rule == "linear" else steering.k


def _further(points: Sequence[Point], chosen: Point, vocab_size: int) -> list[Steering]:
    """Settings beyond an end of the sweep that is the best so far, or beside the best where that is far from q."""
    strengths = sorted(_strength(point.steering) for point in points if point.steering.rule == chosen.steering.rule)
    strength = _strength(chosen.steering)
    linear = chosen.steering.rule == "linear"
    if strength == strengths[-1] and chosen.excess > 0:
        wanted = [strength * factor for factor in (1.25, 1.5, 2.0)]
    elif strength == strengths[0] and chosen.excess < 0:
        wanted = [strength / factor for factor in (1.5, 2.0, 4.0)]
    elif chosen.distance > NEAR:
        place = strengths.index(strength)
        wanted = [
            (strength + other) / 2 for other in (*strengths[max(place - 1, 0) : place], *strengths[place + 1 :][:1])
        ]
    else:
        return []
    if linear:
        new = {round(value, 4) for value in wanted if 0 < value <= MOST_ALPHA}
        return [dataclasses.replace(chosen.steering, alpha=value) for value in sorted(new.difference(strengths))]
    new = {round(value) for value in wanted if 1 <= round(value) < _most(chosen.steering, vocab_size)}
    return [dataclasses.replace(chosen.steering, k=value) for value in sorted(new.difference(strengths))]


def _most(steering: Steering, vocab_size: int) -> int:
    return vocab_size if steering.vocabulary is None else len(steering.vocabulary)


def _leaks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Record],
    form: Format,
    batch_size: int,
) -> int:
    """How many greedy answers tell what the true answer tells."""
    longest = max(len(example.labels) - example.prompt_length for example in encode_records(asked, tokenizer, form))
    texts = answers(model, tokenizer, asked, form=form, max_new_tokens=longest + 8, batch_size=batch_size)
    judge = StringJudge()
    return sum(
        judge.leaks(question_of(record), record.answer, [text])[0] for record, text in zip(asked, texts, strict=True)
    )


def _faults(points: Sequence[Point], chosen: Point, max_retain_drop: float, told: Told | None) -> list[str]:
    found = []
    own_rule = [point for point in points if point.steering.rule == chosen.steering.rule]
    nearest = min(own_rule, key=lambda point: point.distance)
    if chosen.retain_drop > max_retain_drop:
        found.append(
            f"no setting keeps the retain set within {max_retain_drop:.1%}: {chosen.steering} loses least, "
            f"{chosen.retain_drop:.1%}"
        )
    elif nearest.retain_drop > max_retain_drop and nearest.distance < chosen.distance - CLOSE:
        found.append(
            f"the retain limit binds: {nearest.steering} would come nearer to q ({nearest.distance:.3f}), but loses "
            f"{nearest.retain_drop:.1%} of the retain set's probability (allowed: {max_retain_drop:.1%})"
        )
    if chosen.distance > NEAR:
        found.append(
            f"its AUCs differ from q's by {chosen.distance:.3f} on average (allowed: {NEAR:g}): membership in the "
            "forget set shows otherwise than in a model that has not learned it"
        )
    strengths = [_strength(point.steering) for point in own_rule]
    strength = _strength(chosen.steering)
    if strength == max(strengths) and chosen.excess > CLOSE:
        found.append(f"{chosen.steering} is the strongest of its rule that was tried: a better one may lie beyond")
    elif strength == min(strengths) and chosen.excess < -CLOSE:
        found.append(f"{chosen.steering} is the mildest of its rule that was tried: a better one may lie below")
    if told is not None and told.too_many:
        found.append(
            f"asked {told.asked} questions of the forget set, it still tells {told.steered} answers; q, which has not "
            f"learned them, {told.retain_auxiliary}"
        )
    return found


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
        excess=statistics.fmean(aucs[attack] - reference[attack] for attack in ATTACKS),
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
