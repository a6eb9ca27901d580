"""The comparison behind `divdec compare`: every trial on every seed, then leaks of the best settings.

A trial's folder holds the results as `divdec eval` writes them, and `run.json`, which is written last and marks the
folder as complete: a comparison that was interrupted continues after its last complete trial. A failed trial is a row
of the table.
"""

from __future__ import annotations

import concurrent.futures.process
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from filelock import FileLock
from tqdm.auto import tqdm

from divdec.checkpoint import check_apart, dtype_for_passes, load_model, load_tokenizer
from divdec.data.records import write_records
from divdec.errors import Diverged, FailedClosed, UsageError, first_line
from divdec.evaluation.judges import StringJudge
from divdec.evaluation.leak import evaluate_attack, template_prompts
from divdec.evaluation.questions import question_of
from divdec.evaluation.results import Results, read_results, write_results
from divdec.evaluation.scoring import EvaluatedModel
from divdec.model.bundle import is_bundle, write_bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import RECORD, ResultCache, RunFolder, output_folder, read_record, record, write_json
from divdec.steering import Steering
from divdec.training.distillation import distill
from divdec.training.settings import DistillationSettings
from divdec_research.baselines import auto  # noqa: F401  composites load
from divdec_research.baselines.job import Job
from divdec_research.baselines.method import BuiltModel
from divdec_research.baselines.run import build_method
from divdec_research.baselines.table import METHODS, REFERENCES
from divdec_research.compare.benchmark import Benchmark, check_inputs, load_benchmarks
from divdec_research.compare.settings import CompareSettings, Trial, trials_of
from divdec_research.compare.table import (
    TEST,
    VALIDATION,
    BenchmarkResults,
    SeedResult,
    TrialSummary,
    best_of,
    summarize,
    write_files,
)
from divdec_research.suites.aggregate import Bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORK = ("data", "bundle", "retrain", "base", "split", "holdout", "limit", "tofu", "muse")
MODEL = "model"
TEACHER = "linear:1.5"  # the paper's, for every distilled model of its table
LOG = "jobs.log"  # standard error of parallel processes
LEAKS = "leaks"
LEAK_TOKENS = 48
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """Result of a trial on one benchmark."""

    trial: Trial
    folder: Path
    seconds: float | None
    """Training time in seconds; None if unknown, 0 without training."""
    notes: tuple[str, ...] = ()
    failed: str | None = None
    """Reason for missing results."""

    @property
    def results(self) -> Results:
        """Figures and items."""
        return read_results(self.folder)


def compare_methods(settings: CompareSettings, report: Callable[[str], None] = print) -> BenchmarkResults:
    """Run the missing trials, and write tables and report.

    Raises:
        UsageError: an input cannot be used; finished trials are kept.
        Interrupted: on Ctrl-C while models are trained; the same call continues.
    """
    started = time.perf_counter()
    trials = [*(Trial(name) for name in REFERENCES), *trials_of(settings.methods, settings.grid)]
    output = Path(settings.output).expanduser()
    check_apart(output.resolve(), [path.resolve() for path in check_inputs(settings)])
    decides = {name: getattr(settings, name) for name in WORK}
    overwrite = settings.overwrite
    run = RunFolder.open(output, "compare", settings, decides, overwrite=overwrite, extend=not overwrite, stale=("*",))
    with run:
        results = _compare(settings, trials, output, report, started)
        write_files(results, settings)
        figures = {
            trial.method: {name: trial.values.get(name) for name in results.suite.shown}
            for trial in results.best.values()
        }
        run.finish(seconds=round(results.seconds, 1), figures=figures)
    return results


