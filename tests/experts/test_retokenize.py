"""Retokenising step by step gives what tokenising everything gives."""

import codecs
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divdec.bridge.context import Context, ContextReader
from divdec.bridge.retokenize import AuxiliaryTokenizer, splits_at_words
from divdec.bridge.token_bytes import structure

WORDS = st.text(
    alphabet=st.one_of(st.sampled_from(" .,'\n\tabcdes1"), st.sampled_from("éжор日ك한"), st.sampled_from("😀‍\u0301ﬁ")),
    max_size=60,
)
FILLER = "the author was born in a small town by the sea and ещё одна строка о людях who aren't there "


def whole(reader, ids):
    """The auxiliary's ids for a text without special tokens, all at once."""
    data = b"".join(reader.bytes[token] or b"" for token in ids)
    if reader.strips_first and data.startswith(b" "):
        data = data[1:]
    text, length = codecs.utf_8_decode(data, "replace", False)
    auxiliary = reader.auxiliary
    return [*auxiliary.head, *auxiliary.encode(text), *auxiliary.pending(data[length:])] or reader.stand_in


@pytest.fixture(scope="module")
def readers(tokenizers):
    return {
        (target, auxiliary): ContextReader(tokenizers[target], tokenizers[auxiliary])
        for target in ("bpe", "unigram")
        for auxiliary in ("small", "bpe", "unigram", "wordpiece")
    }


@given(data=st.data())
@settings(max_examples=30)
@pytest.mark.parametrize("auxiliary", ["small", "bpe", "unigram", "wordpiece"])
@pytest.mark.parametrize("target", ["bpe", "unigram"])
def test_every_prefix_of_any_text(readers, tokenizers, target, auxiliary, data):
    reader = readers[target, auxiliary]
    text = FILLER * data.draw(st.integers(0, 2)) + data.draw(WORDS) + FILLER * data.draw(st.integers(0, 1))
    ids = tokenizers[target](text + data.draw(WORDS), add_special_tokens=False)["input_ids"]
    ids += data.draw(st.lists(st.integers(20, 300), max_size=5))
    counts = sorted(data.draw(st.sets(st.integers(1, len(ids)), min_size=1, max_size=20))) if ids else []
    context = Context(reader)
    for count, view in zip(counts, context.views(ids, counts), strict=True):
        assert view.ids == whole(reader, ids[:count])
    if ids:  # another end, from somewhere in the middle
        other = ids[: data.draw(st.integers(0, len(ids)))] + data.draw(st.lists(st.integers(20, 300), min_size=1))
        branch = context.copy()
        assert branch.views(other, [len(other)])[0].ids == whole(reader, other)
        assert context.views([*ids, 30], [len(ids) + 1])[0].ids == whole(reader, [*ids, 30])


def test_only_the_last_words_are_tokenised_again(readers, tokenizers, monkeypatch):
    reader = readers["bpe", "small"]
    ids = tokenizers["bpe"](FILLER * 40, add_special_tokens=False)["input_ids"]
    context = Context(reader)
    context.views(ids, [len(ids)])
    seen = []
    encode = AuxiliaryTokenizer.encode
    monkeypatch.setattr(AuxiliaryTokenizer, "encode", lambda self, text: seen.append(len(text)) or encode(self, text))
    generator = random.Random(0)
    for _ in range(60):
        ids = [*ids, generator.choice(ids)]
        context.views(ids, [len(ids)])
    assert max(seen) < 700
    assert sum(seen) / 60 < 150


