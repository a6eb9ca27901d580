"""Measure what a steered model forgets and what else changes in its answers, and choose a rule by these figures.

Three sets are compared with the unsteered target: the forget set, retain records that no auxiliary was trained on, and
neutral text, to which steering should do nothing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from divdec.data.formatting import Format, encode_prompts, encode_set
from divdec.data.records import Record, RecordSet
from divdec.errors import UsageError
from divdec.evaluation.calibration import MAX_GUESSED, UNSTEERED, ask
from divdec.evaluation.generation import MAX_THOUGHT, continuations
from divdec.evaluation.phrases import holds, key_phrase, words
from divdec.evaluation.questions import question_of
from divdec.evaluation.recitation import count_recited, passages_of
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

CANDIDATES = ("linear:0.5", "linear:1", "linear:1.5", "rank:20", "rank:5:3", "rank:20:3", "rank:50:3")
ALPHAS = (1.0, 1.5)  # of the linear rules with a margin
NOISE_LEVELS = (0.5, 0.9, 0.99)
MIN_MARGIN, NOISE_FACTOR = 1.0, 2.0
MIN_RETAIN = 0.95
"""Least probability of the retain set's answers, relative to the target's."""
MAX_PERPLEXITY = 1.10
"""Largest perplexity of neutral text, relative to the target's."""
MIN_UNCHANGED = 0.5
"""Least share of answers to neutral prompts that are the target's, word for word."""
MAX_LEAKED = 0.05
"""Largest share of the forget set's questions that may be answered, beyond what q answers."""
ASKED = 3  # settings whose answers are generated
MAX_RECORDS = 64  # of a set
LONGEST = 32  # tokens of a generated answer to neutral text
PROMPT = 16  # tokens of a plain neutral text before its continuation


