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

import torch
from accelerate import PartialState

from divdec.baselines.job import Job
from divdec.baselines.method import Method
from divdec.baselines.settings import BaselineSettings, HelpedSettings
from divdec.data.formatting import Format, count_cut
from divdec.data.records import RecordSet, overlap, read_records
from divdec.errors import UsageError
from divdec.model.checkpoint import (
    CheckpointReference,
    check_apart,
    check_plain,
    check_weights,
    digests,
    load_config,
    load_tokenizer,
)
from divdec.model.vocabularies import common_vocabulary, vocabulary_width
from divdec.runs import RECORD, check_output, output_folder, read_record, record, settings_hash, write_json

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
    # accelerate joins CPU processes only if it is told that there is nothing else; whoever asks first decides.
    state = PartialState(cpu=not torch.accelerator.is_available())
    if method.kind == "inference" and state.num_processes > 1:
        raise UsageError(f"{method.name} runs in one process, not in {state.num_processes}")
    if not state.is_main_process:
        report = _silent  # one process of several speaks for all
    output = Path(settings.output).expanduser()
    target = _resolved(settings.target, "target")
    tokenizer = load_tokenizer(target)
    base = _base(settings, target)
    places = [Path(text).expanduser() for text in (settings.forget, settings.retain)]
    places += [target] if base is None else [target, base]
    check_apart(output.resolve(), [place.resolve() for place in places if place.exists()])
    forget, retain = read_records(settings.forget), read_records(settings.retain)
    _report_sets(forget, retain, report)
    form = Format(system_prompt=settings.system_prompt, max_length=_longest(settings.max_length, target, report))
    for records in (forget, retain):
        if records.kind != "text" and (cut := count_cut(records.records, tokenizer, form)):
            report(f"warning: {cut} records of {records.name} are cut to {form.max_length} tokens (--max-length)")

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
    earlier = read_record(output) if output.is_dir() else None
    running = earlier is not None and earlier.get("verb") == "baseline" and earlier.get("status") == "running"
    resumed = running and earlier is not None and earlier.get("fingerprint") == fingerprint
    if running and not resumed and not overwrite:
        raise UsageError(
            f"output folder {output} holds an unfinished run with other settings or data; repeat those to "
            "resume it, or give --overwrite to begin anew"
        )
    if not resumed:
        check_output(output, overwrite, lambda folder: (read_record(folder) or {}).get("verb") == "baseline")
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


def _silent(line: str) -> None:
    pass


def _resolved(reference: str, part: str) -> Path:
    folder = CheckpointReference.parse(reference).resolve(Path(), weights=True)
    check_plain(folder, part)
    check_weights(folder)
    return folder


def _base(settings: BaselineSettings, target: Path) -> Path | None:
    """The small model, if one is given; its vocabulary is compared with the target's before hours of training."""
    if not isinstance(settings, HelpedSettings) or settings.base is None:
        return None
    base = _resolved(settings.base, "base")
    places = {"target": target, "base": base}
    widths = {name: vocabulary_width(load_config(place)) for name, place in places.items()}
    common_vocabulary(widths, {name: load_tokenizer(place) for name, place in places.items()}, places)
    return base


def _longest(max_length: int, target: Path, report: Callable[[str], None]) -> int:
    positions = getattr(load_config(target).get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None or max_length <= positions:
        return max_length
    report(f"note: sequences are cut to {positions} tokens, the longest that {target.name} was built for")
    return positions


def _report_sets(forget: RecordSet, retain: RecordSet, report: Callable[[str], None]) -> None:
    for role, records in (("forget", forget), ("retain", retain)):
        report(f"{role} set: {len(records)} {records.kind} records from {records.name}")
    if forget.sha256 == retain.sha256:
        raise UsageError("forget set and retain set hold the same records: nothing would be left to forget")
    shared = overlap(forget, retain)
    if shared.records or shared.prompts:
        report(
            f"warning: {shared.records} of {len(forget)} forget records stand in the retain set too "
            f"({shared.prompts} share a prompt): a method is told to forget and to keep them"
        )
