import html.parser
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divdec.playground.tokens import LEVELS, Other, Token, tokens_html, escape, in_words, level


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
@given(st.lists(st.tuples(st.text(), st.floats(allow_nan=False), st.text())))
def test_any_text_is_shown_as_it_is_and_adds_no_element(parts):
    tokens = [Token(text, push, others=(Other(other, -1.0),)) for text, push, other in parts]
    read = Reader(tokens_html(tokens))
    # HTML itself reads a carriage return as a line's end, and takes no NUL.
    assert read.shown == "".join(text for text, _, _ in parts)
    assert read.elements <= {"span", "b"}
    assert read.open == []


@pytest.mark.parametrize(
    "text", [NASTY, '"><img src=x onerror=alert(1)>', "' onmouseover='x", "${1+1}", "{{value}}", "`x`"]
)
def test_neither_markup_nor_a_template_comes_out_of_a_token(text):
    made = tokens_html([Token(text, 3.0, others=(Other(text, -2.0),))])
    assert text not in made
    assert "$" not in made
    assert "{" not in made
    assert "<script" not in made
    assert "<img" not in made
    assert Reader(made).shown == text


@pytest.mark.parametrize(
    ("push", "strength"),
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
def test_colours_have_steps(push, strength):
    assert level(push) == strength


def test_up_and_down_are_coloured_apart():
    read = Reader(tokens_html([Token("a", 5.0), Token("b", -1.2), Token("c", 0.0)]))
    assert [name for name in read.classes if name.startswith("dd-token")] == [
        "dd-token dd-up4",
        "dd-token dd-down2",
        "dd-token",
    ]


def test_a_place_where_another_token_lost_much_is_marked():
    assert "dd-marked" in tokens_html([Token("a", 1.0, marked=True)])
    assert "dd-marked" not in tokens_html([Token("a", 1.0)])


def test_parts_of_a_character_are_one_span_whose_pushes_add_up():
    made = tokens_html([Token("", 1.5, others=(Other("x", -1.0),)), Token("é", 1.0), Token("!", 0.0)])
    read = Reader(made)
    assert read.shown == "é!"
    assert read.classes[0] == "dd-token dd-up3"  # 2.5 nats
    assert "x" in made


def test_words_for_pushes():
    assert in_words(0.1) == "hardly pushed (+0.1 nats)"
    assert in_words(-LEVELS[1]) == "2.7 times less likely (−1.0 nats)"
    assert in_words(4.0) == "55 times likelier (+4.0 nats)"
    assert in_words(80.0) == "more than 10,000 times likelier (+80.0 nats)"
    assert in_words(-math.inf) == "masked: it cannot be said here"


def test_probabilities_are_told_only_where_they_are_given():
    assert "%" not in tokens_html([Token("a", 2.0, others=(Other("b", -2.0),))])
    assert "target 80.0% → steered 10.0%" in tokens_html([Token("a", 2.0, others=(Other("b", -2.0, 0.8, 0.1),))])
    assert "probability 10.0%" in tokens_html([Token("a", after=0.1)])


def test_white_space_that_was_pushed_down_is_seen():
    assert "<b>␣Rome</b>" in tokens_html([Token("a", others=(Other(" Rome", -1.0),))])
    assert "<b>⏎</b>" in tokens_html([Token("a", others=(Other("\n", -1.0),))])


def test_escaping_leaves_words_alone():
    assert escape("Where was Zoë born? 3 < 4") == "Where was Zoë born? 3 &lt; 4"
