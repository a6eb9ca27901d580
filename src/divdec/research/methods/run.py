"""A comparison from beginning to end: every cell of every seed, the best settings' leaks and costs, and the table.

What is done is kept cell by cell, so that a stopped run goes on; a cell that fails is a line of the table.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from divdec.errors import UsageError
from divdec.evaluation.aggregate import Bootstrap
from divdec.evaluation.attack_prompts import template_prompts
from divdec.evaluation.judges import StringJudge
from divdec.evaluation.leak import evaluate_attack
from divdec.evaluation.questions import question_of
from divdec.evaluation.results import Results, read_results, write_results
from divdec.model.checkpoint import check_apart, load_model
from divdec.research.methods.arena import Arena, arenas, check_inputs
from divdec.research.methods.cell import Cell
from divdec.research.methods.cells import MODEL, REFERENCES, Outcome, earlier, load
from divdec.research.methods.costs import time_ratio
from divdec.research.methods.grids import cells_of
from divdec.research.methods.jobs import run_cells, seed_folder, spread
from divdec.research.methods.making import Model, make
from divdec.research.methods.settings import CompareSettings
from divdec.research.methods.table import Line, Measured, best_of, line_of
from divdec.runs import RECORD, check_output, read_record, record, settings_hash, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAKS = "leaks"
LOCK = ".lock"
TIMED = 4  # prompts
LEAK_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a comparison found."""

    lines: list[Line]
    """The whole grid, references first."""
    best: dict[str, Line]
    """By method."""
    leaks: dict[str, dict[int, float]]
    """Leak@k by method and k, the mean over seeds; of the best settings."""
    times: dict[str, float]
    """Time per token relative to the target's, by method; on the first seed."""
    seconds: float


def compare_methods(settings: CompareSettings, report: Callable[[str], None] = print) -> Comparison:
    """Run what is missing, and put everything into one table.

    Args:
        settings: methods, data, grid and seeds.
        report: told what is done, a line each.

    Raises:
        UsageError: something given cannot be used; finished cells are kept.
        Interrupted: Ctrl-C while models were trained; the same call goes on.
    """
    started = time.perf_counter()
    cells = cells_of(settings.methods, settings.grid)
    output = Path(settings.output).expanduser()
    check_apart(output.resolve(), [place.resolve() for place in check_inputs(settings)])
    _open_output(output, settings)
    try:
        held = FileLock(output / LOCK).acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another comparison is running in {output}; wait for it, or give another name") from None
    with held:
        return _compare(settings, cells, output, report, started)


def _compare(
    settings: CompareSettings, cells: list[Cell], output: Path, report: Callable[[str], None], started: float
) -> Comparison:
    found = arenas(settings, report)
    cells = [*(Cell(name) for name in REFERENCES), *cells]
    searched = found[: settings.search_seeds]
    outcomes = _run_all(searched, cells, settings, output, report)
    lines = _lines(cells, searched, outcomes, settings.variant)
    best = best_of(lines)
    if len(searched) < len(found):
        # What was chosen on some seeds is measured on others, where nothing was chosen.
        kept = [cell for cell in cells if cell.label == best[cell.method].setting]
        outcomes |= _run_all(found[len(searched) :], kept, settings, output, report)
        lines = _lines(cells, found, outcomes, settings.variant)
        best = {line.method: line for line in lines if line.setting == best[line.method].setting}
    chosen = {
        arena.seed: [
            outcome
            for outcome in outcomes[arena.seed]
            if outcome.failed is None and outcome.cell.label == best[outcome.cell.method].setting
        ]
        for arena in found
    }
    leaks = _leaks(found, chosen, settings, output)
    times = _times(found[0], chosen[found[0].seed], output)
    if not settings.keep_models:
        kept = {outcome.folder for own in chosen.values() for outcome in own}
        for outcome in (outcome for own in outcomes.values() for outcome in own):
            if outcome.folder not in kept:
                shutil.rmtree(outcome.folder / MODEL, ignore_errors=True)
    return Comparison(lines, best, leaks, times, time.perf_counter() - started)


def _run_all(
    found: Sequence[Arena],
    cells: Sequence[Cell],
    settings: CompareSettings,
    output: Path,
    report: Callable[[str], None],
) -> dict[int, list[Outcome]]:
    """The outcome of every cell, by seed; those that an earlier run has left are not made again."""
    kept: dict[tuple[int, Cell], Outcome] = {}
    missing: list[tuple[Arena, Cell]] = []
    for arena in found:
        for cell in cells:
            done = earlier(cell, arena, seed_folder(output, arena))
            if done is None:
                missing.append((arena, cell))
            else:
                kept[arena.seed, cell] = done
    if kept and missing:
        report(f"{len(kept)} of {len(kept) + len(missing)} cells are there already")
    with tqdm(total=len(missing), desc="cells", unit="cell", dynamic_ncols=True, disable=not missing) as bar:
        for arena, cell, outcome in run_cells(missing, settings.jobs, output):
            kept[arena.seed, cell] = outcome
            bar.update()
            if outcome.failed is not None:
                report(f"{arena.name} seed {arena.seed}, {cell.folder}: {outcome.failed}")
    return {arena.seed: [kept[arena.seed, cell] for cell in cells] for arena in found}


def _references(outcomes: Sequence[Outcome]) -> tuple[Results, Results]:
    target, retrain = outcomes[: len(REFERENCES)]
    for outcome in (target, retrain):
        if outcome.failed is not None:
            raise UsageError(f"{outcome.cell.method} cannot be measured: {outcome.failed}")
    return target.results, retrain.results


