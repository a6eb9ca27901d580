"""MUSE-News cut to size for models that are trained from scratch, and the texts of MUSE for the user's own models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from divdec.data.formatting import Format
from divdec.data.records import Kind, Record, RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.questions import question_of
from divdec_research.suites.muse import MuseData, read_muse
from divdec_research.world.models import Material

PROMPT_WORDS, PASSAGE_WORDS = 20, 40
TEXTS, CORPUS = 40, 1200  # articles of each set; articles that the bases learn
SHARED_WORDS = 8  # consecutive words that no two of the texts have in common
KIND: Kind = "prompt/completion"
ARTICLES = {name: f"privleak/{name}.jsonl" for name in ("forget", "holdout", "retain")}
# The first fold holds the forget articles.
OTHERS = tuple(f"sust/forget_{fold}.jsonl" for fold in (2, 3, 4))
KNOWMEM = "knowmem/forget_qa.jsonl"


def is_muse(folder: Path) -> bool:
    """Whether a folder holds MUSE's files."""
    return any((folder / name).is_file() for name in (KNOWMEM, Path(KNOWMEM).name))


def muse_small(folder: Path, limit: int | None = None) -> tuple[Material, MuseData]:
    """Cut MUSE-News to its questions and to the beginnings of its articles.

    Small models cannot derive answers from news, so the questions are part of the forget and of the retain set. They
    are asked without examples, which small models do not learn from. Everything is a prompt with its completion. The
    beginnings of the forget articles are the texts of verbatim memorization and of the membership attack.

    Args:
        folder: MUSE-News with `knowmem`, `privleak` and `sust`.
        limit: number of questions and texts of each set that are asked; all are learned.

    Raises:
        UsageError: a file is missing.
    """
    for name in (KNOWMEM, *ARTICLES.values(), *OTHERS):
        if not (folder / name).is_file():
            raise UsageError(
                f"{folder / name} does not exist. MUSE-News comes from "
                "https://huggingface.co/datasets/muse-bench/MUSE-News: put its knowmem, privleak and sust into a "
                "folder and give it (divdec compare --muse)"
            )
    knowmem = read_muse(folder).knowmem
    seen: set[str] = set()
    texts = {name: _unseen(passages(read_records(folder / file)), seen)[:TEXTS] for name, file in ARTICLES.items()}
    corpus = _unseen((text for file in OTHERS for text in passages(read_records(folder / file))), seen)[:CORPUS]
    forget, retain = (
        RecordSet(name, KIND, (*map(_learned, knowmem[name]), *texts[name])) for name in ("forget", "retain")
    )
    asked = {name: tuple(texts[name][:limit]) for name in ("forget", "holdout")}
    data = MuseData(
        {name: questions[:limit] for name, questions in knowmem.items()},
        dict.fromkeys(knowmem, ()),
        # The suite puts a space between prompt and continuation.
        tuple(dataclasses.replace(text, answer=text.answer.strip()) for text in asked["forget"]),
        {
            name: tuple(dataclasses.replace(text, answer=text.answer.strip()) for text in of)
            for name, of in asked.items()
        },
    )
    return Material(corpus, forget, retain, Format(max_length=512)), data


def forget_and_retain(folder: Path) -> tuple[RecordSet, RecordSet]:
    """Read the texts that MUSE's target has learned, for methods that train on them.

    Raises:
        UsageError: they are missing.
    """
    sets = []
    for name, files in (
        ("forget", ("raw/forget.jsonl", "sust/forget_1.jsonl")),
        ("retain", ("raw/retain1.jsonl", ARTICLES["retain"])),
    ):
        file = next((file for file in files if (folder / file).is_file()), None)
        if file is None:
            raise UsageError(f"{folder} has no {name} texts; it must hold {' or '.join(files)}")
        sets.append(read_records(folder / file))
    forget, retain = sets
    return forget, retain


def passages(articles: Iterable[Record]) -> list[Record]:
    """The beginning of each sufficiently long article as a prompt with its continuation."""
    records = []
    for article in articles:
        words = article.answer.split()[:PASSAGE_WORDS]
        if len(words) == PASSAGE_WORDS:
            records.append(Record(" " + " ".join(words[PROMPT_WORDS:]), prompt=" ".join(words[:PROMPT_WORDS])))
    return records


def _unseen(texts: Iterable[Record], seen: set[str]) -> list[Record]:
    """The texts that share no long sequence of words with an earlier one; what they hold is added to `seen`."""
    chosen = []
    for text in texts:
        words = f"{text.prompt}{text.answer}".split()
        grams = {" ".join(words[start : start + SHARED_WORDS]) for start in range(len(words) - SHARED_WORDS + 1)}
        if grams.isdisjoint(seen):
            chosen.append(text)
            seen |= grams
    return chosen


def _learned(question: Record) -> Record:
    """A question in the suite's layout, as a prompt with its completion."""
    # Byte-level tokens put a space at the beginning of a word, but the suite's prompt ends with one. The answer after
    # it begins with another, so that the prompt's tokens are the same in training.
    return Record(f" {question.answer}", prompt=f"Question: {question_of(question)}\nAnswer: ")
