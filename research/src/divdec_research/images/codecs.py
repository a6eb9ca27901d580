"""Codecs between images and rasters of codes: k-means patches for tiny images, and VQGANs (diffusers' `VQModel`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import fold, unfold

from divdec.errors import UsageError
from divdec.extras import require_modules
from divdec.runs import read_json, write_json

if TYPE_CHECKING:
    from diffusers import VQModel

FOLDER = "codec"
"""Folder of the codec, beside `image.json`."""
DESCRIPTION, CONFIG = "codec.json", "config.json"
PATCH_WEIGHTS, VQ_WEIGHTS = "patches.safetensors", "diffusion_pytorch_model.safetensors"
MAX_PATCHES = 20_000
"""Maximum number of patches for k-means."""
VQ_BATCH = 8
"""Images in a pass of a VQGAN; distances of 8 · 16×16 vectors to 16,384 entries take 128 MiB."""

Images = Float[Tensor, "images channels image_height image_width"]
"""Pixels from 0 to 1, with one channel, or red, green and blue."""
Codes = Int[Tensor, "images height width"]
"""Rasters of codes, each below the size of the codebook."""


class PatchCodec:
    """Replaces each square patch of an image by the nearest of k patches.

    Attributes:
        codes: size of the codebook.
        channels: channels of the images.
        size: height and width of the images, in pixels.
        grid: height and width of the raster.
    """

    def __init__(self, patches: Float[Tensor, "codes channels side side"], size: tuple[int, int]) -> None:
        """Create a codec from a codebook of patches, pixels from 0 to 1, for images of `size` [height, width]."""
        self.patches = patches
        self.codes, self.channels, self.side = patches.shape[:3]
        self.size = size
        self.grid = (size[0] // self.side, size[1] // self.side)

    @classmethod
    def fit(cls, images: Images, side: int, codes: int, seed: int = 0) -> PatchCodec:
        """Find a codebook of `codes` patches of `side`×`side` pixels by k-means over all patches of the images.

        Raises:
            UsageError: patches do not tile the images, or there are fewer different patches than codes.
        """
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits

        channels, height, width = images.shape[1:]
        if height % side or width % side:
            raise UsageError(f"patches of {side}×{side} pixels do not tile images of {height}×{width}")
        patches = _patches(images, side).reshape(-1, channels * side * side)
        different = len(patches.unique(dim=0))
        if different < codes:
            raise UsageError(f"{codes} codes are requested, but the images have only {different} different patches")
        sample = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))[:MAX_PATCHES]
        with threadpool_limits(1):  # threads that wait for busy cores cost more than they save here
            means = KMeans(codes, random_state=seed, max_iter=50).fit(patches[sample].numpy())
        centers = torch.from_numpy(means.cluster_centers_).float().clamp(0, 1)
        return cls(centers.reshape(codes, channels, side, side), (height, width))

    def encode(self, images: Images) -> Codes:
        """Return the nearest codes of images of the codec's size and channels."""
        patches = _patches(images, self.side)
        distances = torch.cdist(patches.reshape(len(patches), patches.shape[1], -1), self.patches.flatten(1)[None])
        return distances.argmin(dim=-1).reshape(-1, *self.grid)

    def decode(self, codes: Codes) -> Images:
        """Return the images of rasters of codes."""
        tiles = self.patches[codes.flatten(1)].flatten(2).transpose(1, 2)
        return fold(tiles, self.size, kernel_size=self.side, stride=self.side)

    def to(self, device: str) -> PatchCodec:
        """Return this codec, which always computes on the CPU."""
        return self

    def save(self, folder: Path) -> None:
        """Write description and weights into an existing folder."""
        from safetensors.torch import save_file

        save_file({"patches": self.patches.contiguous()}, folder / PATCH_WEIGHTS)
        write_json(folder / DESCRIPTION, {"kind": "patches", "size": list(self.size)})

    @classmethod
    def load(cls, folder: Path) -> PatchCodec:
        """Load a saved codec.

        Raises:
            UsageError: the file is missing or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            height, width = read_json(folder / DESCRIPTION)["size"]
            patches = load_file(folder / PATCH_WEIGHTS)["patches"]
            codes, channels, side, across = patches.shape
            if not codes or channels not in (1, 3) or side != across or height % side or width % side:
                raise ValueError(f"{codes} patches of {channels}×{side}×{across} for images of {height}×{width}")
            if not patches.is_floating_point() or not patches.isfinite().all():
                raise ValueError("its patches are not finite floats")
            return cls(patches.float(), (height, width))
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise UsageError(f"the codec in {folder} cannot be read ({error})") from None


def _patches(images: Images, side: int) -> Float[Tensor, "images patches pixels"]:
    return unfold(images, kernel_size=side, stride=side).transpose(1, 2)


class VQCodec:
    """A VQGAN, whose codes are the nearest entries of a codebook learned with encoder and decoder.

    Esser et al. 2021, "Taming Transformers for High-Resolution Image Synthesis"; the network is diffusers' `VQModel`.
    For attributes and methods see `PatchCodec`.
    """

    def __init__(self, model: VQModel, size: tuple[int, int], batch: int = VQ_BATCH) -> None:
        """Create a codec for images of `size` [height, width]; `batch` images are read in a pass.

        Raises:
            UsageError: the network's levels do not divide the images evenly, or its input and output channels differ.
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
                "accepted: equal numbers"
            )
        self.model = model.eval().requires_grad_(False)
        self.batch = batch
        self.codes: int = config.num_vq_embeddings
        self.channels: int = config.in_channels
        self.size = size
        self.grid = (size[0] // factor, size[1] // factor)

    def to(self, device: torch.device | str) -> VQCodec:
        """Compute on a device; inputs and outputs stay on the caller's."""
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        return self

    @torch.no_grad()
    def encode(self, images: Images) -> Codes:
        """Return the nearest codes of images of the codec's size and channels."""
        model: Any = self.model
        result = torch.zeros(len(images), *self.grid, dtype=torch.long, device=images.device)
        for start in range(0, len(images), self.batch):
            pixels = images[start : start + self.batch].to(model.device, model.dtype) * 2 - 1
            _, _, (_, _, nearest) = model.quantize(model.encode(pixels).latents)
            result[start : start + self.batch] = nearest.reshape(-1, *self.grid)
        return result

    @torch.no_grad()
    def decode(self, codes: Codes) -> Images:
        """Return the images of rasters of codes; see `ImageLayout.check`."""
        model: Any = self.model
        result = torch.zeros(len(codes), self.channels, *self.size, device=codes.device)
        for start in range(0, len(codes), self.batch):
            some = codes[start : start + self.batch]
            shape = (*some.shape, model.config.vq_embed_dim)
            entries = model.quantize.get_codebook_entry(some.to(model.device).flatten(), shape)
            pixels = model.decode(entries, force_not_quantize=True).sample
            result[start : start + self.batch] = ((pixels.float() + 1) / 2).clamp(0, 1)
        return result

    def save(self, folder: Path) -> None:
        """Write description and weights into an existing folder."""
        self.model.save_pretrained(folder, safe_serialization=True)
        write_json(folder / DESCRIPTION, {"kind": "vq", "size": list(self.size)})

    @classmethod
    def load(cls, folder: Path) -> VQCodec:
        """Load a saved codec on the CPU.

        Raises:
            UsageError: a file is missing or damaged, or diffusers is not installed.
        """
        from safetensors.torch import load_file

        network = vq_model_class()
        for name in (DESCRIPTION, CONFIG, VQ_WEIGHTS):
            if not (folder / name).is_file():
                raise UsageError(f"the codec in {folder} cannot be read: {name} is missing; copy or convert it again")
        try:
            height, width = read_json(folder / DESCRIPTION)["size"]
            config = read_json(folder / CONFIG)
            if config.get("_class_name") != network.__name__:
                raise ValueError(f"{CONFIG} describes {config.get('_class_name')}, not {network.__name__}")
            # Unlike `from_pretrained`, this reads safetensors only, and refuses files that lack weights.
            with torch.device("meta"):
                model: Any = network.from_config(config)
            model.load_state_dict(load_file(folder / VQ_WEIGHTS), strict=True, assign=True)
            return cls(model, (height, width))
        except UsageError:
            raise
        except Exception as error:  # diffusers raises errors of many kinds for a damaged configuration
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UsageError(f"the codec in {folder} cannot be read ({reason}); copy or convert it again") from None


Codec = PatchCodec | VQCodec
_KINDS: dict[Any, type[PatchCodec] | type[VQCodec]] = {"patches": PatchCodec, "vq": VQCodec}


def load_codec(folder: Path) -> Codec:
    """Load a codec.

    Raises:
        UsageError: the folder holds no codec, or one of an unknown kind.
    """
    if not (folder / DESCRIPTION).is_file():
        raise UsageError(f"{folder} holds no codec: {DESCRIPTION} is missing")
    about = read_json(folder / DESCRIPTION)
    kind = about.get("kind") if isinstance(about, dict) else None
    if kind not in _KINDS:
        raise UsageError(f"{folder / DESCRIPTION} is of kind {kind!r}; accepted: 'patches', 'vq'")
    return _KINDS[kind].load(folder)


def vq_model_class() -> type[VQModel]:
    """Import diffusers' `VQModel`.

    Raises:
        UsageError: diffusers is not installed.
    """
    require_modules(("diffusers",), "a VQGAN", "divdec-research[image]")
    from diffusers import VQModel

    return VQModel


def vq_config(
    channels: int, widths: Sequence[int], blocks: int, attention: Sequence[int], latent: int, entries: tuple[int, int]
) -> dict[str, Any]:
    """Arguments of diffusers' `VQModel` for a VQGAN of taming-transformers.

    Args:
        channels: channels of the images.
        widths: channels of each level, from the images' resolution down.
        blocks: residual blocks of a level; the decoder's have one more.
        attention: levels with attention after each block.
        latent: output channels of the encoder.
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
