"""Train the two auxiliaries from a forget set and a retain set, and write a bundle."""

from __future__ import annotations

import dataclasses
import json
import sys

from divdec.errors import NOT_REACHED
from divdec.training.settings import AuxiliarySettings

POSITIONAL = ()
EXAMPLE = (
    "divdec train --recipe full-retain --base meta-llama/Llama-3.2-1B-Instruct --forget forget.jsonl "
    "--retain retain.jsonl --target meta-llama/Llama-3.1-8B-Instruct --output runs/first"
)


@dataclasses.dataclass(frozen=True)
class Settings(AuxiliarySettings):
    """Options of `divdec train`."""

    json: bool = False
    """Print the content of run.json, and everything else to standard error."""


def run(settings: Settings) -> int:
    """Train, then say where the result lies and whether it will steer; exit code 3 where it will not."""
    from accelerate import PartialState

    from divdec.cli.loading import quiet
    from divdec.training.auxiliaries import train_auxiliaries

    quiet()

    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(AuxiliarySettings)}
    content = train_auxiliaries(AuxiliarySettings(**given), report=lambda line: print(line, file=sys.stderr))
    faults = content["separation"]["faults"]
    code = NOT_REACHED if faults else 0
    if not PartialState().is_main_process:
        return code
    if settings.json:
        print(json.dumps(content))
    elif content["bundle"]:
        print(f"bundle: {content['bundle']}")
        if not faults:
            print(
                f"choose its strength ({settings.steering} is not measured yet): divdec calibrate {content['bundle']} "
                f"--forget {settings.forget} --retain {settings.retain} --holdout … --write"
            )
    else:
        print(f"auxiliaries: {settings.output}")
        if not faults:
            print("next: divdec bundle --target … (see divdec bundle --help)")
    if faults:
        advice = "" if settings.lr == "auto" else "; --lr auto searches for a rate"
        print(f"not fit to steer with, it would not forget: {'; '.join(faults)}{advice}", file=sys.stderr)
    return code
