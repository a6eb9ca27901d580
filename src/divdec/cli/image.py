"""Steer image models: train their pair, sample images, evaluate, convert published checkpoints, and a demo."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from divdec.cli.parsing import Options
from divdec.errors import UsageError
from divdec.imaging.settings import (
    ImageConvertSettings,
    ImageDemoSettings,
    ImageEvalSettings,
    ImageSampleSettings,
    ImageTrainSettings,
)

POSITIONAL = ()
EXAMPLE = (
    "divdec image demo\n"
    "  divdec image convert cin_transformer.ckpt --output models/cin\n"
    "  divdec image train --target models/cin --images imagenet/dogs --output runs/dogs --resize\n"
    "  divdec image sample runs/dogs/pair/bundle --classes 207 --steering linear:1 --output runs/retrievers\n"
    "  divdec image eval runs/dogs/pair/bundle --images imagenet/dogs --forget 151 152 --output runs/m --resize\n"
    "  divdec image sample --help"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec image` where no action is named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printing:
    """How the result is told."""

    json: bool = False
    """Print the content of run.json, and everything else to standard error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(ImageTrainSettings, Printing):
    """Options of `divdec image train`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(ImageSampleSettings, Printing):
    """Options of `divdec image sample`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(ImageEvalSettings, Printing):
    """Options of `divdec image eval`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo(ImageDemoSettings, Printing):
    """Options of `divdec image demo`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert(ImageConvertSettings, Printing):
    """Options of `divdec image convert`."""


ACTIONS: dict[str, tuple[type, tuple[str, ...], str]] = {
    "demo": (Demo, (), "train a model that draws digits, make it forget half of them, and show the result"),
    "train": (Train, (), "train the two auxiliaries on images of classes to forget and to keep"),
    "sample": (Sample, ("model",), "draw images of classes"),
    "eval": (Evaluate, ("bundle",), "measure what is drawn: content, quality, distances to real images"),
    "convert": (Convert, ("checkpoint",), "make an image model of a published taming-transformers checkpoint"),
}


def choose(arguments: Sequence[str]) -> tuple[Options, str, Sequence[str]]:
    """The options of the action that is named first; see `parse`.

    Raises:
        UsageError: no action is named, or there is no such action.
    """
    if not arguments:
        raise UsageError(f"an action is required; there are: {', '.join(ACTIONS)}")
    first = arguments[0]
    if first in ACTIONS:
        settings, positional, summary = ACTIONS[first]
        example = next(
            line.strip() for line in EXAMPLE.splitlines() if line.strip().startswith(f"divdec image {first}")
        )
        return Options(settings, summary, example, positional), f"image {first}", arguments[1:]
    if first not in ("--help", "-h"):
        raise UsageError(f"action {first!r} is not known; there are: {', '.join(ACTIONS)}")
    lines = "\n".join(f"  {name:<8} {summary}" for name, (_, _, summary) in ACTIONS.items())
    summary = f"{(__doc__ or '').strip()}\n\nactions, each with options of its own:\n{lines}"
    return Options(Settings, summary, EXAMPLE), "image", arguments


def run(settings: Any) -> None:
    """Do what was named."""
    from divdec.cli.loading import device_map, quiet

    quiet()
    own = {field.name for field in dataclasses.fields(Printing)}

    def only(kind: type) -> Any:
        return kind(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(kind) if f.name not in own})

    if isinstance(settings, Train):
        from divdec.imaging.training import train_image_auxiliaries

        content = train_image_auxiliaries(only(ImageTrainSettings), _tell)
        said = (
            f"bundle: {content['bundle']}\nmeasure what it still draws: divdec image eval {content['bundle']} --images "
            f"{settings.images} --forget … --output …\ndraw with it: divdec image sample {content['bundle']} --output …"
        )
    elif isinstance(settings, Sample):
        from divdec.imaging.sampling import GRID, sample_to_folder

        content = sample_to_folder(only(ImageSampleSettings), device_map(settings.device), _tell)
        said = f"{content['images']} images in {settings.output}, all in {Path(settings.output) / GRID}"
    elif isinstance(settings, Evaluate):
        from divdec.research.image_evaluation import evaluate_images

        content = evaluate_images(only(ImageEvalSettings), device_map(settings.device), _tell)
        said = f"{content.pop('markdown')}\nreport: {content['report']}"
    elif isinstance(settings, Demo):
        from divdec.research.image_demo import is_demo, run_image_demo
        from divdec.runs import check_output

        output = Path(settings.output).expanduser() if settings.output else None
        if output is not None:
            check_output(output, overwrite=True, ours=is_demo)
        content, said = run_image_demo(settings.seed, output, quiet=settings.json), ""
    else:
        from divdec.imaging.taming import convert_taming

        names = _names(settings.names)
        content = convert_taming(
            Path(settings.checkpoint).expanduser(),
            Path(settings.output).expanduser(),
            classes=names,
            heads=settings.heads,
            raster=(settings.raster[0], settings.raster[1]) if settings.raster else None,
            overwrite=settings.overwrite,
            report=_tell,
        )
        said = f"image model: {settings.output}"
    if settings.json or said:
        print(json.dumps(content, default=str) if settings.json else said)


def _names(file: str | None) -> list[str] | None:
    if file is None:
        return None
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as a list of names ({error})") from None
    names = [line.strip() for line in text.rstrip().split("\n")]
    if "" in names:
        raise UsageError(f"line {names.index('') + 1} of {file} is blank; accepted: a class's name in each line")
    return names


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
