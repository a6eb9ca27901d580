"""Sequential requests (sustainability) and growing forget sets (scaling), steered and distilled, on small models.

Paper, section Sustainability and Scaling and figure scal_sust; the tables of docs/depth_and_sequential.md. Step i of
both protocols ends with the first i requests forgotten.

- Sustainability: only the new request is at hand. The pair continues from the previous pair (p learns the new request
  and the retain set, q the retain set); the student continues from the previous student, on the new request alone.
- Scaling: all i requests are at hand at once. p starts from the auxiliaries' base, the student from the target.

The steered model of step i is the target with the pair of step i; the distilled model is the student of step i, whose
teacher that was. Both protocols share the first step.

    make sequential                                            # the demo's world, three requests
    python benchmarks/sequential.py muse --data path/to/muse_news --steps 4
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm.auto import tqdm

from divdec.data.formatting import Example, encode_records, encode_set
from divdec.data.records import write_records
from divdec.demo.models import Questions, StageCache, label_all_tokens, train_tokenizer
from divdec.errors import UsageError
from divdec.evaluation.aggregate import Bootstrap
from divdec.evaluation.generation import answers
from divdec.evaluation.metrics import contains_fact, rouge
from divdec.model.bundle import write_bundle
from divdec.model.checkpoint import load_model
from divdec.model.modeling import DivergenceForCausalLM
from divdec.report.style import style, svg_text
from divdec.research.charts import markdown_table
from divdec.research.figures.runs import distance_figure
from divdec.runs import ResultCache, RunFolder, cache_folder, read_record, write_json, write_text
from divdec.steering import Steering
from divdec.training.distillation import distill
from divdec.training.fine_tuning import Interrupted
from divdec.training.settings import DistillationSettings
from sequential_data import RETAIN, RequestSequence, demo_sequence, muse_sequence, request_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROTOCOLS = ("sustainability", "scaling")
WORKING = ("requests", "rows")
STALE = ("bundles", "students", *WORKING, "result.json", "items.jsonl", "table.md", "distance.svg")
Scores = dict[str, list[float]]
"""Each item's score from 0 to 1, by question set."""


@dataclasses.dataclass(frozen=True)
class SequentialSettings:
    """Steering and distillation of every step."""

    steering: str = "linear:1.5"
    """The rule of every pair, and of the teachers."""
    auxiliaries: Literal["onwards", "anew"] = "onwards"
    """Sustainability's pairs: 'onwards' continues from the previous pair with the new request alone; 'anew' trains p
    from the auxiliaries' base on all requests so far, as scaling does."""
    temperature: float = 1.5
    """T of the distillation loss."""
    lr: float = 2e-4
    """Peak learning rate of distillation."""
    epochs: float = 10.0
    """Passes of distillation over a step's requests."""
    seed: int = 0
    """Seed of initial weights, data order and bootstrap."""

    def __post_init__(self) -> None:
        Steering.parse(self.steering)


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two auxiliaries of a step."""

    retain: Path
    forget: Path


@dataclasses.dataclass(frozen=True)
class SequenceStep:
    """Scores of a method after a number of requests."""

    protocol: str
    """'sustainability' or 'scaling'."""
    method: str
    """'steered' or 'distilled'."""
    step: int
    """Number of requests so far, from 1."""
    scores: Mapping[str, Sequence[float]]
    """Score of each item, from 0 to 1, by the name of the set."""
    distance: float
    """Distance from the method's own first step, in points of 100."""
    low: float
    """Lower end of its interval."""
    high: float
    to_retrained: float
    """Distance from the retrained model, in points of 100."""

    @property
    def means(self) -> dict[str, float]:
        """Mean score by the name of the set."""
        return {name: statistics.fmean(scores) for name, scores in self.scores.items()}

    def to_dict(self) -> dict[str, Any]:
        """The figures without the items, as JSON values."""
        return {
            "protocol": self.protocol,
            "method": self.method,
            "step": self.step,
            "scores": self.means,
            "distance": self.distance,
            "distance_interval": [self.low, self.high],
            "distance_to_retrained": self.to_retrained,
        }


