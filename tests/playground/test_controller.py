import copy
import math

import pytest
import torch

from divdec import DivergenceForCausalLM, write_bundle
from divdec.checkpoint import load_tokenizer
from divdec.data.records import Message
from divdec.errors import UsageError
from divdec.playground.controller import (
    RETRY_HINT,
    Controller,
    ControlValues,
    read_example_questions,
    to_messages,
    without_last_answer,
)
from divdec.playground.models import ChatOptions, SteeredModel, UnsteeredTarget
from divdec.playground.rendering import Token, Turn
from divdec.steering import Steering

QUESTION = "Where was Jasper Ashild born?"
VALUES = ControlValues(alpha=1.5)


def last(talks):
    *_, final = talks
    return final


def expected(steered, alpha=1.5):

    return "".join(
        token.text
        for token in steered.answer(steered.encode_prompt([Message("user", QUESTION)]), Steering(alpha=alpha))
    )


def test_output_is_streamed_to_conversation(controller, steered):
    talks = list(controller.ask(QUESTION, (), VALUES))
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
def test_invalid_control_values_generate_nothing(controller, chosen, said):
    (turn,) = last(controller.ask(QUESTION, (), chosen))
    assert turn.answer == ""
    assert said in turn.note
    assert not turn.running


def test_an_empty_question_changes_nothing(controller):
    assert list(controller.ask("  ", (), VALUES)) == [()]
    assert list(controller.retry((), VALUES)) == [()]


def test_retry_repeats_same_question(controller):
    once = last(controller.ask(QUESTION, (), VALUES))
    twice = last(controller.retry(once, ControlValues(alpha=4.0)))
    assert len(twice) == 1
    assert (twice[0].question, twice[0].rule) == (QUESTION, "linear:4")


def test_changing_strength_recolors_last_output_without_changing_text(controller):
    talk = last(controller.ask(QUESTION, (), VALUES))
    (turn,) = controller.recolor(talk, ControlValues(alpha=4.0))
    assert turn.answer == talk[0].answer
    assert [token.logprob_shift for token in turn.tokens] != [token.logprob_shift for token in talk[0].tokens]
    assert (turn.rule, turn.color_rule) == ("linear:1.5", "linear:4")
    (refused,) = controller.recolor(talk, ControlValues(alpha=0.0))
    assert refused.tokens == talk[0].tokens
    assert "would steer nothing" in refused.note


def test_model_failure_is_reported_with_partial_text_and_retry_works(steered, controller):
    model = copy.deepcopy(steered.model)
    mine = Controller("tiny", SteeredModel(model, steered.tokenizer, steered.options))
    good = {name: weights.clone() for name, weights in model.experts.forget.state_dict().items()}
    seen = []
    tokens = mine.model.answer

    def breaking(*arguments):
        for number, token in enumerate(tokens(*arguments)):
            yield token
            if number == 2:
                with torch.no_grad():
                    for weights in model.experts.forget.parameters():
                        weights.fill_(math.nan)

    mine.model.answer = breaking
    seen = last(mine.ask(QUESTION, (), VALUES))
    mine.model.answer = tokens
    (turn,) = seen
    assert turn.answer
    assert expected(steered).startswith(turn.answer)
    assert turn.note.startswith("The model cannot be steered, so there is no further answer")
    assert turn.note.endswith(RETRY_HINT)
    model.experts.forget.load_state_dict(good)
    (turn,) = last(mine.retry(seen, VALUES))
    assert (turn.answer, turn.note) == (expected(steered), "")


def test_stopped_output_is_marked(controller):
    growing = next(iter(controller.ask(QUESTION, (), VALUES)))
    (turn,) = controller.stop(growing)
    assert not turn.running
    assert turn.note.startswith("Stopped.")
    done = last(controller.ask(QUESTION, (), VALUES))
    assert controller.stop(done) == done


def test_target_output_requires_show_target(controller, steered):
    talk = last(controller.ask(QUESTION, (), VALUES))
    assert list(controller.answer_unsteered(talk, ())) == [()]
    shown = Controller("tiny", steered, target=UnsteeredTarget(steered))
    (turn,) = last(shown.answer_unsteered(talk, ()))
    *_, said = UnsteeredTarget(steered).answer(steered.encode_prompt([Message("user", QUESTION)]))
    assert turn.answer == said


def test_a_conversation_becomes_messages():
    talk = (Turn("one", (Token("a"), Token("b"))), Turn("two"))
    assert to_messages(talk) == (Message("user", "one"), Message("assistant", "ab"), Message("user", "two"))


def test_unanswered_question_is_not_included_in_messages():
    talk = (Turn("one", note="the server went away"), Turn("two"))
    assert to_messages(talk) == (Message("user", "two"),)


def test_partial_output_stays_in_conversation():
    talk = (Turn("one", (Token("half"),), note="the server went away"), Turn("two"))
    assert [message.content for message in to_messages(talk)] == ["one", "half", "two"]


def test_retry_drops_only_last_output():
    talk = (Turn("one", (Token("a"),)), Turn("two", (Token("b"),), note="x"))
    assert without_last_answer(talk) == (talk[0], Turn("two"))
    assert without_last_answer(()) == ()


def test_rules_require_experts(models, registry, tmp_path):
    bundle = write_bundle(tmp_path / "bundle", target=str(models / "target"), registry=registry.folder)
    steered = SteeredModel(DivergenceForCausalLM.from_pretrained(bundle), load_tokenizer(bundle), ChatOptions())
    with pytest.raises(UsageError, match="needs no rule"):
        steered.with_rule(Steering("rank", k=5))
    (turn,) = last(Controller("tiny", steered).ask(QUESTION, (), ControlValues("linear")))
    assert (turn.answer, turn.note) == ("", "Rule is 'linear'; accepted here: takedowns.")
    (turn,) = last(Controller("tiny", steered).ask(QUESTION, (), ControlValues("takedowns")))
    assert (turn.rule, turn.note) == ("takedowns", "")


def test_example_questions_are_read_from_file_next_to_bundle(tmp_path):
    (tmp_path / "bundle").mkdir()
    assert read_example_questions(str(tmp_path / "bundle")) == ()
    (tmp_path / "questions.txt").write_text("One?\n\n  Two? \n" + "More?\n" * 30)
    assert read_example_questions(str(tmp_path / "bundle"))[:3] == ("One?", "Two?", "More?")
    assert len(read_example_questions(str(tmp_path / "bundle"))) == 12
    assert read_example_questions(str(tmp_path / "other")) == ()  # a hub id has no folder
    (tmp_path / "questions.txt").write_bytes(b"\xff")
    assert read_example_questions(str(tmp_path / "bundle")) == ()