def _compare(
    settings: CompareSettings, trials: list[Trial], output: Path, report: Callable[[str], None], started: float
) -> BenchmarkResults:
    benchmarks = load_benchmarks(settings, report)
    searched = benchmarks[: settings.search_seeds]
    results = _run_all(searched, trials, settings, output, report)
    summaries = _summaries(trials, searched, results)
    best = best_of(summaries)
    validated = best_of(_summaries(trials, searched, results, VALIDATION))
    chosen = [trial for trial in trials if trial.label == validated[trial.method].setting]
    if len(searched) < len(benchmarks):
        # The settings chosen on the first seeds are measured on the others, where nothing is chosen.
        winners = [trial for trial in trials if trial.label == best[trial.method].setting or trial in chosen]
        results |= _run_all(benchmarks[len(searched) :], winners, settings, output, report)
        summaries = _summaries(trials, benchmarks, results)
        best = {summary.method: summary for summary in summaries if summary.setting == best[summary.method].setting}
    held_out = {summary.method: summary for summary in _summaries(chosen, benchmarks, results, TEST)}
    winning = {
        seed: [
            result
            for result in runs
            if result.failed is None and result.trial.label == best[result.trial.method].setting
        ]
        for seed, runs in results.items()
    }
    leaks = _leaks(benchmarks, winning, settings, output)
    if not settings.keep_models:
        kept = {result.folder for runs in winning.values() for result in runs}
        for result in (result for runs in results.values() for result in runs):
            if result.folder not in kept:
                shutil.rmtree(result.folder / MODEL, ignore_errors=True)
    return BenchmarkResults(summaries, best, leaks, time.perf_counter() - started, benchmarks[0].suite, held_out)


def _seed_folder(output: Path, benchmark: Benchmark) -> Path:
    return output / f"seed-{benchmark.seed}"


def _run_all(
    benchmarks: Sequence[Benchmark],
    trials: Sequence[Trial],
    settings: CompareSettings,
    output: Path,
    report: Callable[[str], None],
) -> dict[int, list[TrialResult]]:
    """Run the trials that no earlier run has finished; returns all results by seed."""
    results: dict[tuple[int, Trial], TrialResult] = {}
    missing: list[tuple[Trial, Benchmark, Path]] = []
    for benchmark in benchmarks:
        folder = _seed_folder(output, benchmark)
        for trial in trials:
            if finished := read_trial(trial, benchmark, folder):
                results[benchmark.seed, trial] = finished
            else:
                missing.append((trial, benchmark, folder))
    if results and missing:
        report(f"{len(results)} of {len(results) + len(missing)} trials are there already")
    with tqdm(total=len(missing), desc="trials", unit="trial", dynamic_ncols=True, disable=not missing) as bar:
        for (trial, benchmark, _), result in run_parallel(run_trial, missing, settings.jobs, output):
            results[benchmark.seed, trial] = result
            bar.update()
            if result.failed is not None:
                report(f"{benchmark.name} seed {benchmark.seed}, {trial.folder}: {result.failed}")
    return {benchmark.seed: [results[benchmark.seed, trial] for trial in trials] for benchmark in benchmarks}


def _summaries(
    trials: Sequence[Trial],
    benchmarks: Sequence[Benchmark],
    results: dict[int, list[TrialResult]],
    half: int | None = None,
) -> list[TrialSummary]:
    """Summarize trials over the seeds on which they were run, on all questions or on one half of them."""
    suite = benchmarks[0].suite

    def read(result: TrialResult) -> Results:
        return result.results if half is None else suite.half_of(result.results, half)

    references: dict[int, tuple[Results, Results]] = {}
    by_trial: dict[Trial, dict[int, TrialResult]] = {trial: {} for trial in trials}
    for benchmark in benchmarks:
        of_method = {}
        for result in results[benchmark.seed]:
            if result.trial.method in REFERENCES:
                if result.failed is not None:
                    raise UsageError(f"{result.trial.method} cannot be measured: {result.failed}")
                of_method[result.trial.method] = read(result)
            if result.trial in by_trial:
                by_trial[result.trial][benchmark.seed] = result
        references[benchmark.seed] = of_method["target"], of_method["retrain"]
    return [
        summarize(
            trial.method,
            trial.label,
            {
                seed: SeedResult(read(result), result.seconds, seed if benchmarks[0].own_questions else 0)
                for seed, result in by_seed.items()
                if result.failed is None
            },
            references,
            suite,
            Bootstrap(),
            {seed: result.failed for seed, result in by_seed.items() if result.failed is not None},
            list(dict.fromkeys(note for result in by_seed.values() for note in result.notes)),
        )
        for trial, by_seed in by_trial.items()
    ]


