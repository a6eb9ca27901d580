"""Request sequences: training data, and forget requests that arrive one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from divdec.data.formatting import Format
from divdec.data.records import Kind, Record, RecordSet, read_records
from divdec.data.world import WorldSettings, build_world
from divdec.demo import run as demo
from divdec.demo.models import Material, Questions, Recipe
from divdec.errors import UsageError
from divdec.research.compare.benchmark import TOFU_SMALL
from divdec.research.compare.muse_news import passages

RETAIN = "retain"
ARTICLES, CORPUS = 40, 1200  # of a fold of MUSE-News; of the remaining articles of all folds
MUSE_FILES = ("knowmem/forget_qa.jsonl", "knowmem/retain_qa.jsonl", "knowmem/retain_qa_icl.jsonl",
              "knowmem/forget_qa_icl.jsonl", "privleak/retain.jsonl")  # fmt: skip
MUSE_FOLDS = 4
MUSE_RECIPE = dataclasses.replace(
    TOFU_SMALL,
    target_pretraining=dataclasses.replace(TOFU_SMALL.target_pretraining, epochs=4.0),
    auxiliary_pretraining=dataclasses.replace(TOFU_SMALL.auxiliary_pretraining, epochs=4.0),
)


@dataclasses.dataclass(frozen=True)
class RequestSequence:
    """A target's data, and the forget requests for it."""

    title: str
    corpus: Sequence[Record]
    """Pretraining texts of the bases, prompts included."""
    requests: tuple[RecordSet, ...]
    """In order of arrival; all of one kind, and no record in two of them."""
    retain: RecordSet
    questions: tuple[Questions, ...]
    """Question sets for every model: one per request with its name, then `RETAIN`, then further sets."""
    score: str
    """Kind of an item's score, from 0 to 1: 'accuracy' (the answer states the fact) or 'ROUGE-L F1'."""
    recipe: Recipe
    max_new_tokens: int
    form: Format = Format()  # noqa: RUF009

    texts = Material.texts


def demo_sequence(
    steps: int, seed: int, world: WorldSettings | None = None, recipe: Recipe | None = None
) -> RequestSequence:
    """Divide the authors that the demo forgets into requests.

    Args:
        steps: number of requests.
        seed: seed of the world.
        world: its size; the demo's by default, whose bases are then shared with the demo.
        recipe: the demo's by default.

    Raises:
        UsageError: there are more requests than authors, or fewer than two.
    """
    built = build_world(dataclasses.replace(world or demo.WORLD, seed=seed))
    authors = [author.name for author in built.people["forget"]]
    _check_steps(steps, len(authors), "authors to forget")
    whole = demo.material_of(built)
    demo_sets = {questions.name: questions for questions in demo.question_sets(built)}
    requests, sets = [], []
    for step in range(steps):
        names = set(authors[step * len(authors) // steps : (step + 1) * len(authors) // steps])
        chosen = [question for question in built.forget if question.subject in names]
        records = tuple(
            record
            for record, question in zip(whole.forget.records, built.forget, strict=True)
            if question.subject in names
        )
        requests.append(RecordSet(request_name(step + 1), whole.forget.kind, records))
        sets.append(Questions(request_name(step + 1), records, tuple(question.fact for question in chosen)))
    return RequestSequence(
        title=f"demo world, seed {seed}: {len(authors)} authors to forget in {steps} requests",
        corpus=whole.corpus,
        requests=tuple(requests),
        retain=whole.retain,
        questions=(*sets, demo_sets["retain"], demo_sets["holdout"]),
        score="accuracy",
        recipe=recipe or demo.RECIPE,
        max_new_tokens=32,
        form=whole.form,
    )


def muse_sequence(
    data: Path, steps: int, articles: int = ARTICLES, corpus: int = CORPUS, recipe: Recipe = MUSE_RECIPE
) -> RequestSequence:
    """Cut MUSE-News' sustainability folds to beginnings of articles, one request per fold.

    The first request, MUSE's original forget set, also has the questions of knowmem: small models cannot derive
    answers from news, so they learn the answers. Everything is a prompt with its completion, in MUSE's layout.

    Args:
        data: folder with MUSE-News: `sust`, `knowmem` and `privleak`.
        steps: number of requests.
        articles: articles of each fold, and number of retain texts.
        corpus: number of other articles that the bases learn.
        recipe: sizes and training.

    Raises:
        UsageError: a file is missing, or there are more steps than folds.
    """
    _check_steps(steps, MUSE_FOLDS, "sustainability folds of MUSE-News")
    folds = [f"sust/forget_{fold}.jsonl" for fold in range(1, MUSE_FOLDS + 1)]
    for name in (*MUSE_FILES, *folds):
        if not (data / name).is_file():
            raise UsageError(
                f"{data / name} does not exist; MUSE-News comes from "
                "https://huggingface.co/datasets/muse-bench/MUSE-News: put its knowmem, privleak and sust into a "
                "folder and give it (--data)"
            )
    beginnings = [passages(read_records(data / name)) for name in folds]
    retain = passages(read_records(data / "privleak/retain.jsonl"))[:articles]
    questions = {name: _questions(data / f"knowmem/{name}_qa.jsonl") for name in ("forget", RETAIN)}
    shots = [record for name in ("forget", RETAIN) for record in _questions(data / f"knowmem/{name}_qa_icl.jsonl")]
    kind: Kind = "prompt/completion"
    requests, sets = [], []
    for step, fold in enumerate(beginnings[:steps], start=1):
        texts = tuple(fold[:articles])
        own = questions["forget"] if step == 1 else ()
        requests.append(RecordSet(request_name(step), kind, (*own, *texts)))
        sets.append(Questions(request_name(step), own or texts))
    others = [record for fold in beginnings for record in fold[articles:]][:corpus]
    return RequestSequence(
        title=f"MUSE-News cut to {articles} articles a fold, {steps} requests",
        corpus=[*others, *shots],
        requests=tuple(requests),
        retain=RecordSet(RETAIN, kind, (*questions[RETAIN], *retain)),
        questions=(
            *sets,
            Questions(RETAIN, questions[RETAIN]),
            Questions(f"{request_name(1)}, articles", tuple(beginnings[0][:articles])),
            Questions("retain, articles", tuple(retain)),
        ),
        score="ROUGE-L F1",
        recipe=recipe,
        max_new_tokens=40,
    )


def request_name(step: int) -> str:
    """Name of a step's request, counted from 1."""
    return f"request {step}"


def _check_steps(steps: int, most: int, what: str) -> None:
    if not 2 <= steps <= most:
        raise UsageError(f"{steps} requests of {most} {what}; accepted: 2 to {most}")


def _questions(path: Path) -> tuple[Record, ...]:
    """MUSE's questions in MUSE's layout; the space belongs to the answer's first token."""
    return tuple(
        Record(f" {record.answer}", prompt=f"Question: {record.messages[-1].content}\nAnswer:")
        for record in read_records(path)
    )
