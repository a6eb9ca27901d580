"""The two auxiliaries by the paper's recipes, from a base checkpoint, a forget set and a retain set.

The pair is measured (`divdec.training.separation`). Where the learning rate is ours to choose and the pair would not
steer, it is trained again with a higher rate, then for more epochs, a few times. The run can be stopped and taken up
again: whatever part is whole is not trained twice.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from divdec.data.formatting import Example, Format
from divdec.data.records import overlap, read_records, single_turn
from divdec.errors import Diverged
from divdec.model.bundle import auxiliary_card, rewrite_steering, write_bundle
from divdec.model.checkpoint import (
    CheckpointReference,
    check_apart,
    check_weights,
    common_vocabulary_of,
    digests,
    load_config,
    load_model,
    load_tokenizer,
)
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
from divdec.training.fine_tuning import discard_checkpoints, fine_tune
from divdec.training.inputs import begin, checkpoint, encoded, longest, report_sets
from divdec.training.learning_rate import STEP, find_learning_rate
from divdec.training.separation import UNKNOWN, Separation, measure_separation
from divdec.training.settings import AuxiliarySettings, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RETAIN, FORGET, BUNDLE, WORK = "retain_auxiliary", "forget_auxiliary", "bundle", "work"
RESULT = "training.json"
MOST_ATTEMPTS = 4  # pairs that are trained, at most


def train_auxiliaries(
    settings: AuxiliarySettings, report: Callable[[str], None] = print, *, measure: bool = True
) -> dict[str, Any]:
    """Train q and p until they differ where they should, and write a bundle that steers the target with them.

    Args:
        settings: data, base, recipe and training.
        report: told what is found and done, a line each.
        measure: whether the pair must separate the sets' records token by token. False for images, whose pairs learn
            what a class looks like and not single images; then nothing is measured and nothing trained twice.

    Returns:
        The content of `run.json`. Its `separation` says whether the pair is as it should be: `faults` is empty then.

    Raises:
        UsageError: something given cannot be used; nothing has then been written.
        Interrupted: Ctrl-C; the same call goes on where it stopped.
        Diverged: a loss is not finite, and there is no other learning rate to try.
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
    examples = {"forget": encoded(forget, tokenizer, form, report), "retain": encoded(retain, tokenizer, form, report)}

    same_settings = dataclasses.asdict(dataclasses.replace(settings, overwrite=False))
    fingerprint = settings_hash([same_settings, forget.sha256, retain.sha256, digests(base)])
    _open_output(output, fingerprint, settings)
    run = _Run(settings, output, base, tokenizer, examples, measure, report)
    results, attempts = run.until_separated()
    separation = attempts[-1]["separation"] if measure else None

    content = record(
        "train",
        settings,
        forget_set=forget.label,
        retain_set=retain.label,
        overlap=dataclasses.asdict(overlap(forget, retain)),
        auxiliaries=results,
        separation=separation,
        attempts=attempts,
        bundle=str(output / BUNDLE) if settings.target else None,
    )
    if state.is_main_process:
        sets = {"forget set": forget.label, "retain set": retain.label}
        for name, result in results.items():
            _describe(output / name, settings, sets, result, separation)
        if settings.target is not None:
            _write_bundle(settings, output, steering, forget.label, single_turn([*forget, *retain]), separation)
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
    examples: dict[str, list[Example]]
    """By set: 'forget', 'retain'."""
    measure: bool
    report: Callable[[str], None]

    def until_separated(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Train pairs until one is as it should be, or none is left to try; the last one lies in the output.

        Returns:
            What both auxiliaries' training gave, and all attempts: by what rate and epochs were multiplied, and the
            separation, or None where training diverged. A resumed run knows those that were made.
        """
        path = self.output / WORK / "attempts.json"
        attempts: list[dict[str, Any]] = read_json(path) if path.is_file() else []
        results: dict[str, Any] = {}
        while True:
            further = next_attempt(attempts) if attempts else (1.0, 1.0)
            if further is None or (attempts and self.settings.lr != "auto"):
                # In a resumed run the last pair lies there, whole: it is found, not trained.
                return results or self.pair(attempts[-1]["rate"], attempts[-1]["epochs"]), attempts
            attempt: dict[str, Any] = {"rate": further[0], "epochs": further[1], "separation": None}
            try:
                results = self.pair(*further)
            except Diverged as error:
                if not attempts or next_attempt([*attempts, attempt]) is None:
                    raise
                self.report(str(error))
            else:
                if not self.measure:
                    return results, []
                attempt["separation"] = self._separation()
            attempts.append(attempt)
            if PartialState().is_main_process:
                for role in ("retain", "forget"):
                    discard_checkpoints(self.output / WORK / role)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, attempts)
            PartialState().wait_for_everyone()

    def pair(self, raised: float, prolonged: float) -> dict[str, Any]:
        """Train q and p, or find what an earlier call has trained.

        Args:
            raised: what the learning rate of the rule is multiplied by.
            prolonged: what the epochs are multiplied by.
        """
        settings = dataclasses.replace(self.settings, epochs=prolonged * self.settings.epochs)
        forget, retain = self.examples["forget"], self.examples["retain"]
        # One rate for both where they learn the same data, as the paper's auxiliaries do: sought on what p learns, for
        # a base may know the retain set already, and would then hardly move.
        both = settings.recipe == "full-retain"
        p_examples = forget + retain if both else forget
        required = len(forget) if self.measure else 0
        of_q = (p_examples, required) if both else (retain, 0)
        rate, probes = self._rate("retain", self.base, *of_q)
        q = self._part(RETAIN, "retain", self.base, retain, settings.training(raised * rate), probes)
        p_base = self.output / RETAIN if settings.init_forget_from == "retain" else self.base
        probes = None
        if not both:
            rate, probes = self._rate("forget", p_base, forget, required)
        p = self._part(FORGET, "forget", p_base, p_examples, settings.training(raised * rate), probes)
        return {RETAIN: q, FORGET: p}

    def _part(
        self,
        name: str,
        role: str,
        start: Path,
        examples: Sequence[Example],
        training: TrainingSettings,
        probes: list[dict[str, float]] | None,
    ) -> dict[str, Any]:
        """Train one auxiliary, or find that an earlier call has."""
        folder = self.output / name
        if (folder / RESULT).is_file():
            earlier = read_json(folder / RESULT)
            if (earlier["learning_rate"], earlier.get("epochs")) == (training.learning_rate, training.epochs):
                self.report(f"{role} auxiliary: already trained")
                return earlier
        work = self.output / WORK / role
        model, result = fine_tune(
            load_for_training(start), self.tokenizer, examples, training, work, title=f"{role} auxiliary"
        )
        content = {
            "learning_rate": training.learning_rate,
            "epochs": training.epochs,
            **dataclasses.asdict(result),
            "loss_ratio": result.loss_ratio,
            "probes": probes,
        }
        self.report(
            f"{role} auxiliary: loss {result.loss_before:.3f} → {result.loss_after:.3f} "
            f"in {result.steps} steps, {result.seconds:.0f} s"
        )
        if PartialState().is_main_process:
            with output_folder(folder, overwrite=True, ours=lambda folder: (folder / RESULT).is_file()) as temporary:
                model.to(load_config(self.base).dtype or torch.float32).save_pretrained(temporary)  # pyright: ignore[reportArgumentType]
                self.tokenizer.save_pretrained(temporary)
                write_json(temporary / RESULT, content)
            discard_checkpoints(work)
        PartialState().wait_for_everyone()
        return content

    def _rate(
        self, role: str, start: Path, examples: Sequence[Example], required: int
    ) -> tuple[float, list[dict[str, float]] | None]:
        """The learning rate that is given, or found by probes, and these."""
        if self.settings.lr != "auto":
            return float(self.settings.lr), None
        # A resumed run must go on with the rate it began with.
        remembered = self.output / WORK / role / "learning_rate.json"
        if remembered.is_file():
            found = read_json(remembered)
            return found["rate"], found["probes"]
        model = load_for_training(start).to(PartialState().device)  # pyright: ignore[reportArgumentType]
        rate, tried = find_learning_rate(
            model, self.tokenizer, examples, self.settings.training(1.0), required=required, report=self.report
        )
        probes = [dataclasses.asdict(probe) for probe in tried]
        if PartialState().is_main_process:
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_json(remembered, {"rate": rate, "probes": probes})
        PartialState().wait_for_everyone()
        return rate, probes

    def _separation(self) -> dict[str, Any]:
        """Measure the pair in the output; one process does it, so that all go on alike."""
        measured: list[Any] = [None]
        if PartialState().is_main_process:
            device: Any = PartialState().device
            q, p = (load_for_training(self.output / name).to(device).eval() for name in (RETAIN, FORGET))
            measured = [measure_separation(q, p, **self.examples, batch_size=self.settings.batch_size)]
        separation: Separation = broadcast_object_list(measured)[0]
        self.report(f"measured: {separation}")
        for fault in separation.faults:
            self.report(f"the pair does not fit yet: {fault}")
        return separation.to_dict() | {"summary": str(separation)}


def next_attempt(attempts: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """What to multiply learning rate and epochs by after attempts that did not separate; None where nothing may help.

    The rate rises by √10 as long as p learns more by it. After that the epochs double, at the best rate.
    """
    last = attempts[-1]
    separation = last["separation"]
    if len(attempts) == MOST_ATTEMPTS:
        return None
    if separation is not None and (not separation["faults"] or separation["unknown_records"] < UNKNOWN):
        return None
    best = max(attempts, key=lambda attempt: attempt["separation"]["learned"] if attempt["separation"] else -1.0)
    if best is last and last["separation"] is not None and last["epochs"] == 1:
        return last["rate"] * STEP, 1.0
    return best["rate"], 2 * last["epochs"]


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
    settings: AuxiliarySettings,
    output: Path,
    steering: Steering,
    forget_set: str,
    single_turn: bool,
    separation: dict[str, Any] | None,
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
    if separation is not None and separation["faults"]:
        rewrite_steering(bundle, steering, f"no: {'; '.join(separation['faults'])}")


def _describe(
    folder: Path,
    settings: AuxiliarySettings,
    sets: Mapping[str, str],
    result: dict[str, Any],
    separation: dict[str, Any] | None,
) -> None:
    """Write an auxiliary's model card, and what the pair was measured to be into its record."""
    rows = {
        "base": settings.base,
        "recipe": settings.recipe,
        **sets,
        "learning rate": f"{result['learning_rate']:.2e}",
        "epochs": f"{result['epochs']:g}",
    }
    if separation is not None:
        rows["measured"] = separation["summary"]
        rows["separated from the other auxiliary"] = "; ".join(separation["faults"]) or "yes"
    write_text(folder / "README.md", auxiliary_card("retain" if folder.name == RETAIN else "forget", rows))
    write_json(folder / RESULT, result | {"separation": separation})
