"""The two auxiliaries by the paper's recipes, from a base checkpoint, a forget set and a retain set.

The run can be stopped and taken up again: whatever part is whole is not trained twice.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from divdec.data.formatting import Example, Format
from divdec.data.records import overlap, read_records, single_turn
from divdec.model.bundle import write_bundle
from divdec.model.card import auxiliary_card
from divdec.model.checkpoint import (
    CheckpointReference,
    check_apart,
    check_weights,
    digests,
    load_config,
    load_model,
    load_tokenizer,
)
from divdec.model.vocabularies import common_vocabulary_of
from divdec.runs import (
    RECORD,
    goes_on,
    output_folder,
    read_json,
    record,
    settings_hash,
    write_json,
    write_text,
)
from divdec.steering import Steering
from divdec.training.fine_tuning import TrainingResult, discard_checkpoints, fine_tune
from divdec.training.inputs import begin, checkpoint, encoded, longest, report_sets
from divdec.training.learning_rate import find_learning_rate
from divdec.training.settings import AuxiliarySettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RETAIN, FORGET, BUNDLE, WORK = "retain_auxiliary", "forget_auxiliary", "bundle", "work"
RESULT = "training.json"


def train_auxiliaries(settings: AuxiliarySettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train q and p, and write a bundle that steers the target with them.

    Args:
        settings: data, base, recipe and training.
        report: told what is found and done, a line each.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: something given cannot be used; nothing has then been written.
        Interrupted: Ctrl-C; the same call goes on where it stopped.
    """
    state, report = begin(report)
    steering = Steering.parse(settings.steering)
    output = Path(settings.output).expanduser()
    base = checkpoint(settings.base, "base")
    tokenizer = load_tokenizer(base)
    if settings.target is not None:
        steering.check_vocabulary(_check_target(settings.target, base))
    inputs = [
        Path(text).expanduser() for text in (settings.forget, settings.retain, settings.base, settings.target or "")
    ]
    check_apart(output.resolve(), [path.resolve() for path in inputs if path.exists() and path != Path()])
    forget, retain = read_records(settings.forget), read_records(settings.retain)
    report_sets(forget, retain, "what q has seen is not forgotten", report)
    form = Format(system_prompt=settings.system_prompt, max_length=longest(settings.max_length, base, report))
    forget_examples = encoded(forget, tokenizer, form, report)
    retain_examples = encoded(retain, tokenizer, form, report)
    p_examples = forget_examples + (retain_examples if settings.recipe == "full-retain" else [])

    same_settings = dataclasses.asdict(dataclasses.replace(settings, overwrite=False))
    fingerprint = settings_hash([same_settings, forget.sha256, retain.sha256, digests(base)])
    _open_output(output, fingerprint, settings)
    run = _Run(settings, output, base, tokenizer, {"forget": forget.label, "retain": retain.label}, report)
    # One rate for both where they learn the same data, as the paper's auxiliaries do: sought on what p learns, for a
    # base may know the retain set already, and would then hardly move.
    both = settings.recipe == "full-retain"
    retain_result = run.part(RETAIN, "retain", base, retain_examples, probed_on=p_examples if both else None)
    p_base = output / RETAIN if settings.init_forget_from == "retain" else base
    rate = retain_result["learning_rate"] if both else None
    forget_result = run.part(FORGET, "forget", p_base, p_examples, rate)

    content = record(
        "train",
        settings,
        forget_set=forget.label,
        retain_set=retain.label,
        overlap=dataclasses.asdict(overlap(forget, retain)),
        auxiliaries={RETAIN: retain_result, FORGET: forget_result},
        bundle=str(output / BUNDLE) if settings.target else None,
    )
    if state.is_main_process:
        if settings.target is not None:
            _write_bundle(settings, output, steering, forget.label, single_turn([*forget, *retain]))
        shutil.rmtree(output / WORK, ignore_errors=True)
        write_json(output / RECORD, content)
    state.wait_for_everyone()
    return content


