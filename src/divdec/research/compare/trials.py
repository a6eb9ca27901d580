"""Trials of a comparison: build and measure one method with one setting from the grid.

A trial's folder holds the results as `divdec eval` writes them, and `trial.json`, which is written last and marks the
folder as complete.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from divdec.data.records import write_records
from divdec.errors import Diverged, FailedClosed, UsageError, first_line
from divdec.evaluation.results import Results, read_results, write_results
from divdec.evaluation.scoring import EvaluatedModel
from divdec.evaluation.tofu import evaluate_tofu
from divdec.model.bundle import is_bundle, write_bundle
from divdec.model.checkpoint import load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.baselines import auto  # noqa: F401  composites load
from divdec.research.baselines.job import BuiltModel, Job
from divdec.research.baselines.methods import METHODS, REFERENCES, TITLES
from divdec.research.baselines.run import build_method
from divdec.research.compare.benchmark import Benchmark
from divdec.runs import output_folder, read_json, settings_hash, write_json
from divdec.steering import Steering
from divdec.training.distillation import distill
from divdec.training.settings import DistillationSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL = "trial.json"
MODEL = "model"
TEACHER = "linear:1.5"  # the paper's, for every distilled model of its table

Grid = Mapping[str, Sequence[Any]]
_BATCHES: Grid = {"batch_size": (16,), "gradient_accumulation": (1,)}
# For models of a few million parameters, whose learning rates are a hundred times those of large ones. The settings
# were chosen on seed 0 of the demo and widened where a method's best one was its strongest, so that each method's
# settings range from hardly any forgetting to too much.
SMALL: dict[str, Grid] = {
    "linear": {"steering": tuple(f"linear:{alpha:g}" for alpha in (0.75, 1, 1.25, 1.5, 1.75, 2.5))},
    "rank": {"steering": ("rank:5", "rank:30", "rank:100", "rank:300", "rank:600")},
    "distill": {"lr": (3e-4, 1e-3, 2e-3), "rehearse": (0, 200)},
    "grad-ascent": {"learning_rate": (2e-4, 3e-4, 5e-4, 1e-3), "epochs": (2.0, 4.0), **_BATCHES},
    "grad-diff": {"learning_rate": (2e-4, 3e-4, 5e-4, 1e-3, 2e-3), "epochs": (3.0, 5.0), **_BATCHES},
    "npo": {"learning_rate": (2e-4, 3e-4, 5e-4, 1e-3, 2e-3), "epochs": (3.0, 5.0), **_BATCHES},
    "simnpo": {"learning_rate": (1e-3, 2e-3, 3e-3), "epochs": (5.0, 10.0), **_BATCHES},
    "rmu": {
        "learning_rate": (2e-3, 3e-3, 5e-3, 1e-2),
        "alpha": (1.0, 10.0),
        "coefficient": (20.0,),
        "epochs": (5.0,),
        "layer": (2,),
        **_BATCHES,
    },
    "undial": {"learning_rate": (2e-4, 3e-4, 1e-3, 2e-3), "epochs": (2.0, 4.0), **_BATCHES},
    "idk-dpo": {"learning_rate": (5e-4, 1e-3, 2e-3, 4e-3), "epochs": (3.0, 6.0), **_BATCHES},
    "whp": {"learning_rate": (5e-4, 1e-3), "alpha": (2.0, 4.0, 8.0, 16.0)},
    "offset": {"learning_rate": (1e-4, 3e-4, 1e-3, 2e-3), "epochs": (2.0, 5.0)},
    "uld": {"learning_rate": (2e-3, 5e-3), "weight": (0.8, 1.5, 3.0)},
    "ucd": {"learning_rate": (6e-4, 1e-3), "alpha": (2.0, 4.0, 8.0, 16.0)},
    "guard": {"delta": (0.2, 0.3, 0.5), "similarity_weight": (0.0, 1.0)},
    "eco": {"strength": (0.5, 2.0, 10.0, 30.0), "dims": (4, 16)},
    "lunar": {"coefficient": (3.0, 4.0, 6.0), "ridge": (1e-3, 1e-2)},
}
_PAPER_GRADIENT: Grid = {
    "learning_rate": (5e-7, 8e-7, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 1e-5),
    "epochs": tuple(float(number) for number in range(1, 11)),
}
# The paper's (appendix TOFU).
PAPER: dict[str, Grid] = {
    "linear": {
        "steering": tuple(f"linear:{alpha:g}" for alpha in (0.5, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 2, 2.5, 3, 3.5, 4))
    },
    "rank": {"steering": tuple(f"rank:{k}" for k in (1, 5, 20, 50, 100, 200, 500, 1000))},
    "distill": {"lr": (1e-5, 2e-5, 4e-5, 8e-5), "temperature": (1.0, 1.5, 2.0, 4.0)},
    "grad-ascent": _PAPER_GRADIENT,
    "grad-diff": _PAPER_GRADIENT,
    "npo": _PAPER_GRADIENT,
    "simnpo": _PAPER_GRADIENT,
    # OpenUnlearning's defaults, as in the paper.
    "rmu": {**_PAPER_GRADIENT, "coefficient": (2.0,), "alpha": (1.0,), "trainable": ("all",)},
    "undial": _PAPER_GRADIENT,
    "idk-dpo": _PAPER_GRADIENT,
    "whp": {"learning_rate": (1e-5,), "alpha": (0.5, 1.0, 2.0, 3.0, 4.0)},
    "offset": {"learning_rate": (3e-6, 7e-6, 1e-5)},
    "uld": {"learning_rate": (5e-4, 1e-3, 2e-3), "weight": (0.5, 0.8, 1.0)},
    "ucd": {"learning_rate": (1e-5,), "alpha": (0.5, 1.0, 2.0, 3.0)},
    "guard": {"delta": (0.3, 0.5, 0.7)},
    "eco": {"strength": (5.0, 20.0, 50.0, 100.0)},
    "lunar": {"coefficient": (1.0, 2.0, 4.0)},
}
GRIDS = {"small": SMALL, "paper": PAPER}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A method with one setting."""

    method: str
    """A baseline, 'linear', 'rank' or 'distill', or one of the references."""
    options: tuple[tuple[str, Any], ...] = ()
    """Settings that vary within the grid."""
    steering: str | None = None
    """The rule, for 'linear' and 'rank'."""
    constant: tuple[tuple[str, Any], ...] = ()
    """Settings that differ from the method's defaults but do not vary; tables omit them."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that differ from the method's defaults."""
        return dict((*self.options, *self.constant))

    @property
    def label(self) -> str:
        """The setting as tables show it."""
        if self.steering is not None:
            return self.steering
        short = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in self.options}
        return ", ".join(f"{name} {value}" for name, value in short.items())

    @property
    def folder(self) -> Path:
        """Folder of the trial's results within a seed's folder."""
        setting = self.label.replace(", ", "_").replace(" ", "-").replace(":", "-").replace("/", "-") or "default"
        # Grids may differ in their constant settings.
        return Path(self.method) / (f"{setting}-{settings_hash(self.constant)[:4]}" if self.constant else setting)

    def fingerprint(self, benchmark: Benchmark) -> str:
        """Digest of everything that determines the results, except the code."""
        return settings_hash([self.method, self.options, self.constant, self.steering, benchmark.identity])


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """Result of a trial on one benchmark."""

    trial: Trial
    folder: Path
    seconds: float | None
    """Training time in seconds; None if unknown, 0 without training."""
    extra_bytes: int | None
    """Memory of weights beyond the target's."""
    notes: tuple[str, ...] = ()
    failed: str | None = None
    """Reason for missing results."""

    @property
    def results(self) -> Results:
        """Figures and items."""
        return read_results(self.folder)


