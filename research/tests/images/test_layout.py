"""An image is a prompt of one token and a raster of codes: back and forth, and what is refused."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divdec import UsageError
from divdec.data.formatting import IGNORED, encode_set
from divdec_research.images.models import ImageLayout, load_layout

LAYOUT = ImageLayout.new(7, 2, 3, ["cat", "dog"])
SHARED = dataclasses.replace(LAYOUT, first_class=0, no_class=None, vocab_size=7, padding=6)
"""As in the published checkpoint, where classes and codes share tokens."""


@given(st.lists(st.lists(st.integers(0, 6), min_size=6, max_size=6), min_size=1, max_size=4), st.data())
def test_image_layout_round_trips_rasters(rows, data):
    for layout in (LAYOUT, SHARED):
        codes = torch.tensor(rows).reshape(-1, 2, 3)
        wanted = st.sampled_from([0, 1, None] if layout.no_class is not None else [0, 1])
        classes = [data.draw(wanted) for _ in rows]
        examples = encode_set(layout.records("some", codes, classes), layout.tokenizer())
        prompts = layout.prompts(classes)[:, 0].tolist()
        assert [example.input_ids for example in examples] == [[p, *row] for p, row in zip(prompts, rows, strict=True)]
        assert [example.labels for example in examples] == [[IGNORED, *row] for row in rows]
        assert torch.equal(layout.rasters(torch.tensor(rows)), codes)


def test_class_and_image_tokens_share_vocabulary_without_overlap():
    assert LAYOUT.prompts([0, 1, None]).tolist() == [[7], [8], [9]]
    assert (LAYOUT.vocab_size, LAYOUT.no_codes) == (11, [7, 8, 9, 10])
    assert (SHARED.prompts([1]).tolist(), SHARED.no_codes) == ([[1]], [])
    tokenizer = LAYOUT.tokenizer()
    assert len(tokenizer) == LAYOUT.vocab_size
    assert tokenizer("9 3 0")["input_ids"] == [9, 3, 0]
    assert tokenizer.decode([9, 3, 0]) == "9 3 0"


def test_invalid_codes_rasters_and_classes_are_rejected():
    with pytest.raises(UsageError, match="code 7 is not in the codebook; accepted: 0 to 6"):
        LAYOUT.records("some", torch.full((1, 2, 3), 7), [0])
    with pytest.raises(UsageError, match="code -1 is not in the codebook"):
        LAYOUT.check(torch.full((1, 2, 3), -1))
    with pytest.raises(UsageError, match="rasters of 3×2 codes; this model's have 2×3"):
        LAYOUT.check(torch.zeros(1, 3, 2, dtype=torch.long))
    with pytest.raises(UsageError, match="an image has 6 codes, 5 were given"):
        LAYOUT.rasters(torch.zeros(1, 5, dtype=torch.long))
    for index in (2, -1):
        with pytest.raises(UsageError, match=f"class {index} is out of range; accepted: 0 to 1"):
            LAYOUT.prompts([index])
    with pytest.raises(UsageError, match="no token for 'any class'"):
        SHARED.prompts([None])
    assert (LAYOUT.find("dog"), LAYOUT.find("0")) == (1, 0)
    for name in ("2", "bird", "-1", "1.0", "²"):
        with pytest.raises(UsageError, match="is not known; accepted: 0 to 1, or one of cat, dog"):
            LAYOUT.find(name)


def test_a_layout_round_trips_through_a_folder(tmp_path):
    with pytest.raises(UsageError, match=r"is no image model: it has no image\.json"):
        load_layout(tmp_path)
    LAYOUT.save(tmp_path)
    assert load_layout(tmp_path) == LAYOUT
    for broken in ('{"format": 2}', '{"format": 1, "codes": 3}', "[]", "{"):
        (tmp_path / "image.json").write_text(broken)
        with pytest.raises(UsageError):
            load_layout(tmp_path)
    whole = {"format": 1, **dataclasses.asdict(LAYOUT)}
    for field, value in (
        ("first_class", 1000), ("first_class", -5), ("first_class", "7"), ("height", 2.0), ("height", 0),
        ("classes", []), ("classes", [0, 1]), ("classes", "ab"), ("classes", ["a", "a"]), ("classes", ["a", " "]),
        ("no_class", "x"), ("no_class", 3), ("padding", 99), ("vocab_size", "11"), ("vocab_size", 5), ("codes", True),
    ):  # fmt: skip
        (tmp_path / "image.json").write_text(json.dumps({**whole, field: value}))
        with pytest.raises(UsageError, match=r"image\.json"):
            load_layout(tmp_path)


def test_numeric_names_take_precedence_over_indices():
    layout = ImageLayout.new(7, 2, 3, ["3", "7", "9"])
    assert layout.find("7") == 1
    for number in ("0", "1", "2"):
        with pytest.raises(UsageError, match="is not known; accepted: one of 3, 7, 9"):
            layout.find(number)
    assert LAYOUT.find_all(["dog", "cat"]) == [1, 0]
    with pytest.raises(UsageError, match="folders dog and 1 are both of class 'dog'"):
        LAYOUT.find_all(["dog", "1"])