@pytest.mark.parametrize("scheme", [None, "first", "always"])
def test_what_a_template_has_written(tokenizers, retokenized, scheme):
    """Ids are the tokenizer's own, except that a content never holds a special token."""
    from tokenizers import AddedToken

    own = tokenizers["bpe"]
    if scheme is not None:
        before = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
        own = retokenized(tokenizers["unigram"], pre_tokenizer=before)
        lone = AddedToken("[SEP]", single_word=True, special=True)
        own.add_tokens([AddedToken("<|lr|>", lstrip=True, rstrip=True, special=True), lone], special_tokens=True)
    auxiliary = AuxiliaryTokenizer(own)
    for pieces in (
        ["<s> [SEP] a[SEP] [INST] ", "Who was born?", " [/INST]"],
        ["Q: ", "Who", " <|lr|>  ", " She ", "</s>\n<|eot|>", "two  words", "<|head|>"],
    ):
        assert auxiliary.encode_rendered(pieces) == own("".join(pieces), add_special_tokens=False)["input_ids"]
    found = auxiliary.encode_rendered(["<s>", "say </s> <|eot|> <s>", "<|eot|>"])
    assert [token for token in found if token in own.all_special_ids or own.decode(token) == "<|eot|>"] == [
        own.bos_token_id, own.convert_tokens_to_ids("<|eot|>")]  # fmt: skip
    assert "".join(own.decode(found).split()) == "<s>say</s><|eot|><s><|eot|>"


def test_tokens_for_the_same_bytes(tokenizers):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from divdec.bridge.divergence import _sources
    from divdec.bridge.vocabulary_map import VocabularyMap

    description = structure(tokenizers["small"])
    place = len(tokenizers["small"])
    added = Tokenizer.from_str(tokenizers["small"].backend_tokenizer.to_str())
    known = next(token for token in description["model"]["vocab"] if len(token) > 3 and token.isalpha())
    run = next(token for token in description["model"]["vocab"] if len(token) > 2 and token.startswith("Ġ"))
    assert added.add_tokens([run.replace("Ġ", " ")]) == 1
    auxiliary = AuxiliaryTokenizer(PreTrainedTokenizerFast(tokenizer_object=added, eos_token="</s>"))
    text = run.replace("Ġ", " ").encode()
    assert auxiliary.encode(text.decode()) == [place]
    found = VocabularyMap.build([text, known.encode()], _sources(auxiliary.bytes, auxiliary.preferred))
    assert found.source.tolist() == [place, description["model"]["vocab"][known]]


def test_structures_that_are_not_trusted(tokenizers):
    description = structure(tokenizers["small"])
    assert splits_at_words(description)
    prepend = {"type": "Prepend", "prepend": "▁"}
    spaced = {"id": 999, "content": "a b", "special": False, "lstrip": False, "rstrip": False}
    other = {"type": "Split", "pattern": {"Regex": r"\n+"}, "behavior": "Isolated", "invert": False}
    nfkc = lambda text: text.replace("\u00a0", " ")
    assert splits_at_words({**description, "added_tokens": [{**spaced, "content": "ab"}]}, nfkc)
    assert not splits_at_words({**description, "added_tokens": [{**spaced, "content": "▁ab"}]})
    assert not splits_at_words({**description, "added_tokens": [{**spaced, "content": "a\u00a0b"}]}, nfkc)
    assert not splits_at_words({**description, "added_tokens": [{**spaced, "content": "a-b"}]}, lambda text: "a b")
    for change in (
        {"normalizer": {"type": "Sequence", "normalizers": [prepend]}},
        {"added_tokens": [spaced]},
        {"pre_tokenizer": other},
        {"pre_tokenizer": None},
    ):
        assert not splits_at_words({**description, **change})


def test_what_is_not_trusted_is_tokenised_as_a_whole(tokenizers, texts):
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    description = structure(tokenizers["unigram"])
    description["pre_tokenizer"]["split"] = False  # tokens may reach over spaces
    free = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)), eos_token="</s>")
    reader = ContextReader(tokenizers["bpe"], free)
    assert not reader.auxiliary.settles
    ids = tokenizers["bpe"](FILLER * 2, add_special_tokens=False)["input_ids"]
    for count, view in enumerate(Context(reader).views(ids, range(1, len(ids) + 1)), 1):
        assert view.ids == whole(reader, ids[:count])
