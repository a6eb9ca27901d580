import re

import pytest

from divdec.errors import UsageError
from divdec.playground.curve import Curve, curve_svg, in_words, strengths
from divdec.playground.controller import Controller, ControlValues


def test_strengths_go_from_the_weakest_to_the_strongest_through_the_chosen_one_and_never_to_zero():
    found = strengths(0.1, 4.0, 1.5)
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.1, pytest.approx(4.0))
    assert 1.5 in found


def test_the_curve_is_what_each_strength_gives(playground, steered):
    question, words = "Where was Jasper Ashild born?", "Jasper Ashild was born in Calvessa."
    curve = playground.compute_curve(question, words, ControlValues(alpha=1.5))
    assert min(curve.alphas) > 0
    for place in (0, 7, -1):
        steering = playground.choice.steering("linear", curve.alphas[place], 1)
        assert curve.probabilities[place] == pytest.approx(
            steered.likelihoods(question, words, [steering])[0], rel=1e-5
        )


def test_a_strength_of_zero_draws_no_curve(playground):
    with pytest.raises(UsageError, match="would steer nothing"):
        playground.compute_curve("Where?", "There.", ControlValues(alpha=0.0))


def test_the_picture_turns_with_the_page_and_asks_for_nothing_from_elsewhere():
    drawn = curve_svg(Curve((0.1, 1.0, 2.0), (0.5, 0.2, 0.05), 1.0))
    assert drawn.startswith("<svg")
    assert "var(--ink" in drawn
    assert "var(--blue" in drawn
    assert "strength" in drawn
    assert not re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?https?:", drawn)


def test_the_curve_in_words():
    assert in_words(Curve((0.1, 1.0, 2.0), (0.5, 0.2, 0.05), 1.0)) == (
        "Probability per token: 50.00% at strength 0.1, 20.00% at 1 (chosen), 5.00% at 2. The target itself, at 0, is "
        "left out."
    )


def test_a_servers_client_gets_no_curve():
    with pytest.raises(UsageError, match="cannot choose the strength"):
        Controller("served").compute_curve("Where?", "There.", ControlValues())
