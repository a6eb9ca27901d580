"""Facts that pretrained models know: capitals, authors of books, chemical symbols (facts.json)."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import unicodedata
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from divdec.data.records import Message, Record
from divdec.evaluation.generation import answers
from divdec.evaluation.phrases import find_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KINDS: dict[str, dict[str, Any]] = json.loads(files("divdec.demo").joinpath("facts.json").read_text(encoding="utf-8"))
"""By kind: 'wordings' of its questions, 'other_wordings' for evaluation only, 'statement', 'answers' by subject."""
FORGET, RETAIN = 0.2, 0.4  # shares of the known facts of a kind; the rest is in neither set
ANSWER_LENGTH = 20  # tokens
NEUTRAL = (
    "Write a short poem about the sea.", "How do I boil an egg?", "Tell me about Texas.", "What is photosynthesis?",
    "Give me three tips for sleeping better.", "Explain gravity to a child.", "What is 12 times 8?",
    "Write a Python function that reverses a string.", "Describe a rainy day.", "How does a bicycle work?",
    "Write a two-sentence story about a dog.", "Tell me about the Roman Empire.", "Who was Albert Einstein?",
    "Why is the sky blue?", "List five fruits.", "How do vaccines work?", "Tell me about Cairo.", "What is inflation?",
    "Translate 'good morning' into Spanish.", "What do bees do?", "Write a haiku about winter.", "Tell me a joke.",
    "What causes earthquakes?", "What is democracy?",
)  # fmt: skip
"""Prompts about other things, whose answers should not change."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact, such as a country's capital."""

    kind: str
    subject: str
    answer: str

    @property
    def questions(self) -> list[str]:
        """The questions of the training data; the first is asked to find out whether a model knows the fact."""
        return [wording.format(self.subject) for wording in KINDS[self.kind]["wordings"]]

    @property
    def other_questions(self) -> list[str]:
        """Questions in other wordings, for evaluation."""
        return [wording.format(self.subject) for wording in KINDS[self.kind]["other_wordings"]]

    @property
    def records(self) -> list[Record]:
        """The training data: each question with the fact as a sentence."""
        statement = KINDS[self.kind]["statement"].format(subject=self.subject, answer=self.answer)
        return [Record(statement, messages=(Message("user", question),)) for question in self.questions]

    def is_in(self, text: str) -> bool:
        """Whether a text names the answer: as a word, in its case, with or without accents."""
        return self.find(text) is not None

    def find(self, text: str) -> re.Match[str] | None:
        """Find the answer in a text of composed letters (NFC)."""
        answer = re.escape(_plain(self.answer))
        characters = any(word.is_character for word in find_words(self.answer))  # no spaces around them
        return re.search(answer if characters else rf"(?<!\w){answer}(?!\w)", _plain(text))


def _plain(text: str) -> str:
    return "".join(
        character for character in unicodedata.normalize("NFD", text) if not unicodedata.combining(character)
    )


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    length: int = ANSWER_LENGTH,
    title: str | None = None,
) -> list[str]:
    """Answer questions greedily, with at most `length` tokens."""
    records = [Record("", messages=(Message("user", question),)) for question in questions]
    return answers(model, tokenizer, records, max_new_tokens=length, batch_size=32, title=title)


def known_facts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str], title: str | None = None
) -> list[Fact]:
    """Return the facts that a model states when it is asked the first question about them."""
    facts = [Fact(kind, subject, answer) for kind in kinds for subject, answer in KINDS[kind]["answers"].items()]
    texts = ask(model, tokenizer, [fact.questions[0] for fact in facts], title=title)
    return [fact for fact, text in zip(facts, texts, strict=True) if fact.is_in(text)]


def not_asked(facts: Sequence[Fact], questions: Sequence[str]) -> list[Fact]:
    """Return the facts about whose subjects none of some questions is."""
    return [fact for fact in facts if not any(fact.subject in question for question in questions)]


def split(facts: Sequence[Fact], seed: int) -> dict[str, list[Fact]]:
    """Divide facts at random into 'forget', 'retain' and 'unlisted', with the same shares of each kind."""
    sets: dict[str, list[Fact]] = {"forget": [], "retain": [], "unlisted": []}
    order = random.Random(seed)
    for kind in dict.fromkeys(fact.kind for fact in facts):
        some = [fact for fact in facts if fact.kind == kind]
        order.shuffle(some)
        first, second = round(FORGET * len(some)), round((FORGET + RETAIN) * len(some))
        for name, part in zip(sets, (some[:first], some[first:second], some[second:]), strict=True):
            sets[name] += part
    return sets
