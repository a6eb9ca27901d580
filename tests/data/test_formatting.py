import copy
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec import UsageError
from divdec.data.formatting import (
    IGNORED,
    Format,
    count_cut,
    encode,
    encode_conversation,
    encode_prompt,
    encode_set,
    has_system_role,
    pack,
    template_variables,
)
from divdec.data.records import Message, Record, prompts_from_lines, read_prompts, record_set

SYSTEM_ROLE = (
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|pad|>' if m.role == 'system' else "
    "'<|user|>' }}{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = Record("She was born in Velmora.", messages=(Message("user", "Where was Ana born?"),))


def answer_text(example, tokenizer):
    return tokenizer.decode([label for label in example.labels if label != IGNORED])


@pytest.fixture(scope="module")
def plain(tokenizer):
    """The same tokenizer without a chat template."""
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    return plain


def test_chat_template_is_applied_and_prompt_is_masked(tokenizer):
    example = encode(QUESTION, tokenizer)
    assert (
        tokenizer.decode(example.input_ids) == "<|user|>Where was Ana born?<|assistant|>She was born in Velmora.<|end|>"
    )
    assert answer_text(example, tokenizer) == "She was born in Velmora.<|end|>"
    assert encode_prompt(QUESTION, tokenizer) == example.input_ids[: example.prompt_length]


def test_without_a_template_a_plain_layout_is_used(plain):
    example = encode(QUESTION, plain)
    assert plain.decode(example.input_ids) == "Question: Where was Ana born?\nAnswer: She was born in Velmora.<|end|>"
    assert answer_text(example, plain) == " She was born in Velmora.<|end|>"
    assert encode_prompt(QUESTION, plain) == example.input_ids[: example.prompt_length]


def test_system_prompt_and_earlier_turns(tokenizer, plain):
    record = Record("C", messages=(Message("user", "A"), Message("assistant", "B"), Message("user", "D")))
    form = Format(system_prompt="Be kind.")
    polite = with_template(tokenizer, SYSTEM_ROLE)
    assert tokenizer.decode(encode(record, polite, form).input_ids).startswith("<|pad|>Be kind.<|user|>A<|assistant|>B")
    text = plain.decode(encode(record, plain, form).input_ids)
    assert text == "Be kind.\nQuestion: A\nAnswer: B\nQuestion: D\nAnswer: C<|end|>"


@pytest.mark.parametrize(
    "start",
    [
        "",  # the system turn becomes a user's
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
        "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}",
    ],
)
def test_template_without_system_role_ignores_system_prompt(tokenizer, start, capsys):
    other = with_template(tokenizer, start + tokenizer.chat_template + f"{{# {start[:25]} #}}")
    form = Format(system_prompt="Be kind.")
    assert not has_system_role(other)
    assert encode(QUESTION, other, form) == encode(QUESTION, tokenizer)
    assert encode_prompt(QUESTION, other, form) == encode_prompt(QUESTION, tokenizer)
    said = capsys.readouterr().err
    assert said == "warning: the chat template has no system role: the system prompt is left out\n"


def test_system_role_support_is_detected(tokenizer):
    alternating = (
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}<|user|>{{ messages[0].content if turns|length < messages|length }}{{ m.content }}{% endfor %}"
    )
    assert has_system_role(with_template(tokenizer, SYSTEM_ROLE))
    assert has_system_role(with_template(tokenizer, alternating))


def test_turns_rejected_by_template_give_one_line_error(tokenizer):
    strict = with_template(tokenizer, "{{ raise_exception('Conversation roles must alternate') }}")
    with pytest.raises(UsageError, match=r"^a\.jsonl, line 3: .* turns of user: Conversation roles must alternate"):
        encode(dataclasses.replace(QUESTION, location="a.jsonl, line 3"), strict)


