"""Suites of a comparison: what a model is asked, how its answers are measured, and the scores that tables show."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from divdec.data.formatting import Format
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation.results import Results
from divdec.evaluation.scoring import EvaluatedModel
from divdec_research.report.scores import RESAMPLED
from divdec_research.suites import muse, tofu
from divdec_research.suites.aggregate import (
    AGGREGATES,
    DISTANCES,
    FORGET_KNOWMEM,
    RETAIN_KNOWMEM,
    VERBMEM,
    Bootstrap,
    Resampler,
    aggregate,
    distance_to_retrain,
    muse_distances,
    tofu_figures,
)
from divdec_research.suites.metrics import privleak
from divdec_research.suites.muse import MuseData, evaluate_muse
from divdec_research.suites.questions import BenchmarkFormat
from divdec_research.suites.tofu import TofuData, evaluate_tofu

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTACK = "mia_min_k"
MAX_PROMPT_LENGTH = 2048  # tokens of a MUSE question with its examples


class ComparisonSuite(abc.ABC):
    """Questions and texts of one benchmark, and how models are scored on them."""

    name: ClassVar[str]
    shown: ClassVar[tuple[str, ...]]
    """Scores in tables, in their order."""
    scores: ClassVar[tuple[str, ...]]
    """Values with intervals."""
    figures: ClassVar[tuple[str, ...]]
    """Further values, for `comparison.json`."""
    goals: ClassVar[tuple[str, ...]]
    """Scores by which a method's best setting is chosen: the first that the results have."""
    further_goals: ClassVar[tuple[str, ...]] = ()
    """Scores whose best settings a second table lists."""
    note: ClassVar[str]
    """Remark on the scores, for readers."""
    compute_figures: ClassVar[Callable[[Results], None]]
    """Computes the figures of results from their items."""
    data: Any

    @property
    def about(self) -> dict[str, str]:
        """How the scores are computed."""
        return {"suite": self.name}

    @abc.abstractmethod
    def evaluate(self, model: EvaluatedModel) -> Results:
        """Measure a model."""

    @abc.abstractmethod
    def questions(self, name: str) -> tuple[Record, ...]:
        """Return the questions of the set 'forget' or 'retain'."""

    @abc.abstractmethod
    def layout(self, tokenizer: PreTrainedTokenizerBase) -> BenchmarkFormat:
        """Return the layout of the questions."""

    @abc.abstractmethod
    def score(self, figures: Mapping[str, Any], target: Results, retrain: Results) -> dict[str, Any]:
        """Compute the scores of figures, or of arrays with a figure for each draw; None where they do not allow it."""

    def values(self, results: Results, target: Results, retrain: Results) -> dict[str, float | None]:
        """Compute scores and figures against the target and the retrained model."""
        figures = tofu_figures(results)
        values = {name: figures.get(name) for name in self.figures} | self.score(figures, target, retrain)
        return {name: None if value is None else float(value) for name, value in values.items()}

    def draws(self, results: Results, target: Results, retrain: Results, bootstrap: Bootstrap) -> dict[str, np.ndarray]:
        """Compute the scores in every draw of a bootstrap over the items."""
        drawn, _ = Resampler(results, bootstrap).figures(RESAMPLED[self.name])
        scores = self.score(drawn, target, retrain)
        return {name: np.asarray(value) for name, value in scores.items() if value is not None}

    def half_of(self, results: Results, half: int) -> Results:
        """Results on one half of each set's items: those with even (0) or odd (1) numbers."""
        part = dataclasses.replace(results, figures={}, items={})
        for metric, items in results.items.items():
            if chosen := {str(int(index) // 2): fields for index, fields in items.items() if int(index) % 2 == half}:
                part.items[metric] = chosen
        type(self).compute_figures(part)
        return part


@dataclasses.dataclass(frozen=True)
class TofuComparison(ComparisonSuite):
    """TOFU, scored by its aggregates."""

    data: TofuData
    form: Format = Format()  # noqa: RUF009
    """Layout of the training texts, which is that of the questions."""
    variant: str = "openunlearning"

    name = "tofu"
    shown = ("agg", "mem", "priv", "utility")
    scores = AGGREGATES
    figures = ("forget_Q_A_Prob", "forget_Q_A_ROUGE", "retain_Q_A_Prob", "retain_Q_A_ROUGE", "model_utility")
    goals = ("agg", "agg_without_privacy")
    note = "Utility is the model utility relative to the target's; no fluency classifier is used."
    compute_figures = staticmethod(tofu.compute_figures)

    @property
    def about(self) -> dict[str, str]:
        """See `ComparisonSuite.about`."""
        return {**super().about, "variant": self.variant}

    def evaluate(self, model: EvaluatedModel) -> Results:
        """See `ComparisonSuite.evaluate`."""
        # No aggregate needs gradient norms, and they cost a backward pass per item.
        (results,) = evaluate_tofu(model, self.data, self.layout(model.tokenizer), gradient_norms=False)
        return results

    def questions(self, name: str) -> tuple[Record, ...]:
        """See `ComparisonSuite.questions`."""
        return tuple(question.record for question in self.data.sets[name])

    def layout(self, tokenizer: PreTrainedTokenizerBase) -> BenchmarkFormat:
        """See `ComparisonSuite.layout`."""
        form = self.form
        return BenchmarkFormat(tokenizer, system_prompt=form.system_prompt, date=form.date, max_length=form.max_length)

    def score(self, figures: Mapping[str, Any], target: Results, retrain: Results) -> dict[str, Any]:
        """See `ComparisonSuite.score`."""
        return aggregate(figures, target.figures, retrain.figures, self.variant).values


@dataclasses.dataclass(frozen=True)
class MuseComparison(ComparisonSuite):
    """MUSE, scored by the distance to the retrained model."""

    data: MuseData

    name = "muse"
    shown = ("distance", VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM, "privleak")
    scores = ("distance", *DISTANCES, VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM, "privleak")
    figures = ("extraction_strength", "exact_memorization", ATTACK)
    goals = ("distance", "knowmem_distance")  # the latter for a folder of questions alone
    further_goals = DISTANCES
    note = (
        "Distance is the Euclidean distance to the retrained model in the three columns beside it, in percent of the "
        "target's. PrivLeak is relative to the retrained model; 0 is ideal."
    )
    compute_figures = staticmethod(muse.compute_figures)

    def evaluate(self, model: EvaluatedModel) -> Results:
        """See `ComparisonSuite.evaluate`."""
        (results,) = evaluate_muse(model, self.data, max_length=MAX_PROMPT_LENGTH)
        return results

    def questions(self, name: str) -> tuple[Record, ...]:
        """See `ComparisonSuite.questions`."""
        return self.data.knowmem[name]

    def layout(self, tokenizer: PreTrainedTokenizerBase) -> BenchmarkFormat:
        """See `ComparisonSuite.layout`."""
        return BenchmarkFormat(tokenizer, "plain", shots=self.data.shots["forget"], max_length=MAX_PROMPT_LENGTH)

    def score(self, figures: Mapping[str, Any], target: Results, retrain: Results) -> dict[str, Any]:
        """See `ComparisonSuite.score`."""
        names = (VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM)
        scores: dict[str, Any] = {name: figures.get(name) for name in names}
        scores |= muse_distances(figures, target.figures, retrain.figures).values
        with contextlib.suppress(UsageError):  # no texts, or target and retrained model are equal on these items
            scores["distance"] = distance_to_retrain(figures, target.figures, retrain.figures, names)
        auc, reference = figures.get(ATTACK), retrain.figures.get(ATTACK)
        if auc is not None and reference is not None:
            scores["privleak"] = np.vectorize(privleak)(auc, reference)  # a draw each
        return scores
