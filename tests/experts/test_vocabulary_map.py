"""Which auxiliary token stands for which of the target's, against a slow search; and how it is kept."""

import time

import numpy as np
import pytest

from divdec.bridge.vocabulary_map import (
    EXACT,
    EXTENSION,
    NONE,
    PREFIX,
    HealingMaps,
    VocabularyMap,
    cached,
    map_name,
)

AUXILIARY = [None, b"a", b"ab", b"ab", b" th", b"xyzw", b"xyz1", b"\xc3"]


def test_the_rule():
    target = [None, b"ab", b"abc", b"a b", b" the", b"xy", b"q", "é".encode(), b"xyzw1"]
    found = VocabularyMap.build(target, AUXILIARY, 11)
    assert found.source.tolist() == [-1, 2, 2, 1, 4, 5, -1, 7, 5, -1, -1]
    expected = [NONE, EXACT, PREFIX, PREFIX, PREFIX, EXTENSION, NONE, PREFIX, PREFIX, NONE, NONE]
    assert found.kind.tolist() == expected


def test_real_vocabularies_against_a_slow_search(tokenizers):
    from divdec.bridge.token_bytes import token_bytes

    target, auxiliary = token_bytes(tokenizers["bpe"])[::7], token_bytes(tokenizers["wordpiece"])
    found = VocabularyMap.build(target, auxiliary)
    for token, text in enumerate(target):
        if text is None:
            assert found.source[token] == -1
            continue
        fits = [(-len(other), place) for place, other in enumerate(auxiliary) if other and text.startswith(other)]
        grows = [(len(other), place) for place, other in enumerate(auxiliary) if other and other.startswith(text)]
        assert found.source[token] == min(fits or grows, default=(0, -1))[1]


def test_coverage(tokenizers):
    found = VocabularyMap.build([b"ab", b"abc", None, b"q"], AUXILIARY)
    coverage = found.coverage()
    assert (coverage.exact, coverage.prefix, coverage.extension, coverage.none) == (0.25, 0.25, 0, 0.5)
    assert found.coverage_of([0, 0, 0, 1]).exact == 0.75
    assert str(coverage) == "exact 25.0%, by prefix 25.0%, by extension 0.0%, not steered 50.0%"


def test_the_map_is_kept_and_rebuilt_when_damaged(tmp_path, tokenizers):
    built = []

    def build():
        built.append(1)
        return VocabularyMap.build([b"ab", b"q"], AUXILIARY)

    name = map_name(tokenizers["bpe"], tokenizers["small"], 7)
    assert name != map_name(tokenizers["small"], tokenizers["bpe"], 7)
    first = cached(name, tmp_path / "maps", build)
    again = cached(name, tmp_path / "maps", build)
    assert len(built) == 1
    assert np.array_equal(first.source, again.source)
    (path,) = (tmp_path / "maps").iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-40], whole.replace(first.source.tobytes(), (first.source + 1).tobytes())):
        path.write_bytes(damaged)
        count = len(built)
        assert np.array_equal(cached(name, tmp_path / "maps", build).source, first.source)
        assert len(built) == count + 1
    assert [path] == list((tmp_path / "maps").iterdir())


def test_a_map_that_is_not_this_one_is_built_again(tmp_path):
    build = lambda: VocabularyMap.build([b"ab", b"q"], AUXILIARY)
    foreign = lambda: VocabularyMap.build([None] * 5, AUXILIARY)
    expected = build().source.tolist()
    cached("foreign", tmp_path, foreign)
    raw = (tmp_path / "foreign.npz").read_bytes()
    (tmp_path / "mine.npz").write_bytes(raw)
    assert cached("mine", tmp_path, build).source.tolist() == expected
    # Its own name, another width or fewer auxiliary tokens: from a version with another rule.
    assert cached("foreign", tmp_path, build, 2, len(AUXILIARY)).source.tolist() == expected
    assert cached("mine", tmp_path, foreign, 2, 2).source.tolist() == [-1] * 5
    # One bit of an archive's header makes reading raise what no one expects.
    cached("whole", tmp_path, build)
    raw = (tmp_path / "whole.npz").read_bytes()
    for place in range(raw.index(b"PK\x01\x02"), len(raw)):
        (tmp_path / "whole.npz").write_bytes(raw[:place] + bytes([raw[place] ^ 64]) + raw[place + 1 :])
        assert cached("whole", tmp_path, build).source.tolist() == expected
    with (tmp_path / "whole.npz").open("wb") as file:
        np.save(file, np.arange(3))
    assert cached("whole", tmp_path, build).source.tolist() == expected


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken.npz").mkdir()
    build = lambda: VocabularyMap.build([b"ab"], AUXILIARY)
    assert cached("x", tmp_path / "file" / "maps", build).source.tolist() == [2]
    assert cached("taken", tmp_path, build).source.tolist() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.npz"]


@pytest.mark.parametrize("pending", [b" ", b" t", b"a", b"\xc3", b"zqzq"])
def test_healing_maps_against_a_slow_search(tokenizers, pending):
    from divdec.bridge.token_bytes import token_bytes

    target, auxiliary = token_bytes(tokenizers["bpe"]), token_bytes(tokenizers["small"])
    maps = HealingMaps(target, auxiliary, len(target) + 3)
    source = maps.of(pending)
    longer = [(len(text), -place) for place, text in enumerate(auxiliary)
              if text and text.startswith(pending) and len(text) > len(pending)]  # fmt: skip
    assert maps.open(pending) == bool(longer)
    for token, text in enumerate([*target, None, None, None]):
        fits = [(length, place) for length, place in longer if text and (pending + text).startswith(auxiliary[-place])]
        assert source[token] == (-max(fits)[1] if fits else -1)


def test_large_vocabularies_are_mapped_in_seconds():
    numbers = np.random.default_rng(0).integers(97, 117, (2, 50_000, 9), dtype=np.uint8)
    lengths = np.random.default_rng(1).integers(1, 10, (2, 50_000))
    target, auxiliary = (
        [bytes(row[:length]) for row, length in zip(*side, strict=True)] for side in zip(numbers, lengths, strict=True)
    )
    start = time.perf_counter()
    VocabularyMap.build(target, auxiliary)
    assert time.perf_counter() - start < 3
