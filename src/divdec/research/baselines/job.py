"""One method applied to one target: the data that every method reads, and the run behind `divdec baseline`."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from divdec.data.formatting import Example, Format, encode_set
from divdec.data.records import RecordSet, overlap, read_records
from divdec.errors import UsageError
from divdec.model.checkpoint import check_apart, common_vocabulary_of, digests, load_tokenizer
from divdec.research.baselines.registry import Method
from divdec.research.baselines.settings import BaselineSettings, HelpedSettings
from divdec.runs import RECORD, RunFolder, output_folder, read_json, settings_hash, write_json
from divdec.training.inputs import join_processes, limit_length, report_cut, report_sets, resolve_trainable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STAGE = "stage.json"
MODEL, WORK = "model", "work"


@dataclasses.dataclass(frozen=True)
class Job:
    """A target with its forget and retain set, shared by any number of methods."""

    target: Path
    """Folder of the model that has learned both sets."""
    tokenizer: PreTrainedTokenizerBase
    forget: RecordSet
    retain: RecordSet
    work: Path
    """Folder of intermediate models. It is kept, so that stopped runs continue and settings share helpers."""
    form: Format = Format()  # noqa: RUF009
    base: Path | None = None
    """Folder of a small model of the target's vocabulary that has learned neither set, for methods with helpers of
    another size."""
    seed: int = 0
    report: Callable[[str], object] = print
    """Receives one line per step."""

    @property
    def forget_examples(self) -> list[Example]:
        """The forget set as tokens."""
        return encode_set(self.forget, self.tokenizer, self.form)

    @property
    def retain_examples(self) -> list[Example]:
        """The retain set as tokens."""
        return encode_set(self.retain, self.tokenizer, self.form)

    def work_folder(self, name: str, key: Any) -> Path:
        """Name the folder in `work` of a model with these settings.

        Args:
            name: beginning of the folder's name.
            key: JSON values: every setting that decides the weights, beside target, data and seed.
        """
        base = None if self.base is None else digests(self.base)
        sets = [self.forget.sha256, self.retain.sha256]
        content = [key, digests(self.target), base, *sets, dataclasses.asdict(self.form), self.seed]
        return self.work / f"{name}-{settings_hash(content)}"

    def train_once(
        self, name: str, key: Any, train: Callable[[Path], tuple[PreTrainedModel, float]]
    ) -> tuple[Path, float]:
        """Train a helper model, unless `work` holds it.

        Args:
            name: beginning of the folder's name.
            key: see `work_folder`.
            train: given a folder for checkpoints, trains and returns the model and its training time in seconds.

        Returns:
            The checkpoint's folder, with its tokenizer, and its training time in seconds.
        """
        folder = self.work_folder(name, key)
        self.work.mkdir(parents=True, exist_ok=True)
        with FileLock(self.work / f"{folder.name}.lock"):  # parallel trials share helpers
            if not (folder / STAGE).is_file():
                checkpoints = self.work / f"{folder.name}.work"
                model, seconds = train(checkpoints)
                with output_folder(folder) as temporary:
                    model.save_pretrained(temporary)
                    self.tokenizer.save_pretrained(temporary)
                    write_json(temporary / STAGE, {"key": key, "seconds": round(seconds, 2)})
                shutil.rmtree(checkpoints, ignore_errors=True)
        return folder, float(read_json(folder / STAGE)["seconds"])


def run_baseline(
    method: Method, settings: BaselineSettings, options: Any, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train or wrap the target, and write the result with its `run.json`.

    The output folder then holds `run.json`, `model` (whole or absent), and in `work` the helpers that the model
    refers to, if any. A stopped run continues with the same call.

    Args:
        method: the method.
        settings: target, data and output.
        options: an instance of `method.settings`.
        report: receives one line per step.

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
    form = Format(system_prompt=settings.system_prompt, max_length=limit_length(settings.max_length, target, report))
    for records in (forget, retain):
        report_cut(records, tokenizer, form, report)

    given = dataclasses.asdict(settings) | dataclasses.asdict(options)
    models = [digests(target), None if base is None else digests(base)]
    decides = [method.name, given | {"overwrite": False}, forget.sha256, retain.sha256, *models]
    run = RunFolder.open(
        output, "baseline", given, decides, overwrite=settings.overwrite, stale=(MODEL, WORK),
        is_main=state.is_main_process, wait=state.wait_for_everyone, method=method.name,
    )  # fmt: skip
    if run.resumed and state.is_main_process:
        shutil.rmtree(output / MODEL, ignore_errors=True)
    job = Job(target, tokenizer, forget, retain, output / WORK, form, base, settings.seed, report)
    model = output_folder(output / MODEL) if state.is_main_process else contextlib.nullcontext(output / MODEL)
    with model as folder:
        try:
            built = method.build(job, options, folder)
        except UsageError:
            if state.is_main_process and not (output / WORK).is_dir():
                (output / RECORD).unlink()  # nothing was trained: another run may use the folder
            raise
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