def _lines(
    cells: Sequence[Cell], found: Sequence[Arena], outcomes: dict[int, list[Outcome]], variant: str
) -> list[Line]:
    """A line for each cell, of those seeds on which it was run."""
    references = {arena.seed: _references(outcomes[arena.seed]) for arena in found}
    by_cell: dict[Cell, dict[int, Outcome]] = {cell: {} for cell in cells}
    for arena in found:
        for outcome in outcomes[arena.seed]:
            by_cell[outcome.cell][arena.seed] = outcome
    own = found[0].own_questions
    return [_line(by_seed, own, references, variant, Bootstrap()) for by_seed in by_cell.values()]


def _line(
    by_seed: dict[int, Outcome],
    own: bool,
    references: dict[int, tuple[Results, Results]],
    variant: str,
    bootstrap: Bootstrap,
) -> Line:
    outcomes = list(by_seed.values())
    cell = outcomes[0].cell
    measured = {
        seed: Measured(outcome.results, outcome.seconds, outcome.extra_bytes, seed if own else 0)
        for seed, outcome in by_seed.items()
        if outcome.failed is None
    }
    failures = {seed: outcome.failed for seed, outcome in by_seed.items() if outcome.failed is not None}
    notes = dict.fromkeys(note for outcome in outcomes for note in outcome.notes)
    return line_of(cell.method, cell.label, measured, references, variant, bootstrap, failures, tuple(notes))


def _leaks(
    found: Sequence[Arena], chosen: dict[int, list[Outcome]], settings: CompareSettings, output: Path
) -> dict[str, dict[int, float]]:
    """Leak@k of the best settings, over the same attack prompts for every method."""
    if not settings.attacks:
        return {}
    ks = tuple(k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= settings.attacks)
    # In the table's order, not in that in which processes happen to finish.
    by_method: dict[str, list[Results]] = {outcome.cell.method: [] for own in chosen.values() for outcome in own}
    work = [(arena, outcome, settings.attacks, ks, output) for arena in found for outcome in chosen[arena.seed]]
    with tqdm(total=len(work), desc="leaks", unit="model", dynamic_ncols=True) as bar:
        for (_, outcome, *_), results in spread(_leak_of, work, settings.jobs, output):
            by_method[outcome.cell.method].append(results)
            bar.update()
    return {
        method: {k: sum(float(own.figures[f"leak@{k}-attack"] or 0.0) for own in results) / len(results) for k in ks}
        for method, results in by_method.items()
    }


def _leak_of(arena: Arena, outcome: Outcome, attacks: int, ks: tuple[int, ...], output: Path) -> Results:
    """What attacks find in one model; kept beside its other results."""
    folder = outcome.folder / LEAKS
    key = settings_hash([attacks, outcome.cell.fingerprint(arena)])
    if (folder / "key").is_file() and (folder / "key").read_text() == key:
        return read_results(folder)
    records = [asked.record for asked in arena.questions.sets["forget"]]
    layout = arena.layout
    results = evaluate_attack(
        _model_of(outcome, arena, output),
        layout.tokenizer,
        records,
        [template_prompts(question_of(one), one.answer, attacks, arena.seed) for one in records],
        StringJudge(),
        name=outcome.cell.method,
        ks=ks,
        prompt_ids=layout.prompt,
        max_new_tokens=LEAK_TOKENS,
    )
    folder.mkdir(exist_ok=True)
    write_results(results, folder)
    (folder / "key").write_text(key)
    return results


def _times(arena: Arena, chosen: Sequence[Outcome], output: Path) -> dict[str, float]:
    """Time per token of the best settings, relative to the target's; one at a time, whatever `jobs` is."""
    asked = [*arena.questions.sets["forget"][: TIMED // 2], *arena.questions.sets["retain"][: TIMED // 2]]
    prompts = arena.layout.prompts([one.record for one in asked])
    target = load_model(arena.target).eval()
    return {
        outcome.cell.method: time_ratio(_model_of(outcome, arena, output), target, prompts)
        for outcome in tqdm(chosen, desc="time per token", unit="model", dynamic_ncols=True)
        if outcome.cell.method not in REFERENCES
    }


def _model_of(outcome: Outcome, arena: Arena, output: Path) -> PreTrainedModel:
    own = {"target": arena.target, "retrain": arena.retrain}
    folder = own.get(outcome.cell.method, outcome.folder / MODEL)
    if not folder.is_dir():  # it was not the best of an earlier, smaller comparison
        make(outcome.cell, arena, folder, seed_folder(output, arena) / "work")
    return load(Model(folder, None), outcome.cell)


def work_of(settings: CompareSettings) -> dict[str, Any]:
    """What must be the same for another call to go on in the same folder; methods, grid and seeds may grow."""
    content = dataclasses.asdict(settings)
    return {name: content[name] for name in ("data", "bundle", "retrain", "base", "split", "holdout", "limit", "tofu")}


def _open_output(output: Path, settings: CompareSettings) -> None:
    """Begin a new comparison, or go on with one in the same data, whatever methods and seeds it had."""
    record_of = read_record(output) if output.is_dir() else None
    same = work_of(settings)
    if record_of is not None and record_of.get("verb") == "compare" and not settings.overwrite:
        before = record_of.get("work")
        if before != same:
            changed = [name for name in same if (before or {}).get(name) != same[name]]
            raise UsageError(
                f"output folder {output} holds a comparison on other work ({', '.join(changed)} differ); repeat that "
                "to go on with it, give --overwrite to begin anew, or another name"
            )
        return
    check_output(output, settings.overwrite, lambda folder: (read_record(folder) or {}).get("verb") == "compare")
    output.mkdir(parents=True, exist_ok=True)
    for place in output.iterdir():
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
    write_json(output / RECORD, record("compare", settings, work=same) | {"status": "running"})
