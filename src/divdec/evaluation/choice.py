"""Measure what a steered model forgets and what else changes in its answers, and choose a rule by these figures.

The unsteered target is the measure for the forget set, retain records that no auxiliary was trained on, similar
questions whose answers should not change, and neutral text, to which steering should do nothing. With a holdout set q
is the reference as well: q has never seen the forget set, so membership attacks that compare the forget set with the
holdout set succeed on q as they would on a retrained model. Then the rule is chosen whose steered model is nearest to
q.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from divdec.data.formatting import IGNORED, Example, Format, encode_prompt, encode_prompts, encode_records, encode_set
from divdec.data.records import Record, RecordSet, overlap
from divdec.errors import UsageError
from divdec.evaluation.generation import MAX_THOUGHT, continuations, ends_in_thought, has_end, without_padding
from divdec.evaluation.judges import StringJudge
from divdec.evaluation.metrics import attack_auc, membership_scores
from divdec.evaluation.phrases import holds, is_distinctive, key_phrase, words
from divdec.evaluation.questions import continuation, decoded, question_of
from divdec.evaluation.recitation import Passage, passages_of, recites
from divdec.evaluation.scoring import (
    ItemScore,
    mean_loss,
    score,
    score_settings,
    token_log_probabilities,
    unchanged_answers,
)
from divdec.steering import MAX_MARGIN, Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.runs import ResultCache

UNSTEERED = Steering("linear", alpha=0.0)
CANDIDATES = ("linear:1", "linear:1.5", "rank:20", "rank:20:3", "rank:50:3")
NOISE_LEVELS = (0.5, 0.9, 0.99)
MARGIN_ALPHA = 1.5
FULL_ALPHAS = 1.0, 1.5, 2.5  # beyond 1 where q refuses
MIN_NOISE, NOISE_FACTORS = 1.0, (1.0, 2.0, 4.0)  # margins as multiples of the noise, which counts as 1 nat or more
FULL_FACTORS = 1.0, 1.4, 2.0  # there; such pairs hardly forget beyond twice the noise
MIN_RETAIN = 0.95
"""Least probability of the retain set's and similar answers, relative to the target's."""
MAX_PERPLEXITY = 1.10
"""Largest perplexity of neutral text, relative to the target's."""
MIN_UNCHANGED = 0.5
"""Least share of answers to neutral prompts that are the target's, word for word."""
MIN_ANSWERED = 0.9
"""Least share of the retain set's and similar questions that may be answered, relative to the target's."""
MIN_KEPT = 0.95
"""Share of other answers from which on a smaller margin is better, because it forgets facts in more wordings."""
MAX_LEAKED = 0.05
"""Largest share of the forget set's questions that may be answered, beyond what q answers."""
MAX_GUESSED = 0.1
"""Largest share that q may answer: it has not been trained on the forget set, but its base may know it."""
MAX_DISTANCE = 0.1
"""Largest mean difference from q's AUCs. For the demo's pairs the settings at which at most 3 % of the facts leak are
within 0.1; one step of 0.25 beyond the right α adds 0.15."""
MAX_EXCESS = 0.02  # negligible difference of AUCs
MIN_REFERENCE, MAX_REFERENCE = 0.35, 0.8
"""Bounds of the mean AUC of q. Without the forget set it is about 0.5, on similar but unlike sets up to 0.66."""
MAX_ASKED = 5  # settings that answer, if one is good; twice as many where q refuses
MAX_RECORDS = 64  # of a set
MAX_REPLY = 32  # tokens of a generated answer to neutral text
MIN_REPLY = 32  # a bare answer has fewer tokens than a sentence that states it
BEGINNINGS = "", "Answer:", "A:", "Sure, here is the answer:"
"""Beginnings of an answer, which prompts may hold. A pair whose q refuses learns them, and is measured after them."""
PROMPT = 16  # tokens of a plain neutral text before its continuation


