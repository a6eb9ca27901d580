"""Images as files: reading them by class, writing them one by one and as a grid. It knows nothing of codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.imaging.codec import Images

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_MODES = {1: "L", 3: "RGB"}
Row = Float[Tensor, "_ channels image_height image_width"]
"""Images of one size; rows of a grid may hold more and fewer."""


def read_folder(
    folder: Path, channels: int, size: tuple[int, int], resize: bool = False
) -> tuple[Images, list[int], tuple[str, ...]]:
    """Read images that lie in a folder a class.

    Args:
        folder: holds a folder for each class, in the order of their names.
        channels: 1 (grey) or 3 (red, green, blue).
        size: height and width that the images must have, in pixels.
        resize: scale the shorter side to it and cut the middle out, rather than refuse other sizes.

    Returns:
        Pixels from 0 to 1, the class of each by its place, and the classes' names.

    Raises:
        UsageError: there are none, one cannot be read, or has another size.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; accepted: a folder that holds a folder of images for each class")
    names = tuple(sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name[:1] != "."))
    files = [
        (file, place)
        for place, name in enumerate(names)
        for file in sorted((folder / name).iterdir())
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise UsageError(f"{folder} holds no images; accepted: a folder for each class, with {', '.join(SUFFIXES)}")
    pixels = torch.stack([_read(file, channels, size, resize) for file, _ in files])
    return pixels, [place for _, place in files], names


def write_png(image: Float[Tensor, "channels image_height image_width"], file: Path) -> None:
    """Write one image, pixels from 0 to 1."""
    from PIL import Image

    values = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    array = values[0].numpy() if len(values) == 1 else values.permute(1, 2, 0).numpy()
    temporary = file.with_name(f".{file.name}.part")
    Image.fromarray(array).save(temporary, format="PNG")
    temporary.replace(file)


def grid(rows: Sequence[Row], scale: int = 1, gap: int = 1) -> Float[Tensor, "channels grid_height grid_width"]:
    """Images as one, a row of them under the other.

    Args:
        rows: each with the images of a row; all of one size.
        scale: pixels that each pixel is drawn with.
        gap: white pixels between images, before scaling.
    """
    channels, height, width = rows[0].shape[1:]
    across = max(len(row) for row in rows)
    whole = torch.ones(channels, len(rows) * (height + gap) - gap, across * (width + gap) - gap)
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            top, left = y * (height + gap), x * (width + gap)
            whole[:, top : top + height, left : left + width] = image
    return whole.repeat_interleave(scale, 1).repeat_interleave(scale, 2)


def _read(file: Path, channels: int, size: tuple[int, int], resize: bool) -> Tensor:
    import numpy
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            image = opened.convert(_MODES[channels])
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UsageError(f"{file} cannot be read as an image ({error})") from None
    height, width = size
    if resize:
        factor = max(height / image.height, width / image.width)
        scaled = (max(width, round(image.width * factor)), max(height, round(image.height * factor)))
        image = image.resize(scaled, Image.Resampling.LANCZOS)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    if (image.height, image.width) != size:
        raise UsageError(
            f"{file} has {image.height}×{image.width} pixels; accepted: {height}×{width}, or any with --resize"
        )
    pixels = torch.from_numpy(numpy.array(image, dtype=numpy.float32) / 255)
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)
