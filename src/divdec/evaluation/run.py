"""Run a suite on models and steering settings; an interrupted run is resumed after its last finished stage."""

from __future__ import annotations

import dataclasses
import functools
import glob
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from divdec.checkpoint import CheckpointReference, check_weights, dtype_for_passes, load_model, load_tokenizer
from divdec.errors import UsageError
from divdec.evaluation.results import ITEMS, SUMMARY, Results, read_results, write_results
from divdec.evaluation.scoring import EvaluatedModel
from divdec.evaluation.settings import EvalSettings
from divdec.experts.combined import NoExperts
from divdec.model.bundle import is_bundle, read_config
from divdec.model.loading import answer_digests
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import RECORD, RunFolder, path_digests, read_record, record, settings_hash, write_json
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def parse_sweep(texts: Sequence[str]) -> tuple[Steering, ...]:
    """Parse settings such as 'linear:0.5,1,1.5', 'rank:1,5,20', and with a margin 'linear:1,1.5:3' or 'rank:5,20:3'.

    Raises:
        UsageError: a setting is malformed, or given twice.
    """
    settings: list[Steering] = []
    for text in texts:
        rule, _, values = text.partition(":")
        values, *ending = values.split(":")
        ending = "".join(f":{part}" for part in ending)
        for value in values.split(","):
            settings.append(Steering.parse(f"{rule}:{value}{ending}"))
    if len({str(setting) for setting in settings}) < len(settings):
        raise UsageError(f"the sweep {' '.join(texts)} names a setting twice")
    return tuple(settings)


class Suite(Protocol):
    """A benchmark with its data, read and checked before a model is loaded."""

    outputs: ClassVar[tuple[str, ...]] = ()
    """Files that the suite writes into a result folder, besides summary and items."""

    @property
    def digest(self) -> str:
        """Digest of the data."""
        ...

    def evaluate(
        self, model: EvaluatedModel, earlier: list[Results], save: Callable[[Sequence[Results]], None]
    ) -> list[Results]:
        """Add the figures that are missing in earlier results, and save after each stage."""
        ...

    def write(self, results: Results, folder: Path) -> None:
        """Write the results of a model into its folder: at least those of `write_results`."""
        write_results(results, folder)

    def headlines(self, results: Results) -> dict[str, str]:
        """Return the most important figures, each with the direction in which it is better: ↑, ↓ or → 0."""
        ...


def evaluate(
    settings: EvalSettings, suite: Suite, device_map: str | None = None, report: Callable[[str], None] = print
) -> list[Results]:
    """Evaluate every model under every setting, and write the results after every stage; the same call resumes.

    Raises:
        UsageError: an option cannot be used.
    """
    started = time.perf_counter()
    output = Path(settings.output).expanduser()
    for entry in entry_points(group="divdec.models"):
        entry.load()  # installed packages register their model classes with transformers
    runs = _model_runs(settings, output)
    decides = dataclasses.asdict(dataclasses.replace(settings, overwrite=False, batch_size=1))
    decides |= {
        "suite": settings.suite,
        "models' files": [answer_digests(run.checkpoint, verified=not settings.no_verify) for run in runs],
        "data files": suite.digest,
        "other files": path_digests({name: getattr(settings, name) for name in settings.files}),
    }
    files = (SUMMARY, ITEMS, *suite.outputs)
    # An earlier result may have had other folders: a model in the run, a setting of that. Other runs' stay.
    earlier = [file for folders in ("", "*/", "*/*/") for name in files for file in output.glob(f"{folders}{name}")]
    nested = {file.parent for folders in ("*/", "*/*/") for file in output.glob(f"{folders}{RECORD}")}
    others = {folder for folder in nested if "fingerprint" in (read_record(folder) or {})}
    stale = [glob.escape(str(file.relative_to(output))) for file in earlier if not others & {*file.parents}]
    run_folder = RunFolder.open(output, "eval", settings, decides, overwrite=settings.overwrite, stale=stale)
    with run_folder:
        all_results: list[Results] = []
        for run in runs:
            results = [
                read_results(folder)
                if (folder / SUMMARY).is_file()
                else Results("", settings.suite, split=getattr(settings, "split", None))
                for folder in run.folders
            ]
            model = run.load(settings, device_map)
            for setting_results, folder, steering in zip(results, run.folders, run.steering, strict=True):
                if isinstance(model, DivergenceForCausalLM) and steering is not None:
                    model.steering = steering
                rule = getattr(model, "rule", None)
                report(f"{run.name}: {rule or 'not steered'}")
                setting_results.name = folder.name
                setting_results.about |= {"model": run.path, "steering": rule, **_identity(run, model)}
            evaluated = EvaluatedModel(model, load_tokenizer(run.checkpoint), run.steering)
            save = functools.partial(_save, run=run, suite=suite, settings=settings, output=output)
            all_results += suite.evaluate(evaluated, earlier=results, save=save)
        seconds = round(time.perf_counter() - started, 1)
        figures = {results.name: results.figures for results in all_results}
        single = {"result": all_results[0].about} if len(all_results) == 1 else {}
        run_folder.finish(seconds=seconds, figures=figures, **single)
        return all_results