@dataclasses.dataclass(frozen=True)
class Effects:
    """Figures of one setting."""

    steering: Steering
    forget: float
    """Mean length-normalised probability of the forget set's answers."""
    retain: float
    """Mean length-normalised probability of the answers of the retain set, and of the similar questions if both are
    questions, relative to the target's."""
    perplexity: float | None = None
    """Perplexity of neutral text, relative to the target's; None without neutral text."""
    leaked: float | None = None
    """Share of the forget set's questions that are answered correctly, or of its passages that are recited, in greedy
    decoding; None if this setting was not asked."""
    unchanged: float | None = None
    """Share of greedy answers to neutral prompts that are the target's, word for word."""
    answered: float | None = None
    """Share of the questions of the retain set and of the similar questions that are answered correctly, relative to
    the target's; None with a holdout set, and if the target answers none."""
    unanswered: float = 0.0
    """Share of the replies to the forget set's questions that were cut within a thought."""
    cuts: str = ""
    """Describes the replies that were cut."""
    aucs: dict[str, float] = dataclasses.field(default_factory=dict)
    """Area under the curve of each membership attack, forget against holdout; 1 means memorised. Empty without a
    holdout set."""
    distance: float = 0.0
    """Mean absolute difference of the AUCs from those of q."""
    excess: float = 0.0
    """Mean difference: above 0 the forget set still looks learned, below 0 over-unlearned."""

    @property
    def strength(self) -> float:
        """α of the linear rule, k of the rank rule."""
        return self.steering.alpha if self.steering.rule == "linear" else self.steering.k

    @property
    def kept(self) -> float:
        """The lesser of `unchanged` and `answered`; 0 without either."""
        return min((share for share in (self.unchanged, self.answered) if share is not None), default=0.0)

    def keeps(self, min_retain: float = MIN_RETAIN) -> bool:
        """Whether retain set and neutral text stay within the limits."""
        neutral = (self.perplexity or 1.0) <= MAX_PERPLEXITY and (
            self.unchanged is None or self.unchanged >= MIN_UNCHANGED
        )
        return self.retain >= min_retain and neutral

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; the figures of membership attacks only with a holdout set."""
        fields = dataclasses.asdict(self) | {"steering": str(self.steering)}
        return {name: value for name, value in fields.items() if self.aucs or name not in MEMBERSHIP}

    def shows_more_than(self, guessed: float) -> bool:
        """Whether the answers show knowledge that q lacks; if the target's do not, nothing can be forgotten."""
        return self.leaked is None or self.leaked > guessed + MAX_LEAKED

    def faults(self, target: Effects, guessed: float, min_retain: float = MIN_RETAIN) -> list[str]:
        """Return the reasons why the setting is not good, a sentence each.

        Args:
            target: figures of the unsteered target.
            guessed: share of the forget set's questions that q answers.
            min_retain: least value of `retain`.
        """
        faults = []
        if self.retain < min_retain:
            kept = f"{100 * self.retain:.3g}%"
            faults.append(f"{self.steering} keeps only {kept} of the probability of what it should keep")
        if self.perplexity is not None and self.perplexity > MAX_PERPLEXITY:
            faults.append(f"{self.steering} raises the perplexity of neutral text to {self.perplexity:.2f} times")
        if self.unchanged is not None and self.unchanged < MIN_UNCHANGED:
            faults.append(
                f"{self.steering} leaves only {self.unchanged:.0%} of the answers to neutral prompts unchanged"
            )
        if self.answered is not None and self.answered < MIN_ANSWERED:
            faults.append(
                f"{self.steering} answers only {self.answered:.0%} of what the target answers of the retain set's and "
                "similar questions"
            )
        if self.leaked is not None and self.shows_more_than(guessed):
            faults.append(
                f"{self.steering} still answers {self.leaked:.0%} of the forget set (the target {target.leaked:.0%}, q "
                f"{guessed:.0%})"
            )
        elif self.leaked is not None and self.leaked > MAX_GUESSED:
            faults.append(
                f"{self.steering} still answers {self.leaked:.0%} of the forget set, and q {guessed:.0%}: q's base "
                "knows the answers, or they are easy to guess"
            )
        if self.unanswered > MAX_LEAKED:
            faults.append(
                f"{self.unanswered:.0%} of the replies with {self.steering} were cut in a thought of more than "
                f"{MAX_THOUGHT} tokens, so that their answers are not known"
            )
        return faults


MEMBERSHIP = ("aucs", "distance", "excess")