@dataclasses.dataclass(frozen=True)
class Effects:
    """Figures of one setting."""

    steering: Steering
    forget: float
    """Mean length-normalised probability of the forget set's answers."""
    retain: float
    """Mean length-normalised probability of the retain set's answers, relative to the target's."""
    perplexity: float
    """Perplexity of neutral text, relative to the target's."""
    leaked: float | None = None
    """Share of the forget set's questions that are answered correctly, or of its passages that are recited, in greedy
    decoding; None if this setting was not asked."""
    unchanged: float | None = None
    """Share of greedy answers to neutral prompts that are the target's, word for word."""
    unanswered: float = 0.0
    """Share of the replies to the forget set's questions that were cut within a thought."""
    cuts: str = ""
    """Describes the replies that were cut."""

    @property
    def keeps(self) -> bool:
        """Whether retain set and neutral text stay within the limits."""
        return self.retain >= MIN_RETAIN and self.perplexity <= MAX_PERPLEXITY

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return dataclasses.asdict(self) | {"steering": str(self.steering)}

    def shows_more_than(self, guessed: float) -> bool:
        """Whether the answers show knowledge that q lacks; if the target's do not, nothing can be forgotten."""
        return self.leaked is None or self.leaked > guessed + MAX_LEAKED

    def faults(self, target: Effects, guessed: float) -> list[str]:
        """Return the reasons why the setting is not good, a sentence each.

        Args:
            target: figures of the unsteered target.
            guessed: share of the forget set's questions that q answers.
        """
        faults = []
        if not target.shows_more_than(guessed):
            faults.append(
                f"the target answers {target.leaked:.0%} of the forget set (q {guessed:.0%}): nothing was shown"
                f"{target.cuts}"
            )
        if self.retain < MIN_RETAIN:
            faults.append(f"{self.steering} keeps only {self.retain:.0%} of the retain set's probability")
        if self.perplexity > MAX_PERPLEXITY:
            faults.append(f"{self.steering} raises the perplexity of neutral text to {self.perplexity:.2f} times")
        if self.unchanged is not None and self.unchanged < MIN_UNCHANGED:
            faults.append(
                f"{self.steering} leaves only {self.unchanged:.0%} of the answers to neutral prompts unchanged"
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


@dataclasses.dataclass(frozen=True)
class EffectsReport:
    """The measured settings and the best of them."""

    target: Effects
    settings: tuple[Effects, ...]
    best: Effects
    guessed: float
    """Share of the forget set's questions that q answers, or of its passages that q recites."""
    noise: tuple[float, ...]
    """Quantiles `NOISE_LEVELS` of |log q − log p| at the tokens of the neutral text, in nats."""
    q_perplexity: float
    """Perplexity of neutral text under q, relative to the target's."""

    @property
    def faults(self) -> list[str]:
        """Reasons why no setting is good, a sentence each; empty if `best` is."""
        return self.best.faults(self.target, self.guessed)

    @property
    def verdict(self) -> str:
        """The figures of the best setting, or why it is not good enough."""
        return f"no: {'; '.join(self.faults)}" if self.faults else str(self)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A table of the settings, with its head."""
        head = ("", "forget: answered", "probability", "retain: probability", "neutral: unchanged", "perplexity")
        shown = [("target", self.target)] + [(str(one.steering), one) for one in self.settings]
        return [head] + [
            (
                f"{'→ ' if one is self.best else '  '}{name}",
                "" if one.leaked is None else f"{one.leaked:.0%}",
                f"{one.forget:.3f}",
                f"{one.retain:.0%}",
                "" if one.unchanged is None else f"{one.unchanged:.0%}",
                f"×{one.perplexity:.3f}",
            )
            for name, one in shown
        ]

    def __str__(self) -> str:
        best = self.best
        return (
            f"{best.steering} answers {best.leaked:.0%} of the forget set (the target {self.target.leaked:.0%}), keeps "
            f"{best.retain:.0%} of the retain set's probability and leaves {best.unchanged:.0%} of the answers to "
            f"neutral prompts unchanged; perplexity of neutral text ×{best.perplexity:.2f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            "target": self.target.to_dict(),
            "settings": [one.to_dict() for one in self.settings],
            "best": str(self.best.steering),
            "guessed": self.guessed,
            "q_perplexity": self.q_perplexity,
            "noise": dict(zip(map(str, NOISE_LEVELS), self.noise, strict=True)),
            "shown": self.target.shows_more_than(self.guessed),
            "faults": self.faults,
            "summary": str(self),
            "verdict": self.verdict,
        }


def margin_above(noise: Sequence[float]) -> float:
    """Return a margin above the noise, so that the rule does little on neutral text."""
    return round(max(MIN_MARGIN, NOISE_FACTOR * noise[-1]), 1)


def noise_of(q_scores: Sequence[ItemScore], p_scores: Sequence[ItemScore]) -> tuple[float, ...]:
    """Compute the quantiles `NOISE_LEVELS` of |log q − log p| at the tokens of neutral text, in nats.

    p and q should agree there. What remains is noise of their training, which steering adds to the target's logits.

    Args:
        q_scores: scores of the text under q, from `divdec.evaluation.scoring.score`.
        p_scores: the same under p.
    """
    of_q, of_p = (np.array(_token_log_probabilities(scores)) for scores in (q_scores, p_scores))
    return tuple(np.quantile(np.abs(of_q - of_p), NOISE_LEVELS).tolist())


def candidates(noise: Sequence[float]) -> tuple[Steering, ...]:
    """Return the rules that `measure_effects` compares by default, with a margin above the noise.

    Args:
        noise: the result of `noise_of`.
    """
    margin = margin_above(noise)
    return (*map(Steering.parse, CANDIDATES), *(Steering(alpha=alpha, margin=margin) for alpha in ALPHAS))


def measure_effects(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    q: PreTrainedModel,
    sets: Mapping[str, RecordSet],
    settings: Sequence[Steering] | None = None,
    *,
    form: Format = Format(),  # noqa: B008
    batch_size: int = 32,
    progress: bool = False,
) -> EffectsReport:
    """Score all settings in one pass, let the most promising answer, and choose the best.

    The best setting has fewest faults (`Effects.faults`), and of these it answers least of the forget set; of those
    that answer little, it leaves most neutral answers unchanged.

    Args:
        model: a steered model; on return it has the chosen setting.
        tokenizer: its tokenizer.
        q: the retain auxiliary, with the same vocabulary; its answers show what can be guessed.
        sets: 'forget', 'retain' (records that the auxiliaries were not trained on) and 'neutral'.
        settings: the candidates; by default those of `candidates`.
        form: layout of conversations.
        batch_size: sequences in a pass.
        progress: show progress bars.

    Raises:
        UsageError: no text of the forget set is long enough to be continued, or an item cannot be scored.
    """
    sets = {name: _sample(records) for name, records in sets.items()}
    examples = {name: encode_set(records, tokenizer, form) for name, records in sets.items()}
    flat = [example for some in examples.values() for example in some[:MAX_RECORDS]]
    names = [name for name, some in examples.items() for _ in some[:MAX_RECORDS]]
    experts: Any = model.experts
    neutral = examples["neutral"][:MAX_RECORDS]
    of_q, of_p = (score(part, neutral, batch_size=batch_size) for part in (q, experts.forget))
    noise = noise_of(of_q, of_p)
    settings = candidates(noise) if settings is None else settings
    title = "settings" if progress else None
    scored = score_settings(model, flat, [UNSTEERED, *settings], batch_size=batch_size, title=title)
    figures: list[dict[str, float]] = []
    for scores in scored:
        of_set = {name: [one for one, own in zip(scores, names, strict=True) if own == name] for name in sets}
        figures.append(
            {name: statistics.fmean(one.probability for one in of_set[name]) for name in ("forget", "retain")}
            | {"loss": _loss(of_set["neutral"])}
        )
    unsteered = figures[0]
    rows = [
        Effects(
            setting,
            forget=one["forget"],
            retain=one["retain"] / unsteered["retain"] if unsteered["retain"] else 1.0,
            perplexity=math.exp(min(one["loss"] - unsteered["loss"], 700.0)),
        )
        for setting, one in zip([UNSTEERED, *settings], figures, strict=True)
    ]
    asked = GreedyAnswers(model.target, tokenizer, sets, form, batch_size, progress)
    target = dataclasses.replace(rows[0], **asked.leaked(model.target), unchanged=1.0)
    guessed = asked.leaked(q)["leaked"]
    keeping = sorted((row for row in rows[1:] if row.keeps), key=lambda row: row.forget)
    promising = keeping[:ASKED] or [max(rows[1:], key=lambda row: (row.retain / row.perplexity, -row.forget))]
    measured: dict[Steering, Effects] = {row.steering: row for row in rows[1:]}
    answered: list[Effects] = []
    for row in promising:
        model.steering = row.steering
        row = dataclasses.replace(row, **asked.leaked(model), unchanged=asked.unchanged(model))
        measured[row.steering] = row
        answered.append(row)
        if not row.faults(target, guessed) and (row.leaked or 0.0) <= MAX_LEAKED and row.unchanged == 1.0:
            break  # the others lower the forget set's probability less
    best = min(
        answered,
        key=lambda row: (
            len(row.faults(target, guessed)),
            # What little a good setting may answer is no reason to change more neutral answers.
            max(row.leaked or 0.0, MAX_LEAKED),
            -(row.unchanged or 0.0),
            row.forget,
        ),
    )
    model.steering = best.steering
    q_perplexity = math.exp(min(_loss(of_q) - unsteered["loss"], 700.0))
    return EffectsReport(target, tuple(measured.values()), best, guessed, noise, q_perplexity)


def _token_log_probabilities(scores: Sequence[ItemScore]) -> list[float]:
    return [value for one in scores for value in one.log_probabilities]


def _loss(scores: Sequence[ItemScore]) -> float:
    """Mean negative log-probability of a token, in nats."""
    return -statistics.fmean(_token_log_probabilities(scores))


def without_names(neutral: RecordSet, forget: RecordSet, retain: RecordSet) -> RecordSet:
    """Leave out neutral records that contain a name, a number or a key phrase of the forget set.

    Args:
        neutral: records to choose from.
        forget: the forget set. Words with a capital letter count as names, words of digits as numbers. Scripts without
            capital letters have key phrases only.
        retain: the retain set, whose words are no reason to leave a record out.
    """
    names, known = ({word for one in some for word in _words(one)} for some in (forget, retain))
    names = {word for word in names - known if word != word.lower() or word.isdigit()}
    asked = [] if forget.kind == "text" else [one for one in forget if one.messages or one.prompt]
    phrases = {key_phrase(question_of(one), one.answer) for one in asked}
    told = {tuple(words(phrase)) for phrase in phrases if phrase == phrase.lower() == phrase.upper()}
    told = {phrase for phrase in told if not any(holds(words(_text(one)), phrase) for one in retain)}

    def names_none(record: Record) -> bool:
        content = words(_text(record)) if told else []
        return names.isdisjoint(_words(record)) and not any(holds(content, phrase) for phrase in told)

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


def _sample(records: RecordSet) -> RecordSet:
    step = -(-len(records) // MAX_RECORDS)
    return dataclasses.replace(records, records=records.records[::step])


class GreedyAnswers:
    """Greedy answers to the forget set and to neutral prompts."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sets: Mapping[str, RecordSet],
        form: Format,
        batch_size: int,
        progress: bool,
    ) -> None:
        self._tokenizer, self._sets, self._form, self._progress = tokenizer, sets, form, progress
        self._options: dict[str, Any] = {"batch_size": batch_size}
        self._passages = passages_of(sets["forget"], tokenizer, most=MAX_RECORDS)[0]
        if not self._passages:
            raise UsageError("no text of the forget set is long enough to be continued, so forgetting is not measured")
        self._neutral = neutral_prompts(sets["neutral"], tokenizer, form)
        self._expected = self._continue(target)

    def leaked(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fields of `Effects`: share of the questions that a model answers, or of the passages that it recites."""
        forget = self._sets["forget"]
        if forget.kind != "question/answer":
            return {"leaked": count_recited(model, self._tokenizer, self._passages) / len(self._passages)}
        replies = ask(model, self._tokenizer, forget.records, self._form, self._options["batch_size"])
        return {
            "leaked": replies.leaks / replies.count,
            "unanswered": replies.thinking / replies.count,
            "cuts": replies.cuts,
        }

    def unchanged(self, model: PreTrainedModel) -> float:
        """Share of continuations of neutral prompts that are the target's."""
        return statistics.fmean(a == b for a, b in zip(self._continue(model), self._expected, strict=True))

    def _continue(self, model: PreTrainedModel) -> list[str]:
        outputs = continuations(
            model, self._tokenizer, self._neutral, max_new_tokens=LONGEST,
            title="neutral prompts" if self._progress else None, **self._options,
        )  # fmt: skip
        return [str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in outputs]
