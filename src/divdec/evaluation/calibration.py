"""Choose the strength of a pair without a retrained model.

The retain auxiliary q has never seen the forget set, so membership attacks that compare the forget set
with a holdout set succeed on q as they would on a retrained model. The setting is chosen whose steered model is nearest
to q. The choice is also checked against q's figures and against the questions about the forget set that the steered
model still answers (`Calibration.faults`), because the nearest of many may still be far.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import IGNORED, Example, Format, encode_prompts, encode_records
from divdec.data.records import Record, RecordSet, overlap
from divdec.errors import UsageError
from divdec.evaluation.generation import MAX_THOUGHT, continuations, ends_in_thought, has_end
from divdec.evaluation.judges import StringJudge
from divdec.evaluation.metrics import attack_auc, membership_scores
from divdec.evaluation.questions import continuation, decoded, question_of
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNSTEERED = Steering("linear", alpha=0.0)
NEAR = 0.1
"""Largest mean difference from q's AUCs. For the demo's pairs the settings at which at most 3 % of the facts leak are
within 0.1; one step of 0.25 beyond the right α adds 0.15."""
CLOSE = 0.02  # negligible difference of AUCs
MIN_REFERENCE, MAX_REFERENCE = 0.35, 0.8
"""Bounds of the mean AUC of q. Without the forget set it is about 0.5, on similar but unlike sets up to 0.66."""
MAX_GUESSED = 0.1
"""Largest share that q may answer: it has not been trained on the forget set, but its base may know it."""
LEAK_MARGIN = 0.05  # share of the questions by which the steered model may tell more than q, which guesses
MAX_QUESTIONS = 100  # questions that are asked
MAX_OTHERS = 3  # settings that are asked besides the nearest to q, if that tells too much
MAX_ROUNDS = 4  # extensions or refinements of a sweep
MAX_ALPHA = 16.0  # largest alpha that a sweep is extended to
SETS = ("forget", "retain", "holdout")


@dataclasses.dataclass(frozen=True)
class Point:
    """Measurements of one setting."""

    steering: Steering
    aucs: dict[str, float]
    """Area under the curve of each attack, forget against holdout; 1 means memorised."""
    distance: float
    """Mean absolute difference of the AUCs from those of q."""
    excess: float
    """Mean difference: above 0 the forget set still looks learned, below 0 over-unlearned."""
    forget_probability: float
    """Mean length-normalised probability of the forget set's answers."""
    retain_probability: float
    """The same of the retain set's."""
    retain_drop: float
    """Share by which retain probability fell below the target's; negative if it rose."""

    @property
    def strength(self) -> float:
        """α of the linear rule, k of the rank rule."""
        return self.steering.alpha if self.steering.rule == "linear" else self.steering.k


@dataclasses.dataclass(frozen=True)
class Replies:
    """Greedy replies of a model to questions about the forget set."""

    count: int
    leaks: int
    """Replies that tell the true answer, by `StringJudge`. The thoughts before an answer are read, too."""
    limit: int
    """Longest reply in tokens, without its thoughts."""
    cut: int = 0
    """Replies without an end."""
    thinking: int = 0
    """Replies that were cut within a thought, so that there is no answer."""

    @property
    def cuts(self) -> str:
        """Describe the replies that were cut, for an error; empty if there are none."""
        if self.thinking:
            return f"; {self.thinking} of {self.count} replies were cut in a thought of more than {MAX_THOUGHT} tokens"
        return f"; {self.cut} of {self.count} replies were cut after {self.limit} tokens" if self.cut else ""


def ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: Sequence[Record], form: Format, batch_size: int
) -> Replies:
    """Ask a model questions greedily, and judge its replies, which may be 8 tokens longer than the longest answer.

    A model that thinks first may think for `MAX_THOUGHT` tokens.
    """
    prompts = encode_prompts(records, tokenizer, form)
    longest = max(len(example.labels) - example.prompt_length for example in encode_records(records, tokenizer, form))
    outputs = continuations(
        model, tokenizer, prompts, max_new_tokens=longest + 8, batch_size=batch_size, through_thoughts=True
    )
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in outputs]
    judge = StringJudge()
    return Replies(
        len(records),
        leaks=sum(
            judge.leaks(question_of(record), record.answer, [text])[0]
            for record, text in zip(records, texts, strict=True)
        ),
        limit=longest + 8,
        cut=sum(not has_end(model, ids) for ids in outputs),
        thinking=sum(
            ends_in_thought(model, tokenizer, prompt, ids) for prompt, ids in zip(prompts, outputs, strict=True)
        ),
    )


