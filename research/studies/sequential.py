"""Sequential requests (sustainability) and growing forget sets (scaling), with steered, distilled and baseline models.

Paper, section Sustainability and Scaling and figure scal_sust; the results in research/studies/README.md. Step i of
both protocols ends with the first i requests forgotten.

- Sustainability: only the new request is at hand. A pair continues from the previous pair, a trained model from the
  previous one.
- Scaling: all i requests are at hand at once. A pair starts from the base, a trained model from the target.

Every method has three settings. Step 1, which both protocols share, chooses one of them on every second question.

    make sequential                                            # the demo's world, three requests
    python -m research.studies.sequential muse --data path/to/muse_news --steps 4
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from divdec.checkpoint import load_model
from divdec.data.formatting import Example, Format, encode_records, encode_set
from divdec.data.records import Kind, Record, RecordSet, read_records, write_records
from divdec.errors import Diverged, Interrupted, UsageError
from divdec.evaluation.generation import answers
from divdec.model.bundle import is_bundle, write_bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import ResultCache, RunFolder, cache_folder, write_json, write_text
from divdec.steering import Steering
from divdec.training.distillation import distill
from divdec.training.settings import DistillationSettings
from divdec_research.baselines.run import MODEL, run_baseline
from divdec_research.baselines.settings import BaselineSettings
from divdec_research.baselines.table import METHODS as BASELINES
from divdec_research.compare.benchmark import TOFU_SMALL
from divdec_research.compare.muse_news import passages
from divdec_research.figures.runs import distance_figure
from divdec_research.report.style import style, write_figure
from divdec_research.report.tables import markdown_table
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.suites.metrics import rouge
from divdec_research.world import demo as demo
from divdec_research.world.facts import WorldSettings, build_world
from divdec_research.world.models import Material, Questions, Recipe, StageCache, label_all_tokens, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        pairs = questions["forget"] if step == 1 else ()
        requests.append(RecordSet(request_name(step), kind, (*pairs, *texts)))
        sets.append(Questions(request_name(step), pairs or texts))
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


PROTOCOLS = ("sustainability", "scaling")
STEERED, FORGET_RETAIN, DISTILLED = "steered", "steered, forget-retain", "distilled"
METHODS = (STEERED, FORGET_RETAIN, DISTILLED, "grad-diff", "npo")
"""The distilled model's teacher is `STEERED`, which comes first."""
WORKING = ("requests", "rows")
STALE = ("models", *WORKING, "result.json", "items.jsonl", "table.md", "distance.svg")
BATCH_SIZE = 16
Scores = dict[str, list[float]]
"""Each item's score from 0 to 1, by question set."""
Setting = str | float


@dataclasses.dataclass(frozen=True)
class SequentialSettings:
    """Settings to choose from at step 1, and what they have in common."""

    steering: tuple[str, ...] = ("linear:0.75", "linear:1.5", "linear:3")
    """Rules of each pair; the chosen one is also the teacher's."""
    lr: tuple[float, ...] = (2e-4, 5e-4, 1e-3)
    """Peak learning rates of distillation and of each baseline."""
    temperature: float = 1.5
    """T of the distillation loss."""
    epochs: float = 10.0
    """Passes of distillation and of the baselines over a step's requests."""
    seed: int = 0
    """Seed of initial weights, data order and bootstrap."""

    def __post_init__(self) -> None:
        for steering in self.steering:
            Steering.parse(steering)

    def of(self, method: str) -> tuple[Setting, ...]:
        """The settings of a method."""
        return self.steering if method in (STEERED, FORGET_RETAIN) else self.lr


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
    """One of `METHODS`."""
    setting: str
    """The setting that was chosen at step 1."""
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
            "setting": self.setting,
            "step": self.step,
            "scores": self.means,
            "distance": self.distance,
            "distance_interval": [self.low, self.high],
            "distance_to_retrained": self.to_retrained,
        }