def _leaks(
    benchmarks: Sequence[Benchmark], chosen: dict[int, list[TrialResult]], settings: CompareSettings, output: Path
) -> dict[str, dict[int, float]]:
    """Leak@k of the best settings, over the same attack prompts for every method."""
    if not settings.attacks:
        return {}
    ks = tuple(k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= settings.attacks)
    # In the table's order, not in that of finishing processes.
    by_method: dict[str, list[dict[str, float]]] = {
        result.trial.method: [] for runs in chosen.values() for result in runs
    }
    work = [
        (benchmark, result, settings.attacks, ks, output)
        for benchmark in benchmarks
        for result in chosen[benchmark.seed]
    ]
    with tqdm(total=len(work), desc="leaks", unit="model", dynamic_ncols=True) as bar:
        for (_, result, *_), figures in run_parallel(_leak_of, work, settings.jobs, output):
            by_method[result.trial.method].append(figures)
            bar.update()
    return {
        method: {k: sum(seed_figures[f"leak@{k}-attack"] for seed_figures in figures) / len(figures) for k in ks}
        for method, figures in by_method.items()
    }


def _leak_of(
    benchmark: Benchmark, result: TrialResult, attacks: int, ks: tuple[int, ...], output: Path
) -> dict[str, float]:
    """Attack one model; the figures are cached beside its other results."""

    def attack() -> dict[str, float]:
        records = benchmark.suite.questions("forget")
        layout = benchmark.suite.layout(load_tokenizer(benchmark.target))
        results = evaluate_attack(
            _load_result(result, benchmark, output),
            layout.tokenizer,
            records,
            [template_prompts(question_of(question), question.answer, attacks, benchmark.seed) for question in records],
            StringJudge(),
            results=Results(result.trial.method, "leak"),
            ks=ks,
            prompt_ids=layout.prompt,
            max_new_tokens=LEAK_TOKENS,
        )
        (result.folder / LEAKS).mkdir(exist_ok=True)
        write_results(results, result.folder / LEAKS)
        return {f"leak@{k}-attack": float(results.figures[f"leak@{k}-attack"] or 0.0) for k in ks}

    return ResultCache(result.folder / LEAKS).get("figures", [attacks, benchmark.fingerprint(result.trial)], attack)


def _load_result(result: TrialResult, benchmark: Benchmark, output: Path) -> PreTrainedModel:
    references = {"target": benchmark.target, "retrain": benchmark.retrain}
    folder = references.get(result.trial.method, result.folder / MODEL)
    if not folder.is_dir():  # an earlier, smaller comparison had another best setting
        build_model(result.trial, benchmark, folder, _seed_folder(output, benchmark) / "work")
    return load_trial(folder, result.trial)


def read_trial(trial: Trial, benchmark: Benchmark, seed_folder: Path) -> TrialResult | None:
    """Read the result of an earlier run if it is complete, did not fail, and used the same benchmark."""
    folder = seed_folder / trial.folder
    content = read_record(folder)
    if content is None or content["fingerprint"] != benchmark.fingerprint(trial) or content["failed"] is not None:
        return None
    return TrialResult(trial, folder, content["seconds"], tuple(content["notes"]))


def run_trial(trial: Trial, benchmark: Benchmark, seed_folder: Path) -> TrialResult:
    """Build and measure a model. If building fails or training diverges, return a failed result."""
    folder = seed_folder / trial.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    failed = None
    built = BuiltModel(benchmark.target, 0.0)
    try:
        built = build_model(trial, benchmark, folder / MODEL, seed_folder / "work")
        model = load_trial(built.folder, trial)
        results = benchmark.suite.evaluate(EvaluatedModel(model, load_tokenizer(benchmark.target)))
        results.name = str(trial.folder)
        results.about = {
            "method": trial.method, "setting": trial.label, "seed": benchmark.seed, "steering": trial.steering,
        }  # fmt: skip
        write_results(results, folder)
    except (UsageError, Diverged, FailedClosed, torch.OutOfMemoryError) as error:
        failed = first_line(error)
    content = {
        "method": trial.method, "setting": trial.label, "seed": benchmark.seed,
        "seconds": built.seconds, "notes": list(built.notes), "failed": failed,
        "fingerprint": benchmark.fingerprint(trial),
    }  # fmt: skip
    write_json(folder / RECORD, record("trial", trial.settings, **content))
    return TrialResult(trial, folder, built.seconds, built.notes, failed)


