"""Attacks on models that were made to forget: the tables of docs/limits.md, on the demo's world.

The attacked models are the target, the retrained reference, steered models, students distilled from one of them, and
three gradient baselines. The attacks ask for the forget set in many ways, rank candidate answers, and fine-tune
ordinary checkpoints on a few facts to recover others. The demo's models are trained if the cache lacks them. The same
command resumes a stopped run.

    python benchmarks/limits.py [--seeds 3] [--parts prompts candidates relearning] [--output runs/limits] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import documents
from divdec.data.world import World, build_world
from divdec.demo import run as demo
from divdec.errors import UsageError
from divdec.experts.ngram_fit import is_pair, write_pair
from divdec.model.bundle import is_bundle, write_bundle
from divdec.model.checkpoint import load_config, load_model, load_tokenizer, vocabulary_sha256, vocabulary_width
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.compare.benchmark import Benchmark, load_benchmarks
from divdec.research.compare.run import build_model
from divdec.research.compare.settings import CompareSettings, Trial
from divdec.runs import ResultCache, output_folder, read_json, write_json
from limits_attacks import (
    FORMS,
    RELEARNING,
    STRENGTHS,
    attack_by_prompts,
    rank_candidates,
    relearn,
    split_questions,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STEERED = "linear:1.5"  # the best setting of the comparison's grid on this world (docs/benchmarks.md)
NGRAM, FORGET_AUXILIARY = "n-grams", "p alone"
NGRAM_STEERING = "linear:20"  # between the settings that close 78 % and 100 % of the gap (docs/benchmarks.md)
_BATCHES = (("batch_size", 16), ("gradient_accumulation", 1))
# Each under its best setting in the comparison (docs/benchmarks.md), so that no method is attacked at a weak point of
# its grid; the student of the forget set alone is the paper's.
CHECKPOINTS: dict[str, Trial] = {
    "distilled": Trial("distill", (("lr", 3e-4), ("rehearse", 0))),
    "distilled, rehearsed": Trial("distill", (("lr", 3e-4), ("rehearse", 200))),
    "GradDiff": Trial("grad-diff", (("learning_rate", 2e-4), ("epochs", 5.0)), constant=_BATCHES),
    "NPO": Trial("npo", (("learning_rate", 3e-4), ("epochs", 3.0)), constant=_BATCHES),
    "SimNPO": Trial("simnpo", (("learning_rate", 1e-3), ("epochs", 10.0)), constant=_BATCHES),
}
REFERENCES: dict[str, Trial] = {"target": Trial("target"), "retrain": Trial("retrain")}
BUNDLES: dict[str, Trial] = {
    STEERED: Trial("linear", steering=STEERED),
    "rank:30": Trial("rank", steering="rank:30"),
}
PARTS = ("prompts", "candidates", "relearning")
BUILT = "made.json"

Seeds = list[dict[str, Any]]
"""Figures of each seed: by part, by model."""


@dataclasses.dataclass(frozen=True)
class LimitsSettings:
    """Settings of the benchmark."""

    output: str
    """Folder for models and figures; a stopped run continues there."""
    seeds: int = 3
    """Number of worlds, each with its own models."""
    parts: tuple[str, ...] = PARTS
    """Of 'prompts', 'candidates' and 'relearning'."""
    prompts: int = 20
    """Attack prompts per question."""
    samples: int = 16
    """Sampled answers per question."""
    steps: tuple[int, ...] = (0, 5, 10, 20, 40)
    """Steps of fine-tuning after which the attacked model is measured; the last ends the attack."""
    rate: float = 5e-4
    """Peak learning rate of the relearning attack (AdamW, cosine to 0)."""

    def __post_init__(self) -> None:
        for name in ("seeds", "prompts", "samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; accepted: a whole number of at least 1")
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise UsageError(f"part {unknown[0]!r} is not known; there are: {', '.join(PARTS)}")
        if list(self.steps) != sorted(set(self.steps)) or self.steps[0] != 0 or len(self.steps) < 2:
            raise UsageError(f"steps are {self.steps}; accepted: rising numbers that begin with 0")
        if self.rate <= 0:
            raise UsageError(f"rate is {self.rate:g}; accepted: a learning rate greater than 0")


@dataclasses.dataclass(frozen=True)
class AttackTargets:
    """The attacked models of one seed, built once and cached."""

    benchmark: Benchmark
    folder: Path
    report: Callable[[str], object]

    @property
    def world(self) -> World:
        """The world that the models have learned."""
        return build_world(dataclasses.replace(demo.WORLD, seed=self.benchmark.seed))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of all models."""
        return load_tokenizer(self.benchmark.target)

    def prompted(self) -> list[str]:
        """The models that are attacked by prompts: references, p, bundles, and students of a bundle.

        The comparison measures gradient baselines under attack prompts (docs/benchmarks.md).
        """
        students = [name for name, trial in CHECKPOINTS.items() if trial.method == "distill"]
        return [*REFERENCES, FORGET_AUXILIARY, *BUNDLES, NGRAM, *students]

    def path(self, name: str) -> Path:
        """Return the folder of a model; build the model if the folder is missing."""
        if name == NGRAM:
            return self._ngram_bundle()
        if name == FORGET_AUXILIARY:
            return self.benchmark.forget_auxiliary
        trial = {**REFERENCES, **BUNDLES, **CHECKPOINTS}[name]
        folder, work = self.folder / "models" / trial.folder, self.folder / "work"
        if name not in CHECKPOINTS:  # bundles are cheap to write, and refer to models by digest
            return build_model(trial, self.benchmark, folder / "model", work).folder
        fingerprint = trial.fingerprint(self.benchmark)
        if not (folder / BUILT).is_file() or read_json(folder / BUILT)["fingerprint"] != fingerprint:
            self.report(f"seed {self.benchmark.seed}: building {name}")
            built = build_model(trial, self.benchmark, folder / "model", work)
            write_json(folder / BUILT, {"fingerprint": fingerprint, "seconds": built.seconds})
        return folder / "model"

    def load(self, name: str) -> PreTrainedModel:
        """Load a model."""
        path = self.path(name)
        return DivergenceForCausalLM.from_pretrained(path) if is_bundle(path) else load_model(path).eval()

    def _ngram_bundle(self) -> Path:
        counts, bundle = self.folder / "models" / "ngram-counts", self.folder / "models" / "ngram-bundle"
        counts.parent.mkdir(parents=True, exist_ok=True)
        if not is_pair(counts):
            tokenizer = self.tokenizer
            sets = {"retain": self.benchmark.retain, "forget": self.benchmark.forget}
            with output_folder(counts) as temporary:
                write_pair(
                    temporary,
                    {name: documents(records, tokenizer) for name, records in sets.items()},
                    vocabulary_width(load_config(self.benchmark.target)),
                    order=3,
                    space="score",
                    tokenizer=vocabulary_sha256(tokenizer),
                )
        return write_bundle(
            bundle, target=str(self.benchmark.target), ngram=counts, steering=NGRAM_STEERING, overwrite=True
        )


