"""Image models from disk: a bundle, which steers, or a plain checkpoint, with its layout and its codec."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.errors import UsageError
from divdec.imaging.codec import FOLDER, Codec, load_codec
from divdec.imaging.layout import LAYOUT, ImageLayout, load_layout
from divdec.imaging.sampling import check_model
from divdec.model.bundle import is_bundle
from divdec.model.checkpoint import CheckpointReference, check_plain, load_model
from divdec.model.loading import find_bundle, part_paths, read_config
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class ImageModel:
    """A model that draws images, and what its tokens mean."""

    model: PreTrainedModel
    layout: ImageLayout
    codec: Codec
    steering: Steering | None
    """None: a plain checkpoint, which nothing steers."""


def open_image_model(
    reference: str,
    *,
    steering: Steering | None = None,
    verify: bool = True,
    dtype: str = "auto",
    device: str = "cpu",
) -> ImageModel:
    """Load a bundle of image models, or one image model.

    Args:
        reference: folder or hub id.
        steering: another rule than the bundle's.
        verify: compare weight files with the bundle's digests.
        dtype: precision of the weights.
        device: where they go.

    Raises:
        UsageError: it is no image model, does not load, or steering was asked of a checkpoint that has no experts.
    """
    from divdec.model.modeling import DivergenceForCausalLM

    if Path(reference).expanduser().is_dir() and not is_bundle(Path(reference).expanduser()):
        if steering is not None:
            raise UsageError(f"{reference} is a plain checkpoint, which has nothing to steer it; give a bundle")
        folder = CheckpointReference.parse(reference).resolve(Path(), weights=True)
        check_plain(folder, "model")
        layout, codec = read_image_files(folder)
        model, rule = load_model(folder, dtype=dtype, device_map=device), None
    else:
        folder = find_bundle(reference)
        layout, codec = read_image_files(folder)
        model = DivergenceForCausalLM.from_pretrained(
            folder,
            verify=verify,
            steering=None if steering is None else for_codes(steering, layout),
            dtype=dtype,
            device_map=device,
        )
        # A bundle that was written for texts may count class tokens among those that the rank rule suppresses.
        model.steering = for_codes(model.steering, layout)
        rule = model.steering
    codec = codec.to(str(model.device))
    check_model(model, layout)
    return ImageModel(model.eval(), layout, codec, rule)


def parts_of(reference: str) -> list[Path]:
    """The folders that a bundle or model is made of, as far as they lie here: nothing else may be written there."""
    given = Path(reference).expanduser()
    if not given.is_dir():
        return []
    if not is_bundle(given):
        return [given]
    return [given, *part_paths(given, read_config(given), verify=False, local_files_only=False).values()]


def image_folder(folder: Path) -> Path:
    """Where the layout and the codec of a model or a bundle lie: in its folder, else in its target's."""
    if (folder / LAYOUT).is_file() or not is_bundle(folder):
        return folder
    return part_paths(folder, read_config(folder), verify=False, local_files_only=False)["target"]


def read_image_files(folder: Path) -> tuple[ImageLayout, Codec]:
    """Layout and codec of a model's or bundle's folder.

    Raises:
        UsageError: one is missing, or the two do not fit.
    """
    place = image_folder(folder)
    layout, codec = load_layout(place), load_codec(place / FOLDER)
    if codec.codes != layout.codes or codec.grid != (layout.height, layout.width):
        raise UsageError(
            f"{place}: the codec has {codec.codes} codes on {codec.grid[0]}×{codec.grid[1]}, the model "
            f"{layout.codes} on {layout.height}×{layout.width}"
        )
    return layout, codec


def write_image_files(folder: Path, layout: ImageLayout, codec: Codec) -> None:
    """Write layout and codec into a model's or bundle's folder."""
    layout.save(folder)
    (folder / FOLDER).mkdir(exist_ok=True)
    codec.save(folder / FOLDER)


def for_codes(steering: Steering, layout: ImageLayout) -> Steering:
    """The same rule, but so that the rank rule suppresses codes alone: other tokens are never drawn.

    Raises:
        UsageError: it is the soft rank rule, which fills suppressed tokens up again, so that they are drawn.
    """
    if steering.rule == "rank" and steering.fill == "soft":
        raise UsageError(f"{steering} is for likelihoods; images are drawn with rank:{steering.k}")
    if steering.rule == "rank" and layout.no_codes:
        return dataclasses.replace(steering, vocabulary=tuple(range(layout.codes)))
    return steering
