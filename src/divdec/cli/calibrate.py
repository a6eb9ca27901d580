"""Choose rule and strength of a bundle without a retrained model."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from divdec.cli.settings import CalibrateSettings as Settings
from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.evaluation.calibration import Calibration

POSITIONAL = ("bundle",)
EXAMPLE = (
    "divdec calibrate bundle --forget forget.jsonl --retain retain.jsonl --holdout holdout.jsonl "
    "--max-retain-drop 2% --write"
)


def run(settings: Settings) -> None:
    """Sweep, print the curve, and write the choice if asked to."""
    from divdec.cli.loading import load
    from divdec.data.formatting import Format
    from divdec.data.records import read_records
    from divdec.evaluation.calibration import SETS, calibrate
    from divdec.evaluation.run import parse_sweep

    bound = _share(settings.max_retain_drop)
    given = parse_sweep(settings.sweep, allow_negative=settings.allow_negative)
    sets = {name: read_records(getattr(settings, name), limit=settings.limit) for name in SETS}
    model, tokenizer = load(settings)
    vocabulary = model.steering.vocabulary
    candidates = []
    for candidate in given:
        steering = dataclasses.replace(candidate, vocabulary=vocabulary)
        steering.check_vocabulary(model.vocab_size)
        candidates.append(steering)
    form = Format(system_prompt=settings.system_prompt, max_length=settings.max_length)
    found = calibrate(
        model, tokenizer, sets, candidates, max_retain_drop=bound, form=form, batch_size=settings.batch_size,
        title="scoring",
    )  # fmt: skip
    if settings.write:
        from divdec.model.bundle import rewrite_steering

        # The soft fill was for likelihoods; a bundle decodes with the hard one.
        rewrite_steering(settings.bundle, dataclasses.replace(found.chosen.steering, fill="hard"))
    if settings.json:
        print(json.dumps(_as_json(found, settings.write)))
        return
    _print(found)
    if not found.within_bound:
        print(f"warning: no setting keeps the retain set within {bound:.1%}; the one that loses least was taken",
              file=sys.stderr)  # fmt: skip
    if settings.write:
        print(f"written into {settings.bundle}")


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
        "within_bound": found.within_bound,
        "written": written,
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
    print(f"{found.chosen.steering}: its AUCs, forget against holdout, come nearest to those of q")
