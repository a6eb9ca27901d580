"""From figures of images to the paper's tables."""

import dataclasses
import json
import math

import pytest

from divdec_research.images.results import Distances, Mean, SettingResult, by_set, cell_text, tabulate

DISTANCES = {"classifier": Distances(1.0, 2.0, 3.0)}
ACCURACY = {"retain": [1.0], "forget": [1.0]}
BASELINE = SettingResult("Baseline", "", {"retain": [0.9, 1.0], "forget": [1.0, 0.8, 0.9, 0.9]}, ACCURACY, DISTANCES)
LINEAR = SettingResult(
    "Linear", "α=1",
    content={"retain": [0.95, 0.97], "forget": [0.25]},
    accuracy={"retain": [1.0, 1.0, 1.0, 0.0], "forget": [0.0]},
    quality={"gemini": {"retain": [0.5, 1.0, 0.0], "forget": [0.0, 0.0]}},
    distances={"classifier": Distances(19.16, 24.1, 7.256, ("G_F has 1 images",))},
)  # fmt: skip
RANK = SettingResult(
    "Rank",
    "k=20",
    BASELINE.content,
    ACCURACY,
    DISTANCES,
    quality={"qwen": {"retain": [1.0, 1.0], "forget": [0.5, 0.5]}},
)


def test_mean_and_standard_error():
    """Of 0, 0, 1, 1: deviation √(1/3), so an error of √(1/12)."""
    result = Mean.of([0.0, 0.0, 1.0, 1.0])
    assert (result.value, result.images) == (0.5, 4)
    assert result.error == pytest.approx(math.sqrt(1 / 12))
    assert str(result) == "50% ± 28.9"
    assert Mean.of([0.25]) == Mean(0.25, None, 1)
    assert str(Mean.of([0.25])) == "25%"
    assert str(Mean.of([1.0, 1.0, 1.0])) == "100% ± 0.0"


def test_table_has_paper_layout():
    assert tabulate([BASELINE, LINEAR], ["content"]).markdown().splitlines() == [
        "| Method | Config | Retain ↑ | Forget ↓ |",
        "| --- | --- | --: | --: |",
        "| Baseline | – | 95% ± 5.0 | 90% ± 4.1 |",
        "| Linear | α=1 | 96% ± 1.0 | 25% |",
    ]
    assert tabulate([BASELINE, LINEAR], ["distances"]).markdown().splitlines() == [
        "| Method | Config | FID(B_R, G_R) ↓ | FID(B_F, G_F) ↑ | FID(B_R, G_F) ↓ |",
        "| --- | --- | --: | --: | --: |",
        "| Baseline | – | 1.00 | 2.00 | 3.00 |",
        "| Linear | α=1 | 19.2 | 24.1 | 7.26 |",
    ]


def test_all_metrics_in_one_table():
    head, _, _, linear, rank = tabulate([BASELINE, LINEAR, RANK]).markdown().splitlines()
    assert head == (
        "| Method | Config | Content, Retain ↑ | Content, Forget ↓ | Accuracy, Retain ↑ | Accuracy, Forget ↓ "
        "| Quality, gemini, Retain ↑ | Quality, gemini, Forget ↑ | Quality, qwen, Retain ↑ | Quality, qwen, Forget ↑ "
        "| classifier, FID(B_R, G_R) ↓ | classifier, FID(B_F, G_F) ↑ | classifier, FID(B_R, G_F) ↓ |"
    )
    assert linear == (
        "| Linear | α=1 | 96% ± 1.0 | 25% | 75% ± 25.0 | 0% | 50% ± 28.9 | 0% ± 0.0 | – | – | 19.2 | 24.1 | 7.26 |"
    )
    assert rank == (
        "| Rank | k=20 | 95% ± 5.0 | 90% ± 4.1 | 100% | 100% | – | – | 100% ± 0.0 | 50% ± 0.0 | 1.00 | 2.00 | 3.00 |"
    )
    special = dataclasses.replace(BASELINE, method="a|b")
    assert tabulate([special], ["distances"]).markdown().splitlines()[-1] == r"| a\|b | – | 1.00 | 2.00 | 3.00 |"


def test_json_is_not_rounded():
    _, linear, rank = json.loads(json.dumps(tabulate([BASELINE, LINEAR, RANK]).json()))
    assert linear["method"] == "Linear"
    assert linear["config"] == "α=1"
    assert linear["content"]["forget"] == {"value": 0.25, "error": None, "images": 1}
    assert linear["accuracy"]["retain"] == {"value": 0.75, "error": 0.25, "images": 4}
    assert linear["quality"]["gemini"]["forget"] == {"value": 0.0, "error": 0.0, "images": 2}
    assert linear["distances"]["classifier"] == {
        "retain": 19.16, "forget": 24.1, "forget_to_retain": 7.256, "warnings": ["G_F has 1 images"],
    }  # fmt: skip
    assert rank["quality"]["gemini"] == {"retain": None, "forget": None}


def test_metrics_are_grouped_by_set():
    assert by_set([7.0, 8.0, 9.0], [0, 1, 2], {1}) == {"retain": [7.0, 9.0], "forget": [8.0]}
    with pytest.raises(ValueError):
        by_set([7.0, 8.0], [0], {1})


def test_cells_are_formatted():
    assert [cell_text(cell) for cell in (None, 9.994, 10.04, 0.0, Mean(0.974, 0.0104, 9))] == [
        "–", "9.99", "10.0", "0.00", "97% ± 1.0",
    ]  # fmt: skip