@dataclasses.dataclass(frozen=True)
class RuleChoice:
    """The measured settings and the best of them."""

    target: Effects
    settings: tuple[Effects, ...]
    best: Effects
    guessed: float
    """Share of the forget set's questions that q answers, or of its passages that q recites."""
    noise: tuple[float, ...] = ()
    """Quantiles `NOISE_LEVELS` of |log q − log p| at the tokens of the neutral text, in nats."""
    q_perplexity: float | None = None
    """Perplexity of neutral text under q, relative to the target's."""
    min_retain: float = MIN_RETAIN
    asked: int = 0
    """Number of questions or passages of the forget set."""
    reference: dict[str, float] = dataclasses.field(default_factory=dict)
    """The AUCs of q; empty without a holdout set."""
    reference_faults: tuple[str, ...] = ()
    """Reasons why q cannot be the reference."""

    @property
    def shown(self) -> bool:
        """Whether the target knows the forget set better than q, so that something can be forgotten."""
        return self.target.shows_more_than(self.guessed) or self.target.distance > MAX_DISTANCE

    @property
    def faults(self) -> list[str]:
        """Reasons why no setting is good, a sentence each; empty if `best` is."""
        faults, best = list(self.reference_faults), self.best
        if not self.shown:
            faults.append(
                f"the target answers {self.target.leaked:.0%} of the forget set (q {self.guessed:.0%}): nothing was "
                f"shown{self.target.cuts}"
            )
        if best.distance > MAX_DISTANCE:
            faults.append(
                f"its AUCs differ from q's by {best.distance:.3f} on average (allowed: {MAX_DISTANCE:g}): membership "
                "in the forget set shows otherwise than in a model that has not learned it"
            )
        form = best.steering.rule, best.steering.full
        strengths = [row.strength for row in self.settings if (row.steering.rule, row.steering.full) == form]
        if best.strength == max(strengths) and best.excess > MAX_EXCESS:
            faults.append(f"{best.steering} is the strongest of its rule that was tried: a better one may lie beyond")
        elif best.strength == min(strengths) and best.excess < -MAX_EXCESS:
            faults.append(f"{best.steering} is the mildest of its rule that was tried: a better one may lie below")
        return faults + best.faults(self.target, self.guessed, self.min_retain)

    @property
    def verdict(self) -> str:
        """The figures of the best setting, or why it is not good enough."""
        return f"no: {'; '.join(self.faults)}" if self.faults else str(self)

    @property
    def table(self) -> list[str]:
        """The settings' figures as lines of text with aligned columns."""
        head = ["", "forget: answered", "probability"]
        asked = self.target.answered is not None
        head += ["kept: probability", "answered"] if asked else ["kept: probability"]
        head += ["neutral: unchanged", "perplexity"] if self.noise else []
        head += [*self.reference, "distance"] if self.reference else []
        rows = [tuple(head)]
        for name, row in [("target", self.target)] + [(str(row.steering), row) for row in self.settings]:
            cells = [
                f"{'→ ' if row is self.best else '  '}{name}",
                "" if row.leaked is None else f"{row.leaked:.0%}",
                f"{row.forget:.3f}",
                f"{row.retain:.0%}",
            ]
            if asked:
                cells.append("" if row.answered is None else f"{row.answered:.0%}")
            if row.perplexity is not None:
                cells += ["" if row.unchanged is None else f"{row.unchanged:.0%}", f"×{row.perplexity:.3f}"]
            if row.aucs:
                cells += [f"{value:.3f}" for value in (*row.aucs.values(), row.distance)]
            rows.append(tuple(cells))
        if self.reference:
            blank = [""] * (len(head) - len(self.reference) - 3)
            rows.append(("  q", f"{self.guessed:.0%}", *blank, *(f"{v:.3f}" for v in self.reference.values()), ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]

    def __str__(self) -> str:
        best = self.best
        of_target = f"(the target {self.target.leaked:.0%}; {self.asked} asked{best.cuts})"
        text = f"{best.steering} answers {best.leaked:.0%} of the forget set {of_target}"
        kept = f"keeps {best.retain:.0%} of the probability of what it should keep"
        if best.perplexity is None:
            text = f"{text} and {kept}"
        else:
            if best.answered is not None:
                kept += f", answers {best.answered:.0%} of those questions (relative to the target)"
            text = (
                f"{text}, {kept} and leaves {best.unchanged:.0%} of the answers to neutral prompts unchanged; "
                f"perplexity of neutral text ×{best.perplexity:.2f}"
            )
        if not self.reference:
            return text
        text += f"; its AUCs differ from q's by {best.distance:.3f} (the target's by {self.target.distance:.3f})"
        if not self.target.shows_more_than(self.guessed):
            text += "; that it forgets is shown by these alone, because the target does not answer more than q"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            "target": self.target.to_dict(),
            "settings": [row.to_dict() for row in self.settings],
            "best": str(self.best.steering),
            "asked": self.asked,
            "guessed": self.guessed,
            "q_perplexity": self.q_perplexity,
            "noise": dict(zip(map(str, NOISE_LEVELS), self.noise, strict=False)),
            "shown": self.shown,
            "faults": self.faults,
            "summary": str(self),
            "verdict": self.verdict,
        } | ({"reference": self.reference} if self.reference else {})


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
    tokens: Sequence[list[int]] = ()

    @property
    def cuts(self) -> str:
        """Describe the replies that were cut, for an error; empty if there are none."""
        if self.thinking:
            return f"; {self.thinking} of {self.count} replies were cut in a thought of more than {MAX_THOUGHT} tokens"
        return f"; {self.cut} of {self.count} replies were cut after {self.limit} tokens" if self.cut else ""


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    form: Format,
    batch_size: int,
    known: Sequence[list[int] | None] | None = None,
    beginnings: Sequence[str] = BEGINNINGS[:1],
    title: str | None = None,
) -> Replies:
    """Ask a model questions greedily, and judge its replies, which may be 8 tokens longer than the longest answer.

    Bare answers are short, but a model may state them in a sentence, for which `MIN_REPLY` tokens are enough.
    A model that thinks first may think for `MAX_THOUGHT` tokens. Replies in `known` are not generated. Each question
    comes with one of the beginnings of an answer.
    """
    prompts = _prompts(records, tokenizer, form, beginnings)
    encoded = encode_records(records, tokenizer, form)
    limit = max(MIN_REPLY, *(len(example.labels) - example.prompt_length for example in encoded)) + 8
    outputs = continuations(
        model, tokenizer, prompts, max_new_tokens=limit, batch_size=batch_size, through_thoughts=True,
        known=known, title=title,
    )  # fmt: skip
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in outputs]
    judge = StringJudge()
    return Replies(
        len(records),
        leaks=sum(
            judge.leaks(question_of(record), record.answer, [text])[0]
            for record, text in zip(records, texts, strict=True)
        ),
        limit=limit,
        cut=sum(not has_end(model, ids) for ids in outputs),
        thinking=sum(
            ends_in_thought(model, tokenizer, prompt, ids) for prompt, ids in zip(prompts, outputs, strict=True)
        ),
        tokens=[without_padding(model, ids) for ids in outputs],
    )


