"""Measure an experiment's models on its question sets, and choose the steering to recommend."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from divdec.data.formatting import Format, encode_records
from divdec.data.records import Record
from divdec.demo.models import TrainedModels
from divdec.evaluation.generation import answers
from divdec.evaluation.metrics import contains_fact, rouge_l_recall
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.model.checkpoint import load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Targets for the recommended setting: share of the gap closed, share of the retain accuracy kept.
GAP_AIM, RETAIN_AIM = 0.85, 0.95


@dataclasses.dataclass(frozen=True)
class Questions:
    """A set of questions with their true answers."""

    name: str
    """'forget', 'retain', 'holdout', or a paraphrased version of one of these."""
    records: tuple[Record, ...]
    facts: tuple[str, ...] | None = None
    """The text that a correct answer contains, one per record; None where only the true answer's wording is known."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over a question set for one model."""

    probability: float
    """Length-normalised probability of the true answer. The rank rule uses the soft fill."""
    accuracy: float
    """Share of generated answers that contain the fact; without facts, share of the true answer's tokens that are
    the model's most likely token (teacher-forced)."""
    rouge: float
    """ROUGE-L recall of the generated answer."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Metrics and answers of one model with one setting."""

    model: str
    """'target', 'retrain', 'linear' or 'rank'."""
    setting: str | None
    """The steering; None for models that are not steered."""
    figures: dict[str, Figures]
    """By question set."""
    generated: dict[str, list[str]] = dataclasses.field(repr=False)
    """Generated answers by question set."""

    def to_dict(self) -> dict[str, Any]:
        """Metrics by flat name, such as `forget_accuracy` and `retain_rouge`."""
        flat = {
            f"{name}_{field}": round(value, 4)
            for name, figures in self.figures.items()
            for field, value in dataclasses.asdict(figures).items()
        }
        return {"setting": self.setting, **flat}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Measurement:
        """Create the object from the output of `dataclasses.asdict`."""
        figures = {name: Figures(**values) for name, values in content["figures"].items()}
        return cls(content["model"], content["setting"], figures, content["generated"])


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Target, retrain reference, and every steering setting; the mildest setting of each rule comes first."""

    target: Measurement
    retrain: Measurement
    steered: list[Measurement]

    @property
    def recommended(self) -> Measurement:
        """The setting that `recommend` chooses."""
        return recommend(self.steered, self.target)

    @property
    def gap(self) -> float:
        """Share of the forget-set gap between target and retrain reference that the recommended setting closes."""
        return gap_closed(self.recommended, self.target, self.retrain)

    @property
    def kept(self) -> float:
        """Share of the target's retain accuracy that the recommended setting keeps."""
        return retain_kept(self.recommended, self.target)

    @property
    def reached(self) -> bool:
        """Whether the recommended setting reaches GAP_AIM and RETAIN_AIM."""
        return self.gap >= GAP_AIM and self.kept >= RETAIN_AIM

    @property
    def verdict(self) -> str:
        """One sentence on the recommended setting."""
        setting = self.recommended.setting
        if not self.reached:
            return (
                f"No setting closes {GAP_AIM:.0%} of the gap between target and retrained model on the forget set\n"
                f"and keeps {RETAIN_AIM:.0%} of the target's accuracy on the retain set. The bundle holds {setting},\n"
                f"which closes {self.gap:.0%} and keeps {self.kept:.0%}."
            )
        return (
            f"{setting} closes {self.gap:.0%} of the gap between target and retrained model on the forget set\n"
            f"and keeps {self.kept:.0%} of the target's accuracy on the retain set."
        )

    def best(self, rule: str) -> Measurement:
        """The setting of one rule that `recommend` chooses."""
        return recommend([row for row in self.steered if row.model == rule], self.target)


def measure_models(
    models: TrainedModels, sets: Sequence[Questions], settings: Sequence[Steering], form: Format, max_new_tokens: int
) -> Measurements:
    """Measure target, retrain reference and every setting.

    Args:
        models: the models' folders.
        sets: question sets; 'forget', 'retain' and 'holdout' must be among them.
        settings: steering settings, the linear rule before the rank rule and mild before strong.
        form: layout of the questions.
        max_new_tokens: longest answer.
    """
    tokenizer = load_tokenizer(models.target)
    examples = [encode_records(questions.records, tokenizer, form) for questions in sets]
    target, retrain, q, p = (
        load_model(folder).eval()
        for folder in (models.target, models.retrain, models.retain_auxiliary, models.forget_auxiliary)
    )

    def measure(name: str, setting: str | None, model: PreTrainedModel, scores: Sequence[Any]) -> Measurement:
        figures, generated = {}, {}
        for questions, items in zip(sets, scores, strict=True):
            texts = answers(
                model, tokenizer, questions.records, form=form, max_new_tokens=max_new_tokens, batch_size=64
            )
            generated[questions.name] = texts
            figures[questions.name] = _figures(questions, items, texts)
        bar.update()
        return Measurement(name, setting, figures, generated)

    def plain(name: str, model: PreTrainedModel) -> Measurement:
        return measure(name, None, model, [score(model, some) for some in examples])

    with tqdm(total=2 + len(settings), desc=f"{'measuring':<17}", unit="setting", dynamic_ncols=True) as bar:
        references = plain("target", target), plain("retrain", retrain)
        model = DivergenceForCausalLM.from_parts(target, q, p)
        # Likelihoods need finite logits; one pass serves all settings.
        soft = [dataclasses.replace(setting, fill="soft") for setting in settings]
        scores = [score_settings(model, some, soft) for some in examples]
        steered = []
        for index, setting in enumerate(settings):
            model.steering = setting
            steered.append(measure(setting.rule, str(setting), model, [by_set[index] for by_set in scores]))
    return Measurements(*references, steered)


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


def gap_closed(row: Measurement, target: Measurement, retrain: Measurement) -> float:
    """Fraction of the gap in forget accuracy between target and retrain reference that is closed; may exceed 1."""
    gap = target.figures["forget"].accuracy - retrain.figures["forget"].accuracy
    return (target.figures["forget"].accuracy - row.figures["forget"].accuracy) / gap if gap > 0 else 0.0


def retain_kept(row: Measurement, target: Measurement) -> float:
    """Retain accuracy as a share of the target's."""
    accuracy = target.figures["retain"].accuracy
    return row.figures["retain"].accuracy / accuracy if accuracy > 0 else 0.0


def recommend(rows: Sequence[Measurement], target: Measurement, keep: float = 0.97, slack: float = 0.02) -> Measurement:
    """Choose the mildest setting whose forget accuracy is at most the target's holdout accuracy.

    The choice needs no retrained model: the target's accuracy on unseen questions is the rate of lucky guesses. A lower
    forget accuracy would be over-unlearning. Among the settings that keep `keep` of the target's retain accuracy, the
    first sufficient one is chosen. If none is sufficient, the one with the lowest forget accuracy is chosen; if none
    keeps enough, the one that keeps most.

    Args:
        rows: steered settings, the mildest first.
        target: the unsteered target.
        keep: minimum fraction of the target's retain accuracy.
        slack: difference in accuracy that is ignored.
    """
    enough = [row for row in rows if retain_kept(row, target) >= keep]
    if not enough:
        return max(rows, key=lambda row: retain_kept(row, target))
    guessing = target.figures["holdout"].accuracy + slack
    forgotten = (row for row in enough if row.figures["forget"].accuracy <= guessing)
    return next(forgotten, min(enough, key=lambda row: row.figures["forget"].accuracy))
