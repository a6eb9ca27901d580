import copy
import math

import pytest
import torch

from divdec.playground.controller import RETRY_HINT, Controller, ControlValues
from divdec.playground.steered_model import SteeredModel
from divdec.playground.steered_model import UnsteeredTarget

QUESTION = "Where was Jasper Ashild born?"
VALUES = ControlValues(alpha=1.5)


def last(talks):
    *_, found = talks
    return found


def expected(steered, alpha=1.5):
    from divdec.data.records import Message
    from divdec.steering import Steering

    return "".join(
        token.text for token in steered.answer(steered.encode_prompt([Message("user", QUESTION)]), Steering(alpha=alpha))
    )


def test_a_question_is_answered_as_it_grows(playground, steered):
    talks = list(playground.ask(QUESTION, (), VALUES))
    assert talks[0][-1].running
    whole = expected(steered)
    assert all(whole.startswith(talk[-1].answer) for talk in talks)
    (turn,) = talks[-1]
    assert (turn.answer, turn.rule, turn.note, turn.running) == (whole, "linear:1.5", "", False)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (ControlValues(alpha=0.0), "would steer nothing"),
        (ControlValues(alpha=-1.0), "Strength is -1.0"),
        (ControlValues(alpha=math.nan), "Strength is nan"),
        (ControlValues("target"), "Rule is 'target'"),
        (ControlValues("rank", k=0), "K is 0"),
        (ControlValues(alpha=1.5, temperature=-1), "Temperature is -1"),
        (ControlValues(alpha=1.5, temperature=math.nan), "Temperature is nan"),
    ],
    ids=str,
)
def test_what_the_controls_do_not_offer_is_not_answered(playground, chosen, said):
    (turn,) = last(playground.ask(QUESTION, (), chosen))
    assert turn.answer == ""
    assert said in turn.note
    assert not turn.running


def test_an_empty_question_changes_nothing(playground):
    assert list(playground.ask("  ", (), VALUES)) == [()]
    assert list(playground.retry((), VALUES)) == [()]


def test_again_answers_the_same_question(playground):
    once = last(playground.ask(QUESTION, (), VALUES))
    twice = last(playground.retry(once, ControlValues(alpha=4.0)))
    assert len(twice) == 1
    assert (twice[0].question, twice[0].rule) == (QUESTION, "linear:4")


def test_moving_the_strength_recolours_the_last_answer_and_keeps_its_words(playground):
    talk = last(playground.ask(QUESTION, (), VALUES))
    (turn,) = playground.recolor(talk, ControlValues(alpha=4.0))
    assert turn.answer == talk[0].answer
    assert [token.logprob_shift for token in turn.tokens] != [token.logprob_shift for token in talk[0].tokens]
    assert (turn.rule, turn.color_rule) == ("linear:1.5", "linear:4")
    (refused,) = playground.recolor(talk, ControlValues(alpha=0.0))
    assert refused.tokens == talk[0].tokens
    assert "would steer nothing" in refused.note


def test_a_model_that_fails_in_the_middle_says_so_keeps_the_text_and_can_be_asked_again(steered, playground):
    model = copy.deepcopy(steered.model)
    mine = Controller("tiny", SteeredModel(model, steered.tokenizer, steered.options), playground.choice)
    good = {name: weights.clone() for name, weights in model.experts.forget.state_dict().items()}
    seen = []
    tokens = mine.steered.answer

    def breaking(*arguments):
        for number, token in enumerate(tokens(*arguments)):
            yield token
            if number == 2:
                with torch.no_grad():
                    for weights in model.experts.forget.parameters():
                        weights.fill_(math.nan)

    mine.steered.answer = breaking
    seen = last(mine.ask(QUESTION, (), VALUES))
    mine.steered.answer = tokens
    (turn,) = seen
    assert turn.answer
    assert expected(steered).startswith(turn.answer)
    assert turn.note.startswith("The model could not be steered, and gives no other answer")
    assert turn.note.eos_token_idswith(RETRY_HINT)
    model.experts.forget.load_state_dict(good)
    (turn,) = last(mine.retry(seen, VALUES))
    assert (turn.answer, turn.note) == (expected(steered), "")


def test_a_stopped_answer_says_so(playground):
    growing = next(iter(playground.ask(QUESTION, (), VALUES)))
    (turn,) = playground.stop(growing)
    assert not turn.running
    assert turn.note.startswith("Stopped.")
    done = last(playground.ask(QUESTION, (), VALUES))
    assert playground.stop(done) == done


def test_the_target_is_not_shown_unless_it_was_asked_for(playground, steered):
    talk = last(playground.ask(QUESTION, (), VALUES))
    assert list(playground.answer_unsteered(talk, ())) == [()]
    shown = Controller("tiny", steered, playground.choice, target=UnsteeredTarget(steered, "127.0.0.1"))
    (turn,) = last(shown.answer_unsteered(talk, ()))
    *_, said = UnsteeredTarget(steered, "localhost").answer(steered.encode_prompt([*_messages(QUESTION)]))
    assert turn.answer == said


def _messages(question):
    from divdec.data.records import Message

    yield Message("user", question)