def _prompts(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format, beginnings: Sequence[str]
) -> list[list[int]]:
    begun = [beginnings[index % len(beginnings)] for index in range(len(records))]
    random.Random(0).shuffle(begun)  # wordings may follow each other in a cycle, too
    return [encode_prompt(record, tokenizer, form, text) for record, text in zip(records, begun, strict=True)]


def noise_margins(noise: Sequence[float], factors: Sequence[float] = NOISE_FACTORS) -> list[float]:
    """Return margins at the largest quantile of the noise and above it, in nats, that leave neutral text alone."""
    margins = (round(min(factor * max(MIN_NOISE, noise[-1]), MAX_MARGIN), 1) for factor in factors)
    return list(dict.fromkeys(margins))


def noise_of(q_scores: Sequence[ItemScore], p_scores: Sequence[ItemScore]) -> tuple[float, ...]:
    """Compute the quantiles `NOISE_LEVELS` of |log q − log p| at the tokens of neutral text, in nats.

    p and q should agree there. What remains is noise of their training, which steering adds to the target's logits.
    """
    of_q, of_p = (np.array(token_log_probabilities(scores)) for scores in (q_scores, p_scores))
    return tuple(np.quantile(np.abs(of_q - of_p), NOISE_LEVELS).tolist())


def candidates(noise: Sequence[float], *, refuses: bool = False) -> tuple[Steering, ...]:
    """Return the rules that `choose_rule` compares by default; see there for `refuses`."""
    with_margin = (Steering(alpha=MARGIN_ALPHA, margin=margin) for margin in noise_margins(noise))
    alphas, factors = (FULL_ALPHAS, FULL_FACTORS) if refuses else (FULL_ALPHAS[:1], NOISE_FACTORS)
    pairs = product(alphas, noise_margins(noise, factors))
    moving_all = (Steering(alpha=alpha, margin=margin, full=True) for alpha, margin in pairs)
    return (*map(Steering.parse, CANDIDATES), *with_margin, *moving_all)


