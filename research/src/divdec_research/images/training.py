"""Train the auxiliaries of an image model: images become records of codes for the recipes of texts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from divdec.checkpoint import CheckpointReference, check_apart
from divdec.data.records import RecordSet, write_records
from divdec.errors import UsageError
from divdec.model.bundle import rewrite_steering
from divdec.runs import RunFolder, folder_digests, read_record
from divdec.steering import Steering
from divdec.training.auxiliaries import BUNDLE, train_auxiliaries
from divdec.training.inputs import join_processes, on_main
from divdec.training.settings import AuxiliarySettings, optimization_of
from divdec_research.images.codecs import Codec, Codes, Images
from divdec_research.images.files import read_folder
from divdec_research.images.models import ImageLayout, load_image_files, restrict_to_codes
from divdec_research.images.settings import ImageEvalSettings, ImageTrainSettings

VERB = "image train"
ANY_CLASS_SHARE = 0.1
"""Share of the images that are also learned without their class (Ho and Salimans 2022, section 5)."""
FORGET_SHARE = 0.5
"""Share of the classes to forget if the settings name none, as in the paper."""
PAPER_SHARE = 0.1
"""Learning rate of the pair, relative to that of the base (paper, appendix on images)."""


def train_image_auxiliaries(settings: ImageTrainSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train p and q for an image model, and write a bundle that steers it with them.

    `data/` in the output folder holds the images as records, for `divdec distill` and other commands; `pair/` is the
    output of `divdec train`.

    Args:
        settings: images, classes, models and training.
        report: receives one line at a time.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: an input cannot be used; training has not begun.
        Interrupted: Ctrl-C; the same call resumes the run.
    """
    _, report = join_processes(report)
    output = Path(settings.output).expanduser()
    steering = Steering.parse(settings.steering)
    target = CheckpointReference.parse(settings.target).resolve(Path(), weights=True)
    layout, codec = load_image_files(target)
    code_steering = restrict_to_codes(steering, layout)
    code_steering.check_vocabulary(layout.codes)
    base = None if settings.base is None else CheckpointReference.parse(settings.base).resolve(Path(), weights=True)
    folder = Path(settings.images).expanduser()
    check_apart(output.resolve(), [path.resolve() for path in (target, base, folder) if path and path.exists()])
    images, indices, names = read_folder(folder, codec.channels, codec.size, settings.resize, report)
    classes = layout.find_all(names)
    forget = select_classes(settings, layout, classes)
    report(f"{len(images)} images of {len(names)} classes, of which {len(forget)} are to be forgotten")
    labels = [classes[index] for index in indices]
    same_settings = dataclasses.asdict(dataclasses.replace(settings, overwrite=False))
    decides = {
        **same_settings,
        "image files": [digest(images), labels],
        "target files": folder_digests(target),
        "base files": None if base is None else folder_digests(base),
    }
    sets = {name: output / "data" / f"{name}.jsonl" for name in ("forget", "retain")}
    run = RunFolder.open(
        output, VERB, settings, decides, overwrite=settings.overwrite, stale=("data/*.jsonl",), on_main=on_main
    )
    with run:
        members = {"forget": forget, "retain": set(classes).difference(forget)}
        on_main(functools.partial(_write_sets, sets, members, layout, codec, images, labels, settings.seed))
        del images
        content = read_record(output / "pair")
        if not run.resumed or content is None or content.get("status") != "finished":
            recipe = AuxiliarySettings(
                base=settings.base or settings.target,
                forget=str(sets["forget"]),
                retain=str(sets["retain"]),
                output=str(output / "pair"),
                target=settings.target,
                recipe="forget-retain",
                # From the trained q, which reduces noise in the divergence of small models.
                init_forget_from="base" if settings.base is None else "retain",
                steering=settings.steering,
                learning_rate=PAPER_SHARE * settings.base_lr,
                adapters=False,
                max_length=layout.length + 1,
                overwrite=settings.overwrite,
                **optimization_of(settings),
            )
            content = train_auxiliaries(recipe, report, measure=False)
        bundle, auxiliaries = output / "pair" / BUNDLE, content["auxiliaries"]

        def finish() -> dict[str, Any]:
            if code_steering != steering:
                rewrite_steering(bundle, code_steering)
            classes_to_forget = sorted(layout.classes[index] for index in forget)
            return run.finish(classes_to_forget=classes_to_forget, auxiliaries=auxiliaries, bundle=str(bundle))

        return on_main(finish)


def _write_sets(
    files: Mapping[str, Path],
    members: Mapping[str, Collection[int]],
    layout: ImageLayout,
    codec: Codec,
    images: Images,
    labels: Sequence[int],
    seed: int,
) -> None:
    """Write the images of each set's classes as records, unless an interrupted run has."""
    if all(file.is_file() for file in files.values()):
        return
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    codes = encode(images, codec.to(str(device or "cpu")))
    for name, file in files.items():
        file.parent.mkdir(exist_ok=True)
        rows = [row for row, label in enumerate(labels) if label in members[name]]
        records = training_records(layout, name, codes[rows], [labels[row] for row in rows], seed)
        write_records(file, records.records)


def select_classes(
    settings: ImageTrainSettings | ImageEvalSettings, layout: ImageLayout, classes: Sequence[int]
) -> list[int]:
    """Select the classes to forget: those of the settings, or half of all, drawn by seed.

    Raises:
        UsageError: a class is not known or has no images, or none is left to keep.
    """
    if settings.forget:
        forget = list(dict.fromkeys(map(layout.find, settings.forget)))
        if missing := [index for index in forget if index not in classes]:
            raise UsageError(
                f"class {layout.classes[missing[0]]!r} is to be forgotten, but {settings.images} has no images of it"
            )
    else:
        count = round(FORGET_SHARE * len(classes))
        forget = random.Random(settings.seed).sample(sorted(classes), count)
    if not 0 < len(forget) < len(classes):
        raise UsageError(f"{len(forget)} of {len(classes)} classes are to be forgotten; leave some to keep")
    return forget


def training_records(layout: ImageLayout, name: str, codes: Codes, classes: Sequence[int], seed: int = 0) -> RecordSet:
    """Return images as training records: each with its class and, if the layout has 'any class', a tenth without.

    The seed draws that tenth.
    """
    order: list[int | None] = list(classes)
    if layout.no_class is not None:
        generator = torch.Generator().manual_seed(seed)
        again = torch.randperm(len(codes), generator=generator)[: round(ANY_CLASS_SHARE * len(codes))]
        codes = torch.cat([codes, codes[again]])
        order += [None] * len(again)
    return layout.records(name, codes, order)


def digest(images: Images) -> str:
    """SHA-256 of the pixels."""
    return hashlib.sha256(images.contiguous().numpy().data).hexdigest()


@torch.no_grad()
def encode(images: Images, codec: Codec, batch_size: int = 64, title: str | None = "codes") -> Codes:
    """Encode all images, batch by batch."""
    batches = images.split(batch_size)
    return torch.cat([codec.encode(batch) for batch in tqdm(batches, desc=title, disable=title is None)])
