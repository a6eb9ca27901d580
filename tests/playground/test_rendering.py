import html.parser
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divdec.playground.rendering import (
    LEVELS,
    WELCOME,
    Token,
    TokenShift,
    Turn,
    color_level,
    conversation_html,
    describe_shift,
    escape,
    tokens_html,
)


class Reader(html.parser.HTMLParser):
    """What a browser would make of a piece of HTML: its elements, and the text outside of boxes."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.shown, self.classes = set(), [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.open.append("dd-box" in dict(attrs).get("class", ""))
        self.classes.append(dict(attrs).get("class", ""))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        if not any(self.open):
            self.shown += data


NASTY = "<script>alert(1)</script>"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.text(), st.floats(allow_nan=False), st.text()), max_size=6))
def test_any_text_is_shown_verbatim_without_adding_elements(parts):
    tokens = [Token(text, push, alternatives=(TokenShift(other, -1.0),)) for text, push, other in parts]
    read = Reader(tokens_html(tokens))
    # HTML itself reads a carriage return as a line's end, and takes no NUL.
    assert read.shown == "".join(text for text, _, _ in parts)
    assert read.elements <= {"span", "b"}
    assert read.open == []


@pytest.mark.parametrize(
    "text", [NASTY, '"><img src=x onerror=alert(1)>', "' onmouseover='x", "${1+1}", "{{value}}", "`x`"]
)
def test_markup_and_templates_in_a_token_are_escaped(text):
    made = tokens_html([Token(text, 3.0, alternatives=(TokenShift(text, -2.0),))])
    assert text not in made
    assert "$" not in made
    assert "{" not in made
    assert "<script" not in made
    assert "<img" not in made
    assert Reader(made).shown == text


@pytest.mark.parametrize(
    ("shift", "shade"),
    [
        (None, 0),
        (0.0, 0),
        (0.2, 0),
        (0.25, 1),
        (-0.25, -1),
        (1.5, 2),
        (-3.0, -3),
        (4.0, 4),
        (-math.inf, -4),
        (math.nan, 0),
    ],
)
def test_shifts_map_to_colour_levels(shift, shade):
    assert color_level(shift) == shade


def test_promoted_and_suppressed_tokens_have_different_colours():
    read = Reader(tokens_html([Token("a", 5.0), Token("b", -1.2), Token("c", 0.0)]))
    assert [name for name in read.classes if name.startswith("dd-token")] == [
        "dd-token dd-up4",
        "dd-token dd-down2",
        "dd-token",
    ]


def test_a_marked_token_is_underlined():
    assert "dd-marked" in tokens_html([Token("a", 1.0, marked=True)])
    assert "dd-marked" not in tokens_html([Token("a", 1.0)])


def test_partial_character_tokens_share_one_span_with_summed_shift():
    made = tokens_html([Token("", 1.5, alternatives=(TokenShift("x", -1.0),)), Token("é", 1.0), Token("!", 0.0)])
    read = Reader(made)
    assert read.shown == "é!"
    assert read.classes[0] == "dd-token dd-up3"  # 2.5 nats
    assert "x" in made


def test_shifts_are_described_in_words():
    assert describe_shift(0.1) == "almost unchanged (+0.1 nats)"
    assert describe_shift(-LEVELS[1]) == "2.7 times less likely (−1.0 nats)"
    assert describe_shift(4.0) == "55 times more likely (+4.0 nats)"
    assert describe_shift(80.0) == "more than 10,000 times more likely (+80.0 nats)"
    assert describe_shift(-math.inf) == "masked"


def test_only_available_probabilities_are_shown():
    assert "%" not in tokens_html([Token("a", 2.0, alternatives=(TokenShift("b", -2.0),))])
    assert "target 80.0% → steered 10.0%" in tokens_html(
        [Token("a", 2.0, alternatives=(TokenShift("b", -2.0, 0.8, 0.1),))]
    )
    assert "probability 10.0%" in tokens_html([Token("a", steered_probability=0.1)])


def test_white_space_is_shown_as_symbols():
    assert "<b>␣Rome</b>" in tokens_html([Token("a", alternatives=(TokenShift(" Rome", -1.0),))])
    assert "<b>⏎</b>" in tokens_html([Token("a", alternatives=(TokenShift("\n", -1.0),))])


def test_escaping_does_not_change_plain_words():
    assert escape("Where was Zoë born? 3 < 4") == "Where was Zoë born? 3 &lt; 4"


def test_questions_and_notes_are_escaped():
    made = conversation_html((Turn("<b>${1}</b>", note="<img>"),))
    assert "&lt;b&gt;&#36;&#123;1&#125;&lt;/b&gt;" in made
    assert "&lt;img&gt;" in made


def test_an_empty_conversation_shows_the_welcome():
    assert WELCOME in conversation_html(())


def test_caption_names_rule_if_colours_differ():
    turn = Turn("q", (Token("a"),), rule="linear:1", color_rule="linear:3")
    assert "answered with linear:1, coloured for linear:3" in conversation_html((turn,))
    assert "recolor" not in conversation_html((Turn("q", (Token("a"),), rule="linear:1", color_rule="linear:1"),))