@dataclasses.dataclass(frozen=True)
class SettingScores:
    """A method's first step with one of its settings, on every second question."""

    method: str
    setting: str
    request: float
    """Mean score on request 1."""
    retain: float
    to_retrained: float
    """Distance from the retrained model, in points of 100; the smallest is chosen."""


@dataclasses.dataclass(frozen=True)
class SequenceModels:
    """Folders of the models that all steps share, and of each step's pair."""

    tokenizer: PreTrainedTokenizerBase
    target: Path
    retrain: Path
    pairs: dict[tuple[str, str, int], Pair]
    """By method, protocol and step."""


@dataclasses.dataclass(frozen=True)
class SequenceEvaluator:
    """Asks models the questions of a sequence; answers are cached."""

    sequence: RequestSequence
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    report: Callable[[str], None]
    rows: dict[str, dict[str, list[dict[str, Any]]]] = dataclasses.field(default_factory=dict)
    """Answers with their scores, by model and question set."""

    def scores(self, name: str, folder: Path) -> Scores:
        """Scores of a checkpoint or of a bundle."""
        cache = ResultCache(self.folder)
        if cache.has(name, None):
            self.report(f"{name}: already measured")
        self.rows[name] = cache.get(name, None, lambda: self._ask(name, folder))
        return {asked: [item["score"] for item in items] for asked, items in self.rows[name].items()}

    def items(self) -> list[dict[str, Any]]:
        """All answers of all models, a row each."""
        return [
            {"model": name, "asked": asked, "index": index, **item}
            for name, rows in sorted(self.rows.items())
            for asked, items in rows.items()
            for index, item in enumerate(items)
        ]

    def _ask(self, name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
        model = DivergenceForCausalLM.from_pretrained(folder) if is_bundle(folder) else load_model(folder).eval()
        total = sum(len(questions.records) for questions in self.sequence.questions)
        rows = {}
        with tqdm(total=total, desc=f"{name:<40}", unit="answer", dynamic_ncols=True) as bar:
            for questions in self.sequence.questions:
                rows[questions.name] = self._items(model, questions)
                bar.update(len(questions.records))
        return rows

    def _items(self, model: Any, questions: Questions) -> list[dict[str, Any]]:
        records, length = questions.records, self.sequence.max_new_tokens
        texts = answers(model, self.tokenizer, records, form=self.sequence.form, max_new_tokens=length)
        if questions.facts is not None:
            scores = [float(fact in text) for text, fact in zip(texts, questions.facts, strict=True)]
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
    """Train what the cache and `output` lack, measure, and write table, plot, figures and items into `output`.

    Args:
        sequence: the target's data and requests.
        settings: what to choose from at step 1.
        output: folder for result.json, items.jsonl, table.md, distance.svg and run.json, with the bundles and models
            of every step. A stopped run continues there.
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
    data = [sequence.texts, [request.sha256 for request in sequence.requests], sequence.retain.sha256, sequence.title]
    decides = [data, dataclasses.asdict(sequence.recipe), dataclasses.asdict(settings)]
    with RunFolder.open(output, "sequential", settings, decides, overwrite=overwrite, stale=STALE) as run:
        models = train_models(sequence, settings.seed, cache, report)

        evaluator = SequenceEvaluator(sequence, models.tokenizer, output / "rows", report)
        plain = {name: evaluator.scores(name, folder)
                 for name, folder in (("target", models.target), ("retrained", models.retrain))}  # fmt: skip
        builder = SequenceBuilder(sequence, settings, models, output, report)

        def measure(method: str, protocol: str, step: int, setting: Setting) -> Scores:
            return evaluator.scores(
                builder.name(method, protocol, step, setting), builder.build(method, protocol, step, setting)
            )

        bootstrap = Bootstrap(seed=settings.seed)
        steps: list[SequenceStep] = []
        candidates: list[SettingScores] = []
        for method in METHODS:
            by_setting = {setting: measure(method, PROTOCOLS[0], 1, setting) for setting in settings.of(method)}
            setting, tried = choose_setting(method, by_setting, plain["retrained"])
            builder.chosen[method] = setting
            candidates += tried
            first = by_setting[setting]
            for protocol, step in itertools.product(PROTOCOLS, range(1, len(sequence.requests) + 1)):
                scores = first if step == 1 else measure(method, protocol, step, setting)
                low, high = distance_interval(scores, first, bootstrap)
                steps.append(
                    SequenceStep(
                        protocol, method, str(setting), step, scores,
                        distance=distance(scores, first), low=low, high=high,
                        to_retrained=distance(scores, plain["retrained"]),
                    )
                )  # fmt: skip
        references = {name: {asked: statistics.fmean(of) for asked, of in sets.items()} for name, sets in plain.items()}
        result = {
            "title": sequence.title,
            "score": sequence.score,
            "level": bootstrap.level,
            "draws": bootstrap.draws,
            "references": references,
            "candidates": [dataclasses.asdict(candidate) for candidate in candidates],
            "steps": [step.to_dict() for step in steps],
        }
        write_json(output / "result.json", result)
        items = [json.dumps(item, ensure_ascii=False) for item in evaluator.items()]
        write_text(output / "items.jsonl", "\n".join(items) + "\n")
        write_text(output / "table.md", sequential_table(sequence.title, sequence.score, references, candidates, steps))
        with style("divdec-sequential"):
            figure = distance_figure([step.to_dict() for step in steps], sequence.score, bootstrap.level)
            about = {"title": sequence.title, "description": sequence.score, "sources": ["result.json"]}
            write_figure(output / "distance.svg", figure, **about)
        seconds = round(time.perf_counter() - started, 1)
        run.finish(title=sequence.title, seconds=seconds)
        for name in WORKING:
            shutil.rmtree(output / name, ignore_errors=True)
        return {**result, "seconds": seconds}


def train_models(sequence: RequestSequence, seed: int, cache: Path, report: Callable[[str], None]) -> SequenceModels:
    """Train the models that the cache does not hold."""
    cache.mkdir(parents=True, exist_ok=True)
    recipe, form = sequence.recipe, sequence.form
    tokenizer = train_tokenizer(sequence.texts, recipe.vocab_size)
    stages = StageCache(cache, tokenizer, seed, report)
    corpus = [label_all_tokens(example) for example in encode_records(sequence.corpus, tokenizer, form)]
    retain = encode_set(sequence.retain, tokenizer, form)
    requests = [encode_set(request, tokenizer, form) for request in sequence.requests]

    large = stages.run("large base", recipe.target, corpus, recipe.target_pretraining)
    target = stages.run("target", large, [*itertools.chain(*requests), *retain], recipe.target_tuning)
    retrain = stages.run("retrain reference", large, retain, recipe.target_tuning)
    small = stages.run("small base", recipe.auxiliary, corpus, recipe.auxiliary_pretraining)
    base = stages.run("auxiliary base", small, retain, recipe.auxiliary_base_tuning)

    def pair(q_start: Path, p_start: Path, examples: list[Example]) -> Pair:
        q = stages.run("retain auxiliary", q_start, retain, recipe.auxiliary_tuning)
        return Pair(q, stages.run("forget auxiliary", p_start, examples + retain, recipe.auxiliary_tuning))

    def forget_retain_pair(p_start: Path, examples: list[Example]) -> Pair:
        # q is the small base after the retain set; p is trained likewise, on the requests.
        return Pair(base, stages.run("forget-only auxiliary", p_start, examples, recipe.auxiliary_base_tuning))

    pairs: dict[tuple[str, str, int], Pair] = {}
    for step, new in enumerate(requests, start=1):
        so_far = list(itertools.chain(*requests[:step]))
        pairs[STEERED, "scaling", step] = pair(base, base, so_far)
        pairs[FORGET_RETAIN, "scaling", step] = forget_retain_pair(small, so_far)
        if step == 1:
            pairs |= {(method, "sustainability", 1): pairs[method, "scaling", 1] for method in (STEERED, FORGET_RETAIN)}
            continue
        before = pairs[STEERED, "sustainability", step - 1]
        pairs[STEERED, "sustainability", step] = pair(before.retain, before.forget, new)
        before = pairs[FORGET_RETAIN, "sustainability", step - 1]
        pairs[FORGET_RETAIN, "sustainability", step] = forget_retain_pair(before.forget, new)
    return SequenceModels(tokenizer, target, retrain, pairs)


@dataclasses.dataclass(frozen=True)
class SequenceBuilder:
    """Builds the model of each method at each step, unless an earlier call has."""

    sequence: RequestSequence
    settings: SequentialSettings
    models: SequenceModels
    output: Path
    report: Callable[[str], None]
    chosen: dict[str, Setting] = dataclasses.field(default_factory=dict)
    """Each method's setting, once it is chosen."""

    def name(self, method: str, protocol: str, step: int, setting: Setting) -> str:
        """Name of a model and of its folder; the first step has one model for each setting."""
        name = f"{method} {protocol} {step}" if step > 1 else f"{method} step 1 {setting}"
        return name.replace(", ", "-").replace(":", "-").replace(" ", "-")

    def build(self, method: str, protocol: str, step: int, setting: Setting) -> Path:
        """Write a bundle or train a model.

        Returns:
            The bundle's or the checkpoint's folder.
        """
        checkpoint = self._checkpoint(method, protocol, step, setting)
        name = self.name(method, protocol, step, setting)
        if method in (STEERED, FORGET_RETAIN):
            return self._write_bundle(checkpoint, self.models.pairs[method, protocol, step], str(setting), step)
        if checkpoint.is_dir():
            self.report(f"{name}: already trained")
            return checkpoint
        onwards = protocol == "sustainability" and step > 1
        start = self._checkpoint(method, protocol, step - 1, setting) if onwards else self.models.target
        requests = self.sequence.requests[step - 1 if onwards else 0 : step]
        common = {
            "forget": self._write_data(f"{'new' if onwards else 'all'}-{step}", itertools.chain(*requests)),
            "output": str(self.output / "models" / name),
            "max_length": self.sequence.form.max_length,
            "seed": self.settings.seed,
        }

        def report(line: str) -> None:
            self.report(f"{name}: {line}")

        if method == DISTILLED:
            teacher = self._checkpoint(STEERED, protocol, step, self.chosen[STEERED])
            distill(
                DistillationSettings(
                    bundle=str(teacher), init_student=str(start), temperature=self.settings.temperature,
                    learning_rate=float(setting), epochs=self.settings.epochs, batch_size=BATCH_SIZE, **common,
                ),
                report,
            )  # fmt: skip
        else:
            baseline = BASELINES[method]
            options = baseline.settings(
                learning_rate=float(setting), epochs=self.settings.epochs,
                batch_size=BATCH_SIZE, gradient_accumulation=1,
            )  # fmt: skip
            retain = self._write_data("retain", self.sequence.retain)
            run_baseline(baseline, BaselineSettings(target=str(start), retain=retain, **common), options, report)
        return checkpoint

    def _checkpoint(self, method: str, protocol: str, step: int, setting: Setting) -> Path:
        folder = self.output / "models" / self.name(method, protocol, step, setting)
        return folder / MODEL if method in BASELINES else folder

    def _write_bundle(self, folder: Path, pair: Pair, steering: str, step: int) -> Path:
        folder.parent.mkdir(exist_ok=True)
        return write_bundle(
            folder,
            target=str(self.models.target),
            retain_auxiliary=str(pair.retain),
            forget_auxiliary=str(pair.forget),
            steering=steering,
            overwrite=True,
            forget_set="; ".join(request.label for request in self.sequence.requests[:step]),
        )

    def _write_data(self, name: str, records: Iterable[Record]) -> str:
        path = self.output / "requests" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_records(path, records)
        return str(path)


def choose_setting(
    method: str, by_setting: Mapping[Setting, Scores], retrained: Scores
) -> tuple[Setting, list[SettingScores]]:
    """Choose the setting whose first step is closest to the retrained model on every second item of each set."""

    def half(scores: Scores) -> Scores:
        return {name: values[::2] for name, values in scores.items()}

    tried = {}
    for setting, scores in by_setting.items():
        request, retain = (statistics.fmean(half(scores)[name]) for name in (request_name(1), RETAIN))
        tried[setting] = SettingScores(method, str(setting), request, retain, distance(half(scores), half(retrained)))
    return min(tried, key=lambda setting: tried[setting].to_retrained), list(tried.values())


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
    title: str,
    score: str,
    references: Mapping[str, Mapping[str, float]],
    candidates: Sequence[SettingScores],
    steps: Sequence[SequenceStep],
) -> str:
    """Format the choice of settings and the first and the last step as Markdown; result.json has all steps.

    Scores are in percent; those of requests that come later are in brackets.

    Args:
        title: title of the experiment.
        score: what an item's score is.
        references: mean scores of target and retrained model, by name.
        candidates: settings that were tried.
        steps: all steps.
    """
    chosen = {(step.method, step.setting) for step in steps}
    tried = [
        [
            trial.method, f"**{trial.setting}**" if (trial.method, trial.setting) in chosen else trial.setting,
            f"{100 * trial.request:.1f}", f"{100 * trial.retain:.1f}", f"{trial.to_retrained:.1f}",
        ]
        for trial in candidates
    ]  # fmt: skip
    sets = list(steps[0].scores)
    rows = [[name, "", *(f"{100 * means[part]:.1f}" for part in sets), "", ""] for name, means in references.items()]
    last = max(step.step for step in steps)
    shown = [step for step in steps if step.step == 1 and step.protocol == PROTOCOLS[0]]
    shown += [step for protocol in PROTOCOLS for step in steps if (step.protocol, step.step) == (protocol, last)]
    for step in shown:
        cells = []
        for name, value in step.means.items():
            first, _, rest = name.partition(" ")
            later = first == "request" and int(rest.split(",")[0]) > step.step
            cells.append(f"({100 * value:.1f})" if later else f"{100 * value:.1f}")
        away = f"{step.distance:.1f} [{step.low:.1f}, {step.high:.1f}]" if step.step > 1 else "0"
        name = f"{step.protocol}: {step.method}" if step.step > 1 else step.method
        rows.append([name, str(step.step), *cells, away, f"{step.to_retrained:.1f}"])
    header = ["", "step", *sets, "distance from step 1", "distance from retrained"]
    trials = markdown_table(
        ["method", "setting", request_name(1), RETAIN, "distance from retrained"], tried, align_right=True
    )
    return (
        f"{title}. {score} in percent.\n\n{markdown_table(header, rows, align_right=True)}\n"
        f"Step 1 on every second question, by setting; chosen settings are bold.\n\n{trials}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("demo", "muse"))
    parser.add_argument("--steps", type=int, default=3, help="number of requests")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/muse_news"), help="folder with MUSE-News")
    parser.add_argument("--steering", nargs="+", default=SequentialSettings.steering, help="rules to choose from")
    parser.add_argument("--temperature", type=float, default=SequentialSettings.temperature, help="of distillation")
    parser.add_argument(
        "--lr", nargs="+", type=float, default=SequentialSettings.lr, help="of training, to choose from"
    )
    parser.add_argument("--epochs", type=float, default=SequentialSettings.epochs, help="of distillation and baselines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="run folder; runs/sequential-WORLD by default")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    output = args.output or Path("runs") / f"sequential-{args.world}"
    try:
        demo = args.world == "demo"
        sequence = demo_sequence(args.steps, args.seed) if demo else muse_sequence(args.data, args.steps)
        settings = SequentialSettings(tuple(args.steering), tuple(args.lr), args.temperature, args.epochs, args.seed)
        cache = cache_folder() / ("demo" if demo else "sequential-muse") / "models"
        result = run_sequential(
            sequence, settings, output, cache, overwrite=args.overwrite,
            report=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    except (UsageError, Diverged) as error:
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
