"""A target with its forget and retain set: the input of every method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Example, Format, encode_set
from divdec.data.records import RecordSet
from divdec.model.checkpoint import digests
from divdec.runs import settings_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model that a method has written."""

    folder: Path
    """Folder that `AutoModelForCausalLM.from_pretrained` loads."""
    seconds: float | None
    """Training time in seconds, including earlier runs in the work folder; None if unknown."""
    notes: tuple[str, ...] = ()
    """Notes to show with the model's results."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A target with its forget and retain set, shared by any number of methods."""

    target: Path
    """Folder of the model that has learned both sets."""
    tokenizer: PreTrainedTokenizerBase
    forget: RecordSet
    retain: RecordSet
    work: Path
    """Folder of intermediate models. It is kept, so that stopped runs continue and settings share helpers."""
    form: Format = Format()  # noqa: RUF009
    base: Path | None = None
    """Folder of a small model of the target's vocabulary that has learned neither set, for methods with helpers of
    another size."""
    seed: int = 0
    report: Callable[[str], object] = print
    """Receives one line per step."""

    @property
    def forget_examples(self) -> list[Example]:
        """The forget set as tokens."""
        return encode_set(self.forget, self.tokenizer, self.form)

    @property
    def retain_examples(self) -> list[Example]:
        """The retain set as tokens."""
        return encode_set(self.retain, self.tokenizer, self.form)

    def work_folder(self, name: str, key: Any) -> Path:
        """Name the folder in `work` of a model with these settings.

        Args:
            name: beginning of the folder's name.
            key: JSON values of all settings that determine the weights, in addition to target, data and seed.
        """
        base = None if self.base is None else digests(self.base)
        sets = [self.forget.sha256, self.retain.sha256]
        content = [key, digests(self.target), base, *sets, dataclasses.asdict(self.form), self.seed]
        return self.work / f"{name}-{settings_hash(content)}"