@dataclasses.dataclass(frozen=True)
class SequenceModels:
    """Folders of the models that all steps share, and of each step's pair."""

    tokenizer: PreTrainedTokenizerBase
    target: Path
    retrain: Path
    pairs: dict[tuple[str, int], Pair]
    """By protocol and step."""


@dataclasses.dataclass(frozen=True)
class SequenceEvaluator:
    """Asks models the questions of a sequence; answers are cached."""

    sequence: RequestSequence
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    report: Callable[[str], None]
    rows: dict[str, dict[str, list[dict[str, Any]]]] = dataclasses.field(default_factory=dict)
    """Answers with their scores, by model and question set."""

    def plain(self, name: str, checkpoint: Path) -> Scores:
        """Scores of an ordinary checkpoint."""
        return self._scores(name, lambda: load_model(checkpoint).eval())

    def steered(self, name: str, bundle: Path) -> Scores:
        """Scores of a bundle."""
        return self._scores(name, lambda: DivergenceForCausalLM.from_pretrained(bundle))

    def items(self) -> list[dict[str, Any]]:
        """All answers of all models, a row each."""
        return [
            {"model": name, "asked": asked, "index": index, **item}
            for name, rows in sorted(self.rows.items())
            for asked, items in rows.items()
            for index, item in enumerate(items)
        ]

    def _scores(self, name: str, load: Callable[[], PreTrainedModel]) -> Scores:
        cache = ResultCache(self.folder)
        if cache.has(name, None):
            self.report(f"{name}: already measured")
        self.rows[name] = cache.get(name, None, lambda: self._ask(name, load()))
        return {asked: [item["score"] for item in items] for asked, items in self.rows[name].items()}

    def _ask(self, name: str, model: PreTrainedModel) -> dict[str, list[dict[str, Any]]]:
        total = sum(len(questions.records) for questions in self.sequence.questions)
        rows = {}
        with tqdm(total=total, desc=f"{name:<26}", unit="answer", dynamic_ncols=True) as bar:
            for questions in self.sequence.questions:
                rows[questions.name] = self._items(model, questions)
                bar.update(len(questions.records))
        return rows

    def _items(self, model: PreTrainedModel, questions: Questions) -> list[dict[str, Any]]:
        records, length = questions.records, self.sequence.max_new_tokens
        texts = answers(model, self.tokenizer, records, form=self.sequence.form, max_new_tokens=length)
        if questions.facts is not None:
            scores = [float(contains_fact(text, fact)) for text, fact in zip(texts, questions.facts, strict=True)]
        else:
            scores = [rouge(text, record.answer)["rougeL_f1"] for text, record in zip(texts, records, strict=True)]
        return [{"score": score, "answer": text} for score, text in zip(scores, texts, strict=True)]


