"""Choose rule and strength of a bundle without a retrained model."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from divdec.cli.settings import SWEEP
from divdec.cli.settings import CalibrateSettings as Settings
from divdec.errors import NOT_REACHED, UsageError

if TYPE_CHECKING:
    from divdec.evaluation.calibration import Calibration

POSITIONAL = ("bundle",)
EXAMPLE = (
    "divdec calibrate bundle --forget forget.jsonl --retain retain.jsonl --holdout holdout.jsonl "
    "--max-retain-drop 2% --write"
)


def run(settings: Settings) -> int:
    """Sweep, print the curve, and write the choice if asked to; exit code 3 where it does not do what it is for."""
    from divdec.cli.loading import load
    from divdec.data.formatting import Format
    from divdec.data.records import read_records
    from divdec.evaluation.calibration import SETS, calibrate
    from divdec.evaluation.run import parse_sweep

    if settings.force and not settings.write:
        raise UsageError("--force writes a choice that does not do what it is for: give it with --write")
    bound = _share(settings.max_retain_drop)
    given = parse_sweep(settings.sweep or SWEEP, allow_negative=settings.allow_negative)
    sets = {name: read_records(getattr(settings, name), limit=settings.limit) for name in SETS}
    model, tokenizer = load(settings)
    vocabulary = model.steering.vocabulary
    candidates = [dataclasses.replace(candidate, vocabulary=vocabulary) for candidate in given]
    if not settings.sweep:  # vocabularies may be smaller than the largest k of the default
        candidates = [candidate for candidate in candidates if candidate.k < model.vocab_size]
    for candidate in candidates:
        candidate.check_vocabulary(model.vocab_size)
    form = Format(system_prompt=settings.system_prompt, max_length=settings.max_length)
    found = calibrate(
        model, tokenizer, sets, candidates, max_retain_drop=bound, extend=not settings.sweep, form=form,
        batch_size=settings.batch_size, title="scoring",
    )  # fmt: skip
    write = settings.write and (settings.force or not found.faults)
    if write:
        from divdec.model.bundle import rewrite_steering

        # The soft fill was for likelihoods; a bundle decodes with the hard one.
        rewrite_steering(settings.bundle, dataclasses.replace(found.chosen.steering, fill="hard"), _card_row(found))
    code = 0 if write or not found.faults else NOT_REACHED
    if settings.json:
        print(json.dumps(_as_json(found, write)))
        return code
    _print(found)
    for fault in found.faults:
        print(f"warning: {fault}", file=sys.stderr)
    if write:
        print(f"written into {settings.bundle}{', though it does not do what it is for' if found.faults else ''}")
    elif settings.write:
        print(f"nothing was written into {settings.bundle}: train a better pair, or give --force", file=sys.stderr)
    return code


def _share(text: str) -> float:
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise UsageError(f"max-retain-drop is {text!r}; accepted: a percentage such as 2%, or a share such as 0.02")
    return value


def _as_json(found: Calibration, written: bool) -> dict[str, Any]:
    points = [dataclasses.asdict(point) | {"steering": str(point.steering)} for point in found.points]
    return {
        "chosen": str(found.chosen.steering),
        "faults": list(found.faults),
        "written": written,
        "told": None if found.leak_check is None else dataclasses.asdict(found.leak_check),
        "reference": found.reference,
        "points": points,
    }


def _print(found: Calibration) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("", "loss", "zlib", "min-k", "min-k++", "distance", "forget prob.", "retain prob.", "retain drop"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_row("  q alone", *(f"{value:.3f}" for value in found.reference.values()), "", "", "", "")
    for point in found.points:
        chosen = point is found.chosen
        table.add_row(
            f"{'→ ' if chosen else '  '}{point.steering}",
            *(f"{value:.3f}" for value in point.aucs.values()),
            f"{point.distance:.3f}",
            f"{point.forget_probability:.4f}",
            f"{point.retain_probability:.4f}",
            f"{point.retain_drop:.1%}",
            style="bold" if chosen else None,
        )
    Console(width=max(Console().width, 100), emoji=False).print(table)
    print(f"{found.chosen.steering}: {_measured(found)}")


def _measured(found: Calibration) -> str:
    """What the chosen setting was measured to do, in a sentence."""
    parts = [
        f"AUCs, forget against holdout, differ from q's by {found.chosen.distance:.3f}",
        f"retain probability falls by {found.chosen.retain_drop:.1%}",
    ]
    if found.leak_check is not None:
        parts.append(
            f"of {found.leak_check.asked} answers to the forget set's questions {found.leak_check.steered} tell the "
            f"truth (q's own: {found.leak_check.retain_auxiliary})"
        )
    return "; ".join(parts)


def _card_row(found: Calibration) -> str:
    if found.faults:
        return f"not as it should (written with --force): {'; '.join(found.faults)}"
    return _measured(found)
