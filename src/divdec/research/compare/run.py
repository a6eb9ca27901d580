"""The comparison behind `divdec compare`: every trial on every seed, then leaks and costs of the best settings.

Each trial's result is kept, so that a comparison that was interrupted continues; a failed trial is a row of the table.
"""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing
import multiprocessing.connection
import os
import shutil
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tqdm.auto import tqdm

from divdec.errors import UsageError
from divdec.evaluation.aggregate import Bootstrap
from divdec.evaluation.attack_prompts import template_prompts
from divdec.evaluation.judges import StringJudge
from divdec.evaluation.leak import evaluate_attack
from divdec.evaluation.questions import question_of
from divdec.evaluation.results import write_results
from divdec.model.checkpoint import check_apart, load_model
from divdec.research.baselines.methods import REFERENCES
from divdec.research.compare.benchmark import Benchmark, check_inputs, load_benchmarks
from divdec.research.compare.settings import CompareSettings
from divdec.research.compare.table import BenchmarkResults, SeedResult, TrialSummary, best_of, summarize, write_files
from divdec.research.compare.trials import (
    MODEL,
    Trial,
    TrialResult,
    build_model,
    load_trial,
    read_trial,
    run_trial,
    trials_of,
)
from divdec.runs import ResultCache, RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORK = ("data", "bundle", "retrain", "base", "split", "holdout", "limit", "tofu")
LOG = "jobs.log"  # standard error of parallel processes
LEAKS = "leaks"
LEAK_TOKENS = 48
TIMED_PROMPTS, TIMED_TOKENS, TIMED_ROUNDS = 4, 32, 3
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Result = TypeVar("Result")


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
    with run.locked():
        results = _compare(settings, trials, output, report, started)
        write_files(results, settings)
        shown = ("agg", "mem", "priv", "utility")
        figures = {trial.method: {name: trial.values.get(name) for name in shown} for trial in results.best.values()}
        run.finish(seconds=round(results.seconds, 1), figures=figures)
    return results


def _compare(
    settings: CompareSettings, trials: list[Trial], output: Path, report: Callable[[str], None], started: float
) -> BenchmarkResults:
    benchmarks = load_benchmarks(settings, report)
    searched = benchmarks[: settings.search_seeds]
    results = _run_all(searched, trials, settings, output, report)
    summaries = _summaries(trials, searched, results, settings.variant)
    best = best_of(summaries)
    if len(searched) < len(benchmarks):
        # The settings chosen on the first seeds are measured on the others, where nothing is chosen.
        winners = [trial for trial in trials if trial.label == best[trial.method].setting]
        results |= _run_all(benchmarks[len(searched) :], winners, settings, output, report)
        summaries = _summaries(trials, benchmarks, results, settings.variant)
        best = {one.method: one for one in summaries if one.setting == best[one.method].setting}
    chosen = {
        seed: [one for one in own if one.failed is None and one.trial.label == best[one.trial.method].setting]
        for seed, own in results.items()
    }
    leaks = _leaks(benchmarks, chosen, settings, output)
    times = _times(benchmarks[0], chosen[benchmarks[0].seed], output)
    if not settings.keep_models:
        winning = {one.folder for own in chosen.values() for one in own}
        for one in (one for own in results.values() for one in own):
            if one.folder not in winning:
                shutil.rmtree(one.folder / MODEL, ignore_errors=True)
    return BenchmarkResults(summaries, best, leaks, times, time.perf_counter() - started)


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
    return {one.seed: [results[one.seed, trial] for trial in trials] for one in benchmarks}


