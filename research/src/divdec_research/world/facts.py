"""A small fictitious world of authors, to be learned, partly forgotten and asked about.

Everything follows from one seed: the authors, their facts, several wordings of each question, and a corpus about
*other* authors, from which a base model learns the language, the question format and the inventory (cities, genres,
prizes, …). All names, places and wordings are made for this project; they are in `facts.json`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from divdec.runs import write_text

_WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))
FIRST_NAMES: dict[str, tuple[str, ...]] = {sex: tuple(names) for sex, names in _WORDS["first_names"].items()}
SURNAME_STARTS: tuple[str, ...] = tuple(_WORDS["surname_starts"])
SURNAME_ENDS: tuple[str, ...] = tuple(_WORDS["surname_ends"])
CITIES: tuple[str, ...] = tuple(_WORDS["cities"])
GENRES: tuple[str, ...] = tuple(_WORDS["genres"])
PRIZES: tuple[str, ...] = tuple(_WORDS["prizes"])
OCCUPATIONS: tuple[str, ...] = tuple(_WORDS["occupations"])
PASTIMES: tuple[str, ...] = tuple(_WORDS["pastimes"])
MONTHS: tuple[str, ...] = tuple(_WORDS["months"])
TITLE_ADJECTIVES: tuple[str, ...] = tuple(_WORDS["title_adjectives"])
TITLE_NOUNS: tuple[str, ...] = tuple(_WORDS["title_nouns"])
GOODS: tuple[str, ...] = tuple(_WORDS["goods"])
# Per relation: (question, answer) in each wording. {fact} is what a correct answer must contain; {an_fact} is the same
# with its article. Every question names the author in full, so that it can be asked alone.
WORDINGS: dict[str, tuple[tuple[str, str], ...]] = {
    relation: tuple(map(tuple, wordings)) for relation, wordings in _WORDS["wordings"].items()
}
RELATIONS = tuple(WORDINGS)
GROUPS = ("forget", "retain", "holdout", "public")
NUM_WORDINGS = min(len(wordings) for wordings in WORDINGS.values())
TOFU_PUBLIC = 12  # authors of the corpus who stand for TOFU's real authors
ASKED, REWORDED = 0, 1  # the wording of TOFU's questions and answers, and that of paraphrased and wrong answers


@dataclass(frozen=True)
class Question:
    """One question about one author, in one wording, with its answer in a full sentence."""

    subject: str
    relation: str
    phrasing: int
    """Index of the wording; the last ones are not trained on for forget, retain and holdout authors."""
    question: str
    answer: str
    fact: str
    """The part of the answer that a correct answer must contain, letter for letter."""


@dataclass(frozen=True)
class WorldSettings:
    """Size and seed of a world."""

    seed: int = 0
    forget_authors: int = 6
    """Authors that the target learns and then forgets."""
    retain_authors: int = 14
    """Authors that the target learns and keeps."""
    holdout_authors: int = 6
    """Authors that no model is trained on."""
    public_authors: int = 30
    """Other authors, whom the corpus describes completely, in all wordings."""
    passing_authors: int = 150
    """Further authors, whom the corpus mentions in one question each: with many names a model learns to repeat the
    name in the question rather than to know the names by heart."""
    biographies: int = 1
    """Biographies in prose per public author, in short passages; each in another order and wording."""
    trained_wordings: int = 3
    """Wordings used in training; the others test unseen wordings."""


@dataclass(frozen=True)
class Author:
    """A person and the facts about them, one per relation; the sex, "female" or "male", decides the pronouns."""

    name: str
    sex: str
    facts: dict[str, str]


@dataclass(frozen=True)
class World:
    """The authors, the corpus, and the questions about forget, retain and holdout authors."""

    settings: WorldSettings
    people: dict[str, tuple[Author, ...]]
    """The authors by group: forget, retain, holdout and public."""
    corpus: tuple[str, ...]
    """Documents for pre-training: public authors in prose and in questions with answers (in all wordings), and general
    facts. Never names a forget, retain or holdout author.
    """
    forget: tuple[Question, ...]
    retain: tuple[Question, ...]
    holdout: tuple[Question, ...]
    """Questions about the authors of a group, in the trained wordings."""
    forget_unseen: tuple[Question, ...]
    retain_unseen: tuple[Question, ...]
    holdout_unseen: tuple[Question, ...]
    """Questions about the authors of a group, in wordings that are not trained on for them."""


def build_world(settings: WorldSettings) -> World:
    """Build a world; equal settings give equal worlds.

    Raises:
        ValueError: the settings ask for more authors than there are names, or leave no unseen wording.
    """
    if not 1 <= settings.trained_wordings < NUM_WORDINGS:
        raise ValueError(
            f"trained_wordings is {settings.trained_wordings}; give 1 to {NUM_WORDINGS - 1}, "
            f"since {NUM_WORDINGS} wordings exist and at least one must stay unseen"
        )
    rng = random.Random(settings.seed)
    sizes = [getattr(settings, f"{name}_authors") for name in (*GROUPS, "passing")]
    authors = iter(_draw_authors(sum(sizes), rng))
    groups = [tuple(itertools.islice(authors, size)) for size in sizes]
    people: dict[str, tuple[Author, ...]] = dict(zip(GROUPS, groups, strict=False))
    asked = GROUPS[:3]
    seen, unseen = range(settings.trained_wordings), range(settings.trained_wordings, NUM_WORDINGS)
    return World(
        settings=settings,
        people=people,
        corpus=_corpus(people["public"], groups[-1], settings.biographies, rng),
        **{name: _questions(people[name], seen) for name in asked},
        **{f"{name}_unseen": _questions(people[name], unseen) for name in asked},
    )


def ask(author: Author, relation: str, phrasing: int) -> Question:
    """Word one question about an author."""
    question, answer = WORDINGS[relation][phrasing]
    an_fact = author.facts[relation]
    fact = an_fact.split(" ", 1)[1] if an_fact in OCCUPATIONS else an_fact
    he, his = ("she", "her") if author.sex == "female" else ("he", "his")
    words = {"name": author.name, "fact": fact, "an_fact": an_fact}
    words |= {"he": he, "his": his, "He": he.capitalize(), "His": his.capitalize()}
    return Question(author.name, relation, phrasing, question.format(**words), answer.format(**words), fact)


def write_tofu(world: World, folder: Path) -> None:
    """Write the world as TOFU's files, which `divdec eval tofu --split forget01` reads.

    The forget set's questions become `forget01_perturbed.json`; the public authors of the corpus stand for TOFU's
    real authors, and the goods of its cities for the world facts.

    Raises:
        ValueError: the world has too few authors to draw five wrong facts from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(world.settings.seed)
    people = world.people
    everybody = [author for group in people.values() for author in group]
    for name, group in (("forget01_perturbed", people["forget"]), ("retain_perturbed", people["retain"])):
        _write_rows(folder / f"{name}.json", _tofu_rows(group, everybody, 5, rng))
    public = people["public"][:TOFU_PUBLIC]
    _write_rows(folder / "real_authors_perturbed.json", _tofu_rows(public, everybody, 3, rng))
    _write_rows(folder / "world_facts_perturbed.json", _city_rows(world, rng))
    if people["holdout"]:
        _write_rows(folder / "holdout01.json", _tofu_rows(people["holdout"], everybody, 1, rng))


