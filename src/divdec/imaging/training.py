"""The pair of auxiliaries for an image model: images become records of codes, and the recipes for texts do the rest."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from divdec.data.records import RecordSet, write_records
from divdec.errors import UsageError
from divdec.imaging.codec import Codec, Images
from divdec.imaging.layout import Codes, ImageLayout
from divdec.imaging.opened import for_codes, read_image_files
from divdec.imaging.pictures import read_folder
from divdec.imaging.settings import ImageTrainSettings
from divdec.model.bundle import rewrite_steering
from divdec.model.checkpoint import CheckpointReference, check_apart, digests
from divdec.runs import RECORD, goes_on, read_record, record, settings_hash, write_json
from divdec.steering import Steering
from divdec.training.auxiliaries import BUNDLE, train_auxiliaries
from divdec.training.settings import AuxiliarySettings

VERB = "image train"
ANY_CLASS_SHARE = 0.1
"""Of the images that are learned once more without their class, as Ho and Salimans (2022, section 5) do."""
PAPER_SHARE = 0.1
"""Of the base's learning rate that the pair is fine-tuned with (the paper, appendix on images)."""


def train_pair(settings: ImageTrainSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train p and q for an image model, and write a bundle that steers it with them.

    `data/` of the output folder holds the images as records, for `divdec distill` and the other verbs; `pair/` what
    `divdec train` writes.

    Args:
        settings: images, classes, models, training.
        report: told what is found and done, a line each.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: something given cannot be used; nothing has then been trained.
        Interrupted: Ctrl-C; the same call goes on where it stopped.
    """
    output = Path(settings.output).expanduser()
    steering = Steering.parse(settings.steering)
    target = CheckpointReference.parse(settings.target).resolve(Path(), weights=True)
    layout, codec = read_image_files(target)
    for_codes(steering, layout).check_vocabulary(layout.codes)
    base = None if settings.base is None else CheckpointReference.parse(settings.base).resolve(Path(), weights=True)
    folder = Path(settings.images).expanduser()
    check_apart(output.resolve(), [place.resolve() for place in (target, base, folder) if place and place.exists()])
    images, places, names = read_folder(folder, codec.channels, codec.size, settings.resize, report)
    classes = layout.find_all(names)
    forget = chosen_classes(settings, layout, classes)
    report(f"{len(images)} images of {len(names)} classes, of which {len(forget)} are to be forgotten")
    of = [classes[place] for place in places]
    decided = dataclasses.asdict(dataclasses.replace(settings, overwrite=False))
    fingerprint = settings_hash([decided, digest(images), of, digests(target), base and digests(base)])
    resumed = goes_on(output, VERB, fingerprint, settings.overwrite)
    sets = {name: output / "data" / f"{name}.jsonl" for name in ("forget", "retain")}
    if not resumed:
        (output / "data").mkdir(parents=True, exist_ok=True)
        for file in sets.values():
            file.unlink(missing_ok=True)
        write_json(output / RECORD, record(VERB, settings, fingerprint=fingerprint) | {"status": "running"})
    if not all(file.is_file() for file in sets.values()):
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        codes = encode(images, codec.to(str(device or "cpu")), settings.encode_batch)
        for name, wanted in (("forget", forget), ("retain", set(classes) - forget)):
            rows = [row for row, place in enumerate(of) if place in wanted]
            found = learned(layout, name, codes[rows], [of[row] for row in rows], settings.seed)
            write_records(sets[name], found.records)
    del images
    pair = read_record(output / "pair")
    if resumed and pair is not None and pair.get("status") == "finished":
        content = pair  # stopped after the pair was whole
    else:
        content = train_auxiliaries(_recipe(settings, layout, sets, output / "pair"), report, measure=False)
    bundle = output / "pair" / BUNDLE
    if for_codes(steering, layout) != steering:
        rewrite_steering(bundle, for_codes(steering, layout))
    written = record(
        VERB, settings, fingerprint=fingerprint,
        classes_to_forget=sorted(layout.classes[place] for place in forget),
        auxiliaries=content["auxiliaries"], bundle=str(bundle),
    )  # fmt: skip
    write_json(output / RECORD, written)
    return written


def _recipe(
    settings: ImageTrainSettings, layout: ImageLayout, sets: Mapping[str, Path], output: Path
) -> AuxiliarySettings:
    return AuxiliarySettings(
        base=settings.base or settings.target,
        forget=str(sets["forget"]),
        retain=str(sets["retain"]),
        output=str(output),
        target=settings.target,
        recipe=settings.recipe,
        init_forget_from=settings.init_forget_from or ("base" if settings.base is None else "retain"),
        steering=settings.steering,
        lr="auto" if settings.base_lr is None else PAPER_SHARE * settings.base_lr,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        gradient_accumulation=settings.gradient_accumulation,
        max_length=layout.length + 1,
        precision=settings.precision,
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=settings.seed,
        overwrite=settings.overwrite,
    )


def chosen_classes(settings: ImageTrainSettings, layout: ImageLayout, classes: Sequence[int]) -> set[int]:
    """The classes to forget: those that are named, or a share of all drawn by seed.

    Raises:
        UsageError: a class is not known, has no images, or none is left to keep.
    """
    if settings.forget:
        forget = {layout.find(name) for name in settings.forget}
        if missing := sorted(forget - set(classes)):
            raise UsageError(f"class {layout.classes[missing[0]]!r} is to be forgotten, but has no images")
    else:
        count = round(settings.forget_share * len(classes))
        forget = set(random.Random(settings.seed).sample(sorted(classes), count))
    if not forget or forget >= set(classes):
        raise UsageError(f"{len(forget)} of {len(classes)} classes are to be forgotten; some must be, and some kept")
    return forget


def learned(layout: ImageLayout, name: str, codes: Codes, classes: Sequence[int], seed: int = 0) -> RecordSet:
    """Images as they are learned: each with its class and, where the layout has a token for it, a tenth with none.

    Args:
        layout: what tokens mean.
        name: of the set.
        codes: of the images.
        classes: theirs, by place.
        seed: of which are learned without their class too.
    """
    order: list[int | None] = list(classes)
    if layout.no_class is not None:
        generator = torch.Generator().manual_seed(seed)
        again = torch.randperm(len(codes), generator=generator)[: round(ANY_CLASS_SHARE * len(codes))]
        codes = torch.cat([codes, codes[again]])
        order += [None] * len(again)
    return layout.records(name, codes, order)


def digest(images: Images) -> str:
    """Of the pixels, image by image."""
    found = hashlib.sha256()
    for image in images:
        found.update(image.numpy().tobytes())
    return found.hexdigest()


@torch.no_grad()
def encode(images: Images, codec: Codec, batch_size: int = 64, title: str | None = "codes") -> Codes:
    """All images as codes, batch by batch.

    Raises:
        UsageError: they have another size than the codec's.
    """
    batches = images.split(batch_size)
    return torch.cat([codec.encode(batch) for batch in tqdm(batches, desc=title, disable=title is None)])
