"""A target with its forget and retain set: the input of every method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from divdec.checkpoint import digests, load_config, load_model
from divdec.data.formatting import Example, Format, encode_set
from divdec.data.records import RecordSet
from divdec.runs import settings_hash


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

    def load_frozen_target(self) -> PreTrainedModel:
        """Load the target in float32 without gradients."""
        return load_model(self.target, dtype=torch.float32).eval().requires_grad_(False)

    def save_model(self, model: PreTrainedModel, output: Path) -> None:
        """Save a changed target in the dtype of its checkpoint, with the tokenizer."""
        dtype: Any = load_config(self.target).dtype or torch.float32
        model.to(dtype).save_pretrained(output)
        self.tokenizer.save_pretrained(output)

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
