"""Values of metrics: their format."""

import json

import pytest

from divdec.errors import UsageError
from divdec.evaluation.results import Results
from divdec_research.report.scores import MEASURES, Entry, Scorer
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.suites.results import read_results


def test_values_are_formatted():
    assert MEASURES["agg"].text(0.777) == "0.78"
    assert MEASURES["mia_loss"].text(0.0) == "0.000"
    assert MEASURES["forget_quality"].text(1.834e-21) == "1.8e-21"
    assert MEASURES["privleak"].text(-99.82) == "−99.8"
    assert MEASURES["agg"].text(None) == "–"


def test_non_numeric_metric_is_omitted(tmp_path):
    figures = {"model_utility": 0.5, "mia_loss": "many", "mia_zlib": True, "mia_min_k": float("nan")}
    (tmp_path / "TOFU_SUMMARY.json").write_text(json.dumps(figures))
    scorer = Scorer(None, None, "openunlearning", Bootstrap(draws=50))
    row = scorer.score(Entry("x", tmp_path, read_results(tmp_path)))
    assert {name for name, value in row.values.items() if value is not None} == {"model_utility"}


def test_results_of_different_splits_are_not_compared(tmp_path):
    target, entry = (
        Results("target", "tofu", split="forget10"),
        Entry("x", tmp_path, Results("x", "tofu", split="forget01")),
    )
    with pytest.raises(UsageError, match="different splits: forget01, forget10"):
        Scorer(target, None, "openunlearning", Bootstrap(draws=50)).score(entry)
