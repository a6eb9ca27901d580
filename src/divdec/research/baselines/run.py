"""One method applied to one target, from files to a folder: the run behind `divdec baseline`.

The run can be stopped and taken up again. It knows nothing of any method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState

from divdec.data.formatting import Format
from divdec.data.records import overlap, read_records
from divdec.errors import UsageError
from divdec.model.checkpoint import (
    check_apart,
    common_vocabulary_of,
    digests,
    load_tokenizer,
)
from divdec.research.baselines.job import Job
from divdec.research.baselines.method import Method
from divdec.research.baselines.settings import BaselineSettings, HelpedSettings
from divdec.runs import RECORD, goes_on, output_folder, record, settings_hash, write_json
from divdec.training.inputs import join_processes, limit_length, report_cut, report_sets, resolve_trainable

MODEL, WORK = "model", "work"


def run_baseline(
    method: Method, settings: BaselineSettings, options: Any, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train or wrap the target, and write the result with its `run.json`.

    The output folder then holds `run.json`, `model`, and in `work` the helpers that the model refers to, if it has any.
    `model` is whole or absent.

    Args:
        method: which.
        settings: target, data and output.
        options: an instance of `method.settings`.
        report: told what is found and done, a line each.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: something given cannot be used; no weights have then been written.
        Interrupted: Ctrl-C; the same call goes on where it stopped.
        Diverged: a loss is not finite.
    """
    state, report = join_processes(report)
    if method.kind == "inference" and state.num_processes > 1:
        raise UsageError(f"{method.name} runs in one process, not in {state.num_processes}")
    output = Path(settings.output).expanduser()
    target = resolve_trainable(settings.target, "target")
    tokenizer = load_tokenizer(target)
    base = _base(settings, target)
    places = [Path(text).expanduser() for text in (settings.forget, settings.retain)]
    places += [target] if base is None else [target, base]
    check_apart(output.resolve(), [place.resolve() for place in places if place.exists()])
    forget, retain = read_records(settings.forget), read_records(settings.retain)
    report_sets(forget, retain, "a method is told to forget and to keep them", report)
    form = Format(system_prompt=settings.system_prompt, max_length=limit_length(settings.max_length, target, report))
    for records in (forget, retain):
        report_cut(records, tokenizer, form, report)

    given = dataclasses.asdict(settings) | dataclasses.asdict(options)
    fingerprint = settings_hash(
        [
            method.name,
            given | {"overwrite": False},
            forget.sha256,
            retain.sha256,
            digests(target),
            None if base is None else digests(base),
        ]
    )
    _open_output(output, method, given, fingerprint, settings.overwrite)
    job = Job(
        target=target,
        tokenizer=tokenizer,
        forget=forget,
        retain=retain,
        work=output / WORK,
        form=form,
        base=base,
        seed=settings.seed,
        report=report,
    )
    place = output_folder(output / MODEL) if state.is_main_process else contextlib.nullcontext(output / MODEL)
    with place as folder:
        try:
            made = method.make(job, options, folder)
        except UsageError:
            if state.is_main_process:
                _withdraw(output)
            raise
    content = record(
        "baseline",
        given,
        method=method.name,
        kind=method.kind,
        source=method.source,
        forget_set=forget.label,
        retain_set=retain.label,
        overlap=dataclasses.asdict(overlap(forget, retain)),
        seconds=round(made.seconds, 2),
        notes=list(made.notes),
        model=str(output / MODEL),
    )
    if state.is_main_process:
        if (output / WORK).is_dir() and not any((output / WORK).iterdir()):
            (output / WORK).rmdir()
        write_json(output / RECORD, content)
    state.wait_for_everyone()
    return content


def _open_output(output: Path, method: Method, given: dict[str, Any], fingerprint: str, overwrite: bool) -> None:
    """Begin a new run in an empty folder, or go on with the same run that was stopped."""
    state = PartialState()
    resumed = goes_on(output, "baseline", fingerprint, overwrite)
    state.wait_for_everyone()
    if state.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        # Of a run that is resumed the work is kept: there its training goes on.
        for name in (MODEL,) if resumed else (MODEL, WORK):
            shutil.rmtree(output / name, ignore_errors=True)
        opened = record("baseline", given, method=method.name, fingerprint=fingerprint) | {"status": "running"}
        write_json(output / RECORD, opened)
    state.wait_for_everyone()


def _withdraw(output: Path) -> None:
    """Forget a run that was refused before it had trained anything, so that another may begin there."""
    if not (output / WORK).is_dir():
        (output / RECORD).unlink()


def _base(settings: BaselineSettings, target: Path) -> Path | None:
    """The small model, if one is given; its vocabulary is compared with the target's before hours of training."""
    if not isinstance(settings, HelpedSettings) or settings.base is None:
        return None
    base = resolve_trainable(settings.base, "base")
    common_vocabulary_of({"target": target, "base": base})
    return base
