"""Membership AUC, forget quality and PrivLeak against definitions, an oracle's figures and TOFU's own logs."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.evaluation.metrics import attack_auc
from divdec_research.suites.metrics import forget_quality, privleak
from divdec_research.suites.results import read_results

scores = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=12)


@given(scores, scores)
def test_auc_is_share_of_ordered_pairs(forget, holdout):
    wins = [1.0 if high > low else 0.5 if high == low else 0.0 for low in forget for high in holdout]
    assert attack_auc(forget, holdout) == pytest.approx(sum(wins) / len(wins))


@given(scores, scores)
def test_auc_is_symmetric(forget, holdout):
    assert attack_auc(forget, holdout) == pytest.approx(1 - attack_auc(holdout, forget))
    assert attack_auc(forget, forget) == pytest.approx(0.5)
    assert attack_auc([-score for score in forget], [-score for score in holdout]) == pytest.approx(
        1 - attack_auc(forget, holdout)
    )


def test_auc_matches_hand_computed_values():
    assert attack_auc([1.0, 2.0], [3.0, 4.0]) == 1
    assert attack_auc([3.0, 4.0], [1.0, 2.0]) == 0
    assert attack_auc([1.0, 2.0, 3.0], [2.0]) == 0.5


@pytest.mark.parametrize("wrong", [([], [1.0]), ([1.0], []), ([float("nan")], [1.0]), ([1.0], [float("inf")])])
def test_undefined_auc_raises(wrong):
    with pytest.raises(ValueError, match="AUC needs"):
        attack_auc(*wrong)


@pytest.mark.parametrize("run", ["full01", "retain01", "dd1_01", "rank20_01"])
def test_attack_aucs_match_oracle(shared, run):
    result, retrained = (read_results(shared / "oracle" / "results" / name) for name in (run, "retain01"))
    attacks = ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus", "mia_gradnorm", "mia_reference")
    for attack in attacks:
        auc = attack_auc(*(result.scores(f"{attack}.{group}", "score") for group in ("forget", "holdout")))
        assert auc == pytest.approx(result.figures[attack], abs=1e-12)
    if run != "retain01":  # it was evaluated without a retrained model to compare with
        ratios = [results.scores("forget_truth_ratio", "score") for results in (result, retrained)]
        assert forget_quality(*ratios) == pytest.approx(result.figures["forget_quality"], rel=1e-9)
        expected = result.figures["privleak"]
        assert privleak(result.figures["mia_min_k"], retrained.figures["mia_min_k"]) == pytest.approx(expected)


def test_forget_quality_matches_published_tofu_logs(shared):
    def ratios(model):
        path = shared / "data" / "tofu_official" / f"llama2-7b_{model}_wd0.01_eval_log_aggregated.json"
        log = json.loads(path.read_text())["eval_log_forget.json"]
        correct = log["avg_paraphrased_loss"]
        return [np.exp(correct[index] - np.mean(log["average_perturb_loss"][index])) for index in correct]

    full, retrained = ratios("full"), ratios("retain90")
    assert len(full) == 300
    assert forget_quality(full, retrained) == pytest.approx(1.834e-21, rel=1e-3)
    reciprocals = [[1 / ratio for ratio in of] for of in (full, retrained)]
    assert forget_quality(*reciprocals) == pytest.approx(1.834e-21, rel=1e-3)
    assert forget_quality(full, full) == 1
