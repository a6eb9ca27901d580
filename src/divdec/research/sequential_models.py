"""How the steps of a course are made: pairs, bundles and students. It measures nothing.

The stages that all steps share come from a cache; a student is what `divdec distill` makes, in the run's own folder.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from divdec.data.formatting import Example, encode_records, encode_set
from divdec.data.records import write_records
from divdec.model.bundle import write_bundle
from divdec.research.sequential_material import Course
from divdec.research.small_models import train_tokenizer
from divdec.research.stages import Stages, unmasked
from divdec.runs import read_record
from divdec.steering import Steering
from divdec.training.settings import DistillationSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class SequentialSettings:
    """How every step is steered and distilled."""

    steering: str = "linear:1.5"
    """The rule of every pair, and of the teachers."""
    auxiliaries: Literal["onwards", "anew"] = "onwards"
    """Sustainability's pairs: 'onwards' goes on from the pair before with the new request alone; 'anew' trains p from
    the auxiliaries' base on all requests so far, as scaling does."""
    temperature: float = 1.5
    """T of the distillation loss."""
    lr: float = 2e-4
    """Peak learning rate of distillation."""
    epochs: float = 10.0
    """Passes of distillation over a step's requests."""
    seed: int = 0
    """Of initial weights, order and bootstrap."""

    def __post_init__(self) -> None:
        Steering.parse(self.steering)


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two auxiliaries of a step."""

    retain: Path
    forget: Path


@dataclasses.dataclass(frozen=True)
class Models:
    """Where the models lie that all steps share, and the pair of each."""

    tokenizer: PreTrainedTokenizerBase
    target: Path
    retrain: Path
    pairs: dict[tuple[str, int], Pair]
    """By protocol and step."""

    @classmethod
    def trained(
        cls, course: Course, settings: SequentialSettings, cache: Path, report: Callable[[str], None]
    ) -> Models:
        """Train whatever the cache does not hold yet."""
        cache.mkdir(parents=True, exist_ok=True)
        recipe, form = course.recipe, course.form
        tokenizer = train_tokenizer(course.texts, recipe.vocab_size)
        stages = Stages(cache, tokenizer, settings.seed, report)
        corpus = [unmasked(example) for example in encode_records(course.corpus, tokenizer, form)]
        retain = encode_set(course.retain, tokenizer, form)
        requests = [encode_set(request, tokenizer, form) for request in course.requests]

        def seen(count: int) -> list[Example]:
            return [example for request in requests[:count] for example in request] + retain

        large = stages.run("large base", recipe.target, corpus, recipe.target_pretraining)
        target = stages.run("target", large, seen(len(requests)), recipe.target_tuning)
        retrain = stages.run("retrain reference", large, retain, recipe.target_tuning)
        small = stages.run("small base", recipe.auxiliary, corpus, recipe.auxiliary_pretraining)
        base = stages.run("auxiliary base", small, retain, recipe.auxiliary_base_tuning)

        def pair(q_start: Path, p_start: Path, p_examples: list[Example]) -> Pair:
            q = stages.run("retain auxiliary", q_start, retain, recipe.auxiliary_tuning)
            return Pair(q, stages.run("forget auxiliary", p_start, p_examples, recipe.auxiliary_tuning))

        pairs: dict[tuple[str, int], Pair] = {}
        for step, new in enumerate(requests, start=1):
            pairs["scaling", step] = pair(base, base, seen(step))
            before = pairs.get(("sustainability", step - 1))
            onwards = before is not None and settings.auxiliaries == "onwards"
            pairs["sustainability", step] = (
                pair(before.retain, before.forget, new + retain) if onwards and before else pairs["scaling", step]
            )
        return cls(tokenizer, target, retrain, pairs)


def write_step(
    folder: Path, models: Models, pair: Pair, course: Course, settings: SequentialSettings, step: int
) -> Path:
    """Write the bundle that is deployed, steered, at a step: the target with the step's pair."""
    folder.parent.mkdir(exist_ok=True)
    return write_bundle(
        folder,
        target=str(models.target),
        retain_auxiliary=str(pair.retain),
        forget_auxiliary=str(pair.forget),
        steering=settings.steering,
        overwrite=True,
        forget_set="; ".join(request.label for request in course.requests[:step]),
    )


def distil_step(
    folder: Path,
    bundle: Path,
    data: Path,
    before: Path | None,
    course: Course,
    settings: SequentialSettings,
    report: Callable[[str], None],
) -> Path:
    """Distil a step, unless an earlier call has; the same as `divdec distill --init-student`."""
    from divdec.training.distillation import distill

    if read_record(folder) is not None:
        report(f"{folder.name}: already distilled")
        return folder
    folder.parent.mkdir(exist_ok=True)
    distill(
        DistillationSettings(
            bundle=str(bundle),
            forget=str(data),
            output=str(folder),
            init_student=None if before is None else str(before),
            temperature=settings.temperature,
            lr=settings.lr,
            epochs=settings.epochs,
            max_length=course.form.max_length,
            seed=settings.seed,
        ),
        report=lambda line: report(f"{folder.name}: {line}"),
    )
    return folder


def write_requests(course: Course, folder: Path) -> dict[tuple[str, int], Path]:
    """Each request alone ('new') and with all before it ('all') as a file, by step."""
    folder.mkdir(exist_ok=True)
    found = {}
    for step in range(1, len(course.requests) + 1):
        for kind, requests in (("new", course.requests[step - 1 : step]), ("all", course.requests[:step])):
            path = folder / f"{kind}-{step}.jsonl"
            write_records(path, itertools.chain.from_iterable(requests))
            found[kind, step] = path
    return found
