"""Stupid Backoff against a slow dictionary, and the experts' protocol."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divdec.errors import UsageError
from divdec.experts.ngram import NgramPair, StupidBackoff, contexts_of
from divdec.experts.ngram_counts import NgramCounts, SummedCounts
from divdec.experts.ngram_fit import fit
from support.reference import SlowNgrams

VOCAB = 12


DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), min_size=1, max_size=6).filter(
    lambda documents: any(documents)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("counts")


@settings(max_examples=60)
@given(documents=DOCUMENTS, order=st.integers(2, 5), data=st.data())
def test_ngram_scores_match_dictionary_implementation(folder, documents, order, data):
    slow = SlowNgrams(documents, VOCAB, order)
    counts = fit(documents, VOCAB, folder(), order=order)
    assert counts.tokens == slow.total
    assert counts.distinct == len(slow.counts)
    contexts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=order - 1), min_size=1, max_size=5))
    padded = np.array([[-1] * (order - 1 - len(context)) + context for context in contexts])
    result = StupidBackoff(counts).scores(padded).numpy()
    assert np.array_equal(result, np.stack([slow.scores(context) for context in contexts]))


@pytest.mark.parametrize("document", [[3], [3, 4], [3, 4, 5]])
def test_texts_shorter_than_ngram_order(folder, document):
    counts, slow = fit([document], VOCAB, folder(), order=5), SlowNgrams([document], VOCAB, 5)
    contexts = np.array([[-1, -1, 3, 4], [3, 4, 5, 6], [7, 7, 7, 7]])
    expected = [slow.scores([token for token in context if token >= 0]) for context in contexts.tolist()]
    assert np.array_equal(StupidBackoff(counts).scores(contexts).numpy(), np.stack(expected))


@settings(max_examples=30)
@given(one=DOCUMENTS, other=DOCUMENTS, order=st.integers(2, 4), data=st.data())
def test_summed_counts_match_counts_of_combined_documents(folder, one, other, order, data):
    both = fit([*one, *other], VOCAB, folder(), order=order)
    summed = SummedCounts([fit(documents, VOCAB, folder(), order=order) for documents in (one, other)])
    contexts = np.array(
        data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=order - 1, max_size=order - 1), min_size=1))
    )
    assert torch.equal(StupidBackoff(both).scores(contexts), StupidBackoff(summed).scores(contexts))


def test_current_attention_mask_applies_to_cached_tokens(pair):
    ids = torch.tensor([[3, 4, 5]])
    cache = pair.new_cache()
    pair.divergence(ids[:, :2], cache=cache)
    masked = pair.divergence(ids[:, 2:], torch.tensor([[0, 0, 1]]), cache=cache)
    assert torch.equal(masked, pair.divergence(ids[:, 2:]))


def test_counting_is_deterministic(folder):
    rng = np.random.default_rng(0)
    documents = [rng.zipf(1.3, size).clip(max=499) for size in rng.integers(0, 300, 40)]
    contents = []
    for _ in range(2):
        path = folder()
        fit(documents, 500, path, order=4)
        contents.append({file.name: file.read_bytes() for file in path.iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {
        "counts.json", "unigrams.npy", *(f"{name}-{n}.npy" for name in ("keys", "counts", "rows") for n in (2, 3, 4))
    }  # fmt: skip


def test_large_vocabularies_do_not_overflow(folder):
    vocab_size = 200_000
    rng = np.random.default_rng(1)
    documents = [rng.integers(vocab_size - 40, vocab_size, 300).tolist() for _ in range(3)]
    counts, slow = fit(documents, vocab_size, folder(), order=5), SlowNgrams(documents, vocab_size, 5)
    context = documents[0][10:14]
    result = StupidBackoff(counts).scores(np.array([context])).numpy()[0]
    for token in (*documents[0][14:16], vocab_size - 1, 0):
        assert result[token] == np.float32(slow.score(context, token))


def test_ngram_contexts_skip_padding_at_any_position():
    tokens = np.array([[-1, -1, 5, 6, 7], [1, -1, 2, -1, 3], [-1, -1, -1, -1, -1], [1, 2, 3, 4, 5]])
    result = contexts_of(tokens, 2, 2)
    assert result.tolist() == [[[5, 6], [6, 7]], [[1, 2], [2, 3]], [[-1, -1], [-1, -1]], [[3, 4], [4, 5]]]
    assert contexts_of(tokens[3:], 5, 2).tolist() == [[[-1, 1], [1, 2], [2, 3], [3, 4], [4, 5]]]


@pytest.fixture
def pair(folder):
    rng = np.random.default_rng(2)
    retain, forget = ([rng.integers(0, VOCAB, 60).tolist() for _ in range(4)] for _ in range(2))
    return NgramPair(fit(retain, VOCAB, folder()), fit(forget, VOCAB, folder()))


def test_incremental_divergence_matches_single_pass(pair):
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (3, 9))
    whole = pair.divergence(ids)
    cache = pair.new_cache()
    steps = [
        pair.divergence(ids[:, :4], cache=cache),
        *(pair.divergence(ids[:, [t]], cache=cache) for t in range(4, 9)),
    ]
    assert torch.equal(torch.cat(steps, dim=1), whole)
    assert torch.equal(pair.divergence(ids, logits_to_keep=2), whole[:, -2:])


def test_left_padded_batch_matches_unbatched(pair):
    ids = torch.tensor([[0, 0, 3, 4, 5], [7, 8, 9, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    batch = pair.divergence(ids, mask)
    assert torch.equal(batch[:1, 2:], pair.divergence(ids[:1, 2:]))
    assert torch.equal(batch[1:], pair.divergence(ids[1:]))


def test_the_cache_crops_reorders_and_selects(pair):
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    cache = pair.new_cache()
    pair.divergence(ids, cache=cache)
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    result = pair.divergence(torch.tensor([[9], [10]]), cache=cache)
    expected = pair.divergence(torch.tensor([[5, 6, 7, 9], [1, 2, 3, 10]]), logits_to_keep=1)
    assert torch.equal(result, expected)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_out_of_range_token_ids_are_unknown_context(pair):
    known = pair.divergence(torch.tensor([[VOCAB + 3]]))  # a padded vocabulary's
    assert known.isfinite().all()


def test_invalid_counts_give_one_line_error(folder, tmp_path):
    for documents, order, words in (
        ([[1, 2]], 6, "order is 6"),
        ([[1, 2]], 1, "order is 1"),
        ([[1, VOCAB]], 3, f"token id {VOCAB} lies outside"),
        ([[-1]], 3, "token id -1"),
        ([], 3, "no token"),
        ([[]], 3, "no token"),
        ([np.array([0.5])], 3, "give token ids"),
    ):
        with pytest.raises(UsageError, match=words):
            fit(documents, VOCAB, folder(), order=order)
    path = folder()
    one = fit([[1, 2, 3, 4]], VOCAB, path)
    with pytest.raises(UsageError, match="same"):
        NgramPair(one, one)
    with pytest.raises(UsageError, match="belong together"):
        NgramPair(one, fit([[1, 2]], VOCAB, folder(), order=2))
    with pytest.raises(UsageError, match=r"no counts\.json"):
        NgramCounts.load(tmp_path)
    (path / "keys-2.npy").write_bytes((path / "keys-2.npy").read_bytes()[:-1] + b"\1")
    with pytest.raises(UsageError, match=r"keys-2\.npy has changed"):
        NgramCounts.load(path)
    (path / "keys-2.npy").unlink()
    with pytest.raises(UsageError, match=r"keys-2\.npy is missing"):
        NgramCounts.load(path)
    (path / "counts.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(UsageError, match="not the description"):
        NgramCounts.load(path)


def test_interrupted_counting_leaves_no_files(folder):
    path = folder()

    def documents():
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(documents(), VOCAB, path)
    assert not list(path.iterdir())
