"""One cell of a comparison: a method under one setting on the models of one seed, made and measured.

A cell's folder holds the results as `divdec eval` writes them, and `cell.json`, which is written last: a folder with it
is whole, one without is made anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import divdec.research.baselines.composite  # noqa: F401  # registers the composite baselines with transformers
from divdec.errors import Diverged, FailedClosed, UsageError, first_line
from divdec.evaluation.results import Results, read_results, write_results
from divdec.evaluation.scoring import EvaluatedModel
from divdec.evaluation.tofu import evaluate_tofu
from divdec.model.bundle import is_bundle
from divdec.model.checkpoint import load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.methods.arena import Arena
from divdec.research.methods.cell import Cell
from divdec.research.methods.making import Model, make
from divdec.runs import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CELL = "cell.json"
MODEL = "model"
REFERENCES = ("target", "retrain")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: Cell
    folder: Path
    seconds: float | None
    """Of training; None where it is not known, 0 where there is none."""
    extra_bytes: int | None
    """Weights in memory beyond the target's."""
    notes: tuple[str, ...] = ()
    failed: str | None = None
    """Why there are no results."""

    @property
    def results(self) -> Results:
        """Its figures and items."""
        return read_results(self.folder)


def earlier(cell: Cell, arena: Arena, seed_folder: Path) -> Outcome | None:
    """What an earlier run has left of a cell, if it is whole, of the same work, and has not failed."""
    folder = seed_folder / cell.folder
    if not (folder / CELL).is_file():
        return None
    content = read_json(folder / CELL)
    if content["fingerprint"] != cell.fingerprint(arena) or content["failed"] is not None:
        return None
    return Outcome(cell, folder, content["seconds"], content["extra_bytes"], tuple(content["notes"]))


def run_cell(cell: Cell, arena: Arena, seed_folder: Path) -> Outcome:
    """Make a method and measure it; a setting that cannot be made or breaks is an outcome too.

    Args:
        cell: method and setting.
        arena: models and data.
        seed_folder: the folder of this seed.
    """
    folder = seed_folder / cell.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    failed = None
    made = Model(arena.target, 0.0)
    extra = None
    try:
        made = make(cell, arena, folder / MODEL, seed_folder / "work")
        model = load(made, cell)
        extra = weights_of(model) - weights_of(load_model(arena.target))
        subject = EvaluatedModel(model, load_tokenizer(arena.target))
        (found,) = evaluate_tofu(subject, arena.questions, arena.options)
        found.name = str(cell.folder)
        found.about = {"method": cell.method, "setting": cell.label, "seed": arena.seed, "steering": cell.steering}
        write_results(found, folder)
    except (UsageError, Diverged, FailedClosed, torch.OutOfMemoryError) as error:
        failed = first_line(error)
    outcome = Outcome(cell, folder, made.seconds, extra, made.notes, failed)
    write_json(
        folder / CELL,
        {
            "method": cell.method,
            "setting": cell.label,
            "options": cell.settings,
            "seed": arena.seed,
            "seconds": outcome.seconds,
            "extra_bytes": outcome.extra_bytes,
            "notes": list(outcome.notes),
            "failed": failed,
            "fingerprint": cell.fingerprint(arena),
        },
    )
    return outcome


def load(made: Model, cell: Cell) -> PreTrainedModel:
    """A made method as a causal language model."""
    if cell.steering is not None or is_bundle(made.folder):  # δ-Unlearning's ensemble is a bundle too
        model = DivergenceForCausalLM.from_pretrained(made.folder)
        # Likelihoods need finite logits, and the paper's figures of the rank rule are of the soft fill throughout.
        model.steering = dataclasses.replace(model.steering, fill="soft")
        return placed(model)
    return placed(load_model(made.folder).eval())


def placed(model: PreTrainedModel) -> PreTrainedModel:
    """The model on the accelerator, where there is one."""
    device: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device)


def weights_of(model: PreTrainedModel) -> int:
    """Bytes of a model's weights and buffers; those that parts share are counted once."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
