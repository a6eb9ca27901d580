"""The table of an unlearning experiment: target, retrain and steered settings on forget, retain and holdout sets.

It knows nothing of how the models were trained.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Format, encode_records
from divdec.data.records import Record
from divdec.evaluation.generation import answers
from divdec.evaluation.metrics import contains_fact, rouge_l_recall
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM

# What an experiment must reach at its recommended setting.
GAP_AIM, RETAIN_AIM = 0.85, 0.95


@dataclasses.dataclass(frozen=True)
class Questions:
    """A set to be asked, and what counts as a right answer."""

    name: str
    """'forget', 'retain', 'holdout', or one of these with another wording."""
    records: tuple[Record, ...]
    facts: tuple[str, ...] | None = None
    """What a right answer must contain, one a record; None where only the wording of the answer is known."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """How one model does on one set, each a mean over the questions."""

    probability: float
    """Length-normalised probability of the true answer; under the rank rule with the soft fill."""
    accuracy: float
    """Share of generated answers that contain the fact; without facts, share of the true answer's tokens that
    are the model's first choice."""
    rouge: float
    """ROUGE-L recall of the generated answer."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    """'target', 'retrain', 'linear' or 'rank'."""
    setting: str | None
    """The steering; None for the two that are not steered."""
    figures: dict[str, Figures]
    """By name of the set."""
    generated: dict[str, list[str]] = dataclasses.field(repr=False)
    """The generated answers, by name of the set."""

    def to_dict(self) -> dict[str, Any]:
        """Figures as flat names: `forget_accuracy`, `retain_rouge` and so on."""
        flat = {
            f"{name}_{field}": round(value, 4)
            for name, figures in self.figures.items()
            for field, value in dataclasses.asdict(figures).items()
        }
        return {"setting": self.setting, **flat}


@dataclasses.dataclass(frozen=True)
class Bench:
    """What every row of one table shares."""

    tokenizer: PreTrainedTokenizerBase
    sets: Sequence[Questions]
    form: Format = Format()  # noqa: RUF009
    max_new_tokens: int = 48
    batch_size: int = 64

    def plain(self, name: str, model: PreTrainedModel) -> Row:
        """Measure a model that is not steered."""
        scores = [score(model, self._examples(questions)) for questions in self.sets]
        return self._row(name, None, model, scores)

    def steered(
        self, model: DivergenceForCausalLM, settings: Sequence[Steering], tell: Callable[[str], object]
    ) -> list[Row]:
        """Measure a steered model under many settings; likelihoods cost one pass for all of them."""
        finite = [dataclasses.replace(setting, fill="soft") for setting in settings]
        by_set = [score_settings(model, self._examples(questions), finite) for questions in self.sets]
        rows = []
        for place, setting in enumerate(settings):
            model.steering = setting
            rows.append(self._row(setting.rule, str(setting), model, [scores[place] for scores in by_set]))
            tell(str(setting))
        return rows

    def _examples(self, questions: Questions) -> list[Any]:
        return encode_records(questions.records, self.tokenizer, self.form)

    def _row(
        self, name: str, setting: str | None, model: PreTrainedModel, scores: Sequence[Sequence[ItemScore]]
    ) -> Row:
        figures, generated = {}, {}
        for questions, items in zip(self.sets, scores, strict=True):
            texts = answers(
                model,
                self.tokenizer,
                questions.records,
                form=self.form,
                max_new_tokens=self.max_new_tokens,
                batch_size=self.batch_size,
            )
            generated[questions.name] = texts
            figures[questions.name] = _figures(questions, items, texts)
        return Row(name, setting, figures, generated)


def gap_closed(row: Row, target: Row, retrain: Row, name: str = "forget") -> float:
    """Share of the way from the target's accuracy to the retrain's that a model has gone; may exceed 1."""
    gap = target.figures[name].accuracy - retrain.figures[name].accuracy
    return (target.figures[name].accuracy - row.figures[name].accuracy) / gap if gap > 0 else 0.0


def retain_kept(row: Row, target: Row, name: str = "retain") -> float:
    """Accuracy as a share of the target's."""
    accuracy = target.figures[name].accuracy
    return row.figures[name].accuracy / accuracy if accuracy > 0 else 0.0


def _figures(questions: Questions, items: Sequence[ItemScore], texts: Sequence[str]) -> Figures:
    truths = [record.answer for record in questions.records]
    if questions.facts is not None:
        hits = [contains_fact(text, fact) for text, fact in zip(texts, questions.facts, strict=True)]
        accuracy = statistics.fmean(hits)
    else:
        accuracy = statistics.fmean(item.token_accuracy for item in items)
    return Figures(
        probability=statistics.fmean(item.probability for item in items),
        accuracy=accuracy,
        rouge=statistics.fmean(rouge_l_recall(text, truth) for text, truth in zip(texts, truths, strict=True)),
    )


def recommend(rows: Sequence[Row], target: Row, keep: float = 0.97, slack: float = 0.02) -> Row:
    """The mildest setting that knows no more of the forget set than the target knows of what it has never seen.

    No retrained model is looked at, so the choice can be made where there is none: the target's own accuracy on the
    holdout set says how well it guesses. Going below that would over-unlearn. Of the settings that keep `keep` of the
    target's retain accuracy, the first in the order of `rows` is taken, which list the linear rule before the rank
    rule and mild before strong. If none forgets as much, the one that forgets most is taken; if none keeps as much,
    the one that keeps most.

    Args:
        rows: steered settings, the mildest first.
        target: the unsteered target's row.
        keep: least share of the target's retain accuracy.
        slack: difference in accuracy that counts as none.
    """
    kept = [row for row in rows if retain_kept(row, target) >= keep]
    if not kept:
        return max(rows, key=lambda row: retain_kept(row, target))
    guessing = target.figures["holdout"].accuracy + slack
    forgotten = (row for row in kept if row.figures["forget"].accuracy <= guessing)
    return next(forgotten, min(kept, key=lambda row: row.figures["forget"].accuracy))
