"""Bootstrap: coverage, seeds, and resampled composites against a slow loop over drawn items."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.errors import UsageError
from divdec.evaluation.metrics import attack_auc
from divdec.evaluation.results import Results, numbered
from divdec_research.suites.aggregate import (
    FLUENCY,
    PROB_MEAN,
    VARIANTS,
    Bootstrap,
    Resampler,
    aggregate,
    harmonic_mean,
    mean_interval,
    needed,
    tofu_figures,
)
from divdec_research.suites.results import read_results

NAMES = tuple({name: None for variant in VARIANTS for names in needed(variant).values() for name in names})


class EveryItemOnce(Bootstrap):
    """Draws that are the items themselves."""

    def counts(self, items, name):
        return np.ones((self.draws, items), dtype=np.int64)


@pytest.fixture(scope="module")
def oracle(shared):
    return shared / "oracle" / "results"


def auc_interval(forget, holdout, bootstrap):
    """The interval of an attack's AUC."""
    items = {"mia_loss.forget": numbered(forget), "mia_loss.holdout": numbered(holdout)}
    draws, reasons = Resampler(Results("r", "tofu", items=items), bootstrap).figures(["mia_loss"])
    assert not reasons
    return bootstrap.interval(draws["mia_loss"])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 9))
def test_mean_interval_contains_mean_and_stays_within_items(values, seed):
    low, high = mean_interval(values, Bootstrap(draws=300, seed=seed))
    assert min(values) - 1e-12 <= low <= sum(values) / len(values) + 1e-12
    assert sum(values) / len(values) - 1e-12 <= high <= max(values) + 1e-12


scores = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=15)


@given(scores, scores)
def test_auc_interval_contains_auc(forget, holdout):
    low, high = auc_interval(forget, holdout, Bootstrap(draws=300))
    assert low - 1e-12 <= attack_auc(forget, holdout) <= high + 1e-12


def test_mean_interval_coverage():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        low, high = mean_interval(generator.exponential(size=100).tolist(), Bootstrap(level=0.9, draws=400))
        held += low <= 1 <= high
    assert 0.84 <= held / 400 <= 0.94


def test_auc_interval_coverage():
    generator = np.random.default_rng(0)
    truth = 0.5 * (1 + math.erf(0.5))  # P(N(1, 1) > N(0, 1))
    held = 0
    for _ in range(400):
        low, high = auc_interval(
            generator.normal(size=80).tolist(), generator.normal(1, size=80).tolist(), Bootstrap(level=0.9, draws=400)
        )
        held += low <= truth <= high
    assert 0.84 <= held / 400 <= 0.94


def test_mean_interval_width_matches_standard_error():
    values = np.random.default_rng(0).normal(size=400)
    low, high = mean_interval(values.tolist(), Bootstrap(draws=5000))
    assert high - low == pytest.approx(2 * 2.576 * values.std() / math.sqrt(400), rel=0.05)


def test_bootstrap_counts_are_draws_with_replacement():
    counts = Bootstrap(draws=2000).counts(30, "forget")
    assert counts.shape == (2000, 30)
    assert (counts.sum(axis=1) == 30).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(30), abs=0.12)
    np.testing.assert_array_equal(counts, Bootstrap(draws=2000).counts(30, "forget"))
    assert (counts != Bootstrap(draws=2000).counts(30, "holdout")).any()
    assert (counts != Bootstrap(draws=2000, seed=1).counts(30, "forget")).any()


def test_invalid_bootstrap_settings_raise():
    for wrong in (
        {"level": 0.0},
        {"level": 1.0},
        {"level": float("nan")},
        {"draws": 0},
        {"draws": 10**9},
        {"seed": -1},
    ):
        with pytest.raises(UsageError, match="accepted"):
            Bootstrap(**wrong)
    with pytest.raises(ValueError, match="at least one item"):
        mean_interval([], Bootstrap())


@pytest.mark.parametrize("run", ["full01", "retain01", "dd1_01", "rank20_01"])
def test_resampling_each_item_once_matches_oracle(oracle, run):
    results = read_results(oracle / run)
    result, reasons = Resampler(results, EveryItemOnce(draws=2)).figures(NAMES)
    assert reasons == {}
    figures = tofu_figures(results)
    assert {name: draws[0] for name, draws in result.items()} == pytest.approx(
        {name: figures[name] for name in NAMES}, abs=1e-6
    )