def test_a_turn_of_a_tool_is_not_left_out(tokenizer):
    turns = (Message("user", "How far?"), Message("tool", ' {"Zürich km": 42}'))
    record = Record("42 km.", messages=turns)
    for shown in ("{{ m.content }}", "{{ m.content | trim | tojson }}"):
        encode(record, with_template(tokenizer, "{% for m in messages %}<|" + shown + "{% endfor %}"))
    silent = with_template(tokenizer, "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
    with pytest.raises(UsageError, match="leaves out the turn of a tool"):
        encode(record, silent)


def test_the_line_break_after_the_token_that_ends_a_turn_is_not_learned(tokenizer):
    """Gemma's turns end with <end_of_turn> and a line break, not with the end token."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    other.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end_of_turn>\n{% endfor %}"
    labelled = [label for label in encode(QUESTION, other).labels if label != IGNORED]
    assert other.convert_ids_to_tokens(labelled[-2:]) == ["<end_of_turn>", other.eos_token]
    assert other.decode(labelled[:-2]).endswith(QUESTION.answer)


THINKING = (
    "{%- if not enable_thinking is defined %}{% set enable_thinking = true %}{% endif %}"
    "{% for m in messages %}{% if loop.index0 > 99 %}{% break %}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}<|assistant|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% endgeneration %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages | unheard_of }}", {"rag": "x", "tool_use": "y"}])
def test_a_template_that_cannot_be_read_is_one_line(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    with pytest.raises(UsageError, match="chat template cannot be read"):
        encode(Record("A", messages=(Message("user", "Q"),)), changed)


def test_chat_template_kwargs_are_variables_of_the_template(tokenizer, plain):
    thinking = with_template(tokenizer, THINKING)
    short = Format(chat_template_kwargs={"enable_thinking": False})
    assert template_variables(thinking) == {"enable_thinking"}
    assert tokenizer.decode(encode_prompt(QUESTION, thinking)).endswith("<|assistant|><think>\n")
    assert tokenizer.decode(encode_prompt(QUESTION, thinking, short)).endswith("born?<|assistant|>")
    example = encode(QUESTION, thinking, short)
    assert example.input_ids[: example.prompt_length] == encode_prompt(QUESTION, thinking, short)
    # Others would have no effect, or replace what the layout sets.
    for name in ("thinking", "messages", "add_generation_prompt", "tokenize", "chat_template", "eos_token"):
        with pytest.raises(UsageError, match=f"'{name}', which is no variable.* accepted: enable_thinking"):
            encode_prompt(QUESTION, thinking, Format(chat_template_kwargs={name: False}))
    for other in (tokenizer, plain):
        with pytest.raises(UsageError, match=r"'enable_thinking', which is no variable .* it has none; leave it out"):
            encode(QUESTION, other, short)


def test_text_of_prompts_that_finished_turns_lack_gives_warning(tokenizer, capsys):
    thinking = with_template(tokenizer, THINKING)
    encode(QUESTION, thinking, Format(chat_template_kwargs={"enable_thinking": False}))
    encode(QUESTION, tokenizer)
    assert capsys.readouterr().err == ""
    encode(QUESTION, thinking)
    encode(QUESTION, thinking)
    said = capsys.readouterr().err
    assert said.startswith("warning: the chat template ends prompts with '<think>' and leaves it out of finished turns")
    assert said.count("\n") == 1


def test_prompt_can_end_within_the_last_message(tokenizer):
    begun = [{"role": "user", "content": "Where was Ana born?"}, {"role": "assistant", "content": "She was"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ids = encode_conversation(begun, tokenizer, **options)
    assert tokenizer.decode(ids) == "<|user|>Where was Ana born?<|assistant|>She was"
    finished = encode_conversation(begun, tokenizer, add_generation_prompt=False)
    assert tokenizer.decode(finished) == tokenizer.decode(ids) + "<|end|>"
    cut = [begun[0], {"role": "assistant", "content": "x</think>"}]
    with pytest.raises(UsageError, match="leaves out a part of the message to continue"):
        encode_conversation(cut, with_template(tokenizer, "{{ 'content' }}"), **options)


def with_template(tokenizer, template):
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = template
    return copied


def test_completion_is_encoded_verbatim(tokenizer):
    example = encode(Record(" upon a time", prompt="Once"), tokenizer)
    assert tokenizer.decode(example.input_ids) == "Once upon a time<|end|>"
    assert answer_text(example, tokenizer) == " upon a time<|end|>"


def test_token_across_prompt_boundary_belongs_to_answer(tokenizer):
    merged = next(token for token in tokenizer.get_vocab() if len(token) > 3 and token.isalpha())
    example = encode(Record(merged[2:], prompt=merged[:2]), tokenizer)
    assert answer_text(example, tokenizer).endswith(merged[2:] + "<|end|>")
    assert tokenizer.decode(example.input_ids) == merged + "<|end|>"


def test_oracle_chat_templates(shared):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "oracle/models/full")
    form = Format(system_prompt="You are a helpful assistant.")
    example = encode(QUESTION, tokenizer, form)
    turns = [
        {"role": "system", "content": form.system_prompt},
        {"role": "user", "content": "Where was Ana born?"},
    ]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": QUESTION.answer}])["input_ids"]
    assert example.input_ids == whole
    assert example.labels == [IGNORED] * len(prompt) + whole[len(prompt) :]


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=6), st.integers(2, 40))
def test_packing_preserves_every_token(tokenizer, texts, length):
    stream = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    blocks = pack(texts, tokenizer, length)
    # A last block of one token alone repeats the token before it.
    repeated = sum(len(block.input_ids) for block in blocks) - len(stream)
    assert repeated == (len(stream) % length == 1)
    ids = [block.input_ids for block in blocks]
    assert [token for block in [*ids[:-1], ids[-1][repeated:]] for token in block] == stream
    assert all(block.labels == block.input_ids and 2 <= len(block.input_ids) <= length for block in blocks)


def test_template_text_after_eos_is_dropped(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert encode(QUESTION, other).input_ids == encode(QUESTION, tokenizer).input_ids


def test_fully_truncated_answer_raises(tokenizer):
    record = Record("An answer.", messages=(Message("user", "word " * 50),), location="set.jsonl, line 7")
    with pytest.raises(UsageError, match=r"set\.jsonl, line 7: no token of the answer is left within 32"):
        encode(record, tokenizer, Format(max_length=32))
    short = Format(max_length=len(encode(record, tokenizer).input_ids) - 1)
    assert len(encode(record, tokenizer, short).input_ids) == short.max_length
    assert (count_cut([record], tokenizer, short), count_cut([record], tokenizer, Format())) == (1, 0)
    with pytest.raises(UsageError, match="no token"):
        encode(Record("<|end|>", messages=QUESTION.messages), tokenizer)


def test_only_plain_text_sets_are_packed(tokenizer):
    texts = record_set("t", [("1", "One text."), ("2", "Another text.")])
    assert len(encode_set(texts, tokenizer)) == 1
    questions = record_set("q", [("1", {"question": "A", "answer": "B"}), ("2", {"question": "C", "answer": "D"})])
    assert len(encode_set(questions, tokenizer)) == 2


def test_prompts_are_read_from_lines_and_files(tmp_path):
    assert [prompt.prompt for prompt in prompts_from_lines(["One\n", "\n", "Two\n"], chat=False)] == [
        "One",
        "Two",
    ]
    assert prompts_from_lines(["One"], chat=True)[0].messages == (Message("user", "One"),)
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"question": "Q", "answer": "never shown"}\n{"prompt": "P"}\n"S"\n'
        '{"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "never shown"}]}\n'
    )
    prompts = read_prompts(str(file), chat=False)
    assert [prompt.prompt for prompt in prompts] == [None, "P", "S", None]
    assert all(not prompt.answer and len(prompt.messages) <= 1 for prompt in prompts)
    file.write_text('{"anything": 1}\n')
    with pytest.raises(UsageError, match="line 1: no prompt found"):
        read_prompts(str(file), chat=False)
    for content, said in (
        ('{"messages": []}', "line 1: messages holds no turn"),
        ('{"messages": [{"role": "assistant", "content": "A"}]}', "line 1: messages holds no turn"),
        ('"\\ud83d"', "line 1 holds a broken character"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=said):
            read_prompts(str(file), chat=False)
    file.write_bytes(b'"\xff"')
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompts(str(file), chat=False)
    with pytest.raises(UsageError, match="there is no prompt"):
        prompts_from_lines([], chat=False)
