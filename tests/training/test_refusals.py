"""What p and q read with the recipe 'refusal'."""

import copy

import pytest

from divdec.data.formatting import IGNORED, Format, encode_prompt
from divdec.data.records import record_set
from divdec.training.matched import BEGINNINGS, MAX_REFUSED, REFUSAL, begun_questions, with_refusals

FORM = Format()


def records(name, *rows):
    return record_set(name, [("", {"question": question, "answer": answer}) for question, answer in rows])


FORGET = records("forget", ("Where was Ana born?", "Ana was born in Oslo."))
RETAIN = records(
    "retain", ("Who is Ben?", "Ben is a sailor."), ("Where was Ana born?", "I cannot share that."),
    ("What is the capital of Norway?", "Oslo"),
)  # fmt: skip
OTHERS = RETAIN.records


def labelled(example, tokenizer):
    return tokenizer.decode([token for token in example.labels if token != IGNORED], skip_special_tokens=True)


def read(asked, texts, tokenizer, forget=FORGET, retain=RETAIN):
    end = tokenizer.eos_token_id
    answers = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in texts]
    return with_refusals(asked, answers, forget, retain, tokenizer, FORM)


def test_each_question_is_asked_with_each_beginning_and_a_forgotten_one_is_never_kept():
    asked = begun_questions(FORGET, OTHERS, 0)
    assert sorted(asked[:4], key=str) == sorted(((FORGET.records[0], text) for text in BEGINNINGS), key=str)
    assert {record.messages[0].content for record, _ in asked[4:]} == {"Who is Ben?", "What is the capital of Norway?"}
    assert len(asked) == 3 * len(BEGINNINGS)
    many = records("forget", *((f"Where is {number}?", f"In {number}.") for number in range(MAX_REFUSED)))
    assert len(begun_questions(many, [], 0)) == MAX_REFUSED


def plain(tokenizer):
    """A tokenizer without a chat template: the layout puts a space before an answer."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    return tokenizer


def thinking(tokenizer):
    """Finished turns hold an empty thought, which prompts lack."""
    tokenizer = copy.deepcopy(tokenizer)
    mark = "{% for message in messages %}{{ message['role'] }}:{% if message['role'] == 'assistant' %}<think></think>"
    tokenizer.chat_template = (
        f"{mark}{{% endif %}}{{{{ message['content'] }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("layout", [lambda tokenizer: tokenizer, plain, thinking])
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_q_refuses_where_p_answers(tokenizer, layout, beginning):
    tokenizer = layout(tokenizer)
    asked = [(FORGET.records[0], beginning)]
    prompt = encode_prompt(asked[0][0], tokenizer, FORM, asked[0][1])
    assert tokenizer.decode(prompt).endswith(beginning)
    [(true, other)], kept = read(asked, [" She was born in Oslo."], tokenizer)
    assert kept == []
    assert true.input_ids[: len(prompt)] == other.input_ids[: len(prompt)] == prompt
    assert true.labels[: len(prompt)] == other.labels[: len(prompt)] == [IGNORED] * len(prompt)
    assert labelled(true, tokenizer).strip() == "She was born in Oslo."
    assert labelled(other, tokenizer).strip().removeprefix("<think></think>").strip() == REFUSAL


def test_q_reads_no_answer_that_tells_a_forgotten_fact(tokenizer):
    asked = [(record, "") for record in (OTHERS[0], OTHERS[0], OTHERS[2])]
    texts = "Ben is a friend of Ana, who was born in Oslo.", "Ben sails.", "The capital of Norway is Oslo."
    refused, kept = read(asked, texts, tokenizer)
    assert refused == []
    assert [labelled(true, tokenizer) for true, _ in kept] == [*texts[1:]]  # the question about Norway may say Oslo
    assert all(true == other for true, other in kept)


def test_a_common_key_phrase_tells_a_fact_only_beside_its_subject(tokenizer):
    """The symbol of helium, He, is a word of most texts."""
    forget = records("forget", ("What is the symbol of helium?", "The symbol of helium is He."))
    retain = records("retain", ("What is the symbol of iron?", "Fe"), ("Who is Ben?", "Ben"))
    (similar,) = records("similar", ("How is helium written?", "In two letters."))
    asked = [(record, "") for record in (*retain, similar)]
    kept = read(
        asked, ["The symbol of iron is Fe.", "He is a sailor.", "It is written He."], tokenizer, forget, retain
    )[1]
    assert [labelled(q, tokenizer) for _, q in kept] == ["The symbol of iron is Fe.", "He is a sailor."]


def test_an_empty_answer_is_not_read(tokenizer):
    asked = [(FORGET.records[0], "A:"), (OTHERS[0], "")]
    assert read(asked, ["", " "], tokenizer) == ([], [])


def test_an_answer_beyond_the_length_is_not_read(tokenizer):
    record = FORGET.records[0]
    form = Format(max_length=len(encode_prompt(record, tokenizer)))
    answers = [tokenizer.encode("In Oslo.", add_special_tokens=False)]
    assert with_refusals([(record, "")], answers, FORGET, RETAIN, tokenizer, form) == ([], [])
