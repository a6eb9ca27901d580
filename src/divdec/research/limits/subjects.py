"""The models that are attacked: made once by the comparison's cells, kept, and opened again.

It knows nothing of attacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.data.formatting import documents
from divdec.data.world import World, build_world
from divdec.experts.ngram_folder import is_pair, write_pair
from divdec.model.bundle import is_bundle, write_bundle
from divdec.model.checkpoint import load_config, load_model, load_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.model.vocabularies import vocabulary_sha256, vocabulary_width
from divdec.demo import run as demo
from divdec.research.limits.settings import BUNDLES, CHECKPOINTS, FORGET_AUXILIARY, NGRAM, REFERENCES
from divdec.research.methods.arena import Arena
from divdec.research.methods.cell import Cell
from divdec.research.methods.making import make
from divdec.runs import output_folder, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MADE = "made.json"
NGRAM_STEERING = "linear:20"  # between what closes 78 % and 100 % of the gap on this world (docs/benchmarks.md)


@dataclasses.dataclass(frozen=True)
class Lineup:
    """The models of one seed, and what they are about."""

    arena: Arena
    folder: Path
    """Where what is made is kept."""
    report: Callable[[str], object]

    @property
    def world(self) -> World:
        """What the models have learned."""
        return build_world(dataclasses.replace(demo.WORLD, seed=self.arena.seed))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of all of them."""
        return load_tokenizer(self.arena.target)

    def steered(self) -> list[str]:
        """References, bundles, p and the students of a bundle: what is asked in many ways.

        What gradient baselines tell under attack prompts is in the comparison (docs/benchmarks.md).
        """
        students = [name for name, cell in CHECKPOINTS.items() if cell.method == "distill"]
        return [*REFERENCES, FORGET_AUXILIARY, *BUNDLES, NGRAM, *students]

    def place(self, name: str) -> Path:
        """The folder of a model, made now where it is missing."""
        if name == NGRAM:
            return self._ngram_bundle()
        if name == FORGET_AUXILIARY:
            return self.arena.forget_auxiliary
        cell = {**REFERENCES, **BUNDLES, **CHECKPOINTS}[name]
        # Bundles are written anew: they are cheap, and refer to models by digest.
        if name in REFERENCES or name in BUNDLES:
            return make(cell, self.arena, self._place(cell) / "model", self.folder / "work").folder
        folder, output = self._place(cell), self._place(cell) / "model"
        fingerprint = cell.fingerprint(self.arena)
        if not (folder / MADE).is_file() or read_json(folder / MADE)["fingerprint"] != fingerprint:
            self.report(f"seed {self.arena.seed}: making {name}")
            made = make(cell, self.arena, output, self.folder / "work")
            write_json(folder / MADE, {"fingerprint": fingerprint, "seconds": made.seconds})
        return output

    def open(self, name: str) -> PreTrainedModel:
        """A model, ready to be asked."""
        place = self.place(name)
        return DivergenceForCausalLM.from_pretrained(place) if is_bundle(place) else load_model(place).eval()

    def _place(self, cell: Cell) -> Path:
        return self.folder / "models" / cell.folder

    def _ngram_bundle(self) -> Path:
        counts, bundle = self.folder / "models" / "ngram-counts", self.folder / "models" / "ngram-bundle"
        counts.parent.mkdir(parents=True, exist_ok=True)
        if not is_pair(counts):
            tokenizer = self.tokenizer
            sets = {"retain": self.arena.retain, "forget": self.arena.forget}
            with output_folder(counts) as temporary:
                write_pair(
                    temporary,
                    {name: documents(records, tokenizer) for name, records in sets.items()},
                    vocabulary_width(load_config(self.arena.target)),
                    order=3,
                    space="score",
                    tokenizer=vocabulary_sha256(tokenizer),
                )
        return write_bundle(
            bundle, target=str(self.arena.target), ngram=counts, steering=NGRAM_STEERING, overwrite=True
        )
