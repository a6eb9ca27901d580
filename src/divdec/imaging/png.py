"""An image as the bytes of a PNG file, for a request or a page."""

from __future__ import annotations

import base64
import io

import torch
from jaxtyping import Float
from torch import Tensor


def png(image: Float[Tensor, "channels height width"], least_side: int = 1) -> bytes:
    """Write one image.

    Args:
        image: pixels from 0 to 1.
        least_side: repeat its pixels until the shorter side has as many; models that look at images refuse tiny ones.
    """
    from PIL import Image

    values = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    times = -(-least_side // min(values.shape[1:]))
    values = values.repeat_interleave(times, 1).repeat_interleave(times, 2)
    buffer = io.BytesIO()
    Image.fromarray(values[0].numpy() if len(values) == 1 else values.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(content: bytes) -> str:
    """A PNG file as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
