"""`divdec image`: steer autoregressive image models."""

from __future__ import annotations

import json
from pathlib import Path

from cyclopts import App

from divdec.cli.loading import quiet
from divdec.options import Printing

app = App(name="image", help="Demonstrate steering on images of digits.")


@app.command
def demo(*, seed: int = 0, output: str | None = None, printing: Printing = Printing()) -> None:
    """Train a model that draws digits, make it forget half of them, and show the result.

    For example:

        divdec image demo --output runs/image-demo

    Args:
        seed: Seed of the digits to forget, the initial weights, the order of training and the samples.
        output: Folder for table and grids; in the user's cache folder by default.
        printing: format of the result.
    """
    from divdec_research.images.demo import run_image_demo

    quiet()
    content = run_image_demo(seed, Path(output).expanduser() if output else None, quiet=printing.json)
    if printing.json:
        print(json.dumps(content))
