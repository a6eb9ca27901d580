"""The fictitious world as TOFU lays its questions out, so that the TOFU suite can be run where TOFU is not at hand.

The forget set's questions become `forget01_perturbed.json`, whatever their share; the public authors of the corpus
stand for TOFU's real authors, and what its cities are known for for the world facts.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from divdec.data.world import GOODS, RELATIONS, Author, World, ask
from divdec.runs import write_text

PUBLIC = 12  # authors of the corpus who are asked about
ASKED, REWORDED = 0, 1  # the wording of questions and answers, and that of paraphrased and wrong answers


def write_tofu(world: World, folder: Path) -> None:
    """Write the files that `divdec eval tofu --split forget01` reads.

    Args:
        world: its forget, retain, holdout and public authors become TOFU's sets.
        folder: is made where it is missing.

    Raises:
        ValueError: the world has too few authors to draw five wrong facts from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(world.settings.seed)
    people = world.people
    everybody = [author for group in people.values() for author in group]
    for name, group in (("forget01_perturbed", people["forget"]), ("retain_perturbed", people["retain"])):
        _write(folder / f"{name}.json", _rows(group, everybody, 5, rng))
    _write(folder / "real_authors_perturbed.json", _rows(people["public"][:PUBLIC], everybody, 3, rng))
    _write(folder / "world_facts_perturbed.json", _city_rows(world, rng))
    if people["holdout"]:
        _write(folder / "holdout01.json", _rows(people["holdout"], everybody, 1, rng))


def general_questions(world: World) -> list[tuple[str, str]]:
    """Question and answer of all that the suite asks besides the forget, retain and holdout sets.

    These are public authors and cities; the corpus tells them all.
    """
    asked = (ask(author, relation, ASKED) for author in world.people["public"][:PUBLIC] for relation in RELATIONS)
    return [
        *((one.question, one.answer) for one in asked),
        *((question, answer) for question, answer, _ in _cities(world)),
    ]


def _write(file: Path, rows: Iterable[Any]) -> None:
    write_text(file, "".join(f"{json.dumps(row)}\n" for row in rows))


def _rows(group: Sequence[Author], everybody: Sequence[Author], wrong: int, rng: random.Random) -> Iterable[Any]:
    for author in group:
        for relation in RELATIONS:
            asked, reworded = (ask(author, relation, wording) for wording in (ASKED, REWORDED))
            facts = sorted({other.facts[relation] for other in everybody} - {author.facts[relation]})
            if len(facts) < wrong:
                raise ValueError(f"{len(everybody)} authors have too few facts of {relation} for {wrong} wrong answers")
            others = [
                ask(dataclasses.replace(author, facts={relation: fact}), relation, REWORDED).answer
                for fact in rng.sample(facts, wrong)
            ]
            yield {
                "question": asked.question,
                "answer": asked.answer,
                "paraphrased_answer": reworded.answer,
                "perturbed_answer": others,
            }


def _city_rows(world: World, rng: random.Random) -> Iterable[Any]:
    for question, answer, goods in _cities(world):
        others = rng.sample([other for other in GOODS if other != goods], 3)
        wrong = [answer.replace(f"its {goods}.", f"its {other}.") for other in others]
        yield {"question": question, "answer": answer, "perturbed_answer": wrong}


def _cities(world: World) -> Iterable[tuple[str, str, str]]:
    """What the corpus says of its cities: question, answer, and the goods that a city is known for."""
    for document in world.corpus:
        question, found, answer = document.removeprefix("Question: ").partition("\nAnswer: ")
        if not found or not question.startswith("What is ") or not question.endswith(" known for?"):
            continue
        goods = next((goods for goods in GOODS if f"for its {goods}." in answer), None)
        if goods is not None:
            yield question, answer, goods
