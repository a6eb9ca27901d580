"""`divdec image`: steer autoregressive image models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from divdec.cli.loading import device_map, quiet, report
from divdec.options import Printing
from divdec_research.images.settings import (
    ImageConvertSettings,
    ImageDemoSettings,
    ImageEvalSettings,
    ImageSampleSettings,
    ImageTrainSettings,
)

app = App(name="image", help="Steer image models: train auxiliaries, sample and evaluate images, convert checkpoints.")


@app.command(sort_key=1)
def demo(
    settings: Annotated[ImageDemoSettings, Parameter(name="*")] = ImageDemoSettings(),
    *,
    printing: Printing = Printing(),
) -> None:
    """Train a model that draws digits, make it forget half of them, and show the result.

    For example:

        divdec image demo --output runs/image-demo
    """
    from divdec.runs import check_output
    from divdec_research.images.demo import is_demo, run_image_demo

    quiet()
    output = Path(settings.output).expanduser() if settings.output else None
    if output is not None:
        check_output(output, overwrite=True, ours=is_demo)
    content = run_image_demo(settings.seed, output, quiet=printing.json)
    if printing.json:
        _print(content, "", printing)


@app.command(sort_key=2)
def train(settings: Annotated[ImageTrainSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Train the two auxiliaries on images of classes to forget and to keep.

    For example:

        divdec image train --target models/cin --images imagenet/dogs \
          --output runs/dogs --resize
    """
    from divdec_research.images.training import train_image_auxiliaries

    quiet()
    content = train_image_auxiliaries(settings, report)
    bundle = content["bundle"]
    text = (
        f"bundle: {bundle}\nmeasure it: divdec image eval {bundle} --images {settings.images} --forget … --output …\n"
        f"sample from it: divdec image sample {bundle} --output …"
    )
    _print(content, text, printing)


@app.command(sort_key=3)
def sample(settings: Annotated[ImageSampleSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Sample images of classes.

    For example:

        divdec image sample runs/dogs/pair/bundle --classes 207 \
          --steering linear:1 --output runs/retrievers
    """
    from divdec_research.images.sampling import GRID, sample_to_folder

    quiet()
    content = sample_to_folder(settings, device_map(settings.device), report)
    text = f"{content['images']} images in {settings.output}, all in {Path(settings.output) / GRID}"
    _print(content, text, printing)


@app.command(name="eval", sort_key=4)
def evaluate(settings: Annotated[ImageEvalSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Measure generated images: content, quality, and distances to real images.

    The same command resumes a stopped run.

    For example:

        divdec image eval runs/dogs/pair/bundle --images imagenet/dogs \
          --forget 151 152 --output runs/measured --resize
    """
    from divdec_research.images.report import evaluate_images

    quiet()
    content = evaluate_images(settings, device_map(settings.device), report)
    _print(content, f"{content.pop('markdown')}\nresults: {settings.output}", printing)


@app.command(sort_key=5)
def convert(settings: Annotated[ImageConvertSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    """Convert a published taming-transformers checkpoint into an image model.

    For example:

        divdec image convert cin_transformer.ckpt --output models/cin
    """
    from divdec_research.images.taming import convert_taming

    quiet()
    content = convert_taming(
        Path(settings.checkpoint).expanduser(),
        Path(settings.output).expanduser(),
        heads=settings.heads,
        overwrite=settings.overwrite,
        report=report,
    )
    _print(content, f"image model: {settings.output}", printing)


def _print(content: dict[str, Any], text: str, printing: Printing) -> None:
    print(json.dumps(content, default=str) if printing.json else text)