def trials_of(names: Sequence[str], grid: str) -> list[Trial]:
    """List the trials of methods.

    Raises:
        UsageError: a method is not known.
    """
    known = [name for name in TITLES if name not in REFERENCES]
    if unknown := [name for name in names if name != "all" and name not in known]:
        raise UsageError(f"method {unknown[0]!r} is not known; there are: all, {', '.join(known)}")
    trials = []
    for name in known if "all" in names else [name for name in known if name in names]:
        axes = GRIDS[grid].get(name, {})
        for values in itertools.product(*axes.values()):
            options = dict(zip(axes, values, strict=True))
            steering = options.pop("steering", None)
            varied = tuple((axis, value) for axis, value in options.items() if len(axes[axis]) > 1)
            constant = tuple((axis, value) for axis, value in options.items() if len(axes[axis]) == 1)
            trials.append(Trial(name, varied, steering, constant))
    return trials


def read_trial(trial: Trial, benchmark: Benchmark, seed_folder: Path) -> TrialResult | None:
    """Read the result of an earlier run if it is complete, did not fail, and used the same benchmark."""
    folder = seed_folder / trial.folder
    if not (folder / TRIAL).is_file():
        return None
    content = read_json(folder / TRIAL)
    if content["fingerprint"] != trial.fingerprint(benchmark) or content["failed"] is not None:
        return None
    return TrialResult(trial, folder, content["seconds"], content["extra_bytes"], tuple(content["notes"]))