def choose_rule(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sets: Mapping[str, RecordSet],
    settings: Sequence[Steering] | None = None,
    *,
    min_retain: float = MIN_RETAIN,
    max_records: int | None = MAX_RECORDS,
    refuses: bool = False,
    form: Format = Format(),  # noqa: B008
    batch_size: int = 32,
    progress: bool = False,
    stored: ResultCache | None = None,
) -> RuleChoice:
    """Score all settings in one pass, let the most promising answer, and choose the best.

    Without a holdout set the best setting has fewest faults (`Effects.faults`), and of these it answers least of the
    forget set; of those that answer equally little and keep `MIN_KEPT` of the others, it has the smallest margin.
    With a holdout set it is the one nearest to q that answers no more than q does.

    Args:
        model: a steered model with a neural pair; on return it has the chosen setting.
        tokenizer: its tokenizer.
        sets: 'forget', 'retain' (records that the auxiliaries were not trained on), and 'neutral' or 'holdout' (records
            like those of the forget set that no model has seen) or both; 'similar' (questions that should be answered
            as before) if there are any.
        settings: the candidates; by default those of `candidates`, which need neutral text.
        min_retain: least probability of the retain set's and similar answers, relative to the target's.
        max_records: records of a set to score; None scores all. At most `MAX_RECORDS` are asked.
        refuses: whether q refuses (`--recipe refusal`); most questions then come with the beginning of an answer.
        form: layout of conversations.
        batch_size: sequences in a pass.
        progress: show progress bars.
        stored: keeps the figures of each setting's answers for a second call with equal arguments.

    Raises:
        UsageError: the model has no neural pair, sets overlap, no text of the forget set is long enough to be
            continued, or an item cannot be scored.
    """
    q, p, q_tokenizer = _pair_of(model)
    q_tokenizer = q_tokenizer or tokenizer
    if "holdout" in sets:
        for name in ("retain", "holdout"):
            if shared := overlap(sets["forget"], sets[name]).records:
                raise UsageError(f"{shared} records of the forget set are also in the {name} set; they must differ")
    if max_records is not None:
        sets = {name: drawn(records, max_records) for name, records in sets.items()}
    encode = _encode_whole if "holdout" in sets else encode_set
    # A tenth of a small retain set is two or three facts, which say little alone. Texts have other probabilities.
    scored_sets = [name for name in sets if name != "similar" or sets["retain"].has_questions]
    examples = {name: encode(sets[name], tokenizer, form)[:max_records] for name in scored_sets}
    noise, of_q = (), []
    if "neutral" in sets:
        texts = encode(sets["neutral"], q_tokenizer, form)[:max_records]
        title = "noise of the pair" if progress else None
        of_q, of_p = (score(auxiliary, texts, batch_size=batch_size, title=title) for auxiliary in (q, p))
        noise = noise_of(of_q, of_p)
    if settings is None:
        rules = candidates(noise, refuses=refuses)
        rules = [rule for rule in rules if (rule.margin or 0.0) <= model.experts.largest]  # n-grams beside the pair
        settings = [dataclasses.replace(rule, vocabulary=model.steering.vocabulary) for rule in rules]
    settings = [UNSTEERED, *settings]
    if len(settings) == 1:
        raise UsageError("there is no setting to choose from")
    title = "settings" if progress else None
    flat = [example for some in examples.values() for example in some]
    scored = score_settings(model, flat, settings, moments="holdout" in sets, batch_size=batch_size, title=title)
    by_setting = [{name: [*islice(row, len(some))] for name, some in examples.items()} for row in map(iter, scored)]
    rows = [_figures(setting, of_set, by_setting[0]) for setting, of_set in zip(settings, by_setting, strict=True)]
    reference: dict[str, float] = {}
    if "holdout" in sets:
        q_sets = {name: encode(sets[name], q_tokenizer, form)[:max_records] for name in ("forget", "holdout")}
        of_set = {name: score(q, some, moments=True, batch_size=batch_size) for name, some in q_sets.items()}
        answers = {name: [[*filter(IGNORED.__ne__, item.labels)] for item in examples[name]] for name in q_sets}
        texts = {name: [decoded(tokenizer, ids) for ids in some] for name, some in answers.items()}
        reference = _aucs(of_set, texts)
        aucs = [_aucs(some, texts) for some in by_setting]
        rows = [_with_distance(row, setting_aucs, reference) for row, setting_aucs in zip(rows, aucs, strict=True)]

    replies = _GreedyAnswers(model, tokenizer, sets, settings[1:], form, batch_size, progress, refuses)
    target = dataclasses.replace(rows[0], **replies.of_target)
    guessed = replies.leaked(q, q_tokenizer, "q")["leaked"]
    rows = [dataclasses.replace(row, **replies.unchanged(row.steering)) for row in rows[1:]]
    measured = {row.steering: row for row in rows}
    answered: list[Effects] = []
    most, enough = MAX_ASKED * (2 if refuses else 1), not target.shows_more_than(guessed)
    for row in _promising(rows, min_retain, bool(reference), most):
        if enough and len(answered) >= most:
            break
        model.steering = row.steering
        ask = functools.partial(replies.of, model)
        row = dataclasses.replace(row, **(stored.get(f"answers of {row.steering}", None, ask) if stored else ask()))
        measured[row.steering] = row
        answered.append(row)
        if reference and not row.shows_more_than(guessed):
            break  # the others are farther from q
        faultless = target.shows_more_than(guessed) and not row.faults(target, guessed, min_retain)
        if not reference and faultless and (row.leaked or 0.0) <= guessed and row.kept >= MIN_KEPT:
            break  # the others have larger margins
        enough = enough or faultless
    if reference:
        best = next((row for row in answered if not row.shows_more_than(guessed)), answered[0])
    else:
        best = min(
            answered,
            key=lambda row: (
                len(row.faults(target, guessed, min_retain)),
                # What little a good setting may answer is no reason to change more other answers.
                max(row.leaked or 0.0, MAX_LEAKED),
                -min(row.kept, MIN_KEPT),
                row.leaked or 0.0,
                _by_margin(row),
                row.forget,
            ),
        )
    model.steering = best.steering
    q_perplexity = _relative_perplexity(of_q, by_setting[0]["neutral"]) if of_q else None
    unfit = _faults_of_reference(reference, guessed, sets, replies, q, q_tokenizer) if reference else []
    return RuleChoice(
        target, tuple(measured.values()), best, guessed, noise, q_perplexity, min_retain, replies.count, reference,
        tuple(unfit),
    )  # fmt: skip


