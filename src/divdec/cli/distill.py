"""Distil a bundle into one ordinary model: the steered model teaches its own target on the forget set."""

from __future__ import annotations

import dataclasses
import json
import sys

from divdec.training.distillation_settings import DistillationSettings

POSITIONAL = ("bundle",)
EXAMPLE = "divdec distill bundle --forget forget.jsonl --retain retain.jsonl --lr 4e-5 --output runs/student"


@dataclasses.dataclass(frozen=True)
class Settings(DistillationSettings):
    """Options of `divdec distill`."""

    json: bool = False
    """Print the content of run.json, and everything else to standard error."""


def run(settings: Settings) -> None:
    """Distil, then say where the student lies."""
    from accelerate import PartialState

    from divdec.cli.loading import quiet
    from divdec.training.distillation import distill

    quiet()
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(DistillationSettings)}
    content = distill(DistillationSettings(**given), report=lambda line: print(line, file=sys.stderr))
    if not PartialState().is_main_process:
        return
    if settings.json:
        print(json.dumps(content))
        return
    before, after = (content[when]["forget"]["kl"] for when in ("before", "after"))
    print(f"student: {settings.output} (KL to the teacher on the forget set {before:.4f} → {after:.4f} nats a token)")
    print(f"measure it: divdec eval --help; as the next request's student: --init-student {settings.output}")
    if not after < before:
        print("warning: the student came no nearer to its teacher; try another --lr", file=sys.stderr)
