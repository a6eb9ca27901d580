"""Which way is chosen and why, and what a plan says of what is unusual."""

import pytest
import transformers

from divdec.costs.estimate import CostSettings, estimate_costs
from divdec.costs.model_size import number_of_experts
from divdec.errors import UsageError

GIVEN = {"target": "8B", "aux": "1B", "forget_tokens": "1M", "retain_tokens": "10M"}


def choice(**more):
    estimate = estimate_costs(CostSettings(**(GIVEN | more)))
    return estimate["choice"], estimate["reason"]


def test_recommendation_follows_break_even_volume():
    assert choice(volume="129M")[0] == "steer"
    assert choice(volume="131M")[0] == "distil"
    estimate = estimate_costs(CostSettings(**GIVEN, volume="130M"))
    assert estimate["break_even_tokens"]["paper"] == pytest.approx(130e6)
    assert estimate["flops_at_volume"]["steer"] == pytest.approx(estimate["flops_at_volume"]["distil"])


def test_verbatim_recommends_ngrams_and_missing_volume_gives_no_recommendation():
    assert choice(verbatim=True)[0] == "n-gram"
    way, reason = choice()
    assert way is None
    assert "give --volume" in reason


def test_volume_between_break_even_counts_is_explained():
    assert "170M" in choice(volume="150M")[1]
    assert "170M" not in choice(volume="200M")[1]


def test_auxiliaries_larger_than_half_the_target_give_warning():
    estimate = estimate_costs(CostSettings(**(GIVEN | {"aux": "5B"}), volume="1M"))
    assert any("2n ≤ N" in warning for warning in estimate["warnings"])
    assert estimate["compute_increase"] == pytest.approx(1.25)
    assert not estimate_costs(CostSettings(**(GIVEN | {"aux": "4B"})))["warnings"]


def test_mixture_of_experts_gives_warning(tmp_path):
    transformers.MixtralConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1).save_pretrained(tmp_path)
    estimate = estimate_costs(CostSettings(**(GIVEN | {"target": str(tmp_path), "aux": "1M"})))
    assert "give the active ones" in estimate["warnings"][-1]


def test_mixture_with_experts_by_modality_is_one():
    config = transformers.LlamaConfig(moe_num_experts=[64, 48])
    assert number_of_experts(config) == 64
    assert number_of_experts(transformers.LlamaConfig()) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"target": "8Q"}, {"aux": "-1B"}, {"aux": "0"}, {"forget_tokens": "0"}, {"retain_tokens": -1.0},
     {"volume": "many"}, {"epochs": 0.0}, {"epochs": float("nan")},
     {"epochs": 1e300}],
)  # fmt: skip
def test_invalid_cost_settings_give_one_line_error(wrong):
    with pytest.raises(UsageError, match="accepted") as error:
        estimate_costs(CostSettings(**(GIVEN | wrong)))
    assert "\n" not in str(error.value)
