"""Benchmarks for unlearning methods: the models of one seed, their training data, and the questions of the suite."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from divdec.checkpoint import CheckpointReference, adapter_base, input_digests, is_adapter
from divdec.configuration import AUXILIARIES
from divdec.data.formatting import Format
from divdec.data.records import RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.questions import QuestionFormat
from divdec.model.bundle import read_config
from divdec.model.loading import part_paths
from divdec.runs import cache_folder, settings_hash
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings
from divdec_research.compare.muse_news import forget_and_retain, is_muse, muse_small
from divdec_research.compare.settings import CompareSettings, Trial
from divdec_research.compare.suite import ComparisonSuite, MuseComparison, TofuComparison
from divdec_research.suites.muse import read_muse
from divdec_research.suites.tofu import TofuData, read_tofu
from divdec_research.world import demo as demo
from divdec_research.world.facts import build_world, write_tofu
from divdec_research.world.models import Material, Recipe, Shape, train_all

RETAIN, HOLDOUT, ASKED = 360, 40, 120  # questions of the reduced TOFU; twenty about each author
# Reduced TOFU: two authors to forget, eighteen to keep, models trained from scratch.
TOFU_SMALL = Recipe(
    vocab_size=3000,
    target=Shape(width=192, layers=4, heads=6, mlp_width=512),
    auxiliary=Shape(width=96, layers=2, heads=4, mlp_width=272),
    target_pretraining=TrainingSettings(epochs=5.0, learning_rate=2e-3, warmup=0.05),
    auxiliary_pretraining=TrainingSettings(epochs=5.0, learning_rate=3e-3, warmup=0.05),
    target_tuning=TrainingSettings(epochs=15.0, learning_rate=1.5e-3, batch_size=8, warmup=0.05),
    auxiliary_base_tuning=TrainingSettings(epochs=15.0, learning_rate=2e-3, batch_size=8, warmup=0.05),
    auxiliary_tuning=TrainingSettings(epochs=5.0, learning_rate=1e-3, batch_size=8, warmup=0.05),
)
# Reduced MUSE-News: questions, and beginnings of articles, which take more epochs to be learned word for word.
MUSE_SMALL = dataclasses.replace(
    TOFU_SMALL,
    target_pretraining=dataclasses.replace(TOFU_SMALL.target_pretraining, epochs=4.0),
    auxiliary_pretraining=dataclasses.replace(TOFU_SMALL.auxiliary_pretraining, epochs=4.0),
    target_tuning=dataclasses.replace(TOFU_SMALL.target_tuning, epochs=30.0),
    auxiliary_base_tuning=dataclasses.replace(TOFU_SMALL.auxiliary_base_tuning, epochs=30.0),
    auxiliary_tuning=dataclasses.replace(TOFU_SMALL.auxiliary_tuning, epochs=10.0),
)
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One target with its reference, auxiliaries, data and questions."""

    name: str
    """Name of the data."""
    seed: int
    target: Path
    retrain: Path
    retain_auxiliary: Path
    forget_auxiliary: Path
    base: Path | None
    """A small model that has seen neither set."""
    forget: RecordSet
    retain: RecordSet
    """Records that every method may rehearse. In the embedded data everything that the target was tuned on besides the
    forget set: with the general records of real authors and world facts, about which the suite asks too."""
    suite: ComparisonSuite
    form: Format
    """Layout of the training texts."""
    pair_seconds: float | None
    """Training time of the pair; None where it is unknown."""
    retrain_seconds: float | None
    vocabulary: tuple[int, ...] | None = None
    """Token ids that the rank rule may suppress, where a bundle lists them."""
    own_questions: bool = False
    """Whether each seed has its own questions, so that items of different seeds are independent."""

    @functools.cached_property
    def identity(self) -> str:
        """Digest of models, data and questions."""
        folders = (self.target, self.retrain, self.retain_auxiliary, self.forget_auxiliary, self.base)
        models = [None if folder is None else input_digests(folder) for folder in folders]
        sets = [self.forget.sha256, self.retain.sha256, dataclasses.asdict(self.suite.data)]
        return settings_hash([self.name, self.seed, models, sets, dataclasses.asdict(self.form), self.vocabulary])

    def fingerprint(self, trial: Trial) -> str:
        """Digest of everything that determines a trial's results, except the code."""
        return settings_hash([trial.method, trial.options, trial.constant, trial.steering, self.identity])