def run_trial(trial: Trial, benchmark: Benchmark, seed_folder: Path) -> TrialResult:
    """Build and measure a model. If building fails or training diverges, return a failed result."""
    folder = seed_folder / trial.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    failed, extra = None, None
    built = BuiltModel(benchmark.target, 0.0)
    try:
        built = build_model(trial, benchmark, folder / MODEL, seed_folder / "work")
        model = load_trial(built.folder, trial)
        extra = weight_bytes(model) - weight_bytes(load_model(benchmark.target))
        subject = EvaluatedModel(model, load_tokenizer(benchmark.target))
        # No aggregate needs gradient norms, and they cost a backward pass per item.
        (results,) = evaluate_tofu(subject, benchmark.questions, benchmark.layout, gradient_norms=False)
        results.name = str(trial.folder)
        results.about = {
            "method": trial.method, "setting": trial.label, "seed": benchmark.seed, "steering": trial.steering,
        }  # fmt: skip
        write_results(results, folder)
    except (UsageError, Diverged, FailedClosed, torch.OutOfMemoryError) as error:
        failed = first_line(error)
    content = {
        "method": trial.method, "setting": trial.label, "options": trial.settings, "seed": benchmark.seed,
        "seconds": built.seconds, "extra_bytes": extra, "notes": list(built.notes), "failed": failed,
        "fingerprint": trial.fingerprint(benchmark),
    }  # fmt: skip
    write_json(folder / TRIAL, content)
    return TrialResult(trial, folder, built.seconds, extra, built.notes, failed)


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


def _distill(trial: Trial, benchmark: Benchmark, output: Path, work: Path) -> BuiltModel:
    options: dict[str, Any] = {"steering": TEACHER, **trial.settings}
    work.mkdir(parents=True, exist_ok=True)
    with FileLock(work / "teacher.lock"):  # parallel trials share the teacher
        bundle = work / f"teacher-{str(options['steering']).replace(':', '-')}-{benchmark.identity}"
        if not is_bundle(bundle):
            _write_bundle(benchmark, bundle, str(options["steering"]))
        forget, retain = work / "forget.jsonl", work / "retain.jsonl"
        write_records(forget, benchmark.forget)
        write_records(retain, benchmark.retain)
    form = benchmark.form
    settings = DistillationSettings(
        bundle=str(bundle), forget=str(forget), retain=str(retain), output=str(output), seed=benchmark.seed,
        system_prompt=form.system_prompt, date=form.date, max_length=form.max_length, overwrite=True, **options,
    )  # fmt: skip
    content = distill(settings, report=lambda line: None)
    seconds = float(content["training"]["seconds"])
    return BuiltModel(output, None if benchmark.pair_seconds is None else benchmark.pair_seconds + seconds)


def load_trial(folder: Path, trial: Trial) -> PreTrainedModel:
    """Load a trial's model, on an accelerator if one is available."""
    if trial.steering is not None or is_bundle(folder):  # δ-Unlearning writes a bundle too
        model = DivergenceForCausalLM.from_pretrained(folder)
        # Likelihoods need finite logits, and the paper's figures of the rank rule use the soft fill throughout.
        model.steering = dataclasses.replace(model.steering, fill="soft")
    else:
        model = load_model(folder).eval()
    device: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device)


def weight_bytes(model: PreTrainedModel) -> int:
    """Memory of a model's weights and buffers; shared tensors count once."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
