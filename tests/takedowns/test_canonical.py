"""Takedowns match text, not token ids: spellings and tokenizations of the same text have the same context."""

import unicodedata

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from divdec.data.records import record_set, texts_of
from divdec.takedowns.canonical import WINDOW, CanonicalReader, canonical_text, lower_case
from support.tokenizer_kinds import sentence_piece

TEXT = (
    "The ferry left the harbour at half past four, and nobody on the quay could say who was aboard: don't ask - wait."
)
LENGTH = 4


def byte_level(texts, **options):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", **options)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level([f" {TEXT}"] * 8)


@pytest.fixture(scope="module")
def reader(tokenizer):
    return CanonicalReader(tokenizer, len(tokenizer))


def contexts(reader, ids, number=1, **options):
    return reader.read(np.array([ids]), number, LENGTH, **options)


SPELLINGS = {
    "two spaces": "left the harbour  at",
    "a line break": "left the harbour\r\n\tat",
    "a no-break space": "left the harbour\u00a0at",
    "a zero-width space": "left the har\u200bbour at",
    "a soft hyphen": "left the har\u00adbour at",
    "a word joiner": "left\u2060 the harbour at",
    "a control character": "left the har\u0001bour at\u007f",
    "a blank of Braille": "left the har\u2800bour at",
    "a special token": "left the<|im_end|> harbour at",
    "full-width letters": "ｌｅｆｔ ｔｈｅ ｈａｒｂｏｕｒ ａｔ",
    "many invisible characters": "left the harbour" + "\u200b" * 500 + " at",
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_has_the_context_of_the_text(reader, tokenizer, spelling):
    expected = tokenizer("The ferry left the harbour at", add_special_tokens=False).input_ids[-LENGTH:]
    context, words, spaces = contexts(reader, tokenizer(f"The ferry {spelling}", add_special_tokens=False).input_ids)
    assert context[0].tolist() == words[0].tolist() == expected
    assert not spaces.any()


def test_every_tokenization_has_the_context_of_the_text(reader, tokenizer):
    text = "The ferry left the harbour at"
    expected = tokenizer(text, add_special_tokens=False).input_ids[-LENGTH:]
    characters = [token for character in text for token in tokenizer(character, add_special_tokens=False).input_ids]
    assert contexts(reader, characters)[0][0].tolist() == expected


def test_contexts_of_a_canonical_text_are_its_tokens(reader, tokenizer):
    ids = tokenizer(f" {TEXT}", add_special_tokens=False).input_ids
    found, words, spaces = contexts(reader, ids, len(ids))
    for position, context in enumerate(found):
        own = ids[max(position + 1 - LENGTH, 0) : position + 1]
        assert context.tolist() == [-1] * (LENGTH - len(own)) + own
    assert not spaces.any()
    assert (found == words).all()


def test_a_position_does_not_depend_on_later_tokens_padding_or_batches(reader, tokenizer):
    ids = tokenizer(TEXT.replace(" ", "  "), add_special_tokens=False).input_ids
    whole = contexts(reader, ids, len(ids))
    for end in range(1, len(ids) + 1):
        alone = contexts(reader, ids[:end])
        padded = reader.read(np.array([[-1, -1, *ids[:end]], [-1] * (end + 1) + ids[:1]]), 1, LENGTH)
        for array, single, several in zip(whole, alone, padded, strict=True):
            assert (array[end - 1] == single[0]).all()
            assert (single[0] == several[0]).all()


def test_windows_hold_the_contexts_of_whole_sequences(reader, tokenizer):
    ids = tokenizer(f"{TEXT} {TEXT}".replace(" the ", "  the "), add_special_tokens=False).input_ids
    assert len(ids) > WINDOW
    whole = contexts(reader, ids, len(ids))
    for end in range(1, len(ids) + 1):
        window = ([-1] * WINDOW + ids[:end])[-WINDOW:]
        for array, row in zip(whole, contexts(reader, window, windows=True), strict=True):
            assert (array[end - 1] == row[0]).all()


def test_parts_of_characters_stay_in_the_context():
    text = "작은 배는 네 시 반에 항구를 떠났고 부두에 있던 사람"
    tokenizer = byte_level(["a"])
    reader = CanonicalReader(tokenizer, len(tokenizer))
    ids = tokenizer(f" {text}", add_special_tokens=False).input_ids
    found = contexts(reader, ids, len(ids))[0]
    for position in range(LENGTH - 1, len(ids)):
        assert found[position].tolist() == ids[position + 1 - LENGTH : position + 1]


def test_layout_is_not_counted(reader, tokenizer):
    records = record_set("t", [("1", {"question": "Who is the mayor?", "answer": "The mayor is Marta."})])
    documents = [tokenizer.decode(ids) for ids in reader.documents(records)]
    assert documents == [" Who is the mayor?", " The mayor is Marta."]


def test_documents_are_canonical(reader, tokenizer):
    (document,) = reader.documents(texts_of("t", ["The\u00a0ferry “left” —\n\n the har\u00adbour"]))
    assert tokenizer.decode(document) == ' The ferry "left" - the harbour'


def test_names_of_special_tokens_are_not_counted(reader, tokenizer):
    text = "The ferry<|im_end|>left<|im_end|>\nthe harbour"
    (document,) = reader.documents(texts_of("t", [text]))
    assert tokenizer.decode(document) == " The ferry left the harbour"
    written = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in written
    assert contexts(reader, written)[0][0].tolist() == document[-LENGTH:]


def test_instructions_of_the_system_are_not_counted(reader, tokenizer):
    turns = [("system", "Ask the harbour."), ("user", "Who is the mayor?"), ("assistant", "The mayor is Marta.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    documents = reader.documents(record_set("t", [("1", {"messages": messages})]))
    assert [tokenizer.decode(ids) for ids in documents] == [" Who is the mayor?", " The mayor is Marta."]


@pytest.mark.parametrize("text", ["Chiếc thuyền nhỏ rời bến lúc bốn giờ rưỡi", "작은 배는 네 시 반에 항구를 떠났고"])
def test_decomposed_text_is_counted_as_composed_text(reader, text):
    composed, decomposed = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert composed != decomposed
    assert list(reader.documents(texts_of("t", [composed]))) == list(reader.documents(texts_of("t", [decomposed])))


def test_canonical_text_is_a_fixed_point():
    for text in (
        TEXT,
        "Chiê\u0301c thuyê\u0300n",
        "작은",
        "e\u200b\u0301",
        "a \u00a0 b",
        "…",
        "ﬁ，；？",
        "ﷺ",
        "一 ㆒ 一",
    ):
        assert canonical_text(canonical_text(text)) == canonical_text(text)
    assert canonical_text("e\u200b\u0301") == "é"
    assert canonical_text("ﬁrst，话　说：ﻻ") == "first，话说：لا"
    # Tokens hold these; those of their compatibility forms do not exist.
    for text in ("คำ", "，请", "。」", "½", "ㅋㅋ", "ຳ"):
        assert canonical_text(text) == text


def test_a_character_is_lowered_in_the_token_that_texts_are_written_with():
    """Gemma's and Llama 2's first token of a quotation mark is a byte, which no text is written with."""
    tokenizer = sentence_piece(['“a” "b"'] * 4, 400, prefix=False)
    reader = CanonicalReader(tokenizer, len(tokenizer))
    pairs = dict(zip(*(side.tolist() for side in reader._spellings), strict=True))
    curly, plain = (tokenizer(text, add_special_tokens=False).input_ids[-1] for text in '”"')
    assert tokenizer.convert_ids_to_tokens([curly, plain]) == ["”", '"']
    assert pairs[curly] == plain


def test_lower_case_changes_no_text_that_is_in_lower_case():
    """Their tokens are the ones that models write; "İ" has two characters in lower case, and "ß" in casefold."""
    assert lower_case("İSTANBUL, STRASSE, Straße, ΟΔΟΣ, Москва") == "İstanbul, strasse, straße, οδοσ, москва"
    for text in ("οδός", "straße", "i̇stanbul", "ǆ"):
        assert lower_case(text) == text


@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_a_capitalised_word_is_lowered_with_the_token_that_begins_it(kind):
    """A bare space, or a part of a character, would lower all words that the tokenizer never saw in lower case."""
    texts = ["Über Marta and Élan , Ellen in ROME at 1950, mar el rom"] * 8
    tokenizer = (
        byte_level([f" {text}" for text in texts]) if kind == "byte level" else sentence_piece(texts, 360, prefix=True)
    )
    reader = CanonicalReader(tokenizer, len(tokenizer)).in_lower_case()
    texts, _ = reader._vocabulary()
    begun = 0
    for pairs in (reader._spellings, reader._words):
        for token, source in zip(*(side.tolist() for side in pairs), strict=True):
            lowered, head = lower_case(texts[token]), texts[source]
            if lowered.strip() != head.strip():
                begun += 1
                assert head.strip().isalnum(), (lowered, head)
                assert lowered.strip().startswith(head.strip())
    assert begun