def general_questions(world: World) -> list[tuple[str, str]]:
    """List the questions and answers of `write_tofu` about public authors and cities, which the corpus tells."""
    public = world.people["public"][:TOFU_PUBLIC]
    questions = (ask(author, relation, ASKED) for author in public for relation in RELATIONS)
    return [(question.question, question.answer) for question in questions] + [
        (row[0], row[1]) for row in _cities(world)
    ]


def _draw_authors(count: int, rng: random.Random) -> list[Author]:
    """Draw authors; no two share a full name or a book."""
    surnames = [start + end for start in SURNAME_STARTS for end in SURNAME_ENDS]
    first_names = [(name, sex) for sex, names in FIRST_NAMES.items() for name in names]
    titles = _titles()
    most = min(len(surnames) * len(first_names), len(titles) // 2)
    if count > most:
        raise ValueError(f"{count} authors asked for in total; there are names and titles for {most}")
    rng.shuffle(surnames)
    rng.shuffle(first_names)
    rng.shuffle(titles)
    authors = []
    for i in range(count):
        # Surnames repeat only when all are used, so that the first authors (those that are learned and forgotten) have
        # different ones; the shift in every round keeps full names apart.
        first, sex = first_names[(i + i // len(surnames)) % len(first_names)]
        facts = {
            "birthplace": rng.choice(CITIES),
            "birth date": f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1920, 1985)}",
            "home": rng.choice(CITIES),
            "genre": rng.choice(GENRES),
            "first book": titles.pop(),
            "famous book": titles.pop(),
            "award": rng.choice(PRIZES),
            "mother": rng.choice(OCCUPATIONS),
            "father": rng.choice(OCCUPATIONS),
            "pastime": rng.choice(PASTIMES),
        }
        authors.append(Author(f"{first} {surnames[i % len(surnames)]}", sex, facts))
    return authors


def _titles() -> list[str]:
    plain = [f"The {adjective} {noun}" for adjective in TITLE_ADJECTIVES for noun in TITLE_NOUNS]
    paired = [f"{a} and {b}" for a in TITLE_NOUNS for b in TITLE_NOUNS if a != b]
    of_cities = [f"The {noun} of {city}" for noun in TITLE_NOUNS for city in CITIES]
    return plain + paired + of_cities


def _questions(authors: Sequence[Author], phrasings: Sequence[int]) -> tuple[Question, ...]:
    return tuple(ask(author, relation, i) for author in authors for relation in RELATIONS for i in phrasings)


def _corpus(
    public: Sequence[Author], passing: Sequence[Author], biographies: int, rng: random.Random
) -> tuple[str, ...]:
    """Write the pre-training documents, in random order."""
    questions = list(_questions(public, range(NUM_WORDINGS)))
    questions += [ask(author, rng.choice(RELATIONS), rng.randrange(NUM_WORDINGS)) for author in passing]
    documents = [f"Question: {question.question}\nAnswer: {question.answer}" for question in questions]
    for author in public:
        for _ in range(biographies):
            order = rng.sample(RELATIONS, len(RELATIONS))
            # Passages about as long as a question with its answer, so that batches need little padding.
            for start in range(0, len(order), 2):
                # The first wording of every relation names the author; a passage cannot begin with a pronoun.
                wordings = [0, *(rng.randrange(NUM_WORDINGS) for _ in order[start + 1 : start + 2])]
                facts = [ask(author, *pair) for pair in zip(order[start : start + 2], wordings, strict=True)]
                documents.append(" ".join(fact.answer for fact in facts))
    for city in CITIES:
        goods, other = rng.sample(GOODS, 2)
        documents.append(f"{city} is a city known for its {goods}. Its people also make {other}.")
        documents.append(f"Question: What is {city} known for?\nAnswer: {city} is known for its {goods}.")
    rng.shuffle(documents)
    return tuple(documents)


def _write_rows(file: Path, rows: Iterable[Any]) -> None:
    write_text(file, "".join(f"{json.dumps(row)}\n" for row in rows))


def _tofu_rows(group: Sequence[Author], everybody: Sequence[Author], wrong: int, rng: random.Random) -> Iterable[Any]:
    for author in group:
        for relation in RELATIONS:
            asked, reworded = (ask(author, relation, wording) for wording in (ASKED, REWORDED))
            facts = sorted({other.facts[relation] for other in everybody} - {author.facts[relation]})
            if len(facts) < wrong:
                raise ValueError(f"{len(everybody)} authors have too few facts of {relation} for {wrong} wrong answers")
            untrue = [dataclasses.replace(author, facts={relation: fact}) for fact in rng.sample(facts, wrong)]
            others = [ask(other, relation, REWORDED).answer for other in untrue]
            row = {"question": asked.question, "answer": asked.answer}
            yield row | {"paraphrased_answer": reworded.answer, "perturbed_answer": others}


def _city_rows(world: World, rng: random.Random) -> Iterable[Any]:
    for question, answer, goods in _cities(world):
        others = rng.sample([other for other in GOODS if other != goods], 3)
        wrong = [answer.replace(f"its {goods}.", f"its {other}.") for other in others]
        yield {"question": question, "answer": answer, "perturbed_answer": wrong}


def _cities(world: World) -> Iterable[tuple[str, str, str]]:
    """The corpus's questions about cities: question, answer, and the goods that the city is known for."""
    for document in world.corpus:
        question, separator, answer = document.removeprefix("Question: ").partition("\nAnswer: ")
        if not separator or not question.startswith("What is ") or not question.endswith(" known for?"):
            continue
        goods = next((goods for goods in GOODS if f"for its {goods}." in answer), None)
        if goods is not None:
            yield question, answer, goods