@dataclasses.dataclass(frozen=True)
class LeakCheck:
    """Questions about the forget set, answered greedily, and the answers that tell the true one."""

    asked: int
    steered: int
    retain_auxiliary: int
    """Answers of q, which can only guess."""
    unanswered: int = 0
    """Replies of the steered model that were cut within a thought."""

    @property
    def too_many(self) -> bool:
        """Whether the steered model tells clearly more than q guesses."""
        return self.steered - self.retain_auxiliary > LEAK_MARGIN * self.asked

    @property
    def guessed(self) -> bool:
        """Whether the steered model tells too much although it tells no more than q."""
        return not self.too_many and self.steered > MAX_GUESSED * self.asked


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The measured settings, the chosen one, and its faults."""

    points: tuple[Point, ...]
    reference: dict[str, float]
    """The AUCs of q."""
    chosen: Point
    leak_check: LeakCheck | None
    """Answers of the chosen setting; None if the forget set is plain text, which asks nothing."""
    faults: tuple[str, ...]
    """Reasons why the choice may not forget enough, a sentence each."""


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
    """Choose among settings with one pass of target, q and p; answer questions with the choice.

    Args:
        model: a steered model with a neural pair; on return it has the chosen setting.
        tokenizer: its tokenizer.
        sets: 'forget', 'retain' and 'holdout', which no model has seen.
        settings: the candidates.
        max_retain_drop: largest share of retain probability that may be lost.
        extend: try further settings if the best is the first or last of its rule, and between two if it is far from q;
            each round takes another pass.
        form: layout of conversations.
        batch_size: sequences in a pass.
        title: title of the progress bar; None shows none.

    Raises:
        UsageError: there is no candidate, sets overlap, or an item cannot be scored.
    """
    if not settings:
        raise UsageError("there is no setting to choose from")
    if not 0 <= max_retain_drop < 1:
        raise UsageError(f"max_retain_drop is {max_retain_drop:g}; accepted: a share of 0 to 1, or a percentage")
    for name in ("retain", "holdout"):
        if shared := overlap(sets["forget"], sets[name]).records:
            raise UsageError(f"{shared} records of the forget set are also in the {name} set; they must differ")
    q, q_tokenizer = _retain_auxiliary(model)
    examples = {name: _examples(sets[name], tokenizer, form) for name in SETS}
    flat = q_flat = [example for name in SETS for example in examples[name]]
    if q_tokenizer is not None:  # q reads the same texts in its own tokens
        q_flat = [example for name in SETS for example in _examples(sets[name], q_tokenizer, form)]
    texts = [decoded(tokenizer, [label for label in example.labels if label != IGNORED]) for example in flat]
    counts = [len(examples[name]) for name in SETS]
    of_set = {name: slice(sum(counts[:index]), sum(counts[: index + 1])) for index, name in enumerate(SETS)}
    q_scores = score(q, q_flat, moments=True, batch_size=batch_size)
    reference = _aucs(q_scores, texts, of_set)

    def measure(candidates: Sequence[Steering]) -> list[Point]:
        """Measure the target, and settings."""
        swept = score_settings(model, flat, [UNSTEERED, *candidates], moments=True, batch_size=batch_size, title=title)
        forget, retain = (
            [statistics.fmean(item.probability for item in scores[of_set[name]]) for scores in swept]
            for name in ("forget", "retain")
        )
        points = []
        for index, steering in enumerate([UNSTEERED, *candidates]):
            aucs = _aucs(swept[index], texts, of_set)
            differences = [aucs[attack] - reference[attack] for attack in aucs]
            points.append(
                Point(
                    steering,
                    aucs,
                    distance=statistics.fmean(map(abs, differences)),
                    excess=statistics.fmean(differences),
                    forget_probability=forget[index],
                    retain_probability=retain[index],
                    retain_drop=1 - retain[index] / retain[0] if retain[0] else 0.0,
                )
            )
        return points

    target, *points = measure(settings)
    for _ in range(MAX_ROUNDS if extend else 0):
        further = _further(points, _nearest(points, max_retain_drop), model.vocab_size)
        if not further:
            break
        points += measure(further)[1:]
        points.sort(key=lambda point: (point.steering.rule, point.strength))
    chosen = _nearest(points, max_retain_drop)

    leak_check = None
    shown, cuts = target.distance > NEAR, ""
    unfit = _faults_of_reference(statistics.fmean(reference.values()))
    if sets["forget"].kind != "text":
        records = sets["forget"].records[:: -(-len(sets["forget"]) // MAX_QUESTIONS)]
        q_leaks = ask(q, q_tokenizer or tokenizer, records, form, batch_size).leaks
        if q_leaks > MAX_GUESSED * len(records) and sets["holdout"].kind != "text":
            # Answers that are easy to guess are told of the holdout set, too.
            unseen = sets["holdout"].records[:MAX_QUESTIONS]
            guesses = ask(q, q_tokenizer or tokenizer, unseen, form, batch_size).leaks
            if q_leaks / len(records) > guesses / len(unseen) + MAX_GUESSED:
                unfit.append(
                    f"q itself tells {q_leaks} of {len(records)} answers to the forget set's questions, and {guesses} "
                    f"of {len(unseen)} to the holdout set's, so it is no reference: it has read the forget set, or its "
                    "base knows it; train q without it, from another base"
                )
        if not shown:
            of_target = ask(model.target, tokenizer, records, form, batch_size)
            shown, cuts = LeakCheck(len(records), of_target.leaks, q_leaks).too_many, of_target.cuts
        # Of those that are near enough, the nearest that tells no more than q does, if there is one.
        near = [point for point in points if point.retain_drop <= max_retain_drop and point.distance <= NEAR]
        others = sorted((point for point in near if point is not chosen), key=lambda point: point.distance)
        for point in [chosen, *others[:MAX_OTHERS]]:
            model.steering = point.steering
            replies = ask(model, tokenizer, records, form, batch_size)
            check = LeakCheck(len(records), replies.leaks, q_leaks, replies.thinking)
            if leak_check is None or not check.too_many:
                chosen, leak_check = point, check
            if not check.too_many:
                break
    model.steering = chosen.steering
    if not shown:
        unfit.append(
            f"the target's own AUCs differ from q's by {target.distance:.3f} on average, and it tells no more than q: "
            f"nothing was shown, because the target does not know the forget set better than q does{cuts}"
        )
    faults = unfit + _faults(points, chosen, max_retain_drop, leak_check)
    return Calibration(tuple(points), reference, chosen, leak_check, tuple(faults))


def _nearest(points: Sequence[Point], max_retain_drop: float) -> Point:
    within = [point for point in points if point.retain_drop <= max_retain_drop]
    if within:
        # AUCs of 1 are equal: the forget set's probability then says which setting comes closer.
        return min(within, key=lambda p: (round(p.distance, 3), math.copysign(p.forget_probability, p.excess)))
    return min(points, key=lambda point: point.retain_drop)


def _further(points: Sequence[Point], chosen: Point, vocab_size: int) -> list[Steering]:
    """Settings beyond the end of a sweep that is the best so far, or beside the best if that is far from q."""
    kind = (chosen.steering.rule, chosen.steering.margin)
    strengths = sorted(point.strength for point in points if (point.steering.rule, point.steering.margin) == kind)
    strength = chosen.strength
    if strength == strengths[-1] and chosen.excess > 0:
        wanted = [strength * factor for factor in (1.25, 1.5, 2.0)]
    elif strength == strengths[0] and chosen.excess < 0:
        wanted = [strength / factor for factor in (1.5, 2.0, 4.0)]
    elif chosen.distance > NEAR:
        index = strengths.index(strength)
        wanted = [
            (strength + other) / 2 for other in (*strengths[max(index - 1, 0) : index], *strengths[index + 1 :][:1])
        ]
    else:
        return []
    if chosen.steering.rule == "linear":
        alphas = {round(value, 4) for value in wanted if 0 < value <= MAX_ALPHA}
        return [dataclasses.replace(chosen.steering, alpha=value) for value in sorted(alphas.difference(strengths))]
    vocabulary = chosen.steering.vocabulary
    most = vocab_size if vocabulary is None else len(vocabulary)
    ks = {round(value) for value in wanted if 1 <= round(value) < most}
    return [dataclasses.replace(chosen.steering, k=value) for value in sorted(ks.difference(strengths))]


def _faults_of_reference(auc: float) -> list[str]:
    """Return why q cannot be the reference, by its mean AUC."""
    if auc < MIN_REFERENCE:
        return [
            f"q finds the forget set less likely than the holdout set (mean AUC {auc:.2f}), so it is no reference: the "
            "recipe 'matched' trains q on other answers to the forget set's questions; for calibrate, train with "
            "--recipe full-retain"
        ]
    if auc > MAX_REFERENCE:
        return [
            f"q finds the forget set much likelier than the holdout set (mean AUC {auc:.2f}; accepted: at most "
            f"{MAX_REFERENCE:g}), so it is no reference: it has read the forget set, or the holdout set is of another "
            "kind; train q without the forget set, or give records like the forget set's as --holdout"
        ]
    return []


def _faults(points: Sequence[Point], chosen: Point, max_retain_drop: float, leak_check: LeakCheck | None) -> list[str]:
    faults = []
    same_rule = [point for point in points if point.steering.rule == chosen.steering.rule]
    nearest = min(same_rule, key=lambda point: point.distance)
    if chosen.retain_drop > max_retain_drop:
        faults.append(
            f"no setting keeps the retain set within {max_retain_drop:.1%}: {chosen.steering} loses least, "
            f"{chosen.retain_drop:.1%}"
        )
    elif nearest.retain_drop > max_retain_drop and nearest.distance < chosen.distance - CLOSE:
        faults.append(
            f"the retain limit binds: {nearest.steering} would come nearer to q ({nearest.distance:.3f}), but loses "
            f"{nearest.retain_drop:.1%} of the retain set's probability (allowed: {max_retain_drop:.1%})"
        )
    if chosen.distance > NEAR:
        faults.append(
            f"its AUCs differ from q's by {chosen.distance:.3f} on average (allowed: {NEAR:g}): membership in the "
            "forget set shows otherwise than in a model that has not learned it"
        )
    strengths = [point.strength for point in same_rule]
    if chosen.strength == max(strengths) and chosen.excess > CLOSE:
        faults.append(f"{chosen.steering} is the strongest of its rule that was tried: a better one may lie beyond")
    elif chosen.strength == min(strengths) and chosen.excess < -CLOSE:
        faults.append(f"{chosen.steering} is the mildest of its rule that was tried: a better one may lie below")
    if leak_check is not None and leak_check.too_many:
        faults.append(
            f"asked {leak_check.asked} questions of the forget set, it still tells {leak_check.steered} answers; q, "
            f"which has not learned them, {leak_check.retain_auxiliary}"
        )
    elif leak_check is not None and leak_check.guessed:
        faults.append(
            f"asked {leak_check.asked} questions of the forget set, it still tells {leak_check.steered} answers, and q "
            f"{leak_check.retain_auxiliary} (accepted: {MAX_GUESSED:.0%}): q's base knows them, or they are easy to "
            "guess"
        )
    if leak_check is not None and leak_check.unanswered > LEAK_MARGIN * leak_check.asked:
        faults.append(
            f"{leak_check.unanswered} of {leak_check.asked} replies were cut in a thought of more than {MAX_THOUGHT} "
            "tokens, so that their answers are not known"
        )
    return faults


def _retain_auxiliary(model: DivergenceForCausalLM) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Return q, and its tokenizer if it differs from the target's."""
    for experts in getattr(model.experts, "parts", (model.experts,)):
        retain: Any = getattr(experts, "retain", None)
        if hasattr(retain, "forward"):
            return retain, getattr(experts, "auxiliary_tokenizer", None)
    raise UsageError(
        "calibrate measures against the retain auxiliary, and this bundle has none (n-grams or a registry steer it): "
        "compare settings with `divdec eval … --sweep`"
    )


def _aucs(scores: Sequence[ItemScore], texts: Sequence[str], of_set: dict[str, slice]) -> dict[str, float]:
    forget, holdout = (
        [membership_scores(*item) for item in zip(scores[of_set[name]], texts[of_set[name]], strict=True)]
        for name in ("forget", "holdout")
    )
    return {
        attack: attack_auc([one[attack] for one in forget], [one[attack] for one in holdout]) for attack in forget[0]
    }


def _examples(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format) -> list[Example]:
    if records.kind == "text":
        return [continuation(record, tokenizer, form.max_length) for record in records]
    return encode_records(records.records, tokenizer, form)
