"""`divdec image sample`: images of classes from a bundle or a plain image model, as files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from divdec.imaging.codec import Codec, Images
from divdec.imaging.layout import Codes, ImageLayout
from divdec.imaging.opened import open_image_model, parts_of
from divdec.imaging.pictures import grid, write_png
from divdec.imaging.sampling import sample
from divdec.imaging.settings import ImageSampleSettings
from divdec.model.checkpoint import check_apart
from divdec.runs import RECORD, check_output, output_folder, read_record, record, write_json
from divdec.steering import Steering

CODES, GRID = "codes.safetensors", "grid.png"
LEAST_GRID_SIDE = 64
"""Smaller images are drawn larger in a grid, for eyes."""
MOST_ROWS, MOST_ACROSS = 64, 16
"""Of a grid; further classes and images are in their folders."""
LONGEST_NAME = 80
SAFE, UNSAFE = re.compile(r"[^\W_][\w ,()-]{0,79}(?<! )"), re.compile(r"[^\w ,()-]")


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
    check_apart(output.resolve(), [place.resolve() for place in parts_of(settings.model)])
    opened = open_image_model(
        settings.model, steering=steering, verify=not settings.no_verify, dtype=settings.dtype, device=device
    )
    if opened.steering is None:
        report(f"note: {settings.model} is no bundle: nothing steers it")
    layout = opened.layout
    # A class that is named twice is drawn once: its images would have the same names.
    classes = list(dict.fromkeys(layout.find(name) for name in settings.classes)) or list(range(len(layout.classes)))
    asked = [place for place in classes for _ in range(settings.count)]
    codes = sample(
        opened.model, layout, asked, settings.sampling(), speculative=settings.draft_length, title="images"
    )  # fmt: skip
    content = record(
        "image sample",
        settings,
        steering=None if opened.steering is None else str(opened.steering),
        classes=[layout.classes[place] for place in classes],
        images=len(codes),
    )
    with output_folder(output, settings.overwrite, is_drawn) as folder:
        save_file({"codes": codes.contiguous(), "classes": torch.tensor(asked)}, folder / CODES)
        shown: list[Images] = []
        for place, of_class in zip(classes, codes.split(settings.count), strict=True):
            images = decode(of_class, opened.codec)
            inside = folder / folder_name(layout, place)
            inside.mkdir()
            for number, image in enumerate(images):
                write_png(image, inside / f"{number:06}.png")
            if len(shown) < MOST_ROWS:
                shown.append(images[:MOST_ACROSS])
        write_png(grid_of(torch.cat(shown), len(shown[0])), folder / GRID)
        write_json(folder / RECORD, content)
    return content


def folder_name(layout: ImageLayout, place: int) -> str:
    """A folder's name for a class: its own, or its place before what of it is no danger in a path."""
    name = layout.classes[place]
    if SAFE.fullmatch(name) and name not in (GRID, CODES, RECORD):
        return name
    return f"{place:04} {UNSAFE.sub('_', name)}"[:LONGEST_NAME].rstrip(" .")


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
