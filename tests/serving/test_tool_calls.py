"""Tool calls are read from a reply's text however it is cut, and no tag reaches the content."""

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divdec.serving.grammar import HERMES, ToolCallParser
from support.tools import CLOCK, WEATHER

TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo \\u00e9", "note": "</b> {}"}}\n</tool_call>'
OTHER = '<tool_call>{"arguments": {}, "name": "clock"}</tool_call>'
ARGUMENTS = {"city": "Oslo é", "note": "</b> {}"}
# A form with another tag and JSON that the template reads itself.
OWN = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "[CALL]", "close": "[/CALL]", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}  # fmt: skip


def read(text, cuts=(), template=HERMES, prompt="", **options):
    parser = ToolCallParser(template, prompt, TOOLS, **options)
    edges = [0, *sorted(cuts), len(text)]
    outputs = [parser.feed(text[start:end]) for start, end in itertools.pairwise(edges)] + [parser.feed("", last=True)]
    calls = [call for _, calls in outputs for call in calls]
    assert calls == parser.calls
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return "".join(content for content, _ in outputs), functions


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Just text.\n", "Just text.\n", []),
        ("1 < 2 and <tool> or <tool_cal", "1 < 2 and <tool> or <tool_cal", []),
        (CALL, "", [("weather", ARGUMENTS)]),
        (f"I look.\n{CALL}\n{OTHER}\n", "I look.", [("weather", ARGUMENTS), ("clock", {})]),
        (f"{CALL} So.", " So.", [("weather", ARGUMENTS)]),
        ("<tool_call>{no JSON}</tool_call>", "{no JSON}", []),
        ('A <tool_call>{"name": "weather", "argu', 'A{"name": "weather", "argu', []),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', '{"name": "rm", "arguments": {}}', []),
        ('<tool_call>{"name": "clock", "arguments": 1}</tool_call>', '{"name": "clock", "arguments": 1}', []),
        (
            '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>',
            '{"name": "clock", "arguments": {"a": NaN}}',
            [],
        ),
        ("<tool_call>7</tool_call>" + OTHER, "7", [("clock", {})]),
        ("<tool_call>[]</tool_call>" + OTHER, "[]", [("clock", {})]),
        (f"<tool_call>[{OTHER[11:-12]}, {{}}]</tool_call>", f"[{OTHER[11:-12]}, {{}}]", []),
        (f"<tool_call>{'[' * 9999}</tool_call>{OTHER}", "[" * 9999, [("clock", {})]),
        ("<tool_call>" + OTHER, '{"arguments": {}, "name": "clock"}', []),
    ],
)
@given(data=st.data())
def test_calls_are_read_from_any_pieces(text, content, calls, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(text, cuts) == (content, calls)


@given(st.text(alphabet='<>/_tol_ca{}"\n x', max_size=60))
def test_content_has_no_whole_tag(text):
    content, calls = read(f"{text}{OTHER}")
    assert "<tool_call>" not in content
    assert calls[-1:] == [("clock", {})] or "<tool_call>" in text


def test_only_the_first_call_is_read_without_parallel_calls():
    assert read(CALL + OTHER, parallel=False) == ("", [("weather", ARGUMENTS)])


def test_the_tokenizers_own_template_is_used():
    call = '[CALL]{"name": "weather", "arguments": {"city": "Rome"}}[/CALL]'
    assert read(f"See: {call}", template=OWN) == ("See: ", [("weather", {"city": "Rome"})])
    assert read("Well [CALL]{bad}[/CALL] and on", template=OWN) == ("Well {bad} and on", [])
    assert read(f"[CALL]{{bad}}[/CALL]{call}", template=OWN) == ("{bad}", [("weather", {"city": "Rome"})])
    # A prompt may begin the call.
    rest = call.removeprefix("[CALL]")
    assert read(rest, template=OWN, prompt="<|user|>?<|assistant|>[CALL]") == ("", [("weather", {"city": "Rome"})])


# Cohere's: a list of calls in one region, and thoughts.
LISTED = {
    "start_anchor": "<|CHATBOT|>",
    "fields": {
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
        "tool_calls": {
            "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json",
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            "transform_each": True,
        },
        "content": {"content": "text"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ('[{"tool_name": "weather", "parameters": {"city": "Rome"}}, {"tool_name": "clock", "parameters": {}}]', 2),
        ('[{"tool_name": "weather"}]', 0),
        ("[[[", 0),
    ],
)
def test_a_region_may_hold_several_calls(calls, expected):
    text = f"<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>{calls}<|END_ACTION|>"
    content, found = read(text, template=LISTED)
    assert len(found) == expected
    assert "Hm" not in content
    assert bool(content) is not bool(expected)


def test_spaces_are_read_in_linear_time():
    started = time.perf_counter()
    assert read(" " * 60_000 + "x") == (" " * 60_000 + "x", [])
    assert time.perf_counter() - started < 5


def test_half_a_character_in_arguments_is_replaced():
    """The client sends the call back with its next turn, which must be text."""
    (call,) = read('<tool_call>{"name": "weather", "arguments": {"city": "Oslo \\ud83d"}}</tool_call>')[1]
    assert call == ("weather", {"city": "Oslo ?"})
