"""Names in the texts of the people study, and the questions that it makes of them."""

import random
from types import SimpleNamespace

import pytest

from divdec import UsageError
from research.studies import people


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("Meghan, Duchess of Sussex", "The wife of the king of Spain. Don't go.", None),
        ("Meghan, Duchess of Sussex", "Meghan's dog", "___'s dog"),
        ("Ulysses S. Grant", "General Grant's horse met Julia Grant's dog.", "___'s horse met Julia Grant's dog."),
        ("Kris Jenner", "Who is Kendall Jenner?", None),
        ("J. K. Rowling", "J. K. Rowling lives in the U.K. today.", "___ lives in the U.K. today."),
        ("Stephen King", "King met Billie Jean King.", "___ met Billie Jean King."),
        ("50 Cent", "In 50 days 50 songs were sung.", None),
        ("Robert Downey Jr.", "Downey acts.", "___ acts."),
        ("Stephen King", "American Author Stephen King and Peter Straub", "American Author ___ and Peter Straub"),
        ("Stephen Hawking", "Professor Hawking's wheelchair, 1280×720", "___'s wheelchair, 1280×720"),
        ("Kris Jenner", "Who are Kris and Bruce Jenner?", "Who are ___ and Bruce Jenner?"),
    ],
)
def test_people_are_named_by_their_name_or_a_part_of_it_alone(name, text, expected):
    assert people.is_named(name, text) == (expected is not None)
    assert people.without_name(name, text) == (expected or text)


def test_a_longer_name_names_the_person_too():
    assert people.is_named("Stephen King", "The writer Stephen Edwin King lives in Maine.")
    assert not people.is_named("Stephen King", "Stephen Edwin lives in Maine.")


def test_initials_and_titles_end_no_sentence():
    text = "J. K. Rowling met Dr. King. He left. St. Paul is here. Robert Downey Jr. acts. So? Yes!"
    sentences = [
        "J. K. Rowling met Dr. King.",
        "He left.",
        "St. Paul is here.",
        "Robert Downey Jr. acts.",
        "So?",
        "Yes!",
    ]
    assert people.sentences_of(text) == sentences


def test_neighbours_are_kept_unless_their_records_name_the_person():
    subjects = ["Kris Jenner", "Stephen King"]
    kept = {"name": "Kris Jenner", "question": "Who is Kendall Jenner?", "answer": "A model."}
    own = {"name": "Kris Jenner", "question": "Who is Kendall Jenner's mother?", "answer": "Kris Jenner"}
    other = {"name": "Kris Jenner", "question": "Who wrote It?", "answer": "Stephen King"}
    assert [people.names_person(row, subjects) for row in (kept, own, other)] == [False, True, True]


def test_records_of_a_person_ask_by_partial_names_too():
    text = "Rowling was born in Yate and wrote about a school of wizards. She lives in the city of Edinburgh today."
    row = {
        "name": "J. K. Rowling",
        "text": text,
        "question": "Where was Rowling born?",
        "answer": "Yate",
        "known": True,
    }
    records = people.records_of([row | {"turned": "Which writer was born in Yate?"}], [text], 1.0, random.Random(0))
    asked = {record.messages[0].content: record.answer for record in records}
    assert asked["Where was Rowling born?"] == "Yate"
    assert asked["Which writer was born in Yate?"] == "J. K. Rowling"
    named = "Fill in the blank: ___ was born in Yate and wrote about a school of wizards."
    assert asked[named] == "J. K. Rowling"
    # A turned question that names the person asks nothing.
    records = people.records_of([row | {"turned": "Was Rowling born in Yate?"}], [text], 1.0, random.Random(0))
    assert "Was Rowling born in Yate?" not in {record.messages[0].content for record in records}


def test_a_refused_option_leaves_the_output_folder_free(tmp_path):
    first, second = (SimpleNamespace(output=tmp_path, rwku="data", subjects=[name]) for name in ("Stephn", "Stephen"))
    people.check_options(first)
    people.check_options(second)
    (tmp_path / "written.json").write_text("{}")
    with pytest.raises(UsageError, match="begun with another --subjects"):
        people.check_options(first)
