"""Models that several runs share, each trained once and cached in a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from divdec.data.formatting import Example
from divdec.runs import RECORD, output_folder, read_record, record, write_json
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def train_once(
    folder: Path,
    name: str,
    load: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    settings: TrainingSettings,
    report: Callable[[str], object],
    *,
    dtype: Any = None,
    **options: Any,
) -> float:
    """Fine-tune a model into a folder, unless it is there, and return the training time in seconds.

    The folder's name has a hash of all that decides the weights. An interrupted training continues. Weights are saved
    in `dtype`, by default that of the training; `options` are those of `fine_tune`.
    """
    from divdec.training.fine_tuning import fine_tune

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):  # parallel runs share models
        if (finished := read_record(folder)) is not None:
            report(f"{name}: in the cache")
            return finished["seconds"]
        checkpoints = folder.with_name(f"{folder.name}.work")
        model, result = fine_tune(load(), tokenizer, examples, settings, checkpoints, **{"title": name, **options})
        if options.get("measure", True):
            losses = f"{result.loss_before:.3f} → {result.loss_after:.3f}"
            report(f"{name}: loss {losses} in {result.steps} steps, {result.seconds:.0f} s")
        with output_folder(folder) as temporary:
            (model if dtype is None else model.to(dtype)).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            content = {"seconds": round(result.seconds, 2), "steps": result.steps, "tokens": result.tokens}
            write_json(temporary / RECORD, record(name, settings, **content))
        shutil.rmtree(checkpoints, ignore_errors=True)
    return content["seconds"]
