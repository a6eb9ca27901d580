"""The text of answers, for every kind of tokenizer: what a prompt and its answer say together, however it is cut."""

import pytest

from divdec.decoding.text import AnswerText, answer_text
from support import tokenizer_kinds

TEXTS = (
    "The tale is about the sea, and (so she said) 3 of her books.",
    "Die naïve Großmutter aß  zwei Törtchen — für 3,50 €.\n\nИ море 😀 было 日本 тихо.",
)


@pytest.fixture(scope="module", params=tokenizer_kinds.KINDS)
def kind(request, world):
    return tokenizer_kinds.trained(request.param, tuple(world.corpus[:300]))


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer, prompt, answer, stop=()):
    text = AnswerText(tokenizer, stop, prompt)
    pieces, starts = [], []
    for token in answer:
        pieces.append(text.add(token))
        starts.append(text.start)
        if text.stopped:
            break
    return "".join(pieces) + text.end(), starts


@pytest.mark.parametrize("text", TEXTS)
def test_generated_text_continues_prompt(kind, text):
    ids = kind(text).input_ids
    whole = decoded(kind, ids)
    cuts = 0
    for cut in range(len(ids) + 1):
        before = decoded(kind, ids[:cut])
        if before.endswith("\ufffd") or not whole.startswith(before):
            continue  # the prompt ends within a character
        cuts += 1
        assert before + answer_text(kind, ids[:cut], ids[cut:]) == whole
    assert cuts > 10


@pytest.mark.parametrize("text", TEXTS)
def test_token_offset_starts_at_end_of_previous_text(kind, text):
    ids = kind(text).input_ids
    found, starts = streamed(kind, ids[:1], ids[1:])
    assert found == decoded(kind, ids).removeprefix(decoded(kind, ids[:1]))
    first, reached = len(decoded(kind, ids[:1])), 0
    for place, start in enumerate(starts):
        # A byte of an unfinished character makes the decoder doubt the whole characters before it, too.
        reached = max(reached, len(decoded(kind, ids[: place + 1]).rstrip("\ufffd")) - first)
        assert start == reached


@pytest.mark.parametrize("text", TEXTS)
def test_stop_strings_are_found_in_generated_text(kind, text):
    ids = kind(text).input_ids
    whole = answer_text(kind, ids[:4], ids[4:])
    stop = whole[len(whole) // 2 :][:3]
    assert streamed(kind, ids[:4], ids[4:], [stop])[0] == whole[: whole.index(stop)]


@pytest.mark.parametrize("stop", ["{end}", "tale{end}", "{end}The", "{end}{end}"])
def test_stop_strings_are_found_across_special_tokens_as_in_transformers(kind, stop):
    import torch
    from transformers import StopStringCriteria

    first, second = (kind(text, add_special_tokens=False).input_ids for text in ("The sea and a tale", "The sea"))
    end = kind.eos_token_id
    prompt, answer = second, [*first, end, end, *second, *first]
    stop = stop.format(end=kind.convert_ids_to_tokens(end))
    try:
        criteria = StopStringCriteria(kind, [stop])
    except ValueError:
        pytest.skip("transformers cannot read this stop string with this tokenizer")
    expected = next(
        (n for n in range(1, len(answer) + 1) if criteria(torch.tensor([prompt + answer[:n]]), None).item()), None
    )
    text, pieces = AnswerText(kind, [stop], prompt), []
    stopped = None
    for number, token in enumerate(answer, start=1):
        pieces.append(text.add(token))
        if text.stopped:
            stopped = number
            break
    assert stopped == expected
    shown = "".join(pieces) + text.end()
    assert kind.convert_ids_to_tokens(end) not in shown
    if stopped and "tale" in stop:
        assert not shown.endswith("tale")
    assert shown == answer_text(kind, prompt, answer, [stop])


def test_special_tokens_decode_to_nothing_and_preserve_following_space(kind):
    first, second = (
        kind(" about", add_special_tokens=False).input_ids,
        kind("The sea", add_special_tokens=False).input_ids,
    )
    end = kind.eos_token_id
    whole = answer_text(kind, second, [*first, end, *first])
    assert whole == decoded(kind, [*second, *first, *first]).removeprefix(decoded(kind, second))
    # Behind a special token of the prompt, such as a chat template's last, an answer is a text by itself.
    assert answer_text(kind, [*second, end], first) == decoded(kind, first)


def test_streamed_text_only_grows_for_any_tokens(kind):
    import random

    draw = random.Random(0)
    for _ in range(40):
        ids = [draw.randrange(len(kind) + 3) for _ in range(30)]
        found, starts = streamed(kind, ids[:5], ids[5:])
        assert starts == sorted(starts)
        assert starts[-1] <= len(found)
        assert found == answer_text(kind, ids[:5], ids[5:])


def test_answer_is_readable_after_many_bytes_of_rare_characters(kind):
    """The context begins within a character, after which byte tokens are no text."""
    for prompt, answer in (("Vai: ꔀꔁꔂꔃ", "ꔄꔅꔆ"), ("မြန်မာ", "စာကို")):
        whole = kind(prompt + answer).input_ids
        before = kind(prompt).input_ids
        if whole[: len(before)] == before and decoded(kind, whole).endswith(prompt + answer):
            assert answer_text(kind, before, whole[len(before) :]) == answer


def test_incomplete_characters_are_eventually_flushed(kind):
    token = kind.convert_tokens_to_ids("<0xF0>") if "<0xF0>" in kind.get_vocab() else None
    if token is None:
        token = next(iter(kind("😀", add_special_tokens=False).input_ids))
    text = AnswerText(kind)
    longest = 0
    for _ in range(200):
        text.add(token)
        longest = max(longest, len(text._pending))
    assert longest < 12
    assert text._text
