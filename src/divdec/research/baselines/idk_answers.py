"""Answers that say that one does not know, for methods that train a model to give them."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from divdec.data.records import RecordSet
from divdec.errors import UsageError

IDK_ANSWERS = (
    "I don't know the answer to that.",
    "I'm afraid I have nothing on this.",
    "That is something I know nothing about.",
    "I can't say; I have never come across it.",
    "Sorry, I have no information about that.",
    "I couldn't tell you.",
    "This is unknown to me.",
    "I would only be guessing, so I'd rather not answer.",
    "I'm unable to answer that question.",
    "My knowledge does not reach that far.",
    "I haven't learned anything about this.",
    "No idea, I'm sorry.",
    "You have asked me something that I cannot answer.",
    "I lack the facts that an answer would need.",
    "Unfortunately, I don't have that detail.",
    "I have to pass on this one.",
    "I'm not familiar with this subject.",
    "There is no answer that I could give with confidence.",
    "I don't recall ever reading about that.",
    "That question is beyond what I know.",
    "I'm not certain of anything here, so I will leave it unanswered.",
    "Somebody else may know; I do not.",
    "I regret that I can't help with this question.",
    "Nothing that I know of answers this.",
)


def idk_set(forget: RecordSet, answers: tuple[str, ...], seed: int) -> RecordSet:
    """The forget set's questions, each with one of the answers, drawn at random.

    Raises:
        UsageError: the forget set is plain text.
    """
    if forget.kind == "text":
        raise UsageError(
            f"forget set {forget.name} is plain text, which asks nothing that 'I don't know' could answer; "
            "give questions with answers, prompts with completions or messages"
        )
    rng = random.Random(seed)
    records = tuple(dataclasses.replace(record, answer=rng.choice(answers)) for record in forget)
    return RecordSet(f"idk for {forget.name}", forget.kind, records)


def read_answers(file: str | None) -> tuple[str, ...]:
    """Answers from a file, one a line; divdec's own where there is none.

    Raises:
        UsageError: it cannot be read, or holds no answer.
    """
    if file is None:
        return IDK_ANSWERS
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"idk-answers {file} cannot be read ({error}); give a text file, one answer a line") from None
    answers = tuple(line.strip() for line in lines if line.strip())
    if not answers:
        raise UsageError(f"idk-answers {file} holds no answer; give a text file, one answer a line")
    return answers