def run_limits(settings: LimitsSettings, report: Callable[[str], None]) -> Seeds:
    """Measure everything that the output folder lacks; return the results by seed.

    Raises:
        UsageError: a file in the output folder cannot be read.
        Interrupted: on Ctrl-C; the same call continues.
    """
    output = Path(settings.output).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    seeds = []
    for benchmark in load_benchmarks(CompareSettings(output=str(output), data="demo", seeds=settings.seeds), report):
        folder = output / f"seed-{benchmark.seed}"
        seeds.append(_run_seed(AttackTargets(benchmark, folder, report), settings, report))
    return seeds


def _run_seed(targets: AttackTargets, settings: LimitsSettings, report: Callable[[str], None]) -> dict[str, Any]:
    world, tokenizer, seed = targets.world, targets.tokenizer, targets.benchmark.seed
    cache = ResultCache(targets.folder / "figures")

    def cached(part: str, name: str, decides: Any, measure: Callable[[], Any]) -> Any:
        title, decides = f"{part} {name}", [decides, targets.benchmark.identity]
        if not cache.has(title, decides):
            started = time.perf_counter()
            cache.get(title, decides, measure)
            report(f"seed {seed}, {part}, {name}: {time.perf_counter() - started:.0f} s")
        return cache.load(title, decides)

    results: dict[str, Any] = {}
    if "prompts" in settings.parts:
        counts = (settings.prompts, settings.samples)
        results["prompts"] = {
            name: cached(
                "prompts", name, counts,
                lambda n=name: attack_by_prompts(targets.load(n), tokenizer, world, *counts, seed),
            )
            for name in targets.prompted()
        }  # fmt: skip
    if "candidates" in settings.parts:
        results["candidates"] = {
            name: cached(
                "candidates", name, STRENGTHS,
                lambda n=name: rank_candidates(targets.load(n), tokenizer, world, n == STEERED),
            )
            for name in [*REFERENCES, STEERED, *CHECKPOINTS]
        }  # fmt: skip
    if "relearning" in settings.parts:
        results["relearning"] = {
            attack: {
                name: cached(
                    f"relearning {attack}", name, (settings.steps, settings.rate),
                    lambda n=name, a=attack: relearn(
                        targets.path(n), tokenizer, split_questions(world, a, seed), settings.steps, settings.rate,
                        seed, title=f"{n}: {a}",
                    ),
                )
                for name in [*REFERENCES, *CHECKPOINTS]
            }
            for attack in RELEARNING
        }  # fmt: skip
    return results


