import copy
import math

import pytest
import torch

from divdec.playground.play import AGAIN, Chosen, Playground
from divdec.playground.steered import Steered
from divdec.playground.target import Target

QUESTION = "Where was Jasper Ashild born?"
CHOSEN = Chosen(alpha=1.5)


def last(talks):
    *_, found = talks
    return found


def expected(steered, alpha=1.5):
    from divdec.data.records import Message
    from divdec.steering import Steering

    return "".join(
        token.text for token in steered.answer(steered.prompt([Message("user", QUESTION)]), Steering(alpha=alpha))
    )


def test_a_question_is_answered_as_it_grows(playground, steered):
    talks = list(playground.ask(QUESTION, (), CHOSEN))
    assert talks[0][-1].running
    whole = expected(steered)
    assert all(whole.startswith(talk[-1].answer) for talk in talks)
    (turn,) = talks[-1]
    assert (turn.answer, turn.rule, turn.note, turn.running) == (whole, "linear:1.5", "", False)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (Chosen(alpha=0.0), "would steer nothing"),
        (Chosen(alpha=-1.0), "Strength is -1.0"),
        (Chosen(alpha=math.nan), "Strength is nan"),
        (Chosen("target"), "Rule is 'target'"),
        (Chosen("rank", k=0), "K is 0"),
        (Chosen(alpha=1.5, temperature=-1), "Temperature is -1"),
        (Chosen(alpha=1.5, temperature=math.nan), "Temperature is nan"),
    ],
    ids=str,
)
def test_what_the_controls_do_not_offer_is_not_answered(playground, chosen, said):
    (turn,) = last(playground.ask(QUESTION, (), chosen))
    assert turn.answer == ""
    assert said in turn.note
    assert not turn.running


def test_an_empty_question_changes_nothing(playground):
    assert list(playground.ask("  ", (), CHOSEN)) == [()]
    assert list(playground.ask_again((), CHOSEN)) == [()]


def test_again_answers_the_same_question(playground):
    once = last(playground.ask(QUESTION, (), CHOSEN))
    twice = last(playground.ask_again(once, Chosen(alpha=4.0)))
    assert len(twice) == 1
    assert (twice[0].question, twice[0].rule) == (QUESTION, "linear:4")


def test_moving_the_strength_recolours_the_last_answer_and_keeps_its_words(playground):
    talk = last(playground.ask(QUESTION, (), CHOSEN))
    (turn,) = playground.coloured(talk, Chosen(alpha=4.0))
    assert turn.answer == talk[0].answer
    assert [token.push for token in turn.tokens] != [token.push for token in talk[0].tokens]
    assert (turn.rule, turn.seen_by) == ("linear:1.5", "linear:4")
    (refused,) = playground.coloured(talk, Chosen(alpha=0.0))
    assert refused.tokens == talk[0].tokens
    assert "would steer nothing" in refused.note


def test_a_model_that_fails_in_the_middle_says_so_keeps_the_text_and_can_be_asked_again(steered, playground):
    model = copy.deepcopy(steered.model)
    mine = Playground("tiny", Steered(model, steered.tokenizer, steered.manner), playground.choice)
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
    seen = last(mine.ask(QUESTION, (), CHOSEN))
    mine.steered.answer = tokens
    (turn,) = seen
    assert turn.answer
    assert expected(steered).startswith(turn.answer)
    assert turn.note.startswith("The model could not be steered, and gives no other answer")
    assert turn.note.endswith(AGAIN)
    model.experts.forget.load_state_dict(good)
    (turn,) = last(mine.ask_again(seen, CHOSEN))
    assert (turn.answer, turn.note) == (expected(steered), "")


def test_a_stopped_answer_says_so(playground):
    growing = next(iter(playground.ask(QUESTION, (), CHOSEN)))
    (turn,) = playground.stopped(growing)
    assert not turn.running
    assert turn.note.startswith("Stopped.")
    done = last(playground.ask(QUESTION, (), CHOSEN))
    assert playground.stopped(done) == done


def test_the_target_is_not_shown_unless_it_was_asked_for(playground, steered):
    talk = last(playground.ask(QUESTION, (), CHOSEN))
    assert list(playground.unsteered(talk, ())) == [()]
    shown = Playground("tiny", steered, playground.choice, target=Target(steered, "127.0.0.1"))
    (turn,) = last(shown.unsteered(talk, ()))
    *_, said = Target(steered, "localhost").answer(steered.prompt([*_messages(QUESTION)]))
    assert turn.answer == said


def _messages(question):
    from divdec.data.records import Message

    yield Message("user", question)
