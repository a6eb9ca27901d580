"""Image files: read folders of classes, write images and grids."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError, first_line
from divdec_research.images.codecs import Images

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB"}
Row = Float[Tensor, "_ channels image_height image_width"]
"""Images of one size; rows of a grid may have different lengths."""


def read_folder(
    folder: Path, channels: int, size: tuple[int, int], resize: bool = False, report: Callable[[str], None] = print
) -> tuple[Images, list[int], tuple[str, ...]]:
    """Read images from one folder for each class.

    Args:
        folder: holds a folder for each class.
        channels: 1 (grey) or 3 (red, green, blue).
        size: height and width of the images, in pixels.
        resize: scale and crop images of other sizes instead of refusing them.
        report: receives a line for each class with files that are not images.

    Returns:
        Pixels from 0 to 1, the index of each image's class, and the classes' names in order.

    Raises:
        UsageError: a class has no images, or an image cannot be read or has another size.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; accepted: a folder that holds a folder of images for each class")
    names = tuple(sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name[:1] != "."))
    if not names:
        raise UsageError(f"{folder} holds no folders; accepted: a folder for each class, with {', '.join(SUFFIXES)}")
    loose = sum(child.suffix.lower() in SUFFIXES for child in folder.iterdir() if child.name[:1] != ".")
    if loose:
        report(f"note: {loose} images of {folder} are left out: they are in no class's folder")
    files: list[tuple[Path, int]] = []
    for index, name in enumerate(names):
        children = sorted(file for file in (folder / name).iterdir() if file.name[:1] != ".")
        images = [file for file in children if file.suffix.lower() in SUFFIXES]
        if not images:
            raise UsageError(f"{folder / name} holds no images; accepted: {', '.join(SUFFIXES)}")
        if others := len(children) - len(images):
            report(f"note: {others} files of {folder / name} are left out: they are not {', '.join(SUFFIXES)}")
        files += [(file, index) for file in images]
    pixels = torch.empty(len(files), channels, *size)
    for row, (file, _) in enumerate(files):
        pixels[row] = _read(file, channels, size, resize)
    return pixels, [index for _, index in files], names


def png(image: Float[Tensor, "channels height width"], min_side: int = 1) -> bytes:
    """Encode pixels from 0 to 1 as a PNG file.

    Pixels are repeated until the shorter side has `min_side` of them: vision models refuse tiny images.
    """
    from PIL import Image

    values = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    times = -(-min_side // min(values.shape[1:]))
    values = values.repeat_interleave(times, 1).repeat_interleave(times, 2)
    buffer = io.BytesIO()
    Image.fromarray(values[0].numpy() if len(values) == 1 else values.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(content: bytes) -> str:
    """Encode a PNG file as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def grid(rows: Sequence[Row], scale: int = 1) -> Float[Tensor, "channels grid_height grid_width"]:
    """Arrange rows of images as one image, with white lines of one pixel between them.

    Args:
        rows: images of one size, by row.
        scale: side of the square that shows one pixel.
    """
    channels, height, width = rows[0].shape[1:]
    across = max(len(row) for row in rows)
    result = torch.ones(channels, len(rows) * (height + 1) - 1, across * (width + 1) - 1)
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            top, left = y * (height + 1), x * (width + 1)
            result[:, top : top + height, left : left + width] = image
    return result if scale == 1 else result.repeat_interleave(scale, 1).repeat_interleave(scale, 2)


def _read(
    file: Path, channels: int, size: tuple[int, int], resize: bool
) -> Float[Tensor, "channels image_height image_width"]:
    import numpy
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = _opaque(ImageOps.exif_transpose(opened))  # cameras store the rotation as metadata
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{file} cannot be read as an image ({first_line(error)})") from None
    image = image.convert(_MODES[channels])
    height, width = size
    if resize:
        image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    if (image.height, image.width) != size:
        raise UsageError(
            f"{file} has {image.height}×{image.width} pixels; accepted: {height}×{width}, or any with --resize"
        )
    pixels = torch.from_numpy(numpy.array(image, dtype=numpy.float32) / 255)
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def _opaque(image: Any) -> Any:
    """Convert an image to 8 bits a channel, on white where it is transparent."""
    import numpy
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((numpy.asarray(image).astype(numpy.uint32) // 257).astype(numpy.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"of mode {image.mode}, whose range is unknown; save it with 8 or 16 bits a channel")
    if "A" in image.mode or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image