@pytest.mark.parametrize("run", ["full01", "rank20_01"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resampling_matches_slow_loop(oracle, run, variant):
    results, target, retrained = (tofu_results(oracle / name) for name in (run, "full01", "retain01"))
    bootstrap = Bootstrap(draws=8, seed=3)
    draws, _ = Resampler(results, bootstrap).figures(NAMES)
    fast = aggregate(draws, target.figures, retrained.figures, variant).values
    for draw in range(bootstrap.draws):
        slow = aggregate(slowly(results, bootstrap, draw), target.figures, retrained.figures, variant).values
        assert {name: values[draw] for name, values in fast.items()} == pytest.approx(slow, abs=1e-9)


def tofu_results(folder):
    results = read_results(folder)
    results.figures = tofu_figures(results)
    return results


def slowly(results, bootstrap, draw):
    """Figures of one draw, from lists of drawn items."""
    sizes = {"forget": 40, "holdout": 40, "retain": 400, "ra": 100, "wf": 117}
    chosen = {
        group: np.repeat(np.arange(size), bootstrap.counts(size, group)[draw]).tolist() for group, size in sizes.items()
    }

    def drawn(metric, field, group):
        ordered = sorted(results.items[metric].items(), key=lambda item: int(item[0]))
        return [ordered[index][1][field] for index in chosen[group]]

    def mean(values):
        return sum(values) / len(values)

    losses = zip(
        drawn("forget_Q_A_PARA_Prob", "avg_loss", "forget"), drawn("forget_Q_A_PERT_Prob", "avg_loss", "forget"),
        strict=True,
    )  # fmt: skip
    figures = {
        "extraction_strength": mean(drawn("extraction_strength", "score", "forget")),
        "exact_memorization": mean(drawn("exact_memorization", "score", "forget")),
        "forget_Q_A_PARA_Prob": mean(drawn("forget_Q_A_PARA_Prob", "prob", "forget")),
        "forget_truth_ratio": mean([min(r, 1 / (r + 1e-10)) for r in drawn("forget_truth_ratio", "score", "forget")]),
        PROB_MEAN: mean(
            [math.exp(-right) / (math.exp(-right) + math.exp(-mean(wrong)) + 1e-10) for right, wrong in losses]
        ),
        FLUENCY: mean(drawn(FLUENCY, "score", "forget")),
    }
    for attack in ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus"):
        figures[attack] = attack_auc(
            drawn(f"{attack}.forget", "score", "forget"), drawn(f"{attack}.holdout", "score", "holdout")
        )
    parts = []
    for group, probability in (("retain", "Q_A_Prob"), ("ra", "Q_A_Prob_normalised"), ("wf", "Q_A_Prob_normalised")):
        parts += [
            mean(drawn(f"{group}_{probability}", "prob", group)),
            mean(drawn(f"{group}_Q_A_ROUGE", "rougeL_recall", group)),
            mean([max(0, 1 - r) for r in drawn(f"{group}_Truth_Ratio", "score", group)]),
        ]
    figures["model_utility"] = harmonic_mean(parts)
    return figures


def test_bootstrap_draws_are_independent_of_other_metrics(oracle):
    results = read_results(oracle / "full01")
    whole, _ = Resampler(results, Bootstrap(draws=20)).figures(NAMES)
    alone = Results(
        "r", "tofu", items={"exact_memorization": dict(reversed(results.items["exact_memorization"].items()))}
    )
    part, reasons = Resampler(alone, Bootstrap(draws=20)).figures(NAMES)
    assert part.keys() == {"exact_memorization"}
    np.testing.assert_allclose(part["exact_memorization"], whole["exact_memorization"], rtol=1e-12)
    assert reasons["mia_loss"] == "there are no items of mia_loss.forget"
    assert reasons["model_utility"] == "there are no items of retain_Q_A_Prob"
    assert "needs items of forget_Q_A_PARA_Prob" in reasons[PROB_MEAN]


def test_non_numeric_or_missing_items():
    def figures(**items):
        return Resampler(Results("r", "tofu", items=items), Bootstrap(draws=50)).figures(tuple(items))

    for wrong in (None, "x", float("nan"), float("inf")):
        result, reasons = figures(exact_memorization={"0": {"score": 0.5}, "1": {"score": wrong}})
        assert result == {}
        assert reasons["exact_memorization"] == "item 1 of exact_memorization has no finite score"
    # OpenUnlearning drops items that have no value: the others are drawn as before.
    result, _ = figures(
        exact_memorization={"1": {"score": 0.5}}, extraction_strength={"0": {"score": 0.1}, "1": {"score": 0.2}}
    )
    drawn = result["exact_memorization"]
    assert set(drawn[np.isfinite(drawn)]) == {0.5}
    assert aggregate(result, {}, {}, "openunlearning").values["mem"] is None


def test_bootstrap_of_1000_forget10_draws_is_fast():
    generator = np.random.default_rng(0)

    def items(count, **fields):
        return {str(index): {name: float(generator.uniform(0.05, 0.95)) for name in fields} for index in range(count)}

    result = {
        name: items(400, score=0, prob=0)
        for name in ("extraction_strength", "exact_memorization", "forget_Q_A_PARA_Prob", "forget_truth_ratio",
                     PROB_MEAN, FLUENCY)
    }  # fmt: skip
    for attack in ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus"):
        result |= {f"{attack}.{group}": items(400, score=0) for group in ("forget", "holdout")}
    for group, count in (("retain", 400), ("ra", 100), ("wf", 117)):
        probability = "Q_A_Prob" if group == "retain" else "Q_A_Prob_normalised"
        result |= {
            f"{group}_{name}": items(count, score=0, prob=0, rougeL_recall=0)
            for name in (probability, "Q_A_ROUGE", "Truth_Ratio")
        }
    started = time.perf_counter()
    draws, reasons = Resampler(Results("r", "tofu", items=result), Bootstrap()).figures(NAMES)
    elapsed = time.perf_counter() - started
    assert reasons == {}
    assert {values.shape for values in draws.values()} == {(1000,)}
    assert elapsed < 5, f"{elapsed:.1f} s"
