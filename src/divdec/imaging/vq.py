"""A codec for pictures: a VQGAN, whose convolutions turn patches into vectors, each replaced by the nearest of k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from divdec.errors import UsageError
from divdec.extras import require
from divdec.imaging.codec import DESCRIPTION, Images, check_images
from divdec.imaging.layout import Codes
from divdec.runs import read_json, write_json

if TYPE_CHECKING:
    from diffusers import VQModel

BATCH = 8
"""Images at a time; distances of so many of 16×16 codes to 16,384 entries take 128 MiB."""
CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""As diffusers names them."""


class VQCodec:
    """Codes are the nearest entries of a codebook that was learned along with encoder and decoder.

    Esser et al. 2021, "Taming Transformers for High-Resolution Image Synthesis"; the network is diffusers' `VQModel`.
    It works where its weights lie, and answers where the given images or codes do.
    """

    def __init__(self, model: VQModel, size: tuple[int, int], batch: int = BATCH) -> None:
        """Take the network.

        Args:
            model: reads and gives pixels from −1 to 1.
            size: height and width of the images, in pixels.
            batch: how many images are encoded or decoded at a time.

        Raises:
            UsageError: the network's levels do not divide the images evenly, or it gives other channels than it reads.
        """
        config: Any = model.config
        factor = 2 ** (len(config.block_out_channels) - 1)
        if min(size) < 1 or size[0] % factor or size[1] % factor:
            raise UsageError(
                f"images of {size[0]}×{size[1]} pixels; this VQGAN halves them {len(config.block_out_channels) - 1} "
                f"times: give multiples of {factor}"
            )
        if config.in_channels != config.out_channels:
            raise UsageError(
                f"this VQGAN reads {config.in_channels} channel(s) and gives {config.out_channels}; "
                "accepted: as many of both"
            )
        if batch < 1:
            raise UsageError(f"batch is {batch}; accepted: at least 1 image")
        self.model = model.eval().requires_grad_(False)
        self.batch = batch
        self.codes: int = config.num_vq_embeddings
        self.channels: int = config.in_channels
        self.size = size
        self.grid = (size[0] // factor, size[1] // factor)

    def to(self, device: torch.device | str) -> VQCodec:
        """Move the network to a device.

        Returns:
            This codec.
        """
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        return self

    @torch.no_grad()
    def encode(self, images: Images) -> Codes:
        """See `Codec.encode`."""
        check_images(images, self)
        found = [self._encode(some).to(images.device) for some in images.split(self.batch) if len(some)]
        return torch.cat(found) if found else torch.zeros(0, *self.grid, dtype=torch.long, device=images.device)

    @torch.no_grad()
    def decode(self, codes: Codes) -> Images:
        """See `Codec.decode`.

        Raises:
            UsageError: the raster has another size, or a code is not in the codebook.
        """
        if tuple(codes.shape[1:]) != self.grid:
            given = "×".join(map(str, codes.shape[1:]))
            raise UsageError(f"rasters of {given} codes; this codec decodes {self.grid[0]}×{self.grid[1]}")
        wrong = codes[(codes < 0) | (codes >= self.codes)]
        if len(wrong):
            raise UsageError(f"code {int(wrong[0])} is not in the codebook; accepted: 0 to {self.codes - 1}")
        found = [self._decode(some).to(codes.device) for some in codes.split(self.batch) if len(some)]
        return torch.cat(found) if found else torch.zeros(0, self.channels, *self.size, device=codes.device)

    def _encode(self, images: Tensor) -> Tensor:
        model: Any = self.model
        latents = model.encode(images.to(model.device, model.dtype) * 2 - 1).latents
        _, _, (_, _, nearest) = model.quantize(latents)
        return nearest.reshape(-1, *self.grid)

    def _decode(self, codes: Tensor) -> Tensor:
        model: Any = self.model
        shape = (*codes.shape, model.config.vq_embed_dim)
        entries = model.quantize.get_codebook_entry(codes.to(model.device).flatten(), shape)
        pixels = model.decode(entries, force_not_quantize=True).sample
        return ((pixels.float() + 1) / 2).clamp(0, 1)

    def save(self, folder: Path) -> None:
        """See `Codec.save`."""
        self.model.save_pretrained(folder, safe_serialization=True)
        write_json(folder / DESCRIPTION, {"kind": "vq", "size": list(self.size)})

    @classmethod
    def load(cls, folder: Path) -> VQCodec:
        """What `save` has written, on the CPU.

        Raises:
            UsageError: a file is missing or damaged, or diffusers is not installed.
        """
        network = vq_model_class()
        for name in (DESCRIPTION, CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise UsageError(f"the codec in {folder} cannot be read: {name} is missing; copy or convert it again")
        try:
            height, width = read_json(folder / DESCRIPTION)["size"]
            config = read_json(folder / CONFIG)
            if config.get("_class_name") != network.__name__:
                raise ValueError(f"{CONFIG} describes {config.get('_class_name')}, not {network.__name__}")
            return cls(_filled(network, config, folder / WEIGHTS), (height, width))
        except UsageError:
            raise
        except Exception as error:  # of whatever kind diffusers meets a damaged configuration with
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UsageError(f"the codec in {folder} cannot be read ({reason}); copy or convert it again") from None


def vq_model_class() -> type[VQModel]:
    """Diffusers' `VQModel`, which is loaded only where it is needed.

    Raises:
        UsageError: diffusers is not installed.
    """
    require("image", "a VQGAN")
    from diffusers import VQModel

    return VQModel


def vq_config(
    channels: int, widths: Sequence[int], blocks: int, attention: Sequence[int], latent: int, entries: tuple[int, int]
) -> dict[str, Any]:
    """What diffusers' `VQModel` is made from, for a VQGAN as taming-transformers builds them.

    Args:
        channels: of the images.
        widths: channels of each level, from the images' resolution down.
        blocks: residual blocks of a level; the decoder's have one more.
        attention: levels whose blocks are each followed by attention.
        latent: channels of what the encoder gives.
        entries: number and width of the codebook's entries.
    """
    levels = range(len(widths))
    return {
        "in_channels": channels,
        "out_channels": channels,
        "down_block_types": [f"{'Attn' * (level in attention)}DownEncoderBlock2D" for level in levels],
        "up_block_types": [f"{'Attn' * (level in attention)}UpDecoderBlock2D" for level in reversed(levels)],
        "block_out_channels": list(widths),
        "layers_per_block": blocks,
        "latent_channels": latent,
        "num_vq_embeddings": entries[0],
        "vq_embed_dim": entries[1],
        "norm_num_groups": 32,
    }


def _filled(network: type[VQModel], config: dict[str, Any], weights: Path) -> VQModel:
    # Strictly, and never pickled weights: diffusers' own `from_pretrained` leaves what a file lacks to chance.
    from safetensors.torch import load_file

    with torch.device("meta"):
        model: Any = network.from_config(config)
    model.load_state_dict(load_file(weights), strict=True, assign=True)
    return model
