"""Implementation of `divdec baseline`: apply one method to one target."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from divdec.checkpoint import check_apart, input_digests, load_tokenizer
from divdec.data.formatting import Format
from divdec.data.records import overlap, read_records
from divdec.errors import UsageError
from divdec.options import read_template_kwargs
from divdec.runs import RunFolder, output_folder, path_digests
from divdec.training.inputs import join_processes, limit_length, on_main, report_cut, report_sets, resolve_trainable
from divdec_research.baselines.composite import common_vocabulary_of
from divdec_research.baselines.job import Job
from divdec_research.baselines.method import BuiltModel, Method, method_of
from divdec_research.baselines.settings import BaselineSettings, HelpedSettings
from divdec_research.baselines.training import train_target

MODEL, WORK = "model", "work"


def build_method(job: Job, settings: Any, output: Path) -> BuiltModel:
    """Train or wrap the target with the method that belongs to `settings`.

    Args:
        job: target and data.
        settings: an instance of a method's settings.
        output: an empty folder; receives model and tokenizer. `divdec_research.baselines.auto` loads composites.

    Raises:
        UsageError: the settings do not fit the target, the data or the base.
        Interrupted: on Ctrl-C; the same call continues.
        Diverged: a loss is not finite.
    """
    method = method_of(settings)
    if method.objective is not None:
        return train_target(method, method.objective(job, settings), output)
    assert method.build is not None
    started = time.perf_counter()
    built = method.build(job, settings, output)
    return built if built.seconds is not None else dataclasses.replace(built, seconds=time.perf_counter() - started)


def run_baseline(
    method: Method, settings: BaselineSettings, options: Any, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train or wrap the target, and write the result with its `run.json`.

    The output folder then holds `run.json`, `model` (whole or absent), and in `work` the helpers that the model
    refers to, if any. A stopped run continues with the same call.

    Returns:
        The content of `run.json`; empty in all processes but the main one.

    Raises:
        UsageError: an input cannot be used; no weights have been written.
        Interrupted: on Ctrl-C; the same call continues.
        Diverged: a loss is not finite.
    """
    state, report = join_processes(report)
    if method.kind == "inference" and state.num_processes > 1:
        raise UsageError(f"{method.name} runs in one process, not in {state.num_processes}")
    output = Path(settings.output).expanduser()
    target = resolve_trainable(settings.target, "target")
    tokenizer = load_tokenizer(target)
    base = None
    if isinstance(settings, HelpedSettings) and settings.base is not None:
        base = resolve_trainable(settings.base, "base")
        common_vocabulary_of({"target": target, "base": base})
    inputs = [Path(settings.forget).expanduser(), Path(settings.retain).expanduser(), target, *([base] if base else [])]
    check_apart(output.resolve(), [path.resolve() for path in inputs if path.exists()])
    forget, retain = read_records(settings.forget), read_records(settings.retain)
    report_sets(forget, retain, "a method is told to forget and to keep them", report)
    form = Format(
        system_prompt=settings.system_prompt,
        max_length=limit_length(settings.max_length, target, report),
        chat_template_kwargs=read_template_kwargs(settings.chat_template_kwargs),
    )
    for records in (forget, retain):
        report_cut(records, tokenizer, form, report)

    values = dataclasses.asdict(settings) | dataclasses.asdict(options)
    decides = values | {
        "overwrite": False,
        "method": method.name,
        "forget records": forget.sha256,
        "retain records": retain.sha256,
        "target files": input_digests(target),
        "base files": None if base is None else input_digests(base),
        "other files": path_digests(dataclasses.asdict(options)),
    }
    run = RunFolder.open(
        output, "baseline", values, decides, overwrite=settings.overwrite, stale=(MODEL, WORK),
        on_main=on_main, method=method.name,
    )  # fmt: skip
    with run:
        if run.resumed and state.is_main_process:
            shutil.rmtree(output / MODEL, ignore_errors=True)
        job = Job(target, tokenizer, forget, retain, output / WORK, form, base, settings.seed, report)
        model = output_folder(output / MODEL) if state.is_main_process else contextlib.nullcontext(output / MODEL)
        with model as folder:
            built = build_method(job, options, folder)
        content: dict[str, Any] = {}
        if state.is_main_process:
            if (output / WORK).is_dir() and not any((output / WORK).iterdir()):
                (output / WORK).rmdir()
            content = run.finish(
                method=method.name,
                kind=method.kind,
                source=method.source,
                forget_set=forget.label,
                retain_set=retain.label,
                overlap=dataclasses.asdict(overlap(forget, retain)),
                seconds=round(built.seconds or 0.0, 2),
                notes=list(built.notes),
                model=str(output / MODEL),
            )
        state.wait_for_everyone()
        return content
