"""What methods are compared on: the models of one seed, what they have learned, and what they are asked.

It knows nothing of methods.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from divdec.data.formatting import Format
from divdec.data.records import RecordSet, read_records
from divdec.data.world import build_world, write_tofu
from divdec.errors import UsageError
from divdec.evaluation.questions import QuestionFormat
from divdec.evaluation.tofu import TofuData, TofuOptions, read_tofu
from divdec.model.bundle import read_config
from divdec.model.checkpoint import CheckpointReference, digests, load_tokenizer
from divdec.model.configuration import AUXILIARIES
from divdec.model.loading import part_paths
from divdec.research import demo, tofu_small
from divdec.research.methods.settings import CompareSettings
from divdec.research.stages import Material, Recipe, train_all
from divdec.runs import cache_folder, settings_hash
from divdec.steering import Steering


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
    """What training the pair took from its base on; None where it is not known."""
    retrain_seconds: float | None
    vocabulary: tuple[int, ...] | None = None
    """Token ids that the rank rule may suppress, where a bundle says so."""
    own_questions: bool = False
    """Whether the questions are of this seed alone, so that items of other seeds are others."""

    @functools.cached_property
    def identity(self) -> str:
        """Digest of models, data and questions."""
        places = (self.target, self.retrain, self.retain_auxiliary, self.forget_auxiliary, self.base)
        models = [None if place is None else digests(place) for place in places]
        sets = [self.forget.sha256, self.retain.sha256, dataclasses.asdict(self.questions)]
        return settings_hash([self.name, self.seed, models, sets, dataclasses.asdict(self.form), self.vocabulary])

    @property
    def layout(self) -> QuestionFormat:
        """How questions become tokens."""
        options = self.options
        return QuestionFormat(
            load_tokenizer(self.target),
            options.template,
            options.system_prompt,
            options.date,
            max_length=options.max_length,
        )

    @property
    def options(self) -> TofuOptions:
        """How the suite asks: as the models have learned it."""
        return TofuOptions(
            system_prompt=self.form.system_prompt,
            date=self.form.date,
            max_length=self.form.max_length,
            gradient_norms=False,  # no aggregate reads them, and they cost a backward pass an item
        )


def check_inputs(settings: CompareSettings) -> list[Path]:
    """Find what cannot be used before anything is written, and say what must not be written over.

    Returns:
        Folders and files of the user's that are read.

    Raises:
        UsageError: data or models are missing or do not fit.
    """
    if settings.data == "demo":
        return []
    if settings.data == "tofu-small":
        tofu_small.suite_material(Path(settings.tofu or "").expanduser())
        return [Path(settings.tofu or "")]
    own = _own(settings)
    given = (settings.data, settings.bundle, settings.retrain, settings.base, settings.holdout)
    places = [Path(text).expanduser() for text in given if text]
    return [place for place in (*places, own.target, own.retain_auxiliary, own.forget_auxiliary) if place.exists()]


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
    # All that the suite asks besides the authors, whatever the limit.
    general = [
        record
        for name in ("real_authors_perturbed", "world_facts_perturbed")
        for record in read_records(data / f"{name}.json")
    ]
    material = dataclasses.replace(material, general=general)
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
    pair = ("auxiliary base", "retain auxiliary", "forget auxiliary")  # the small base is others' base too
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
        own_questions=name == "demo",
    )


def _own(settings: CompareSettings) -> Arena:
    assert settings.bundle is not None
    assert settings.retrain is not None
    bundle, retrain = (
        CheckpointReference.parse(given).resolve(Path(), weights=True) for given in (settings.bundle, settings.retrain)
    )
    base = CheckpointReference.parse(settings.base).resolve(Path(), weights=True) if settings.base else None
    config = read_config(bundle)
    places = part_paths(bundle, config, verify=True, local_files_only=False)
    if missing := [part for part in AUXILIARIES if part not in places]:
        raise UsageError(f"bundle {settings.bundle} has no {missing[0]}; a comparison needs a pair of models")
    if others := [part for part in ("ngram", "registry", "bridge") if getattr(config, part, None)]:
        raise UsageError(
            f"bundle {settings.bundle} has a {others[0]} beside its pair, which a comparison would leave out; give a "
            "bundle of target and pair alone"
        )
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
        vocabulary=Steering.from_dict(config.steering or {}).vocabulary,
    )
