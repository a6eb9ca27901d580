"""Distil a bundle into one ordinary model: the steered model teaches its own target on the forget set."""

from __future__ import annotations

import dataclasses
import json
import sys

from divdec.errors import NOT_REACHED
from divdec.training.settings import DistillationSettings

POSITIONAL = ("bundle",)
LEAST_CLOSED = 0.5  # of the distance to the teacher on the forget set
EXAMPLE = "divdec distill bundle --forget forget.jsonl --retain retain.jsonl --lr 4e-5 --output runs/student"


@dataclasses.dataclass(frozen=True)
class Settings(DistillationSettings):
    """Options of `divdec distill`."""

    json: bool = False
    """Print the content of run.json, and everything else to standard error."""


def run(settings: Settings) -> int:
    """Distil, then say where the student lies and how near it came; exit code 3 where that is not near."""
    from accelerate import PartialState

    from divdec.cli.loading import quiet
    from divdec.training.distillation import distance_closed, distill

    quiet()
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(DistillationSettings)}
    content = distill(DistillationSettings(**given), report=lambda line: print(line, file=sys.stderr))
    closed = distance_closed(content["before"], content["after"])
    code = 0 if closed >= LEAST_CLOSED else NOT_REACHED
    if not PartialState().is_main_process:
        return code
    if settings.json:
        print(json.dumps(content))
        return code
    before, after = (content[when]["forget"]["kl"] for when in ("before", "after"))
    print(f"student: {settings.output} (KL to the teacher on the forget set {before:.4f} → {after:.4f} nats a token)")
    if code:
        print(
            f"not distilled: the student went {max(closed, 0.0):.0%} of the way to its teacher on the forget set "
            f"(needed: {LEAST_CLOSED:.0%}), and would still tell it; try another --lr or more --epochs",
            file=sys.stderr,
        )
    else:
        print(f"measure it: divdec eval --help; as the next request's student: --init-student {settings.output}")
    return code