def _summaries(
    trials: Sequence[Trial], benchmarks: Sequence[Benchmark], results: dict[int, list[TrialResult]], variant: str
) -> list[TrialSummary]:
    """Summarize every trial over the seeds on which it was run."""
    references = {}
    by_trial: dict[Trial, dict[int, TrialResult]] = {trial: {} for trial in trials}
    for benchmark in benchmarks:
        own = results[benchmark.seed]
        for reference in own[: len(REFERENCES)]:
            if reference.failed is not None:
                raise UsageError(f"{reference.trial.method} cannot be measured: {reference.failed}")
        references[benchmark.seed] = own[0].results, own[1].results
        for result in own:
            by_trial[result.trial][benchmark.seed] = result
    return [
        summarize(
            trial.method,
            trial.label,
            {
                seed: SeedResult(one.results, one.seconds, one.extra_bytes, seed if benchmarks[0].own_questions else 0)
                for seed, one in by_seed.items()
                if one.failed is None
            },
            references,
            variant,
            Bootstrap(),
            {seed: one.failed for seed, one in by_seed.items() if one.failed is not None},
            list(dict.fromkeys(note for one in by_seed.values() for note in one.notes)),
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
    by_method: dict[str, list[dict[str, float]]] = {one.trial.method: [] for own in chosen.values() for one in own}
    work = [
        (benchmark, one, settings.attacks, ks, output) for benchmark in benchmarks for one in chosen[benchmark.seed]
    ]
    with tqdm(total=len(work), desc="leaks", unit="model", dynamic_ncols=True) as bar:
        for (_, one, *_), figures in run_parallel(_leak_of, work, settings.jobs, output):
            by_method[one.trial.method].append(figures)
            bar.update()
    return {
        method: {k: sum(own[f"leak@{k}-attack"] for own in figures) / len(figures) for k in ks}
        for method, figures in by_method.items()
    }


def _leak_of(
    benchmark: Benchmark, result: TrialResult, attacks: int, ks: tuple[int, ...], output: Path
) -> dict[str, float]:
    """Attack one model; the figures are cached beside its other results."""

    def attack() -> dict[str, float]:
        records = [asked.record for asked in benchmark.questions.sets["forget"]]
        layout = benchmark.layout
        results = evaluate_attack(
            _load_result(result, benchmark, output),
            layout.tokenizer,
            records,
            [template_prompts(question_of(one), one.answer, attacks, benchmark.seed) for one in records],
            StringJudge(),
            name=result.trial.method,
            ks=ks,
            prompt_ids=layout.prompt,
            max_new_tokens=LEAK_TOKENS,
        )
        (result.folder / LEAKS).mkdir(exist_ok=True)
        write_results(results, result.folder / LEAKS)
        return {f"leak@{k}-attack": float(results.figures[f"leak@{k}-attack"] or 0.0) for k in ks}

    return ResultCache(result.folder / LEAKS).get("figures", [attacks, result.trial.fingerprint(benchmark)], attack)


def _times(benchmark: Benchmark, chosen: Sequence[TrialResult], output: Path) -> dict[str, float]:
    """Time per token of the best settings relative to the target's; never in parallel."""
    sets = benchmark.questions.sets
    asked = [*sets["forget"][: TIMED_PROMPTS // 2], *sets["retain"][: TIMED_PROMPTS // 2]]
    prompts = benchmark.layout.prompts([one.record for one in asked])
    target = load_model(benchmark.target).eval()
    return {
        one.trial.method: time_ratio(_load_result(one, benchmark, output), target, prompts)
        for one in tqdm(chosen, desc="time per token", unit="model", dynamic_ncols=True)
        if one.trial.method not in REFERENCES
    }


def _load_result(result: TrialResult, benchmark: Benchmark, output: Path) -> PreTrainedModel:
    references = {"target": benchmark.target, "retrain": benchmark.retrain}
    folder = references.get(result.trial.method, result.folder / MODEL)
    if not folder.is_dir():  # an earlier, smaller comparison had another best setting
        build_model(result.trial, benchmark, folder, _seed_folder(output, benchmark) / "work")
    return load_trial(folder, result.trial)


def time_ratio(model: PreTrainedModel, target: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> float:
    """Measure a model's time per token relative to the target's: the median over prompts and rounds, batch size 1."""
    ratios = []
    for number in range(TIMED_ROUNDS + 1):
        for prompt in prompts:
            # In turns, so that a temporarily slow machine is slow for both.
            own, whole = (_seconds_per_token(one, prompt) for one in (model, target))
            if number:  # the first round warms up
                ratios.append(own / whole)
    return statistics.median(ratios)


@torch.inference_mode()
def _seconds_per_token(model: PreTrainedModel, prompt: Sequence[int]) -> float:
    ids = torch.tensor([list(prompt)], device=model.device)
    started = time.perf_counter()
    sequences = model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=TIMED_TOKENS,
        max_new_tokens=TIMED_TOKENS,
    )
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
    return (time.perf_counter() - started) / (sequences.shape[1] - ids.shape[1])


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
