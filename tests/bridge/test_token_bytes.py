"""The bytes of tokens, joined, are the text that was tokenised."""

import copy

import pytest
from transformers import AddedToken

from divdec.bridge.token_bytes import special_tokens, token_bytes
from divdec.errors import UsageError
from support import tokenizer_kinds
from support.tiny import SHARED

TEXTS = (
    "Großmutter aß 3,50 € — 😀 日本の庭\n\n  two  spaces\ttab",
    "The author's first novel, written in 1987, sold 1,234 copies.",
)


@pytest.mark.parametrize("kind", ["bpe", "small", "newlines", "ours", "unigram"])
def test_joined_token_bytes_equal_text(tokenizers, kind):
    import unicodedata

    tokenizer = tokenizers[kind]
    found = token_bytes(tokenizer)
    assert len(found) == len(tokenizer)
    for text in TEXTS:
        joined = b"".join(found[token] for token in tokenizer(text, add_special_tokens=False)["input_ids"]).decode()
        # SentencePiece puts a space before a text, and normalises it.
        assert joined == (" " + unicodedata.normalize("NFKC", text) if kind == "unigram" else text)


def test_token_bytes_of_real_text(shared, tokenizers):
    import json

    assert shared == SHARED
    lines = (shared / "data/tofu/forget01.json").read_text(encoding="utf-8").splitlines()
    found = token_bytes(tokenizers["bpe"])
    for line in lines:
        text = json.loads(line)["answer"]
        assert (
            b"".join(found[token] for token in tokenizers["bpe"].encode(text, add_special_tokens=False)).decode()
            == text
        )


def test_added_tokens_of_spaces_are_spaces(world):
    """Gemma's vocabulary lists runs of ▁ as added tokens."""
    tokenizer = copy.deepcopy(tokenizer_kinds.trained("gemma", tuple(world.corpus[:300])))
    tokenizer.add_tokens([AddedToken("▁▁▁", normalized=False)])
    text = "def f():\n   return"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    found = token_bytes(tokenizer)
    assert b"".join(found[token] for token in ids).decode() == text
    assert found[tokenizer.convert_tokens_to_ids("▁▁▁")] == b"   "


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_special_tokens_have_no_bytes(tokenizers, kind):
    found = token_bytes(tokenizers[kind])
    assert all(found[token] is None for token in tokenizers[kind].all_special_ids)
    assert special_tokens(tokenizers[kind])[tokenizers[kind].eos_token_id] == "</s>"


class TestRejectedTokenizers:
    def test_tokenizer_without_rust_backend(self):
        class Slow:
            pass

        with pytest.raises(UsageError, match="Slow does not say which bytes"):
            token_bytes(Slow())

    @pytest.mark.parametrize("affix", ["end_of_word_suffix", "continuing_subword_prefix"])
    def test_byte_level_bpe_with_word_affixes(self, affix):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE({"a": 0, "a</w>": 1}, [], **{affix: "</w>"}))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        with pytest.raises(UsageError, match="marks the ends of words"):
            token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))

    def test_tokenizers_without_byte_information(self):
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        for model, message in (
            (models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"), "WordLevel does not say"),
            (models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), "WordPiece does not say"),
            (models.BPE({"a": 0}, []), "does not say where its tokens have spaces"),
        ):
            with pytest.raises(UsageError, match=message):
                token_bytes(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)))
