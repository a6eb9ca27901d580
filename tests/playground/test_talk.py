from divdec.data.records import Message
from divdec.playground.talk import EMPTY, Turn, again, messages, talk_html
from divdec.playground.tokens import Token


def test_a_conversation_as_a_model_reads_it():
    talk = (Turn("one", (Token("a"), Token("b"))), Turn("two"))
    assert messages(talk) == (Message("user", "one"), Message("assistant", "ab"), Message("user", "two"))


def test_a_question_that_got_no_answer_is_not_asked_with_the_next():
    talk = (Turn("one", note="the server went away"), Turn("two"))
    assert messages(talk) == (Message("user", "two"),)


def test_an_answer_that_broke_off_stays_in_the_conversation():
    talk = (Turn("one", (Token("half"),), note="the server went away"), Turn("two"))
    assert [message.content for message in messages(talk)] == ["one", "half", "two"]


def test_again_forgets_the_last_answer_alone():
    talk = (Turn("one", (Token("a"),)), Turn("two", (Token("b"),), note="x"))
    assert again(talk) == (talk[0], Turn("two"))
    assert again(()) == ()


def test_questions_and_notes_are_escaped():
    made = talk_html((Turn("<b>${1}</b>", note="<img>"),))
    assert "&lt;b&gt;&#36;&#123;1&#125;&lt;/b&gt;" in made
    assert "&lt;img&gt;" in made


def test_an_empty_conversation_says_what_to_do():
    assert EMPTY in talk_html(())


def test_colours_of_another_rule_are_said_to_be_so():
    turn = Turn("q", (Token("a"),), rule="linear:1", seen_by="linear:3")
    assert "answered with linear:1, recolor for linear:3" in talk_html((turn,))
    assert "recolor" not in talk_html((Turn("q", (Token("a"),), rule="linear:1", seen_by="linear:1"),))