@dataclasses.dataclass(frozen=True)
class _ModelRun:
    """A model, its settings, and the result folder of each setting."""

    path: str  # as the user gave it
    name: str
    checkpoint: Path
    steering: tuple[Steering | None, ...]
    folders: tuple[Path, ...]

    def load(self, settings: EvalSettings, device_map: str | None) -> PreTrainedModel:
        dtype = dtype_for_passes(settings.dtype, device_map)
        if self.steering[0] is not None:
            return DivergenceForCausalLM.from_pretrained(
                self.checkpoint, verify=not settings.no_verify, dtype=dtype, device_map=device_map
            )
        check_weights(self.checkpoint)
        return load_model(self.checkpoint, dtype=dtype, device_map=device_map).eval()


def _model_runs(settings: EvalSettings, output: Path) -> list[_ModelRun]:
    paths = settings.models
    checkpoints = [CheckpointReference.parse(path).resolve(Path(), weights=True) for path in paths]
    names = [
        checkpoint.name if Path(path).name in ("", "..") else Path(path).name
        for path, checkpoint in zip(paths, checkpoints, strict=True)
    ]
    if len(set(paths)) < len(paths):
        raise UsageError(f"a model is given twice: {', '.join(paths)}")
    runs = []
    for path, name, checkpoint in zip(paths, names, checkpoints, strict=True):
        name = f"{name}-{settings_hash(path)[:6]}" if names.count(name) > 1 else name
        steering = _steering(checkpoint, path, settings)
        for setting in steering:
            if setting is not None:
                setting.check_vocabulary(read_config(checkpoint).vocab_size)
        base = output / name if len(paths) > 1 else output
        folders = (base,) if len(steering) == 1 else tuple(base / str(s).replace(":", "-") for s in steering)
        runs.append(_ModelRun(path, name, checkpoint, steering, folders))
    return runs


def _save(
    all_results: Sequence[Results], *, run: _ModelRun, suite: Suite, settings: EvalSettings, output: Path
) -> None:
    for results, folder in zip(all_results, run.folders, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        suite.write(results, folder)
        if folder != output:
            write_json(folder / RECORD, record("eval", settings, result=results.about))


def _identity(run: _ModelRun, model: PreTrainedModel) -> dict[str, Any]:
    """Method, setting, family and size, from the bundle's configuration or the checkpoint's `run.json`."""
    if isinstance(model, DivergenceForCausalLM):
        config, experts = read_config(run.checkpoint), cast("Any", model.experts)
        parts = getattr(experts, "parts", (experts,))
        retain = next((pair.retain for pair in parts if hasattr(pair, "retain")), None)
        reference = config.retain_auxiliary or config.ngram or config.registry or {}
        folder = str(reference.get("hub_id") or reference.get("folder") or run.name)
        path = Path(folder)
        family = path.parent.name if path.name in ("retain", "forget") and path.parent.name else path.name
        size = _billions(retain) if hasattr(retain, "parameters") else 0.0 if config.ngram else None
        method = "takedowns" if isinstance(experts, NoExperts) else model.steering.rule
        return {"method": method, "setting": model.rule, "family": family, "size": size}
    content: dict[str, Any] = {}
    for folder in (run.checkpoint, run.checkpoint.parent):  # a baseline's record is beside the model's folder
        content = content or read_record(folder) or {}
    method = content.get("method") or ("distill" if content.get("verb") == "distill" else run.name)
    options = content.get("settings") if content.get("method") else None
    setting = " ".join(f"{name}={value}" for name, value in options.items()) if isinstance(options, dict) else ""
    return {"method": method, "setting": setting, "family": run.name, "size": _billions(model)}


def _billions(model: Any) -> float:
    return round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 6)


def _steering(checkpoint: Path, path: str, settings: EvalSettings) -> tuple[Steering | None, ...]:
    if not is_bundle(checkpoint):
        if settings.steering or settings.sweep:
            raise UsageError(f"{path} is a plain checkpoint, not steered; give a bundle to --steering or --sweep")
        return (None,)
    default = Steering.from_dict(read_config(checkpoint).steering or {})
    if settings.sweep:
        sweep = parse_sweep(settings.sweep)
        # The eligible vocabulary belongs to the bundle, not to the strength.
        return tuple(dataclasses.replace(setting, vocabulary=default.vocabulary) for setting in sweep)
    if settings.steering:
        return (default.revised(settings.steering),)
    return (default,)