def build_model(trial: Trial, benchmark: Benchmark, output: Path, work: Path) -> BuiltModel:
    """Train or wrap the target.

    Raises:
        UsageError: the method does not accept this setting or these models.
        Diverged: training diverged.
    """
    if trial.method == "target":
        return BuiltModel(benchmark.target, 0.0)
    if trial.method == "retrain":
        return BuiltModel(benchmark.retrain, benchmark.retrain_seconds)
    if trial.steering is not None:
        return BuiltModel(_write_bundle(benchmark, output, trial.steering), benchmark.pair_seconds)
    if trial.method == "distill":
        return _distill(trial, benchmark, output, work)
    job = Job(
        benchmark.target, load_tokenizer(benchmark.target), benchmark.forget, benchmark.retain, work, benchmark.form,
        benchmark.base, benchmark.seed, report=lambda line: None,
    )  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    with output_folder(output) as temporary:
        built = build_method(job, METHODS[trial.method].settings(**trial.settings), temporary)
    return dataclasses.replace(built, folder=output)


def _write_bundle(benchmark: Benchmark, output: Path, steering: str) -> Path:
    rule = dataclasses.replace(Steering.parse(steering), vocabulary=benchmark.vocabulary)
    return write_bundle(
        output, target=str(benchmark.target), retain_auxiliary=str(benchmark.retain_auxiliary),
        forget_auxiliary=str(benchmark.forget_auxiliary), steering=rule, overwrite=True,
        forget_set=benchmark.forget.label,
    )  # fmt: skip


def _write_sets(benchmark: Benchmark, work: Path) -> tuple[str, str]:
    """Write forget and retain set as files; returns their paths."""
    work.mkdir(parents=True, exist_ok=True)
    forget, retain = work / "forget.jsonl", work / "retain.jsonl"
    write_records(forget, benchmark.forget)
    write_records(retain, benchmark.retain)
    return str(forget), str(retain)


def _distill(trial: Trial, benchmark: Benchmark, output: Path, work: Path) -> BuiltModel:
    options: dict[str, Any] = {"steering": TEACHER, **trial.settings}
    forget, retain = _write_sets(benchmark, work)
    with FileLock(work / "teacher.lock"):  # parallel trials share the teacher
        bundle = work / f"teacher-{str(options['steering']).replace(':', '-')}-{benchmark.identity}"
        if not is_bundle(bundle):
            _write_bundle(benchmark, bundle, str(options["steering"]))
    form = benchmark.form
    settings = DistillationSettings(
        bundle=str(bundle), forget=forget, retain=retain, output=str(output), seed=benchmark.seed,
        system_prompt=form.system_prompt, date=form.date, max_length=form.max_length, overwrite=True, **options,
    )  # fmt: skip
    content = distill(settings, report=lambda line: None)
    seconds = float(content["training"]["seconds"])
    return BuiltModel(output, None if benchmark.pair_seconds is None else benchmark.pair_seconds + seconds)


def load_trial(folder: Path, trial: Trial) -> PreTrainedModel:
    """Load a trial's model, on an accelerator if one is available."""
    if trial.steering is not None or is_bundle(folder):  # δ-Unlearning writes a bundle too
        model = DivergenceForCausalLM.from_pretrained(folder, dtype=dtype_for_passes())
    else:
        model = load_model(folder, dtype=dtype_for_passes()).eval()
    device: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device)


def run_parallel(
    function: Callable[..., Result], work: Sequence[Arguments], jobs: int, output: Path
) -> Iterator[tuple[Arguments, Result]]:
    """Call a function with each of many arguments, in parallel processes that end with this one.

    Args:
        function: a module's function, so that other processes can import it.
        work: arguments of each call.
        jobs: number of processes; 1 stays in this process.
        output: folder of the processes' log.

    Yields:
        Arguments and result of each call as it finishes.

    Raises:
        UsageError: a process died.
    """
    if jobs == 1:
        for arguments in work:
            yield arguments, function(*arguments)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # Forked processes would share torch's threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _start_process, (threads, output / LOG)) as pool:
        waiting, running = list(work), {}
        try:
            while waiting or running:
                # Queue no more calls than run: queued calls would still run after an interruption.
                while waiting and len(running) < jobs:
                    arguments = waiting.pop(0)
                    running[pool.submit(function, *arguments)] = arguments
                done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UsageError(
                f"one of {jobs} processes died, most often for lack of memory; give fewer --jobs: finished trials are "
                f"kept ({output / LOG} has the processes' messages)"
            ) from None
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # a training run then writes its checkpoint
            raise


def _start_process(threads: int, log: Path) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    # Progress bars of several processes would overwrite each other.
    sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process with its parent: a new comparison must not write into the same folder meanwhile."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
