"""A run of a suite over models and settings: loading them, and results that are kept after every stage."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.evaluation.results import SUMMARY, Results, read_results, write_results
from divdec.evaluation.settings import EvalSettings
from divdec.evaluation.sharding import is_main, number_of_processes, on_main
from divdec.evaluation.subject import Subject
from divdec.model.bundle import is_bundle, read_config
from divdec.model.checkpoint import CheckpointReference, check_weights, digests, load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import RECORD, check_output, read_record, record, settings_hash, write_json
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Save = Callable[[Sequence[Results]], None]


def parse_sweep(texts: Sequence[str], *, allow_negative: bool = False) -> tuple[Steering, ...]:
    """Settings from texts such as 'linear:0.5,1,1.5' and 'rank:1,5,20'.

    Rank settings get the soft fill, which likelihoods need.

    Raises:
        UsageError: one is malformed, or comes twice.
    """
    settings: list[Steering] = []
    for text in texts:
        rule, _, values = text.partition(":")
        values, _, fill = values.partition(":")
        for value in values.split(","):
            ending = ":soft" if rule == "rank" and fill in ("", "soft") else f":{fill}" if fill else ""
            settings.append(Steering.parse(f"{rule}:{value}{ending}", allow_negative=allow_negative))
    if len({str(setting) for setting in settings}) < len(settings):
        raise UsageError(f"the sweep {' '.join(texts)} names a setting twice")
    return tuple(settings)


def evaluate(
    settings: EvalSettings, device_map: str | None = None, report: Callable[[str], None] = print
) -> list[Results]:
    """Measure every model under every setting, and write the results as they come.

    Within `divdec.evaluation.sharding.sharded` the processes that torchrun has started share the work; one of them
    writes, and all return the same.

    Args:
        settings: what is measured, on what, and where the results go.
        device_map: where the models run.
        report: told what is done, a line each.

    Returns:
        The results, by model and setting.

    Raises:
        UsageError: something given cannot be used; results written so far are kept, and the same call goes on.
    """
    started = time.perf_counter()
    if number_of_processes() > 1 and device_map == "auto":
        raise UsageError("--device spread takes all GPUs for one process; start one, or leave it out")
    output = Path(settings.output).expanduser()
    places = [_Place.of(name, settings, output, step) for step, name in enumerate(settings.models, start=1)]
    if len({place.name for place in places}) < len(places):
        raise UsageError(f"two models share a name, which their results would share: {', '.join(settings.models)}")
    suite = _suite(settings)
    fingerprints = [place.fingerprint for place in places]
    resumed = on_main(lambda: _open_output(output, settings, fingerprints, suite.fingerprint))
    found: list[Results] = []
    for place in places:
        if is_main():
            report(f"{place.name}: {', '.join(map(str, place.steering)) if place.steering[0] else 'not steered'}")
        earlier = on_main(lambda place=place: [_earlier(folder) if resumed else None for folder in place.folders])
        done = [results or Results("", settings.suite, split=suite.split) for results in earlier]
        for results, folder, steering in zip(done, place.folders, place.steering, strict=True):
            results.name = folder.name
            results.about = {"model": place.given, "steering": None if steering is None else str(steering)}
            if settings.sequence != "none":
                results.about |= {"sequence": settings.sequence, "step": place.step}
        subject = Subject(place.load(settings, device_map), load_tokenizer(place.folder), place.steering)
        found += suite.measure(subject, done, place.save(settings.openunlearning))
    seconds = round(time.perf_counter() - started, 1)
    figures = {results.name: results.figures for results in found}
    if is_main():
        write_json(output / RECORD, record("eval", settings, seconds=seconds, figures=figures))
    return found


@dataclasses.dataclass(frozen=True)
class _Place:
    """A model, its settings, and the folder of each setting's results."""

    given: str
    name: str
    folder: Path
    steering: tuple[Steering | None, ...]
    folders: tuple[Path, ...]
    step: int
    """Its place among the models."""

    @classmethod
    def of(cls, given: str, settings: EvalSettings, output: Path, step: int) -> _Place:
        folder = CheckpointReference.parse(given).resolve(Path(), weights=True)
        name = folder.name if Path(given).expanduser().is_dir() else given.replace("/", "--")
        # Steps are told apart by their number: each is often the same folder of another run.
        name = f"step-{step}" if settings.sequence != "none" else name
        steering = _steering(folder, given, settings)
        for setting in steering:
            if setting is not None:
                setting.check_vocabulary(read_config(folder).vocab_size)
        base = output / name if len(settings.models) > 1 else output
        folders = (base,) if len(steering) == 1 else tuple(base / str(s).replace(":", "-") for s in steering)
        return cls(given, name, folder, steering, folders, step)

    @property
    def fingerprint(self) -> Any:
        return digests(self.folder)

    def load(self, settings: EvalSettings, device_map: str | None) -> PreTrainedModel:
        if self.steering[0] is not None:
            return DivergenceForCausalLM.from_pretrained(
                self.folder, verify=not settings.no_verify, dtype=settings.dtype, device_map=device_map
            )
        check_weights(self.folder)
        return load_model(self.folder, dtype=settings.dtype, device_map=device_map).eval()

    def save(self, openunlearning: bool) -> Save:
        def save(found: Sequence[Results]) -> None:
            if not is_main():
                return
            for results, folder in zip(found, self.folders, strict=True):
                folder.mkdir(parents=True, exist_ok=True)
                write_results(results, folder, openunlearning=openunlearning)

        return save


