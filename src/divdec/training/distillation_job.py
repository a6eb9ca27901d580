"""What a distillation works with, read and found fit before anything is loaded or trained."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.data.formatting import Example, Format
from divdec.data.records import RecordSet, read_records
from divdec.errors import UsageError
from divdec.model.checkpoint import (
    CheckpointReference,
    check_apart,
    check_plain,
    check_weights,
    digests,
    load_config,
    load_tokenizer,
    vocabulary_sha256,
    vocabulary_width,
)
from divdec.model.configuration import DivergenceConfig
from divdec.model.loading import find_bundle, read_config
from divdec.runs import cache_folder, check_output, read_record, settings_hash
from divdec.steering import Steering
from divdec.training.distillation_settings import DistillationSettings
from divdec.training.inputs import checkpoint, encoded, report_set
from divdec.training.teacher_cache import FILE, Fingerprint, check_belongs, check_k, layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class DistillationJob:
    """What a run works with, once all of it has been found fit."""

    settings: DistillationSettings
    output: Path
    bundle: Path
    config: DivergenceConfig
    """The bundle's."""
    steering: Steering
    """The teacher's rule."""
    start: Path
    """What the student begins as."""
    target: Path
    tokenizer: PreTrainedTokenizerBase
    forget: RecordSet
    retain: RecordSet | None
    sets: dict[str, list[Example]]
    """As tokens, by role: 'forget', and 'retain' where one is given."""

    @functools.cached_property
    def learned(self) -> list[Example]:
        """What the student is trained on: the forget set, and what is rehearsed of the retain set."""
        kept = self.sets.get("retain", [])
        number = min(self.settings.rehearse, len(kept))
        drawn = sorted(random.Random(self.settings.seed).sample(range(len(kept)), number))
        return self.sets["forget"] + [kept[place] for place in drawn]

    @property
    def identity(self) -> str:
        """Digest of what the bundle refers to, wherever that lies."""
        parts = ("target", "retain_auxiliary", "forget_auxiliary", "ngram", "bridge")
        references = {part: dict(getattr(self.config, part) or {}) for part in parts}
        for reference in references.values():
            reference.pop("folder", None)
        return settings_hash(references)

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides the student."""
        settings = dataclasses.asdict(dataclasses.replace(self.settings, overwrite=False))
        retain = None if self.retain is None else self.retain.sha256
        start = digests(self.start)
        return settings_hash([settings, self.identity, self.steering.to_dict(), self.forget.sha256, retain, start])

    @property
    def cache(self) -> tuple[Path, Fingerprint] | None:
        """Where the teacher's cache lies or shall lie, and what it must say of itself."""
        if self.settings.cache_teacher is None:
            return None
        fingerprint = Fingerprint(
            bundle=self.identity,
            steering=settings_hash(self.steering.to_dict()),
            forget_set=self.forget.sha256,
            layout=layout_of(self.learned),
            temperature=self.settings.temperature,
            k=self.settings.cache_teacher,
        )
        given = self.settings.teacher_cache
        folder = Path(given).expanduser() if given else cache_folder() / "teachers" / fingerprint.name
        return folder / FILE, fingerprint


def prepare(settings: DistillationSettings, report: Callable[[str], None]) -> DistillationJob:
    """Find before anything is loaded what would stop the run.

    Raises:
        UsageError: says what.
    """
    bundle = find_bundle(settings.bundle)
    config = read_config(bundle)
    steering = Steering.from_dict(config.steering or {})
    if settings.steering is not None:
        steering = steering.revised(settings.steering)
    _check_teacher(config, steering, settings)
    target = CheckpointReference.from_dict(config.target, "target").resolve(bundle, weights=True)
    check_plain(target, "target")
    check_weights(target)
    tokenizer = load_tokenizer(bundle)
    start = target if settings.init_student is None else _other_student(settings.init_student, tokenizer, config)
    output = Path(settings.output).expanduser()
    given = [settings.bundle, settings.forget, settings.retain or "", settings.init_student or ""]
    paths = [Path(text).expanduser() for text in given if text]
    check_apart(output.resolve(), [path.resolve() for path in (*paths, target) if path.exists()])
    check_output(output, settings.overwrite, is_run)
    forget = read_records(settings.forget)
    retain = None if settings.retain is None else read_records(settings.retain)
    form = Format(settings.system_prompt, settings.date, _longest(settings, config, start, report))
    sets = {}
    for role, records in (("forget", forget), ("retain", retain)):
        if records is None:
            continue
        report_set(role, records, report)
        sets[role] = encoded(records, tokenizer, form, report)
    job = DistillationJob(settings, output, bundle, config, steering, start, target, tokenizer, forget, retain, sets)
    if job.cache is not None:
        path, fingerprint = job.cache
        if path.resolve().is_relative_to(output.resolve()):
            raise UsageError(f"teacher-cache {path.parent} lies in the output folder; give a folder of its own")
        if path.is_file():
            check_belongs(path, fingerprint)
    return job


def _check_teacher(config: DivergenceConfig, steering: Steering, settings: DistillationSettings) -> None:
    steering.check_vocabulary(config.vocab_size)
    if steering.rule == "rank" and steering.fill == "hard":
        raise UsageError(
            f"the rule {steering} gives suppressed tokens probability 0, which no student reaches (its loss has no "
            f"bound); distil from rank:{steering.k}:soft or linear:ALPHA (--steering)"
        )
    if steering.rule == "linear" and steering.alpha == 0:
        raise UsageError("linear:0 steers nothing: the student would learn the target itself (--steering linear:1.5)")
    if config.registry is not None:
        raise UsageError(
            "the bundle follows a registry of takedown requests, which may change while the student learns; count "
            "what it holds as n-grams (divdec ngram) and distil from a bundle of these"
        )
    if settings.cache_teacher is not None:
        check_k(settings.cache_teacher, config.vocab_size)


def _other_student(given: str, tokenizer: PreTrainedTokenizerBase, config: DivergenceConfig) -> Path:
    folder = checkpoint(given, "init-student")
    own = load_config(folder)
    theirs = load_tokenizer(folder)
    if vocabulary_sha256(theirs) != vocabulary_sha256(tokenizer) or vocabulary_width(own) < config.vocab_size:
        raise UsageError(
            f"init-student {folder} has another vocabulary ({len(theirs)} tokens, {vocabulary_width(own)} logits) than "
            f"the teacher ({len(tokenizer)} tokens, {config.vocab_size} logits); a student must speak its teacher's"
        )
    return folder


def _longest(
    settings: DistillationSettings, config: DivergenceConfig, start: Path, report: Callable[[str], None]
) -> int:
    own = getattr(load_config(start).get_text_config(decoder=True), "max_position_embeddings", None)
    built = min((length for length in (own, config.max_position_embeddings) if length), default=settings.max_length)
    if settings.max_length > built:
        report(f"note: sequences are cut to {built} tokens, the longest that all models were built for")
    return min(settings.max_length, built)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a student, or what an unfinished run has left, so that a new one may replace it."""
    return (read_record(folder) or {}).get("verb") == "distill"