def tables(seeds: Seeds, settings: LimitsSettings) -> list[str]:
    """Markdown tables of the results: means over seeds, with minimum and maximum in brackets."""
    texts = []
    if "prompts" in settings.parts:
        rows = {
            name: [_mean([seed["prompts"][name]["figures"][form] for seed in seeds]) for form in FORMS]
            for name in seeds[0]["prompts"]
        }
        texts.append(_table("Facts of the forget set that are told, in percent, by form of question", [*FORMS], rows))
    if "candidates" in settings.parts:
        rows = {}
        for name, by_setting in seeds[0]["candidates"].items():
            for setting in by_setting:
                of = [seed["candidates"][name][setting] for seed in seeds]
                rows[setting or name] = [
                    *(_mean([figures[key] for figures in of]) for key in ("top", "bottom", "place")),
                    _mean([figures["auc"] for figures in of], 1.0, 2),
                    _mean([figures["probability"] for figures in of], 100.0, 1),
                ]
        chance = statistics.fmean(seed["candidates"]["retrain"][""]["chance"] for seed in seeds)
        columns = ["at the top, %", "at the bottom, %", "mean place, 0 top, 100 bottom", "AUC of the loss",
                   "probability of the true answer, %"]  # fmt: skip
        texts.append(_table(f"Rank of the true fact among all candidates (chance of either end: {chance:.0%})",
                            columns, rows))  # fmt: skip
    for attack in RELEARNING if "relearning" in settings.parts else ():
        of_attack = [seed["relearning"][attack] for seed in seeds]
        rows = {
            name: [_mean([of[name][index]["accuracy"] for of in of_attack]) for index in range(len(settings.steps))]
            + [_mean([of[name][-1]["probability"] for of in of_attack], 100.0, 1)]
            for name in of_attack[0]
        }
        columns = [*(f"{step} steps" for step in settings.steps), "probability at the end, %"]
        texts.append(_table(f"Relearning, {attack}: {RELEARNING[attack]}; facts told, in percent", columns, rows))
    return texts


def _table(title: str, columns: Sequence[str], rows: dict[str, list[str]]) -> str:
    lines = [f"**{title}**", "", f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def _mean(values: Sequence[float], scale: float = 100.0, digits: int = 0) -> str:
    mean, least, most = (scale * value for value in (statistics.fmean(values), min(values), max(values)))
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = LimitsSettings(output="runs/limits")
    parser.add_argument("--output", default=usual.output, help="folder for models and figures")
    parser.add_argument("--seeds", type=int, default=usual.seeds)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rate", type=float, default=usual.rate, help="peak learning rate of the relearning attack")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    args = parser.parse_args()
    settings = dataclasses.replace(usual, output=args.output, seeds=args.seeds, parts=tuple(args.parts), rate=args.rate)
    started = time.perf_counter()
    results = run_limits(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print("\n\n".join(tables(results, settings)))
    print(f"\n{settings.seeds} seeds, {time.perf_counter() - started:.0f} s beside cached results")
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
