"""Numbers with units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.costs.model_size import format_quantity, is_quantity, parse_quantity
from divdec.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [("8B", 8e9), ("8e9", 8e9), ("1.5m", 1.5e6), ("10 K", 1e4), ("2T", 2e12), ("3G", 3e9), (".5B", 5e8),
     ("1_000", 1e3), (7.0, 7.0), (8e9, 8e9), ("0", 0.0)],
)  # fmt: skip
def test_quantities_are_parsed(text, value):
    assert parse_quantity(text, "volume") == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["8Q", "-8B", "B", "", "8_B", "1__0", "8BB", "nan", "inf", "1e999", "8 B of them", float("nan"), -1.0]
)
def test_invalid_quantities_are_rejected(text):
    with pytest.raises(UsageError, match=r"volume is .*; accepted: a number such as 8B, 1.5M or 8e9"):
        parse_quantity(text, "volume")


def test_quantities_above_limit_are_rejected():
    # 1e30 parameters would be a model of a hundred million layers.
    with pytest.raises(UsageError, match=r"target is '1e30'; accepted: .*at most 1e\+21"):
        parse_quantity("1e30", "target", least=1.0)


def test_quantities_below_minimum_are_rejected():
    with pytest.raises(UsageError, match="of at least 1 "):
        parse_quantity("0", "target", least=1.0)


@given(st.floats(min_value=1, max_value=1e15))
def test_formatted_numbers_can_be_parsed(value):
    assert parse_quantity(format_quantity(value).replace(",", ""), "x") == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("text", "means_number"),
    [("8B", True), ("8Q", True), ("-8B", True), (".5B", True), ("runs/8B", False), ("./8B", False), ("llama", False)],
)
def test_paths_are_not_quantities(text, means_number):
    assert is_quantity(text) is means_number


def test_quantity_formats():
    assert [format_quantity(value) for value in (0.0, 12.0, 999.9, 131_072.0, 8_030_261_248.0, 3e15)] == [
        "0", "12", "1K", "131K", "8.03B", "3,000T",
    ]  # fmt: skip