def _steering(folder: Path, given: str, settings: EvalSettings) -> tuple[Steering | None, ...]:
    if not is_bundle(folder):
        if settings.steering or settings.sweep:
            raise UsageError(
                f"{given} is a plain checkpoint: nothing steers it; give a bundle to --steering or --sweep"
            )
        return (None,)
    own = Steering.from_dict(read_config(folder).steering or {})
    if settings.sweep:
        swept = parse_sweep(settings.sweep, allow_negative=settings.allow_negative)
        # The eligible vocabulary belongs to the bundle, not to the strength.
        return tuple(dataclasses.replace(setting, vocabulary=own.vocabulary) for setting in swept)
    if settings.steering:
        return (own.revised(settings.steering, allow_negative=settings.allow_negative),)
    return (own,)


@dataclasses.dataclass(frozen=True)
class _Suite:
    split: str | None
    fingerprint: str
    measure: Callable[[Subject, list[Results], Save], list[Results]]


def _suite(settings: EvalSettings) -> _Suite:
    """The suite with its data read, so that bad data is found before a model is loaded."""
    data = Path(settings.data).expanduser()
    holdout = Path(settings.holdout).expanduser() if settings.holdout else None
    retained = read_results(settings.retain_results) if settings.retain_results else None
    if retained is not None and retained.suite != settings.suite:
        raise UsageError(f"retain results {settings.retain_results} are of the suite {retained.suite}")
    if settings.suite == "tofu":
        return _tofu(settings, data, holdout, retained)
    if settings.suite == "muse":
        return _muse(settings, data, holdout, retained)
    from divdec.evaluation.leak_run import leak_suite

    content, measure = leak_suite(settings)
    return _Suite(None, settings_hash(content), measure)


def _tofu(settings: EvalSettings, data: Path, holdout: Path | None, retained: Results | None) -> _Suite:
    from divdec.evaluation.fluency import Fluency
    from divdec.evaluation.tofu import TofuOptions, evaluate_tofu
    from divdec.evaluation.tofu_data import read_tofu

    questions = read_tofu(data, settings.split, holdout, settings.limit)
    options = TofuOptions(
        settings.template, settings.system_prompt, settings.date, settings.max_length, settings.batch_size, retained
    )
    fluency = None if settings.fluency == "none" else Fluency(settings.fluency)
    reference = None
    if settings.reference is not None:
        folder = CheckpointReference.parse(settings.reference).resolve(Path(), weights=True)
        check_weights(folder)
        reference = load_model(folder, dtype=settings.dtype).eval()

    def measure(subject: Subject, earlier: list[Results], save: Save) -> list[Results]:
        return evaluate_tofu(
            subject, questions, options, fluency=fluency, reference=reference, earlier=earlier, save=save
        )

    return _Suite(settings.split, settings_hash(dataclasses.asdict(questions)), measure)


def _muse(settings: EvalSettings, data: Path, holdout: Path | None, retained: Results | None) -> _Suite:
    from divdec.evaluation.muse import MuseOptions, evaluate_muse
    from divdec.evaluation.muse_data import read_muse

    content = read_muse(data, holdout, settings.limit)
    options = MuseOptions(settings.max_length, settings.batch_size, retained)

    def measure(subject: Subject, earlier: list[Results], save: Save) -> list[Results]:
        return evaluate_muse(subject, content, options, earlier=earlier, save=save)

    return _Suite(None, settings_hash(dataclasses.asdict(content)), measure)


def _open_output(output: Path, settings: EvalSettings, *fingerprints: Any) -> bool:
    """Begin anew, or say that an earlier run of the same kind goes on."""
    same = dataclasses.asdict(dataclasses.replace(settings, overwrite=False, batch_size=1))
    fingerprint = settings_hash([same, *fingerprints])
    earlier = read_record(output) if output.is_dir() else None
    if earlier is not None and earlier.get("status") == "running":
        if earlier.get("fingerprint") == fingerprint:
            return True
        if not settings.overwrite:
            raise UsageError(
                f"output folder {output} holds an unfinished run with other settings, models or data; repeat those "
                "to resume it, or give --overwrite to begin anew"
            )
    check_output(output, settings.overwrite, lambda folder: (read_record(folder) or {}).get("verb") == "eval")
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / RECORD, record("eval", settings, fingerprint=fingerprint) | {"status": "running"})
    return False


def _earlier(folder: Path) -> Results | None:
    return read_results(folder) if (folder / SUMMARY).is_file() else None
