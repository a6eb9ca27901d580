"""Train a small world, make its model forget some of it, and show the result."""

from __future__ import annotations

import dataclasses
import json

POSITIONAL = ()
EXAMPLE = "divdec demo --seed 1 --output runs/demo"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec demo`."""

    seed: int = 0
    """Seed of the world, of the initial weights and of the order of training."""
    output: str | None = None
    """Folder for report, bundle, data and models; in the user's cache folder by default."""
    json: bool = False
    """Print one JSON object; everything else goes to standard error."""


def run(settings: Settings) -> None:
    """Train what the cache lacks, measure, print."""
    from pathlib import Path

    from divdec.cli.loading import quiet
    from divdec.demo.run import run_demo

    quiet()
    output = Path(settings.output).expanduser() if settings.output else None
    result = run_demo(settings.seed, output, quiet=settings.json)
    if settings.json:
        print(json.dumps(result))
