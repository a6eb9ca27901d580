"""Between images and codes: what a codec must do, and finding the one in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from divdec.errors import UsageError
from divdec.imaging.layout import Codes
from divdec.runs import read_json

FOLDER = "codec"
"""Beside `image.json`."""
DESCRIPTION = "codec.json"
Images = Float[Tensor, "images channels image_height image_width"]
"""Pixels from 0 to 1; one channel or red, green and blue."""


@runtime_checkable
class Codec(Protocol):
    """Turns images of one size into rasters of codes, and back."""

    codes: int
    """Size of the codebook."""
    grid: tuple[int, int]
    """Height and width of the raster."""
    channels: int
    size: tuple[int, int]
    """Height and width of the images, in pixels."""

    def encode(self, images: Images) -> Codes:
        """The nearest codes.

        Raises:
            UsageError: the images have another size or number of channels (`check_images`).
        """
        ...

    def decode(self, codes: Codes) -> Images:
        """The images that codes stand for, from 0 to 1."""
        ...

    def save(self, folder: Path) -> None:
        """Write description and weights into an existing folder."""
        ...

    def to(self, device: str) -> Codec:
        """Compute on another device; images and codes come and go where the caller has them."""
        ...


def check_images(images: Images, codec: Codec) -> None:
    """Refuse what a codec cannot read.

    Raises:
        UsageError: says what was given and what is accepted.
    """
    if images.ndim != 4:
        raise UsageError(f"images of shape {tuple(images.shape)}; accepted: [images, channels, height, width]")
    channels, height, width = images.shape[1:]
    if (channels, height, width) != (codec.channels, *codec.size):
        raise UsageError(
            f"images of {height}×{width} pixels and {channels} channel(s); this codec reads "
            f"{codec.size[0]}×{codec.size[1]} and {codec.channels}"
        )


def load_codec(folder: Path) -> Codec:
    """The codec in a folder, of whichever kind.

    Args:
        folder: where `Codec.save` has written.

    Raises:
        UsageError: there is none, or none of a known kind.
    """
    if not (folder / DESCRIPTION).is_file():
        raise UsageError(f"{folder} holds no codec: {DESCRIPTION} is missing")
    about = read_json(folder / DESCRIPTION)
    kind = about.get("kind") if isinstance(about, dict) else about
    if kind == "patches":
        from divdec.imaging.patches import PatchCodec

        return PatchCodec.load(folder)
    if kind == "vq":
        from divdec.imaging.vq import VQCodec

        return VQCodec.load(folder)
    raise UsageError(f"{folder / DESCRIPTION} is of kind {kind!r}; accepted: 'patches', 'vq'")