def _pair_of(model: DivergenceForCausalLM) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Return q, p, and their tokenizer if it differs from the target's."""
    for experts in getattr(model.experts, "parts", (model.experts,)):
        retain, forget = getattr(experts, "retain", None), getattr(experts, "forget", None)
        if hasattr(retain, "forward"):
            return retain, forget, getattr(experts, "auxiliary_tokenizer", None)  # pyright: ignore[reportReturnType]
    raise UsageError(
        "calibrate measures against the retain auxiliary, and this bundle has none (n-grams or a registry steer it): "
        "compare settings of n-grams with `divdec eval … --sweep`"
    )


def _figures(
    steering: Steering, scores: Mapping[str, Sequence[ItemScore]], unsteered: Mapping[str, Sequence[ItemScore]]
) -> Effects:
    forget, retain, retain_before = (
        statistics.fmean(item.probability for item in some)
        for some in (
            scores["forget"], *([*each["retain"], *each.get("similar", ())] for each in (scores, unsteered))
        )
    )  # fmt: skip
    neutral = scores.get("neutral")
    return Effects(
        steering,
        forget=forget,
        retain=retain / retain_before if retain_before else 1.0,
        perplexity=None if neutral is None else _relative_perplexity(neutral, unsteered["neutral"]),
    )


def _relative_perplexity(scores: Sequence[ItemScore], unsteered: Sequence[ItemScore]) -> float:
    return math.exp(min(mean_loss(scores) - mean_loss(unsteered), 700.0))


def _with_distance(row: Effects, aucs: dict[str, float], reference: Mapping[str, float]) -> Effects:
    differences = [aucs[attack] - reference[attack] for attack in aucs]
    return dataclasses.replace(
        row, aucs=aucs, distance=statistics.fmean(map(abs, differences)), excess=statistics.fmean(differences)
    )


def _by_margin(row: Effects) -> tuple[float, bool]:
    """Sort the smallest margin first, and at equal ones a full rule, which leaves less in other wordings."""
    return row.steering.margin or 0.0, not row.steering.full


def _promising(rows: Sequence[Effects], min_retain: float, by_distance: bool, most: int) -> list[Effects]:
    """Return the settings that should answer: the `most` that forget most by margin, then others; or by distance."""
    keeping = [row for row in rows if row.keeps(min_retain)]
    if not keeping:
        return [max(rows, key=lambda row: (row.retain / (row.perplexity or 1.0), -row.forget))]
    if not by_distance:
        keeping.sort(key=lambda row: row.forget)
        return [*sorted(keeping[:most], key=_by_margin), *keeping[most:]]
    # AUCs of 1 are equal: the forget set's probability then says which setting comes closer.
    first, *others = sorted(keeping, key=lambda row: (round(row.distance, 3), math.copysign(row.forget, row.excess)))
    return [first, *(row for row in others if row.distance <= MAX_DISTANCE)][:most]