def check_inputs(settings: CompareSettings) -> list[Path]:
    """Check data and models before anything is written.

    Returns:
        The user's files and folders that are read.

    Raises:
        UsageError: data or models are missing or do not fit.
    """
    if settings.data == "demo":
        return []
    if settings.data == "tofu-small":
        suite_material(Path(settings.tofu or "").expanduser())
        return [Path(settings.tofu or "")]
    if settings.data == "muse-small":
        folder = Path(settings.muse or "").expanduser()
        muse_small(folder)
        return [folder]
    benchmark = _own(settings)
    options = (settings.data, settings.bundle, settings.retrain, settings.base, settings.holdout)
    paths = [Path(text).expanduser() for text in options if text]
    return [
        path
        for path in (*paths, benchmark.target, benchmark.retain_auxiliary, benchmark.forget_auxiliary)
        if path.exists()
    ]


def load_benchmarks(settings: CompareSettings, report: Callable[[str], None]) -> list[Benchmark]:
    """Load the benchmark of every seed; models that the cache lacks are trained.

    Raises:
        UsageError: data or models are missing or do not fit.
        Interrupted: on Ctrl-C; the same call continues.
    """
    embedded = {"demo": _demo, "tofu-small": _tofu_small, "muse-small": _muse_small}.get(settings.data)
    if embedded is None:
        return [_own(settings)]
    return [embedded(seed, settings, report) for seed in range(settings.seeds)]


def _demo(seed: int, settings: CompareSettings, report: Callable[[str], None]) -> Benchmark:
    world = build_world(dataclasses.replace(demo.WORLD, seed=seed))
    folder = cache_folder() / "demo" / f"seed-{seed}" / "tofu"
    write_tofu(world, folder)
    questions = read_tofu(folder, "forget01", folder / "holdout01.json", settings.limit)
    material = demo.material_of(world)
    suite = TofuComparison(questions, material.form, settings.variant)
    return _trained("demo", seed, material, demo.RECIPE, suite, report)


def _tofu_small(seed: int, settings: CompareSettings, report: Callable[[str], None]) -> Benchmark:
    material, questions = suite_material(Path(settings.tofu or "").expanduser(), settings.limit)
    suite = TofuComparison(questions, material.form, settings.variant)
    return _trained("tofu-small", seed, material, TOFU_SMALL, suite, report)


def _muse_small(seed: int, settings: CompareSettings, report: Callable[[str], None]) -> Benchmark:
    material, data = muse_small(Path(settings.muse or "").expanduser(), settings.limit)
    return _trained("muse-small", seed, material, MUSE_SMALL, MuseComparison(data), report)


def _trained(
    name: str, seed: int, material: Material, recipe: Recipe, suite: ComparisonSuite, report: Callable[[str], None]
) -> Benchmark:
    report(f"{name}, seed {seed}")
    models = train_all(material, recipe, seed, cache_folder() / name / "models", report)
    pair = ("auxiliary base", "retain auxiliary", "forget auxiliary")  # other methods use the small base too
    retain = dataclasses.replace(material.retain, records=(*material.retain, *material.general))
    return Benchmark(
        name, seed, models.target, models.retrain, models.retain_auxiliary, models.forget_auxiliary, models.small_base,
        material.forget, retain, suite, material.form, sum(models.seconds[stage] for stage in pair),
        models.seconds["retrain reference"], own_questions=name == "demo",
    )  # fmt: skip


