"""`divdec image sample`: images of classes from a bundle or a plain image model, as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from divdec.imaging.codec import Codec, Images
from divdec.imaging.layout import Codes
from divdec.imaging.opened import open_image_model
from divdec.imaging.pictures import grid, write_png
from divdec.imaging.sampling import sample
from divdec.imaging.settings import ImageSampleSettings
from divdec.model.checkpoint import CheckpointReference, check_apart
from divdec.runs import RECORD, check_output, output_folder, read_record, record, write_json
from divdec.steering import Steering

CODES, GRID = "codes.safetensors", "grid.png"
LEAST_GRID_SIDE = 64
"""Smaller images are drawn larger in a grid, for eyes."""


def draw(settings: ImageSampleSettings, device: str = "cpu", report: Callable[[str], None] = print) -> dict[str, Any]:
    """Draw images and write them: `CLASS/000000.png`, `grid.png` (a row a class), `codes.safetensors`, `run.json`.

    Args:
        settings: what is drawn, by which model.
        device: where the models go.
        report: told a line a note.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: something given cannot be used; nothing has then been written.
        FailedClosed: the model could not be steered.
    """
    output = Path(settings.output).expanduser()
    check_output(output, settings.overwrite, is_drawn)
    steering = None if settings.steering is None else Steering.parse(settings.steering)
    given = Path(CheckpointReference.parse(settings.model).folder or "")
    if given != Path():
        check_apart(output.resolve(), [given.expanduser().resolve()])
    opened = open_image_model(
        settings.model, steering=steering, verify=not settings.no_verify, dtype=settings.dtype, device=device
    )
    if opened.steering is None:
        report(f"note: {settings.model} is no bundle: nothing steers it")
    layout = opened.layout
    classes = [layout.find(name) for name in settings.classes] or list(range(len(layout.classes)))
    asked = [place for place in classes for _ in range(settings.count)]
    codes = sample(
        opened.model,
        layout,
        asked,
        settings.sampling(),
        speculative=settings.drafted,
        title="images",
    )
    images = decode(codes, opened.codec)
    content = record(
        "image sample",
        settings,
        steering=None if opened.steering is None else str(opened.steering),
        classes=[layout.classes[place] for place in classes],
        images=len(images),
    )
    with output_folder(output, settings.overwrite, is_drawn) as folder:
        for row, place in enumerate(classes):
            (folder / layout.classes[place]).mkdir(exist_ok=True)
            for number in range(settings.count):
                write_png(images[row * settings.count + number], folder / layout.classes[place] / f"{number:06}.png")
        write_png(grid_of(images, settings.count), folder / GRID)
        save_file({"codes": codes.contiguous(), "classes": torch.tensor(asked)}, folder / CODES)
        write_json(folder / RECORD, content)
    return content


@torch.no_grad()
def decode(codes: Codes, codec: Codec, batch_size: int = 25) -> Images:
    """All codes as images, batch by batch."""
    return torch.cat([codec.decode(batch) for batch in codes.split(batch_size)]).cpu()


def grid_of(images: Images, across: int) -> Float[Tensor, "channels grid_height grid_width"]:
    """Images as one, so many in a row, tiny ones enlarged."""
    return grid(images.split(across), scale=max(1, LEAST_GRID_SIDE // images.shape[-1]))


def is_drawn(folder: Path) -> bool:
    """Whether a folder holds an earlier result."""
    found = read_record(folder)
    return found is not None and found.get("verb") == "image sample"
