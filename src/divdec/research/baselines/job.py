"""What every baseline is given: target, data, and a place to train in.

It knows nothing of any method.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from divdec.data.formatting import Example, Format, encode_set
from divdec.data.records import RecordSet
from divdec.model.checkpoint import digests
from divdec.runs import output_folder, read_json, settings_hash, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STAGE = "stage.json"


@dataclasses.dataclass(frozen=True)
class Job:
    """One target with its forget and retain set, which any number of methods are tried on."""

    target: Path
    """Folder of the model that has learned both sets."""
    tokenizer: PreTrainedTokenizerBase
    forget: RecordSet
    retain: RecordSet
    work: Path
    """Folder for what is trained on the way: kept, so that a stopped run goes on and settings that share it do not
    train it twice."""
    form: Format = Format()  # noqa: RUF009
    base: Path | None = None
    """Folder of a small model of the target's vocabulary that has learned neither set, for methods with helpers of
    another size."""
    seed: int = 0
    report: Callable[[str], object] = print
    """Told what is done, a line each."""

    @property
    def forget_examples(self) -> list[Example]:
        """The forget set as tokens."""
        return encode_set(self.forget, self.tokenizer, self.form)

    @property
    def retain_examples(self) -> list[Example]:
        """The retain set as tokens."""
        return encode_set(self.retain, self.tokenizer, self.form)

    def place(self, name: str, key: Any) -> Path:
        """Where in `work` a model with these settings belongs: its name says all that decides the weights.

        Args:
            name: what the folder's name begins with.
            key: JSON values: every setting that decides the weights. Target, data and seed are added here.
        """
        content = [
            key,
            digests(self.target),
            None if self.base is None else digests(self.base),
            self.forget.sha256,
            self.retain.sha256,
            dataclasses.asdict(self.form),
            self.seed,
        ]
        return self.work / f"{name}-{settings_hash(content)}"

    def trained(
        self, name: str, key: Any, train: Callable[[Path], tuple[PreTrainedModel, float]]
    ) -> tuple[Path, float]:
        """A model that a method trains, from `work` where an earlier call has left it.

        Args:
            name: what the folder's name begins with.
            key: as `place` takes it.
            train: given a folder for checkpoints, trains and returns the model and how many seconds that took.

        Returns:
            The checkpoint's folder, with its tokenizer, and the seconds that its training took.
        """
        folder = self.place(name, key)
        self.work.mkdir(parents=True, exist_ok=True)
        with FileLock(self.work / f"{folder.name}.lock"):  # methods run side by side: who comes second finds it
            if not (folder / STAGE).is_file():
                checkpoints = self.work / f"{folder.name}.work"
                model, seconds = train(checkpoints)
                with output_folder(folder) as temporary:
                    model.save_pretrained(temporary)
                    self.tokenizer.save_pretrained(temporary)
                    write_json(temporary / STAGE, {"key": key, "seconds": round(seconds, 2)})
                shutil.rmtree(checkpoints, ignore_errors=True)
        return folder, float(read_json(folder / STAGE)["seconds"])
