"""The auxiliary token of each target token, compared with a slow search."""

import time

import numpy as np

from divdec.bridge.token_bytes import source_tokens

AUXILIARY = [None, b"a", b"ab", b"ab", b" th", b"xyzw", b"xyz1", b"\xc3"]


def test_exact_and_prefix_matches():
    target = [None, b"ab", b"abc", b"a b", b" the", b"xy", b"q", "é".encode(), b"xyzw1"]
    assert source_tokens(target, AUXILIARY, 11).tolist() == [-1, 2, 2, 1, 4, -1, -1, 7, 5, -1, -1]


def test_real_vocabulary_maps_match_slow_search(tokenizers):
    from divdec.bridge.token_bytes import token_bytes

    target, auxiliary = token_bytes(tokenizers["bpe"])[::7], token_bytes(tokenizers["unigram"])
    source = source_tokens(target, auxiliary, len(target))
    for token, text in enumerate(target):
        if text is None:
            assert source[token] == -1
            continue
        fits = [(-len(other), index) for index, other in enumerate(auxiliary) if other and text.startswith(other)]
        assert source[token] == min(fits, default=(0, -1))[1]


def test_large_vocabularies_are_mapped_quickly():
    numbers = np.random.default_rng(0).integers(97, 117, (2, 50_000, 9), dtype=np.uint8)
    lengths = np.random.default_rng(1).integers(1, 10, (2, 50_000))
    target, auxiliary = (
        [bytes(row[:length]) for row, length in zip(*side, strict=True)] for side in zip(numbers, lengths, strict=True)
    )
    start = time.perf_counter()
    source_tokens(target, auxiliary, len(target))
    assert time.perf_counter() - start < 3
