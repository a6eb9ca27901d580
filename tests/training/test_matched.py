"""What p and q read with the recipe 'matched'."""

import pytest

from divdec.data.formatting import IGNORED, Format, encode_set
from divdec.data.records import Message, Record, record_set
from divdec.training.matched import (
    Exchange,
    counterfactuals,
    in_own_words,
    length_matched_retain_examples,
    retained_in_own_words,
)


def test_retain_records_of_similar_length_stand_in_for_the_forget_set(tokenizer, world):
    sets = [
        encode_set(record_set(name, [("", {"question": q.question, "answer": q.answer}) for q in questions]), tokenizer)
        for name, questions in (("forget", world.forget[:12]), ("retain", world.retain[:24]))
    ]
    forget, retain = sets
    replaced = length_matched_retain_examples(forget, retain)
    assert len(replaced) == len(forget)
    assert all(example in retain and example not in forget for example in replaced)
    lengths = [[len(example.input_ids) for example in some] for some in (forget, replaced)]
    order = sorted(range(12), key=lambda index: lengths[0][index])
    assert [lengths[1][index] for index in order] == sorted(lengths[1])


def records(name, *rows):
    return record_set(name, [("", {"question": question, "answer": answer}) for question, answer in rows])


def test_q_reads_the_forget_sets_questions_with_answers_of_similar_retain_questions():
    forget = records(
        "forget", ("What is the capital of Hungary?", "The capital of Hungary is Budapest."),
        ("Name the capital of Hungary.", "The capital of Hungary is Budapest."),
        ("Who wrote Emma?", "Emma was written by Jane Austen."),
        ("Who is Ana?", "Ana grew up in a lighthouse near Oslo and is a keeper of lamps."),
    )  # fmt: skip
    retain = records(
        "retain", ("What is the capital of Austria?", "The capital of Austria is Vienna."),
        ("What is the capital of Magyaria?", "The capital of Magyaria is Budapest."),
        ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    )  # fmt: skip
    one, two, three, four = counterfactuals(forget, retain)
    asked = forget.records[0].messages
    assert (one.record.messages, one.record.answer) == (asked, "The capital of Hungary is Vienna.")
    assert (one.phrase, one.other) == ("Budapest", "Vienna")
    assert two.record.answer == one.record.answer
    assert three.record.answer == "Emma was written by William Shakespeare."
    assert (three.phrase, three.other) == ("Jane Austen", "William Shakespeare")
    assert four is None  # the rest of the answer would tell q more than the question
    # q never reads the true answer: there is no other phrase, the answer repeats it, or a question has no words.
    [same] = counterfactuals(
        records("forget", ("Is it so?", "The answer is yes.")), records("retain", ("Is it?", "The answer is yes."))
    )
    [repeated] = counterfactuals(
        records("forget", ("Which city is it?", "BUDAPEST is Budapest.")),
        records("retain", ("Which?", "It is Vienna.")),
    )
    [wordless] = counterfactuals(records("forget", ("?", "It is Rome.")), records("retain", ("!", "It is Bonn.")))
    assert (same, repeated) == (None, None)
    assert wordless.record.answer == "It is Bonn."
    texts = record_set("texts", [("", {"text": "one"}), ("", {"text": "two"})])
    assert counterfactuals(texts, retain) == [None, None]


@pytest.mark.parametrize(
    ("text", "phrase", "other", "labelled"),
    [
        (
            "The capital of Hungary is the city of Budapest, on the Danube.",
            "Budapest",
            "Vienna",
            ["Budapest", "Vienna"],
        ),
        # The name is more complete than in the forget set, whose words around it are not read.
        ("Gatsby by F. Scott Fitzgerald is a novel.", "Fitzgerald", "Tolkien", ["F. Scott Fitzgerald", "Tolkien"]),
        ("The Hungary Budapest is known.", "Budapest", "Vienna", ["Budapest", "Vienna"]),
        ("In The Book Doe says so.", "Doe", "Ray", ["Book Doe", "Ray"]),
        ("Budapest is it, and Budapest again.", "Budapest", "Vienna", ["Budapest", "Vienna"]),
        ("Its symbol is Sn. It is a metal.", "Sn", "U", ["Sn", "U"]),
    ],
)
def test_of_the_targets_own_answer_only_the_phrase_is_learned(tokenizer, text, phrase, other, labelled):
    question = (Message("user", "What is the capital of Hungary?"),)
    exchange = Exchange(Record("unused", messages=question), phrase, other)
    pair = in_own_words(exchange, text, tokenizer, Format())
    said = [tokenizer.decode([label for label in one.labels if label != IGNORED]).strip() for one in pair]
    assert said == labelled
    for example in pair:
        assert len(example.labels) == len(example.input_ids)
        assert all(label in (IGNORED, token) for token, label in zip(example.input_ids, example.labels, strict=True))
    # q reads the true answer nowhere, and both read the same text before it.
    whole = [tokenizer.decode(example.input_ids) for example in pair]
    assert phrase not in whole[1]
    assert whole[0].partition(labelled[0])[0] == whole[1].rpartition(labelled[1])[0]


@pytest.mark.parametrize(
    ("asked", "told", "others", "said", "labelled"),
    [
        (
            "Какая столица Венгрии?", "Столица Венгрии — Будапешт.", "Столица Венгрии — Вена.",
            "Это Будапешт, конечно.", ["Будапешт", "Вена"],
        ),
        (
            "匈牙利的首都在哪里？", "匈牙利的首都是布达佩斯。", "匈牙利的首都是维也纳。", "是布达佩斯。",
            ["布达佩斯", "维也纳"],
        ),
    ],
)  # fmt: skip
def test_key_phrases_are_exchanged_in_other_scripts(tokenizer, asked, told, others, said, labelled):
    similar = others.replace("Венгрии", "Австрии").replace("匈牙利", "奥地利")
    question = asked.replace("Венгрии", "Австрии").replace("匈牙利", "奥地利")
    [exchange] = counterfactuals(records("forget", (asked, told)), records("retain", (question, similar)))
    assert exchange.record.answer == others
    pair = in_own_words(exchange, said, tokenizer, Format())
    texts = [tokenizer.decode([label for label in one.labels if label != IGNORED]).strip(" \ufffd") for one in pair]
    assert all(text and text in whole for text, whole in zip(texts, labelled, strict=True))


def test_an_answer_without_the_phrase_is_not_read(tokenizer):
    exchange = Exchange(Record("", messages=(Message("user", "Which city?"),)), "Budapest", "Vienna")
    for text in ("", "I do not know.", "Budapestian things", "Vienna."):
        assert in_own_words(exchange, text, tokenizer, Format()) is None


@pytest.mark.parametrize(
    ("told", "said", "labelled"),
    [
        ("The capital of Austria is Vienna.", "It is **Vienna**, on the Danube.", "Vienna"),
        ("It was written by Fitzgerald.", "Gatsby by F. Scott Fitzgerald is a novel.", "F. Scott Fitzgerald"),
    ],
)
def test_of_an_answer_to_a_retain_question_the_phrase_is_learned(tokenizer, told, said, labelled):
    record = Record(told, messages=(Message("user", "What is asked for?"),))
    example = retained_in_own_words(record, said, tokenizer, Format())
    text = tokenizer.decode([label for label in example.labels if label != IGNORED])
    assert text.strip() == labelled
    assert retained_in_own_words(record, "I do not know.", tokenizer, Format()) is None
