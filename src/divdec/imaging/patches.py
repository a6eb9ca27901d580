"""A codec for tiny images: square patches, each replaced by the nearest of k that k-means has found."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import fold, unfold

from divdec.errors import UsageError
from divdec.imaging.codec import DESCRIPTION, Images, check_images
from divdec.imaging.layout import Codes
from divdec.runs import read_json, write_json

WEIGHTS = "patches.safetensors"
MOST_PATCHES = 20_000  # that k-means looks at


class PatchCodec:
    """Codes are the nearest of `codes` patches."""

    def __init__(self, patches: Float[Tensor, "codes channels side side"], size: tuple[int, int]) -> None:
        """Take the codebook.

        Args:
            patches: what each code stands for, pixels from 0 to 1.
            size: height and width of the images, multiples of the patches' side.
        """
        self.patches = patches
        self.codes, self.channels, self.side = patches.shape[:3]
        self.size = size
        self.grid = (size[0] // self.side, size[1] // self.side)

    @classmethod
    def fit(cls, images: Images, side: int, codes: int, seed: int = 0) -> PatchCodec:
        """Find the codebook by k-means over all patches of the images.

        Args:
            images: of one size.
            side: of the patches, in pixels.
            codes: how many to find.
            seed: of k-means.

        Raises:
            UsageError: patches do not tile the images, or there are fewer different ones than codes.
        """
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits

        channels, height, width = images.shape[1:]
        if height % side or width % side:
            raise UsageError(f"patches of {side}×{side} pixels do not tile images of {height}×{width}")
        found = _patches(images, side).reshape(-1, channels * side * side)
        different = len(found.unique(dim=0))
        if different < codes:
            raise UsageError(f"{codes} codes are wanted, but the images have only {different} different patches")
        chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:MOST_PATCHES]
        with threadpool_limits(1):  # threads that wait for busy cores cost more than they save here
            means = KMeans(codes, random_state=seed, max_iter=50).fit(found[chosen].numpy())
        centers = torch.from_numpy(means.cluster_centers_).float().clamp(0, 1)
        return cls(centers.reshape(codes, channels, side, side), (height, width))

    def encode(self, images: Images) -> Codes:
        """See `Codec.encode`."""
        check_images(images, self)
        found = _patches(images, self.side)
        distances = torch.cdist(found.reshape(len(found), found.shape[1], -1), self.patches.flatten(1)[None])
        return distances.argmin(dim=-1).reshape(-1, *self.grid)

    def decode(self, codes: Codes) -> Images:
        """See `Codec.decode`."""
        tiles = self.patches[codes.flatten(1)].flatten(2).transpose(1, 2)
        return fold(tiles, self.size, kernel_size=self.side, stride=self.side)

    def to(self, device: str) -> PatchCodec:
        """See `Codec.to`: patches are too few to be worth a device."""
        return self

    def save(self, folder: Path) -> None:
        """See `Codec.save`."""
        from safetensors.torch import save_file

        save_file({"patches": self.patches.contiguous()}, folder / WEIGHTS)
        write_json(folder / DESCRIPTION, {"kind": "patches", "size": list(self.size)})

    @classmethod
    def load(cls, folder: Path) -> PatchCodec:
        """What `save` has written.

        Raises:
            UsageError: the file is missing or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            height, width = read_json(folder / DESCRIPTION)["size"]
            patches = load_file(folder / WEIGHTS)["patches"]
            codes, channels, side, across = patches.shape
            if not codes or channels not in (1, 3) or side != across or height % side or width % side:
                raise ValueError(f"{codes} patches of {channels}×{side}×{across} for images of {height}×{width}")
            if not patches.is_floating_point() or not patches.isfinite().all():
                raise ValueError("its patches hold what are no pixels")
            return cls(patches.float(), (height, width))
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise UsageError(f"the codec in {folder} cannot be read ({error})") from None


def _patches(images: Images, side: int) -> Float[Tensor, "images patches pixels"]:
    return unfold(images, kernel_size=side, stride=side).transpose(1, 2)
