"""Tokenizing a growing text step by step equals tokenizing it whole."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divdec.bridge.alignment import AlignedSequence, Retokenizer
from divdec.bridge.auxiliary_tokenizer import AuxiliaryTokenizer
from divdec.bridge.token_bytes import describe_tokenizer

WORDS = st.text(
    alphabet=st.one_of(st.sampled_from(" .,'\n\tabcdes1"), st.sampled_from("éжор日ك한"), st.sampled_from("😀‍\u0301ﬁ")),
    max_size=60,
)
FILLER = "the author was born in a small town by the sea and ещё одна строка о людях who aren't there "


def whole(reader, ids):
    """Slow reference: the auxiliary's ids of a text without special tokens, tokenized whole."""
    data = b"".join(reader.bytes[token] or b"" for token in ids)
    if reader.adds_space_first and data.startswith(b" "):
        data = data[1:]
    text, length = codecs.utf_8_decode(data, "replace", False)
    auxiliary = reader.auxiliary
    return [*auxiliary.prefix_ids, *auxiliary.encode(text), *auxiliary.encode_bytes(data[length:])] or reader.empty_ids


@pytest.fixture(scope="module")
def readers(tokenizers):
    return {
        (target, auxiliary): Retokenizer(tokenizers[target], tokenizers[auxiliary])
        for target in ("bpe", "unigram")
        for auxiliary in ("small", "bpe", "unigram")
    }


@given(data=st.data())
@settings(max_examples=30)
@pytest.mark.parametrize("auxiliary", ["small", "bpe", "unigram"])
@pytest.mark.parametrize("target", ["bpe", "unigram"])
def test_incremental_tokenization_matches_for_every_prefix(readers, tokenizers, target, auxiliary, data):
    reader = readers[target, auxiliary]
    text = FILLER * data.draw(st.integers(0, 2)) + data.draw(WORDS) + FILLER * data.draw(st.integers(0, 1))
    ids = tokenizers[target](text + data.draw(WORDS), add_special_tokens=False)["input_ids"]
    ids += data.draw(st.lists(st.integers(20, 300), max_size=5))
    counts = sorted(data.draw(st.sets(st.integers(1, len(ids)), min_size=1, max_size=20))) if ids else []
    context = AlignedSequence(reader)
    for count, view in zip(counts, context.auxiliary_inputs(ids, counts), strict=True):
        assert view.ids == whole(reader, ids[:count])
    if ids:  # another end, from somewhere in the middle
        other = ids[: data.draw(st.integers(0, len(ids)))] + data.draw(st.lists(st.integers(20, 300), min_size=1))
        branch = context.copy()
        assert branch.auxiliary_inputs(other, [len(other)])[0].ids == whole(reader, other)
        assert context.auxiliary_inputs([*ids, 30], [len(ids) + 1])[0].ids == whole(reader, [*ids, 30])


@pytest.mark.parametrize("scheme", [None, "first", "always"])
def test_encode_pieces_recognizes_special_tokens_in_the_template_only(tokenizers, retokenized, scheme):
    """The ids equal the tokenizer's, except that a content contains no special tokens."""
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
        assert auxiliary.encode_pieces(pieces) == own("".join(pieces), add_special_tokens=False)["input_ids"]
    found = auxiliary.encode_pieces(["<s>", "say </s> <|eot|> <s>", "<|eot|>"])
    assert [token for token in found if token in own.all_special_ids or own.decode(token) == "<|eot|>"] == [
        own.bos_token_id, own.convert_tokens_to_ids("<|eot|>")]  # fmt: skip
    assert "".join(own.decode(found).split()) == "<s>say</s><|eot|><s><|eot|>"


def test_encoder_token_is_preferred_among_tokens_with_same_bytes(tokenizers):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from divdec.bridge.token_bytes import source_tokens

    description = describe_tokenizer(tokenizers["small"])
    added_id = len(tokenizers["small"])
    added = Tokenizer.from_str(tokenizers["small"].backend_tokenizer.to_str())
    known = next(token for token in description["model"]["vocab"] if len(token) > 3 and token.isalpha())
    run = next(token for token in description["model"]["vocab"] if len(token) > 2 and token.startswith("Ġ"))
    assert added.add_tokens([run.replace("Ġ", " ")]) == 1
    auxiliary = AuxiliaryTokenizer(PreTrainedTokenizerFast(tokenizer_object=added, eos_token="</s>"))
    text = run.replace("Ġ", " ").encode()
    assert auxiliary.encode(text.decode()) == [added_id]
    source = source_tokens([text, known.encode()], auxiliary.written_bytes, 2)
    assert source.tolist() == [added_id, description["model"]["vocab"][known]]
