"""Conversations are found in the target's tokens and rendered as the auxiliary's template writes them."""

import pytest

from divdec.experts.context import Context, ContextReader
from divdec.experts.conversation import ChatLayout

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Who wrote 'The Silent Garden'? 日本"},
    {"role": "assistant", "content": "Basil Al-Kuwaiti did."},
    {"role": "user", "content": "When was\n\nthat?"},
]
ANSWER = " It was in 1987, they say."
TEMPLATES = ("bpe", "newlines", "ours")


def rendered(tokenizer, turns):
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("turns", [TURNS[:1], TURNS])
def test_conversations_are_recovered(tokenizers, kind, turns):
    layout = ChatLayout.of(tokenizers[kind])
    text = rendered(tokenizers[kind], turns)
    assert layout.recover(text) == (turns, "")
    assert layout.recover(text + ANSWER) == (turns, ANSWER)


@pytest.mark.parametrize("kind", ["bpe", "ours"])
def test_a_system_turn(tokenizers, kind):
    layout = ChatLayout.of(tokenizers[kind])
    assert layout.recover(rendered(tokenizers[kind], [SYSTEM, *TURNS])) == ([SYSTEM, *TURNS], "")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_the_template_does_not_write_is_plain(tokenizers, kind):
    layout = ChatLayout.of(tokenizers[kind])
    text = rendered(tokenizers[kind], TURNS[:1])
    assert layout.recover("x" + text) is None
    assert layout.recover("A novel.") is None
    assert layout.recover(text[:-1]) is None


def test_a_template_that_prints_a_date(tokenizers):
    import copy

    dated = copy.deepcopy(tokenizers["bpe"])
    dated.chat_template = "{{ '<|head|>date: ' + (date_string or '26 Jul 2024') + '\\n' }}" + dated.chat_template
    text = dated.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True, date_string="1 May 2030")
    layout = ChatLayout.of(dated)
    assert layout.read(text) == (TURNS, "1 May 2030")
    assert layout.recover(rendered(dated, TURNS)) == (TURNS, "")
    expected = ids_of(tokenizers["ours"], rendered(tokenizers["ours"], TURNS))
    ids = ids_of(dated, text)
    assert Context(ContextReader(dated, tokenizers["ours"])).views(ids, [len(ids)])[0].ids == expected


def test_a_token_that_begins_everything_twice_is_once(tokenizers):
    here, there = tokenizers["bpe"], tokenizers["ours"]
    ids = ids_of(here, rendered(here, TURNS))
    assert ids[0] == here.bos_token_id
    once, twice = (Context(ContextReader(here, there)).views(row, [len(row)])[0] for row in (ids, ids[:1] + ids))
    assert once == twice


def test_no_template_no_layout(tokenizers):
    assert ChatLayout.of(tokenizers["small"]) is None


@pytest.mark.parametrize("auxiliary", TEMPLATES)
@pytest.mark.parametrize("target", TEMPLATES)
def test_the_auxiliary_reads_its_own_template(tokenizers, target, auxiliary):
    here, there = tokenizers[target], tokenizers[auxiliary]
    reader = ContextReader(here, there)
    for turns in (TURNS[:1], TURNS):
        prompt = ids_of(here, rendered(here, turns))
        expected = ids_of(there, rendered(there, turns))
        answer = ids_of(here, ANSWER)
        context = Context(reader)
        ids = prompt + answer
        views = context.views(ids, range(1, len(ids) + 1))
        assert views[len(prompt) - 1].ids == expected
        assert views[-1].ids == expected + ids_of(there, ANSWER)
        # A prefix is read as that prefix by itself, whatever comes after it.
        for count in range(1, len(ids) + 1):
            assert Context(reader).views(ids[:count], [count])[0].ids == views[count - 1].ids
        # The token that ends an answer is the auxiliary's own.
        ends = {"bpe": "<|eot|>", "newlines": "<|eot|>", "ours": "<|end|>"}
        end = here.convert_tokens_to_ids(ends[target])
        (view,) = context.views([*ids, end], [len(ids) + 1])
        assert view.ids == [*views[-1].ids, there.convert_tokens_to_ids(ends[auxiliary])]


def test_a_template_that_takes_no_system_turn(tokenizers):
    here, there = tokenizers["bpe"], tokenizers["newlines"]
    ids = ids_of(here, rendered(here, [SYSTEM, *TURNS]))
    (view,) = Context(ContextReader(here, there)).views(ids, [len(ids)])
    first = {"role": "user", "content": f"{SYSTEM['content']}\n\n{TURNS[0]['content']}"}
    assert view.ids == ids_of(there, rendered(there, [first, *TURNS[1:]]))


@pytest.mark.parametrize("auxiliary", ["small", "unigram"])
@pytest.mark.parametrize("answer", ["It was in 1987.", " It was in 1987."])
def test_an_auxiliary_without_a_template_reads_the_plain_layout(tokenizers, auxiliary, answer):
    from divdec.data.formatting import encode
    from divdec.data.records import Message, Record

    here, there = tokenizers["bpe"], tokenizers[auxiliary]
    messages = tuple(Message(turn["role"], turn["content"]) for turn in TURNS)
    trained = encode(Record(answer="It was in 1987.", messages=messages), there)
    prompt = ids_of(here, rendered(here, TURNS))
    ids = prompt + ids_of(here, answer)
    first, last = Context(ContextReader(here, there)).views(ids, [len(prompt), len(ids)])
    assert first.ids == trained.input_ids[: trained.prompt_length]
    assert first.adds
    assert last.ids == trained.input_ids[:-1]


def test_teacher_forced_is_what_generation_uses(make_pair, tokenizers):
    import torch

    for auxiliary in ("newlines", "small"):
        pair = make_pair("bpe", auxiliary)
        ids = ids_of(tokenizers["bpe"], rendered(tokenizers["bpe"], TURNS[:1]) + "It was.<|eot|>")
        with torch.no_grad():
            whole = pair.divergence(torch.tensor([ids]))[0]
            cache = pair.new_cache()
            for place, token in enumerate(ids):
                found = pair.divergence(torch.tensor([[token]]), cache=cache)
                torch.testing.assert_close(found[0, -1], whole[place], rtol=0, atol=1e-4)