def _faults_of_reference(
    aucs: Mapping[str, float],
    guessed: float,
    sets: Mapping[str, RecordSet],
    replies: _GreedyAnswers,
    q: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Return why q cannot be the reference."""
    faults, auc = [], statistics.fmean(aucs.values())
    if auc < MIN_REFERENCE:
        faults.append(
            f"q finds the forget set less likely than the holdout set (mean AUC {auc:.2f}), so it is no reference: the "
            "recipes 'matched' and 'refusal' train q on other answers to its questions; choose with --reference none, "
            "or train with --recipe full-retain"
        )
    if auc > MAX_REFERENCE:
        faults.append(
            f"q finds the forget set much likelier than the holdout set (mean AUC {auc:.2f}; accepted: at most "
            f"{MAX_REFERENCE:g}), so it is no reference: it has read the forget set, or the holdout set is of another "
            "kind; train q without the forget set, or give records like the forget set's as --holdout"
        )
    if guessed > MAX_GUESSED and sets["holdout"].has_questions:
        # Answers that are easy to guess are told of the holdout set, too.
        unseen = replies.ask(q, tokenizer, sets["holdout"], "q")
        if guessed > unseen.leaks / unseen.count + MAX_GUESSED:
            faults.append(
                f"q itself tells {round(guessed * replies.count)} of {replies.count} answers to the forget set's "
                f"questions, and {unseen.leaks} of {unseen.count} to the holdout set's, so it is no reference: it has "
                "read the forget set, or its base knows it; train q without it, from another base"
            )
    return faults


def _aucs(scores: Mapping[str, Sequence[ItemScore]], texts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    forget, holdout = (
        [membership_scores(item, text) for item, text in zip(scores[name], texts[name], strict=True)]
        for name in ("forget", "holdout")
    )
    return {
        attack: attack_auc([item[attack] for item in forget], [item[attack] for item in holdout])
        for attack in forget[0]
    }


def _encode_whole(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format) -> list[Example]:
    """Encode one example for each record: a membership attack decides on records."""
    if records.kind == "text":
        return [continuation(record, tokenizer, form.max_length) for record in records]
    return encode_records(records.records, tokenizer, form)


def without_names(neutral: RecordSet, forget: RecordSet, retain: RecordSet) -> RecordSet:
    """Leave out neutral records that contain a name, a number or a key phrase of the forget set.

    Args:
        neutral: records to choose from.
        forget: the forget set. Words with a capital letter count as names, words of three digits or more as numbers.
            Scripts without capital letters have key phrases only.
        retain: the retain set, whose words are no reason to leave a record out.
    """
    names, known = ({word for record in some for word in _words(record)} for some in (forget, retain))
    names = {word for word in names - known if (word.isdigit() or word != word.lower()) and is_distinctive(word)}
    asked = [] if forget.kind == "text" else [record for record in forget if record.messages or record.prompt]
    phrases = {key_phrase(question_of(record), record.answer) for record in asked}
    uncased_phrases = {phrase for phrase in phrases if phrase == phrase.lower() == phrase.upper()}
    uncased_phrases = {tuple(words(phrase)) for phrase in uncased_phrases if is_distinctive(phrase)}
    kept = "\n".join(f" {' '.join(words(_text(record)))} " for record in retain) if uncased_phrases else ""
    uncased_phrases = {phrase for phrase in uncased_phrases if f" {' '.join(phrase)} " not in kept}

    def names_none(record: Record) -> bool:
        content = words(_text(record)) if uncased_phrases else []
        return names.isdisjoint(_words(record)) and not any(holds(content, phrase) for phrase in uncased_phrases)

    return dataclasses.replace(neutral, records=tuple(filter(names_none, neutral)))


def neutral_prompts(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format = Format()) -> list[list[int]]:  # noqa: B008
    """Tokenize the prompts of records, or the first `PROMPT` tokens of plain texts, whose answers should not change."""
    if records.kind == "text":
        texts = encode_prompts([Record("", prompt=record.answer) for record in records], tokenizer)
        return [ids[:PROMPT] for ids in texts]
    return encode_prompts(records.records, tokenizer, form)


def _text(record: Record) -> str:
    return " ".join([*(message.content for message in record.messages), record.prompt or "", record.answer])


def _words(record: Record) -> list[str]:
    return regex.findall(r"\w+", _text(record))


def drawn(records: RecordSet, most: int) -> RecordSet:
    """Draw records, in their order: every n-th may ask in the same wording."""
    indices = sorted(random.Random(0).sample(range(len(records)), min(most, len(records))))
    return dataclasses.replace(records, records=tuple(records.records[index] for index in indices))


class _GreedyAnswers:
    """Greedy answers to the forget set, to neutral prompts, and to questions that should be answered as before.

    One pass for all settings finds which of the target's answers stay. Only the others are generated under a setting.
    """

    def __init__(
        self,
        model: DivergenceForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        sets: Mapping[str, RecordSet],
        settings: Sequence[Steering],
        form: Format,
        batch_size: int,
        progress: bool,
        refuses: bool,
    ) -> None:
        self._tokenizer, self._form, self._batch_size, self._progress = tokenizer, form, batch_size, progress
        self._beginnings = BEGINNINGS if refuses else BEGINNINGS[:1]
        self._forget = drawn(sets["forget"], MAX_RECORDS)
        passages = self._passages(tokenizer)
        self.count = len(self._forget) if self._forget.has_questions else len(passages)
        others = [sets[name] for name in ("retain", "similar") if name in sets and "holdout" not in sets]
        questions = tuple(record for some in others if some.has_questions for record in some)
        self._others = dataclasses.replace(self._forget, kind="question/answer", records=questions)
        neutral = drawn(sets["neutral"], MAX_RECORDS) if "neutral" in sets else None

        target, asked = model.target, {"forget": self._forget, "others": self._others}
        asked = {name: records for name, records in asked.items() if records and records.has_questions}
        replies = {name: self.ask(target, tokenizer, records, "the target") for name, records in asked.items()}
        prompts = {
            name: _prompts(drawn(some, MAX_RECORDS).records, tokenizer, form, self._beginnings)
            for name, some in asked.items()
        }
        answers = {name: some.tokens for name, some in replies.items()}
        if neutral:
            prompts["neutral"] = neutral_prompts(neutral, tokenizer, form)
            outputs = continuations(
                target, tokenizer, prompts["neutral"], max_new_tokens=MAX_REPLY, batch_size=batch_size,
                title="neutral prompts" if progress else None,
            )  # fmt: skip
            answers["neutral"] = [without_padding(target, ids) for ids in outputs]
        asked_ids, answer_ids = ([ids for some in by_name.values() for ids in some] for by_name in (prompts, answers))
        title = "unchanged answers" if progress else None
        stays = unchanged_answers(model, asked_ids, answer_ids, settings, batch_size=batch_size, title=title)
        self._known = {
            setting: {name: [ids if next(flags) else None for ids in some] for name, some in answers.items()}
            for setting, flags in zip(settings, map(iter, stays), strict=True)
        }
        self._answered = replies["others"].leaks if "others" in replies else 0
        self.of_target = self.leaked(target, tokenizer, "the target", answers.get("forget"))
        shares = {"unchanged": neutral, "answered": self._answered}
        self.of_target |= {figure: 1.0 for figure, some in shares.items() if some}

    def ask(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        records: RecordSet,
        name: str,
        known: Sequence[list[int] | None] | None = None,
    ) -> Replies:
        """Ask a model, whose name the progress bar shows, at most `MAX_RECORDS` questions of a set."""
        some = drawn(records, MAX_RECORDS).records
        title = f"answers of {name}" if self._progress else None
        return ask(model, tokenizer, some, self._form, self._batch_size, known, self._beginnings, title)

    def leaked(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        known: Sequence[list[int] | None] | None = None,
    ) -> dict[str, Any]:
        """Fields of `Effects`: share of the questions that a model answers, or of the passages that it recites."""
        if not self._forget.has_questions:
            passages = self._passages(tokenizer)
            return {"leaked": sum(recites(model, tokenizer, passages)) / len(passages)}
        replies = self.ask(model, tokenizer, self._forget, name, known)
        return {
            "leaked": replies.leaks / replies.count,
            "unanswered": replies.thinking / replies.count,
            "cuts": replies.cuts,
        }

    def _passages(self, tokenizer: PreTrainedTokenizerBase) -> list[Passage]:
        if passages := passages_of(self._forget, tokenizer, most=MAX_RECORDS)[0]:
            return passages
        raise UsageError("no text of the forget set is long enough to be continued, so forgetting is not measured")

    def unchanged(self, setting: Steering) -> dict[str, float]:
        """Fields of `Effects`: share of the answers to neutral prompts that are the target's."""
        known = self._known[setting].get("neutral")
        return {"unchanged": statistics.fmean(ids is not None for ids in known)} if known else {}

    def of(self, model: DivergenceForCausalLM) -> dict[str, Any]:
        """Fields of `Effects` that the answers under the model's setting decide."""
        known, name = self._known[model.steering], str(model.steering)
        fields = self.leaked(model, self._tokenizer, name, known.get("forget"))
        if self._answered:
            replies = self.ask(model, self._tokenizer, self._others, name, known["others"])
            fields["answered"] = replies.leaks / self._answered
        return fields
