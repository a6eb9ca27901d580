"""`divdec world`: small models from scratch on a fictitious world."""

from __future__ import annotations

import json
from pathlib import Path

from divdec.cli.loading import quiet
from divdec.options import Printing


def world(*, seed: int = 0, output: str | None = None, printing: Printing = Printing()) -> None:
    """Train small models from scratch on a fictitious world, where a retrained model is a reference.

    For example:

        divdec world --seed 1 --output runs/world

    Args:
        seed: Seed of the world, of the initial weights and of the order of training.
        output: Folder for bundle, data and models; in the user's cache folder by default.
        printing: format of the result.
    """
    from divdec_research.world.demo import run_demo

    quiet()
    folder = Path(output).expanduser() if output else None
    result = run_demo(seed, folder, quiet=printing.json)
    if printing.json:
        print(json.dumps(result))
