"""Where results are found, and of which method and setting they are."""

from pathlib import Path

from divdec.evaluation.results import Results, write_results
from divdec_research.suites.results import find_results, identify


def test_results_are_found_in_natural_order(tmp_path):
    for name in ("linear-10", "linear-2", "rank-20-soft"):
        folder = tmp_path / "run" / "bundle" / name
        folder.mkdir(parents=True)
        write_results(Results(name, "tofu", {"model_utility": 0.5}), folder)
    assert [path.name for path in find_results(tmp_path / "run")] == ["linear-2", "linear-10", "rank-20-soft"]


def test_settings():
    def identified(name, **about):
        identity = identify(Results("x", "tofu", about=about), Path("/runs/sweep") / name)
        return identity.rule and (identity.rule, identity.strength, identity.family)

    assert identified("1B-alpha-1.5") == ("linear", 1.5, "1B")
    assert identified("OLMo-2-0425-1B-Instruct-lr5e-5-alpha-3.0") == ("linear", 3, "OLMo-2-0425-1B-Instruct-lr5e-5")
    assert identified("3B-topk-200") == ("rank", 200, "3B")
    assert identified("linear-1.5") == ("linear", 1.5, "sweep")
    assert identified("rank-20-soft") == ("rank", 20, "sweep")
    assert identified("rank-20-hard") == ("rank", 20, "sweep hard")
    assert identified("linear-2.5-2-full") == ("linear", 2.5, "sweep full margin 2")
    assert identified("x", steering="linear:0.5", model="runs/bundle") == ("linear", 0.5, "bundle")
    assert identified("x", steering="linear:-1", model="bundle") == ("linear", -1, "bundle")
    assert identified("x", steering="linear:1", model="bundle", family="pair") == ("linear", 1, "pair")
    assert identified("x", steering="linear:2.5:2:full", model="bundle") == ("linear", 2.5, "bundle full margin 2")
    assert identified("x", steering="linear:1.5 and takedowns", model="bundle") == ("linear", 1.5, "bundle")
    assert identified("linear-2", steering="rank:20:soft", model="bundle") == ("rank", 20, "bundle")
    for name in ("rank20_01", "lr-1e-5_str-50", "alpha-2_0", "checkpoint-39"):
        assert identified(name) is None