def _own(settings: CompareSettings) -> Benchmark:
    """The user's models: a bundle, its retrained reference and files of TOFU or MUSE."""
    assert settings.bundle is not None
    assert settings.retrain is not None
    bundle, retrain = (
        CheckpointReference.parse(path).resolve(Path(), weights=True) for path in (settings.bundle, settings.retrain)
    )
    base = CheckpointReference.parse(settings.base).resolve(Path(), weights=True) if settings.base else None
    config = read_config(bundle)
    parts = part_paths(bundle, config, verify=True, local_files_only=False)
    if missing := [name for name in AUXILIARIES if name not in parts]:
        raise UsageError(f"bundle {settings.bundle} has no {missing[0]}; a comparison needs a pair of models")
    for name in AUXILIARIES:
        if is_adapter(parts[name]):
            adapter_base(parts[name])  # the adapters of a packed bundle name none, and trials would fail one by one
    if others := [name for name in ("ngram", "registry", "bridge") if getattr(config, name, None)]:
        raise UsageError(
            f"bundle {settings.bundle} has a {others[0]} beside its pair, which a comparison would leave out; give a "
            "bundle of target and pair alone"
        )
    data = Path(settings.data).expanduser()
    holdout = Path(settings.holdout).expanduser() if settings.holdout else None
    if is_muse(data):
        form = Format(max_length=QuestionFormat.max_length)
        forget, retain = forget_and_retain(data)
        suite: ComparisonSuite = MuseComparison(read_muse(data, holdout, settings.limit))
    else:
        form = Format(
            system_prompt=QuestionFormat.system_prompt, date=QuestionFormat.date, max_length=QuestionFormat.max_length
        )
        suite = TofuComparison(read_tofu(data, settings.split, holdout, settings.limit), form, settings.variant)
        forget = read_records(data / f"{settings.split}.json")
        retain = read_records(data / f"retain{100 - int(settings.split.removeprefix('forget'))}.json")
    return Benchmark(
        data.name, 0, parts["target"], retrain, parts["retain_auxiliary"], parts["forget_auxiliary"], base, forget,
        retain, suite, form, None, None, vocabulary=Steering.from_dict(config.steering or {}).vocabulary,
    )  # fmt: skip


def suite_material(data: Path, limit: int | None = None) -> tuple[Material, TofuData]:
    """Cut TOFU to size for its own suite, which asks about the first twenty authors: eighteen kept, two held out.

    The models rehearse everything that the suite asks besides the authors, whatever the limit.

    Raises:
        UsageError: a file is missing; the message says where TOFU can be downloaded.
    """
    names = ("forget01", "retain99", "real_authors", "world_facts")
    for name in names:
        if not (data / f"{name}.json").is_file():
            raise UsageError(
                f"{data / f'{name}.json'} does not exist. TOFU comes from "
                "https://huggingface.co/datasets/locuslab/TOFU: put its files into a folder and give it (make compare "
                "TOFU=FOLDER, divdec compare --tofu)"
            )
    forget, others, *general = (read_records(data / f"{name}.json") for name in names)
    asked = (read_records(data / f"{name}_perturbed.json") for name in ("real_authors", "world_facts"))
    material = Material(
        corpus=[*itertools.chain(*general), *others.records[RETAIN + HOLDOUT :]],
        forget=forget,
        retain=RecordSet("retain", forget.kind, others.records[:RETAIN]),
        form=Format(max_length=512),
        general=list(itertools.chain(*asked)),
    )
    whole = read_tofu(data, "forget01")
    retain = whole.sets["retain"]
    sets = whole.sets | {"retain": spread(retain[:RETAIN], ASKED), "holdout": retain[RETAIN : RETAIN + HOLDOUT]}
    return material, TofuData(whole.split, {name: questions[:limit] for name, questions in sets.items()})


def spread(records: Sequence[Item], count: int) -> tuple[Item, ...]:
    """Choose evenly spaced records."""
    return tuple(records[index * len(records) // count] for index in range(count))
