"""Train the two auxiliaries from a forget set and a retain set, and write a bundle."""

from __future__ import annotations

import dataclasses
import json
import sys

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


def run(settings: Settings) -> None:
    """Train, then say where the result lies."""
    from accelerate import PartialState

    from divdec.cli.loading import quiet
    from divdec.training.auxiliaries import train_auxiliaries

    quiet()

    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(AuxiliarySettings)}
    content = train_auxiliaries(AuxiliarySettings(**given), report=lambda line: print(line, file=sys.stderr))
    if not PartialState().is_main_process:
        return
    if settings.json:
        print(json.dumps(content))
    elif content["bundle"]:
        print(
            f"bundle: {content['bundle']}\nchoose its strength: divdec calibrate {content['bundle']} --forget "
            f"{settings.forget} --retain {settings.retain} --holdout … --write\ntry it: divdec chat {content['bundle']}"
        )
    else:
        print(f"auxiliaries: {settings.output}\nnext: divdec bundle --target … (see divdec bundle --help)")