def run_sequential(
    sequence: RequestSequence,
    settings: SequentialSettings,
    output: Path,
    cache: Path,
    *,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train the models that the cache lacks, distill, measure, and write table, plot, figures and items into `output`.

    Args:
        sequence: the target's data and requests.
        settings: steering and distillation.
        output: folder for result.json, items.jsonl, table.md, distance.svg and run.json, with the bundle and the
            student of every step. A stopped run continues there.
        cache: folder of finished stages.
        overwrite: replace an earlier result in `output`.
        report: receives one line per stage.

    Returns:
        The content of result.json.

    Raises:
        UsageError: the output holds something else, or a setting cannot be used; nothing has been trained.
        Interrupted: on Ctrl-C while a model trains; the same call continues.
    """
    started = time.perf_counter()
    data = [sequence.texts, [one.sha256 for one in sequence.requests], sequence.retain.sha256, sequence.title]
    decides = [data, dataclasses.asdict(sequence.recipe), dataclasses.asdict(settings)]
    run = RunFolder.open(output, "sequential", settings, decides, overwrite=overwrite, stale=STALE)
    models = train_models(sequence, settings, cache, report)
    requests = write_requests(sequence, output / "requests")

    evaluator = SequenceEvaluator(sequence, models.tokenizer, output / "rows", report)
    plain = {name: evaluator.plain(name, getattr(models, attribute))
             for name, attribute in (("target", "target"), ("retrained", "retrain"))}  # fmt: skip
    steps: list[SequenceStep] = []
    students: dict[tuple[str, int], Path] = {}
    bootstrap = Bootstrap(seed=settings.seed)
    for protocol in PROTOCOLS:
        first: dict[str, Scores] = {}
        for step in range(1, len(sequence.requests) + 1):
            name = f"{protocol}-{step}" if step > 1 else "step-1"  # both protocols share the first step
            bundle = write_step(
                output / "bundles" / name, models, models.pairs[protocol, step], sequence, settings, step
            )
            before = students.get((protocol, step - 1)) if protocol == "sustainability" else None
            request = requests["new" if protocol == "sustainability" else "all", step]
            student = distill_step(output / "students" / name, bundle, request, before, sequence, settings, report)
            students[protocol, step] = student
            rows = {
                "steered": evaluator.steered(f"{name}-steered", bundle),
                "distilled": evaluator.plain(f"{name}-distilled", student),
            }
            first = first or rows
            for method, scores in rows.items():
                low, high = distance_interval(scores, first[method], bootstrap)
                steps.append(
                    SequenceStep(
                        protocol, method, step, scores,
                        distance=distance(scores, first[method]), low=low, high=high,
                        to_retrained=distance(scores, plain["retrained"]),
                    )
                )  # fmt: skip
    references = {name: {asked: statistics.fmean(of) for asked, of in own.items()} for name, own in plain.items()}
    result = {
        "title": sequence.title,
        "score": sequence.score,
        "level": bootstrap.level,
        "draws": bootstrap.draws,
        "references": references,
        "steps": [step.to_dict() for step in steps],
    }
    write_json(output / "result.json", result)
    items = [json.dumps(item, ensure_ascii=False) for item in evaluator.items()]
    write_text(output / "items.jsonl", "\n".join(items) + "\n")
    write_text(output / "table.md", sequential_table(sequence.title, sequence.score, references, steps))
    with style("divdec-sequential"):
        figure = distance_figure([step.to_dict() for step in steps], sequence.score, bootstrap.level)
        write_text(output / "distance.svg", svg_text(figure))
    seconds = round(time.perf_counter() - started, 1)
    run.finish(title=sequence.title, seconds=seconds)
    for name in WORKING:
        shutil.rmtree(output / name, ignore_errors=True)
    return {**result, "seconds": seconds}


def train_models(
    sequence: RequestSequence, settings: SequentialSettings, cache: Path, report: Callable[[str], None]
) -> SequenceModels:
    """Train the models that the cache does not hold."""
    cache.mkdir(parents=True, exist_ok=True)
    recipe, form = sequence.recipe, sequence.form
    tokenizer = train_tokenizer(sequence.texts, recipe.vocab_size)
    stages = StageCache(cache, tokenizer, settings.seed, report)
    corpus = [label_all_tokens(example) for example in encode_records(sequence.corpus, tokenizer, form)]
    retain = encode_set(sequence.retain, tokenizer, form)
    requests = [encode_set(request, tokenizer, form) for request in sequence.requests]

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
        if before and settings.auxiliaries == "onwards":
            pairs["sustainability", step] = pair(before.retain, before.forget, new + retain)
        else:
            pairs["sustainability", step] = pairs["scaling", step]
    return SequenceModels(tokenizer, target, retrain, pairs)


def write_step(
    folder: Path, models: SequenceModels, pair: Pair, sequence: RequestSequence, settings: SequentialSettings, step: int
) -> Path:
    """Write the bundle of a step: the target with the step's pair."""
    folder.parent.mkdir(exist_ok=True)
    return write_bundle(
        folder,
        target=str(models.target),
        retain_auxiliary=str(pair.retain),
        forget_auxiliary=str(pair.forget),
        steering=settings.steering,
        overwrite=True,
        forget_set="; ".join(request.label for request in sequence.requests[:step]),
    )


def distill_step(
    folder: Path,
    bundle: Path,
    data: Path,
    before: Path | None,
    sequence: RequestSequence,
    settings: SequentialSettings,
    report: Callable[[str], None],
) -> Path:
    """Distill a step, unless an earlier call has; the same as `divdec distill --init-student`."""
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
            max_length=sequence.form.max_length,
            seed=settings.seed,
        ),
        report=lambda line: report(f"{folder.name}: {line}"),
    )
    return folder


