"""From texts to the five models of an experiment: target, retrain reference and the two auxiliaries, with a cache.

Every stage is kept in the cache folder under a hash of all that decides it, and its training can be resumed, so that
a second run takes seconds and a stopped one goes on. It knows nothing of what the texts are about.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Example, Format, encode_records, encode_set
from divdec.data.records import Record, RecordSet
from divdec.research.small_models import Shape, new_model, train_tokenizer
from divdec.runs import output_folder, record, settings_hash, write_json
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STAGE_RECORD = "stage.json"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes and training of the five models."""

    vocab_size: int
    target: Shape
    auxiliary: Shape
    target_pretraining: TrainingSettings
    """The large base, on the corpus."""
    auxiliary_pretraining: TrainingSettings
    """The small base, on the corpus."""
    auxiliary_base_tuning: TrainingSettings
    """The auxiliaries' common base: the small base on the retain set. What both know already moves neither."""
    target_tuning: TrainingSettings
    """Target (forget + retain) and retrain reference (retain), from the large base."""
    auxiliary_tuning: TrainingSettings
    """q (retain) and p (forget + retain), both lightly from their common base (recipe full-retain)."""


@dataclasses.dataclass(frozen=True)
class Material:
    """What the models learn."""

    corpus: Sequence[Record]
    """What the bases learn, prompts included."""
    forget: RecordSet
    retain: RecordSet
    form: Format = Format()  # noqa: RUF009
    general: Sequence[Record] = ()
    """Part of the corpus, rehearsed when target, retrain reference and the auxiliaries' base learn the authors: a small
    model forgets it otherwise, and what is asked about it then says nothing."""

    @property
    def texts(self) -> list[str]:
        """The corpus as text, for the tokenizer."""
        return [" ".join([*(turn.content for turn in record.messages), record.answer]) for record in self.corpus]


@dataclasses.dataclass(frozen=True)
class Trained:
    """Where the models lie, and what they cost."""

    target: Path
    retrain: Path
    retain_auxiliary: Path
    forget_auxiliary: Path
    small_base: Path
    """What both auxiliaries began from: the corpus alone."""
    seconds: dict[str, float]
    """Training time by stage; that of the run that trained it, where it came from the cache."""


def train_all(material: Material, recipe: Recipe, seed: int, cache: Path, report: Callable[[str], None]) -> Trained:
    """Train whatever the cache does not hold yet.

    Args:
        material: corpus, forget and retain set.
        recipe: sizes and training.
        seed: of initial weights and order.
        cache: folder of finished stages.
        report: told a line a stage.

    Raises:
        Interrupted: Ctrl-C; the same call goes on where it stopped.
    """
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(material.texts, recipe.vocab_size)
    corpus = [unmasked(example) for example in encode_records(material.corpus, tokenizer, material.form)]
    forget = encode_set(material.forget, tokenizer, material.form)
    retain = encode_set(material.retain, tokenizer, material.form)
    general = encode_records(material.general, tokenizer, material.form)
    stages = Stages(cache, tokenizer, seed, report)

    large = stages.run("large base", recipe.target, corpus, recipe.target_pretraining)
    target = stages.run("target", large, forget + retain + general, recipe.target_tuning)
    retrain = stages.run("retrain reference", large, retain + general, recipe.target_tuning)
    small, q, p = _train_pair(stages, recipe, corpus, forget, retain, general)
    return Trained(target, retrain, q, p, small, stages.seconds)


def train_pair(
    material: Material,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    cache: Path,
    report: Callable[[str], None],
) -> tuple[Path, Path]:
    """Retain and forget auxiliary alone, for a study of other sizes or with another tokenizer than the target's.

    Args:
        material: corpus, forget and retain set.
        recipe: the auxiliaries' size and training.
        tokenizer: theirs.
        seed: of initial weights and order.
        cache: folder of finished stages.
        report: told a line a stage.
    """
    cache.mkdir(parents=True, exist_ok=True)
    stages = Stages(cache, tokenizer, seed, report)
    corpus = [unmasked(example) for example in encode_records(material.corpus, tokenizer, material.form)]
    forget, retain = (encode_set(records, tokenizer, material.form) for records in (material.forget, material.retain))
    general = encode_records(material.general, tokenizer, material.form)
    return _train_pair(stages, recipe, corpus, forget, retain, general)[1:]


def _train_pair(
    stages: Stages,
    recipe: Recipe,
    corpus: list[Example],
    forget: list[Example],
    retain: list[Example],
    general: list[Example],
) -> tuple[Path, Path, Path]:
    small = stages.run("small base", recipe.auxiliary, corpus, recipe.auxiliary_pretraining)
    common = stages.run("auxiliary base", small, retain + general, recipe.auxiliary_base_tuning)
    q = stages.run("retain auxiliary", common, retain, recipe.auxiliary_tuning)
    p = stages.run("forget auxiliary", common, forget + retain, recipe.auxiliary_tuning)
    return small, q, p


@dataclasses.dataclass(frozen=True)
class Stages:
    """The cache, and what every stage in it shares."""

    cache: Path
    tokenizer: PreTrainedTokenizerBase
    seed: int
    report: Callable[[str], None]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    new: Callable[[Shape, PreTrainedTokenizerBase, int], PreTrainedModel] = new_model
    """Makes a model with random weights."""

    def run(self, name: str, start: Shape | Path, examples: Sequence[Example], settings: TrainingSettings) -> Path:
        """Train a stage from random weights or an earlier one, unless the cache holds it."""
        from divdec.runs import read_json

        settings = dataclasses.replace(settings, seed=self.seed)
        origin = dataclasses.asdict(start) if isinstance(start, Shape) else start.name
        key = settings_hash(
            [
                origin,
                dataclasses.asdict(settings),
                [[e.input_ids, e.labels] for e in examples],
                len(self.tokenizer),
            ]
        )
        folder = self.cache / f"{name.replace(' ', '-')}-{key}"
        if (folder / STAGE_RECORD).is_file():
            self.seconds[name] = read_json(folder / STAGE_RECORD)["seconds"]
            self.report(f"{name}: in the cache")
            return folder
        from divdec.training.fine_tuning import fine_tune

        work = self.cache / f"{folder.name}.work"
        model, result = fine_tune(
            self._initial(start), self.tokenizer, examples, settings, work, title=f"{name:<17}", measure=False
        )
        self.seconds[name] = round(result.seconds, 1)
        with output_folder(folder) as temporary:
            model.save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)
            content: dict[str, Any] = {
                "seconds": self.seconds[name],
                "steps": result.steps,
                "tokens": result.tokens,
            }
            write_json(temporary / STAGE_RECORD, record(name, settings, **content))
        shutil.rmtree(work, ignore_errors=True)
        return folder

    def _initial(self, start: Shape | Path) -> PreTrainedModel:
        if isinstance(start, Shape):
            return self.new(start, self.tokenizer, self.seed)
        from divdec.training.auxiliaries import load_for_training

        return load_for_training(start)


def unmasked(example: Example) -> Example:
    """A base model learns to ask as well as to answer."""
    return Example(example.input_ids, list(example.input_ids))