@dataclasses.dataclass(frozen=True)
class _Run:
    settings: AuxiliarySettings
    output: Path
    base: Path
    tokenizer: PreTrainedTokenizerBase
    sets: dict[str, str]
    report: Callable[[str], None]

    def part(
        self,
        name: str,
        role: str,
        start: Path,
        examples: Sequence[Example],
        rate: float | None = None,
        probed_on: Sequence[Example] | None = None,
    ) -> dict[str, Any]:
        """Train one auxiliary, or find that an earlier call has."""
        finished = self.output / name / RESULT
        if finished.is_file():
            self.report(f"{role} auxiliary: already trained")
            return read_json(finished)
        model = load_for_training(start)
        probes = None
        if self.settings.lr != "auto":
            rate = float(self.settings.lr)
        elif rate is None:
            rate, probes = self._rate(role, model, probed_on or examples)
        work = self.output / WORK / role
        model, result = fine_tune(
            model,
            self.tokenizer,
            examples,
            self.settings.training(rate),
            work,
            title=f"{role} auxiliary",
        )
        content = _as_json(rate, result, probes)
        self.report(
            f"{role} auxiliary: loss {result.loss_before:.3f} → {result.loss_after:.3f} "
            f"in {result.steps} steps, {result.seconds:.0f} s"
        )
        if PartialState().is_main_process:
            self._save(name, role, model, content)
            discard_checkpoints(work)
        PartialState().wait_for_everyone()
        return content

    def _rate(
        self, role: str, model: PreTrainedModel, examples: Sequence[Example]
    ) -> tuple[float, list[dict[str, float]]]:
        # A resumed run must go on with the rate it began with.
        remembered = self.output / WORK / role / "learning_rate.json"
        if remembered.is_file():
            found = read_json(remembered)
            return found["rate"], found["probes"]
        rate, tried = find_learning_rate(
            model, self.tokenizer, examples, self.settings.training(1.0), report=self.report
        )
        probes = [dataclasses.asdict(probe) for probe in tried]
        if PartialState().is_main_process:
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_json(remembered, {"rate": rate, "probes": probes})
        return rate, probes

    def _save(self, name: str, role: str, model: PreTrainedModel, content: dict[str, Any]) -> None:
        dtype = load_config(self.base).dtype
        with output_folder(self.output / name) as folder:
            model.to(dtype or torch.float32).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
            self.tokenizer.save_pretrained(folder)
            write_json(folder / RESULT, content)
            rows = {
                "base": self.settings.base,
                "recipe": self.settings.recipe,
                "forget set": self.sets["forget"],
                "retain set": self.sets["retain"],
                "learning rate": f"{content['learning_rate']:.2e}",
                "epochs": f"{self.settings.epochs:g}",
            }
            write_text(folder / "README.md", auxiliary_card(role, rows))


def load_for_training(folder: Path) -> PreTrainedModel:
    """A checkpoint in float32, which is what the weights are kept in while they move."""
    return load_model(folder, dtype=torch.float32)


def _check_target(target: str, base: Path) -> int:
    """Find before hours of training what would stop the bundle after them."""
    reference = CheckpointReference.parse(target)
    place = reference.resolve(Path(), weights=False)
    if reference.folder is not None:
        check_weights(place)
    return common_vocabulary_of({"target": place, "base": base})


def _open_output(output: Path, fingerprint: str, settings: AuxiliarySettings) -> None:
    """Begin a new run in an empty folder, or go on with the same run that was stopped."""
    state = PartialState()
    resumed = goes_on(output, "train", fingerprint, settings.overwrite)
    state.wait_for_everyone()
    if not resumed and state.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        for name in (WORK, RETAIN, FORGET, BUNDLE):
            shutil.rmtree(output / name, ignore_errors=True)
        write_json(output / RECORD, record("train", settings, fingerprint=fingerprint) | {"status": "running"})
    state.wait_for_everyone()


def _write_bundle(
    settings: AuxiliarySettings, output: Path, steering: Steering, forget_set: str, single_turn: bool
) -> None:
    assert settings.target is not None
    bundle = output / BUNDLE
    if bundle.exists():
        shutil.rmtree(bundle)
    write_bundle(
        bundle,
        target=settings.target,
        retain_auxiliary=str(output / RETAIN),
        forget_auxiliary=str(output / FORGET),
        steering=steering,
        forget_set=forget_set,
        single_turn=single_turn,
    )


def _as_json(rate: float, result: TrainingResult, probes: Sequence[dict[str, float]] | None) -> dict[str, Any]:
    return {
        "learning_rate": rate,
        **dataclasses.asdict(result),
        "loss_ratio": result.loss_ratio,
        "probes": probes,
    }
