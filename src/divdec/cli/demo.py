"""`divdec demo`: the whole method on a small fictitious world."""

from __future__ import annotations

import json
from pathlib import Path

from divdec.options import Printing


def demo(*, seed: int = 0, output: str | None = None, printing: Printing = Printing()) -> None:
    """Train small models on fictitious facts, make one of them forget some facts, and show the result.

    For example:

        divdec demo --seed 1 --output runs/demo

    Args:
        seed: Seed of the world, of the initial weights and of the order of training.
        output: Folder for report, bundle, data and models; in the user's cache folder by default.
        printing: format of the result.
    """
    from divdec.cli.loading import quiet
    from divdec.demo.run import run_demo

    quiet()
    folder = Path(output).expanduser() if output else None
    result = run_demo(seed, folder, quiet=printing.json)
    if printing.json:
        print(json.dumps(result))
