"""Images as files: reading them by class, writing them one by one and as a grid. It knows nothing of codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError, first_line
from divdec.imaging.codec import Images
from divdec.imaging.png import png

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB"}
Row = Float[Tensor, "_ channels image_height image_width"]
"""Images of one size; rows of a grid may hold more and fewer."""


def read_folder(
    folder: Path,
    channels: int,
    size: tuple[int, int],
    resize: bool = False,
    report: Callable[[str], None] = print,
) -> tuple[Images, list[int], tuple[str, ...]]:
    """Read images that lie in a folder a class.

    Args:
        folder: holds a folder for each class, in the order of their names.
        channels: 1 (grey) or 3 (red, green, blue).
        size: height and width that the images must have, in pixels.
        resize: scale the shorter side to it and cut the middle out, rather than refuse other sizes.
        report: told of files that are left out.

    Returns:
        Pixels from 0 to 1, the class of each by its place, and the classes' names.

    Raises:
        UsageError: a class has none, one cannot be read, or has another size.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; accepted: a folder that holds a folder of images for each class")
    names = tuple(sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name[:1] != "."))
    if not names:
        raise UsageError(f"{folder} holds no folders; accepted: a folder for each class, with {', '.join(SUFFIXES)}")
    files: list[tuple[Path, int]] = []
    for place, name in enumerate(names):
        inside = sorted(file for file in (folder / name).iterdir() if file.name[:1] != ".")
        found = [file for file in inside if file.suffix.lower() in SUFFIXES]
        if not found:
            raise UsageError(f"{folder / name} holds no images; accepted: {', '.join(SUFFIXES)}")
        if left := len(inside) - len(found):
            report(f"note: {left} files of {folder / name} are left out: they are not {', '.join(SUFFIXES)}")
        files += [(file, place) for file in found]
    pixels = torch.empty(len(files), channels, *size)
    for row, (file, _) in enumerate(files):
        pixels[row] = _read(file, channels, size, resize)
    return pixels, [place for _, place in files], names


def write_png(image: Float[Tensor, "channels image_height image_width"], file: Path) -> None:
    """Write one image, pixels from 0 to 1."""
    temporary = file.with_name(f".{file.name}.part")
    temporary.write_bytes(png(image))
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
    return whole if scale == 1 else whole.repeat_interleave(scale, 1).repeat_interleave(scale, 2)


def _read(
    file: Path, channels: int, size: tuple[int, int], resize: bool
) -> Float[Tensor, "channels image_height image_width"]:
    import numpy
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            # Cameras write how an image is to be turned beside it.
            image = _opaque(ImageOps.exif_transpose(opened))
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
    """An image of 8 bits a channel, on white where it is transparent."""
    import numpy
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((numpy.asarray(image).astype(numpy.uint32) // 257).astype(numpy.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"of mode {image.mode}, whose range nobody knows; save it with 8 or 16 bits a channel")
    if "A" in image.mode or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image