def write_requests(sequence: RequestSequence, folder: Path) -> dict[tuple[str, int], Path]:
    """Write each request alone ('new') and with all before it ('all') to a file, by step."""
    folder.mkdir(exist_ok=True)
    paths = {}
    for step in range(1, len(sequence.requests) + 1):
        for kind, requests in (("new", sequence.requests[step - 1 : step]), ("all", sequence.requests[:step])):
            path = folder / f"{kind}-{step}.jsonl"
            write_records(path, itertools.chain.from_iterable(requests))
            paths[kind, step] = path
    return paths


def distance(scores: Mapping[str, Sequence[float]], first: Mapping[str, Sequence[float]]) -> float:
    """Euclidean distance between two models' mean scores on the original forget set and the retain set.

    In points of 100: √((100·Δforget)² + (100·Δretain)²) (paper, figure scal_sust).
    """
    names = (request_name(1), RETAIN)
    return sum((100 * (statistics.fmean(scores[name]) - statistics.fmean(first[name]))) ** 2 for name in names) ** 0.5


def distance_interval(
    scores: Mapping[str, Sequence[float]], first: Mapping[str, Sequence[float]], bootstrap: Bootstrap
) -> tuple[float, float]:
    """The percentile interval of `distance`: both sets are resampled, with the same items for both models."""
    squares = np.zeros(bootstrap.draws)
    for name in (request_name(1), RETAIN):
        differences = np.asarray(scores[name]) - np.asarray(first[name])
        counts = bootstrap.counts(len(differences), name)
        squares += (100 * (counts @ differences) / len(differences)) ** 2
    return bootstrap.interval(np.sqrt(squares))


def sequential_table(
    title: str, score: str, references: Mapping[str, Mapping[str, float]], steps: Sequence[SequenceStep]
) -> str:
    """Format mean scores in percent as Markdown; scores of requests that come later are in brackets.

    Args:
        title: title of the experiment.
        score: what an item's score is.
        references: mean scores of target and retrained model, by name.
        steps: all steps.
    """
    sets = list(steps[0].scores)
    rows = [[name, "", *(f"{100 * means[part]:.1f}" for part in sets), "", ""] for name, means in references.items()]
    for step in steps:
        cells = []
        for name, value in step.means.items():
            first, _, rest = name.partition(" ")
            later = first == "request" and int(rest.split(",")[0]) > step.step
            cells.append(f"({100 * value:.1f})" if later else f"{100 * value:.1f}")
        away = f"{step.distance:.1f} [{step.low:.1f}, {step.high:.1f}]" if step.step > 1 else "0"
        rows.append([f"{step.protocol}, {step.method}", str(step.step), *cells, away, f"{step.to_retrained:.1f}"])
    header = ["", "step", *sets, "distance from step 1", "distance from retrained"]
    return f"{title}. {score} in percent.\n\n{markdown_table(header, rows, align_right=True)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("demo", "muse"))
    parser.add_argument("--steps", type=int, default=3, help="number of requests")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/muse_news"), help="folder with MUSE-News")
    parser.add_argument("--steering", default=SequentialSettings.steering)
    parser.add_argument("--auxiliaries", choices=("onwards", "anew"), default=SequentialSettings.auxiliaries)
    parser.add_argument("--temperature", type=float, default=SequentialSettings.temperature)
    parser.add_argument("--lr", type=float, default=SequentialSettings.lr, help="of distillation")
    parser.add_argument("--epochs", type=float, default=SequentialSettings.epochs, help="of distillation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="run folder; runs/sequential-WORLD by default")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    output = args.output or Path("runs") / f"sequential-{args.world}"
    try:
        demo = args.world == "demo"
        sequence = demo_sequence(args.steps, args.seed) if demo else muse_sequence(args.data, args.steps)
        fields = [field.name for field in dataclasses.fields(SequentialSettings)]
        settings = SequentialSettings(**{name: getattr(args, name) for name in fields})
        cache = cache_folder() / ("demo" if demo else "sequential-muse") / "models"
        result = run_sequential(
            sequence, settings, output, cache, overwrite=args.overwrite,
            report=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    except UsageError as error:
        print(f"sequential: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"sequential: {error or 'interrupted'}; the same command continues from there", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result))
    else:
        print((output / "table.md").read_text() + f"\n{result['seconds']:.0f} s. {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
