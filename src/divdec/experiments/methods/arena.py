"""What methods are compared on: the models of one seed, what they have learned, and what they are asked.

It knows nothing of methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from divdec.data.formatting import Format
from divdec.data.records import RecordSet, read_records
from divdec.data.world import build_world
from divdec.data.world_tofu import write_tofu
from divdec.errors import UsageError
from divdec.evaluation.tofu import TofuOptions
from divdec.evaluation.tofu_data import TofuData, read_tofu
from divdec.experiments import demo, tofu_small
from divdec.experiments.methods.settings import CompareSettings
from divdec.experiments.stages import Material, Recipe, train_all
from divdec.model.bundle import read_config
from divdec.model.checkpoint import CheckpointReference
from divdec.model.configuration import AUXILIARIES
from divdec.model.loading import places_of
from divdec.runs import cache_folder


@dataclasses.dataclass(frozen=True)
class Arena:
    """One target with all that belongs to it."""

    name: str
    """Of the data."""
    seed: int
    target: Path
    retrain: Path
    retain_auxiliary: Path
    forget_auxiliary: Path
    base: Path | None
    """A small model that has seen neither set."""
    forget: RecordSet
    retain: RecordSet
    questions: TofuData
    form: Format
    """How the models have learned their texts."""
    pair_seconds: float | None
    """What training the pair took; None where it is not known."""
    retrain_seconds: float | None

    @property
    def options(self) -> TofuOptions:
        """How the suite asks: as the models have learned it."""
        return TofuOptions(
            system_prompt=self.form.system_prompt,
            date=self.form.date,
            max_length=self.form.max_length,
            gradient_norms=False,  # no aggregate reads them, and they cost a backward pass an item
        )


def arenas(settings: CompareSettings, report: Callable[[str], None]) -> list[Arena]:
    """The models of every seed, trained where the cache does not hold them.

    Raises:
        UsageError: data or models are missing or do not fit.
        Interrupted: Ctrl-C; the same call goes on where it stopped.
    """
    if settings.data == "demo":
        return [_demo(seed, settings, report) for seed in range(settings.seeds)]
    if settings.data == "tofu-small":
        return [_tofu_small(seed, settings, report) for seed in range(settings.seeds)]
    return [_own(settings)]


def _demo(seed: int, settings: CompareSettings, report: Callable[[str], None]) -> Arena:
    world = build_world(dataclasses.replace(demo.WORLD, seed=seed))
    cache = cache_folder() / "demo"
    folder = cache / f"seed-{seed}" / "tofu"
    write_tofu(world, folder)
    questions = read_tofu(folder, "forget01", folder / "holdout01.json", settings.limit)
    return _trained("demo", seed, demo.material_of(world), demo.RECIPE, cache, questions, report)


def _tofu_small(seed: int, settings: CompareSettings, report: Callable[[str], None]) -> Arena:
    data = Path(settings.tofu or "").expanduser()
    material, questions = tofu_small.suite_material(data, settings.limit)
    cache = cache_folder() / "tofu-small"
    return _trained("tofu-small", seed, material, tofu_small.RECIPE, cache, questions, report)


def _trained(
    name: str,
    seed: int,
    material: Material,
    recipe: Recipe,
    cache: Path,
    questions: TofuData,
    report: Callable[[str], None],
) -> Arena:
    report(f"{name}, seed {seed}")
    found = train_all(material, recipe, seed, cache / "models", report)
    pair = ("small base", "auxiliary base", "retain auxiliary", "forget auxiliary")
    return Arena(
        name,
        seed,
        found.target,
        found.retrain,
        found.retain_auxiliary,
        found.forget_auxiliary,
        found.small_base,
        material.forget,
        material.retain,
        questions,
        material.form,
        sum(found.seconds[stage] for stage in pair),
        found.seconds["retrain reference"],
    )


def _own(settings: CompareSettings) -> Arena:
    assert settings.bundle is not None
    assert settings.retrain is not None
    bundle, retrain = (
        CheckpointReference.parse(given).resolve(Path(), weights=True) for given in (settings.bundle, settings.retrain)
    )
    base = CheckpointReference.parse(settings.base).resolve(Path(), weights=True) if settings.base else None
    places = places_of(bundle, read_config(bundle), verify=True, local_files_only=False)
    if missing := [part for part in AUXILIARIES if part not in places]:
        raise UsageError(f"bundle {settings.bundle} has no {missing[0]}; a comparison needs a pair of models")
    data = Path(settings.data).expanduser()
    holdout = Path(settings.holdout).expanduser() if settings.holdout else None
    questions = read_tofu(data, settings.split, holdout, settings.limit)
    number = 100 - int(settings.split.removeprefix("forget"))
    return Arena(
        data.name,
        0,
        places["target"],
        retrain,
        places["retain_auxiliary"],
        places["forget_auxiliary"],
        base,
        read_records(data / f"{settings.split}.json"),
        read_records(data / f"retain{number}.json"),
        questions,
        Format(system_prompt=TofuOptions().system_prompt, date=TofuOptions().date, max_length=TofuOptions().max_length),
        None,
        None,
    )
