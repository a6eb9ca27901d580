"""`divdec calibrate`: choose rule and strength of a bundle without a retrained model."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from divdec.cli.loading import ExpertDevices, load
from divdec.errors import NOT_REACHED, UsageError
from divdec.options import Flag, ModelLoading, Printing, SteeringChoice, check_at_least

if TYPE_CHECKING:
    from divdec.evaluation.calibration import Calibration

SWEEP = ("linear:0.25,0.5,0.75,1,1.25,1.5,1.75,2,2.5,3,4", "rank:1,2,5,10,20,50,100,200,500")
"""The default candidates, mild before strong."""


def calibrate(
    bundle: str,
    *,
    forget: str,
    retain: str,
    holdout: str,
    sweep: tuple[str, ...] = (),
    max_retain_drop: str = "2%",
    write: bool = False,
    force: Flag = False,
    system_prompt: str | None = None,
    max_length: int = 1024,
    limit: int | None = None,
    batch_size: int = 32,
    allow_negative: Flag = False,
    printing: Printing = Printing(),
    loading: ModelLoading = ModelLoading(),
    experts: ExpertDevices = ExpertDevices(),
) -> int:
    r"""Choose a bundle's rule and strength without a retrained model.

    Exit code 3: no measured setting forgets without losing too much of the retain set.

    For example:

        divdec calibrate bundle --forget forget.jsonl --retain retain.jsonl \
          --holdout holdout.jsonl --max-retain-drop 2% --write

    Args:
        bundle: The bundle: a folder or hub id.
        forget: Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset.
        retain: Retain set, in the same formats.
        holdout: Records like those of the forget set that none of the three models has seen.
        sweep: Settings to choose from, such as 'linear:1,1.5,2' and 'rank:5,20'. The default is twenty settings,
            extended if the best one is the strongest or the mildest.
        max_retain_drop: Maximum relative loss of retain probability: a percentage, or a fraction such as 0.02.
        write: Write the chosen setting into the bundle if the measurement shows that it forgets.
        force: Write the chosen setting even if it does not forget. The model card records this.
        system_prompt: System prompt of every conversation.
        max_length: Maximum sequence length in tokens.
        limit: Use only the first N records of each set.
        batch_size: Sequences per forward pass.
        allow_negative: Accept a negative alpha, which steers towards the forget set.
        printing: format of the result.
        loading: how models are loaded.
        experts: where the auxiliaries run.
    """
    from divdec.data.formatting import Format
    from divdec.data.records import read_records
    from divdec.evaluation import calibration
    from divdec.evaluation.run import parse_sweep

    check_at_least("batch_size", batch_size, 1)
    if force and not write:
        raise UsageError("--force writes a choice that was measured not to forget: give it with --write")
    bound = _share(max_retain_drop)
    candidates = parse_sweep(sweep or SWEEP, allow_negative=allow_negative)
    sources = {"forget": forget, "retain": retain, "holdout": holdout}
    sets = {name: read_records(sources[name], limit=limit) for name in calibration.SETS}
    model, tokenizer = load(bundle, loading, SteeringChoice(), experts)
    vocabulary = model.steering.vocabulary
    candidates = [dataclasses.replace(candidate, vocabulary=vocabulary) for candidate in candidates]
    if not sweep:  # vocabularies may be smaller than the largest k of the default
        candidates = [candidate for candidate in candidates if candidate.k < model.vocab_size]
    for candidate in candidates:
        candidate.check_vocabulary(model.vocab_size)
    result = calibration.calibrate(
        model, tokenizer, sets, candidates, max_retain_drop=bound, extend=not sweep,
        form=Format(system_prompt=system_prompt, max_length=max_length), batch_size=batch_size, title="scoring",
    )  # fmt: skip
    written = write and (force or not result.faults)
    if written:
        from divdec.model.bundle import rewrite_steering

        # The soft fill was for likelihoods; a bundle decodes with the hard one.
        rewrite_steering(bundle, dataclasses.replace(result.chosen.steering, fill="hard"), _card_row(result))
    code = 0 if written or not result.faults else NOT_REACHED
    if printing.json:
        print(json.dumps(_as_json(result, written)))
        return code
    _print(result)
    for fault in result.faults:
        print(f"warning: {fault}", file=sys.stderr)
    if written:
        print(f"written into {bundle}{', although it was measured not to forget' if result.faults else ''}")
    elif write:
        print(f"nothing was written into {bundle}: train a better pair, or give --force", file=sys.stderr)
    return code


def _share(text: str) -> float:
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise UsageError(f"--max-retain-drop is {text!r}; accepted: a percentage such as 2%, or a share such as 0.02")
    return value


def _as_json(result: Calibration, written: bool) -> dict[str, Any]:
    points = [dataclasses.asdict(point) | {"steering": str(point.steering)} for point in result.points]
    return {
        "chosen": str(result.chosen.steering),
        "faults": list(result.faults),
        "written": written,
        "leak_check": None if result.leak_check is None else dataclasses.asdict(result.leak_check),
        "reference": result.reference,
        "points": points,
    }


def _print(result: Calibration) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("", "loss", "zlib", "min-k", "min-k++", "distance", "forget", "retain", "retain drop"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_row("  q alone", *(f"{value:.3f}" for value in result.reference.values()), "", "", "", "")
    for point in result.points:
        chosen = point is result.chosen
        table.add_row(
            f"{'→ ' if chosen else '  '}{point.steering}",
            *(f"{value:.3f}" for value in point.aucs.values()),
            f"{point.distance:.3f}",
            f"{point.forget_probability:.4f}",
            f"{point.retain_probability:.4f}",
            f"{point.retain_drop:.1%}",
            style="bold" if chosen else None,
        )
    Console(width=max(Console().width, 80), emoji=False).print(table)
    print("loss to min-k++: AUCs of membership attacks; distance: to q's AUCs; forget, retain: mean probability")
    print(f"{result.chosen.steering}: {_measured(result)}")


def _measured(result: Calibration) -> str:
    """Say in a sentence what the chosen setting was measured to do."""
    parts = [
        f"AUCs, forget against holdout, differ from q's by {result.chosen.distance:.3f}",
        f"retain probability falls by {result.chosen.retain_drop:.1%}",
    ]
    if result.leak_check is not None:
        check = result.leak_check
        parts.append(
            f"of {check.asked} answers to the forget set's questions {check.steered} tell the truth "
            f"(q's: {check.retain_auxiliary})"
        )
    return "; ".join(parts)


def _card_row(result: Calibration) -> str:
    if result.faults:
        return f"not as it should (written with --force): {'; '.join(result.faults)}"
    return _measured(result)
