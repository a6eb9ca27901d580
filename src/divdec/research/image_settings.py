"""Drawing and judging every setting of an image model, with what was drawn kept, and writing what was found.

A stopped run goes on with the settings that are not drawn yet.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from divdec.errors import UsageError
from divdec.imaging.codec import Images
from divdec.imaging.drawing import decode, grid_of
from divdec.imaging.evaluation import Exam
from divdec.imaging.layout import Codes
from divdec.imaging.pictures import write_png
from divdec.imaging.tables import GROUPS, Setting, Table, table
from divdec.research.pages import Samples, write_images
from divdec.runs import write_json, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAPTIONS = {
    ("content", "accuracy"): (
        "Content of class-conditional images: the probability of the class asked for, and the share of images "
        "whose likeliest class it is; mean ± standard error"
    ),
    ("quality",): "Quality: how often an image is preferred to the baseline's, in both orders; mean ± standard error",
    ("distances",): "Fréchet distances between real (B) and drawn (G) images of retain (R) and forget (F) classes",
}
ANSWERS = "answers.jsonl"
"""What judges at endpoints have answered."""
NETWORK = (
    "Fréchet distances are those of the classifier's features, not of Inception's: they compare the rows of this "
    "table, not with other tables."
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model with a name in the tables."""

    method: str
    config: str
    model: Callable[[], PreTrainedModel]
    """Gives it, steered as it shall be."""

    @property
    def file(self) -> str:
        """A file's name."""
        return f"{self.method}{self.config}".replace("α=", "-").replace("k=", "-").lower()


@dataclasses.dataclass(frozen=True)
class Found:
    """What was drawn and found."""

    settings: list[Setting]
    tables: dict[str, Table]

    @property
    def markdown(self) -> str:
        """All tables, with captions."""
        return "\n".join(f"{caption}\n\n{one.markdown()}" for caption, one in self.tables.items())


def measure(exam: Exam, candidates: Sequence[Candidate], output: Path, report: Callable[[str], None]) -> list[Setting]:
    """Draw what `output` does not hold yet, and have it judged.

    Args:
        exam: what is asked.
        candidates: the baseline first.
        output: keeps the codes, in `codes/`.
        report: told a line a setting.
    """
    settings: list[Setting] = []
    baseline: Images | None = None
    for number, candidate in enumerate(candidates, start=1):
        codes = drawn(exam, candidate, output, f"{number}/{len(candidates)} {candidate.method} {candidate.config}")
        settings.append(exam.judge(candidate.method, candidate.config, codes, baseline))
        if baseline is None and exam.quality:
            baseline = decode(codes, exam.codec)
    report(f"{len(settings)} settings, {len(exam.asked)} images each")
    return settings


def drawn(exam: Exam, candidate: Candidate, output: Path, title: str | None = None) -> Codes:
    """A candidate's codes, from the file where an earlier call has drawn them."""
    from safetensors.torch import save_file

    file = output / "codes" / f"{candidate.file}.safetensors"
    if (kept := _kept(exam, file)) is not None:
        return kept
    codes = exam.draw(candidate.model(), title)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as temporary:
        save_file({"codes": codes.contiguous(), "classes": torch.tensor(exam.asked)}, Path(temporary) / "part")
        os.replace(Path(temporary) / "part", file)
    return codes


def _kept(exam: Exam, file: Path) -> Codes | None:
    """Codes that an earlier call has drawn, if the file is whole and holds what is asked."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)
        if found["classes"].tolist() != exam.asked or len(found["codes"]) != len(exam.asked):
            return None
        return exam.layout.check(found["codes"])
    except (OSError, KeyError, UsageError, SafetensorError):
        return None


def clear(output: Path) -> None:
    """Remove what an earlier run of other settings has left."""
    for name in ("codes", "grids"):
        shutil.rmtree(output / name, ignore_errors=True)
    for name in (ANSWERS, "table.md", "results.json", "report.html"):
        (output / name).unlink(missing_ok=True)


def write_found(
    exam: Exam,
    candidates: Sequence[Candidate],
    settings: list[Setting],
    output: Path,
    *,
    title: str,
    lead: str,
    notes: Sequence[str] = (),
) -> Found:
    """Write `table.md`, `results.json`, `report.html` and a grid of each setting.

    Args:
        exam: what was asked.
        candidates: as in `measure`, whose codes lie in `output`.
        settings: what was found of them.
        output: the folder.
        title: of the report.
        lead: its first paragraph.
        notes: what a reader must know.
    """
    tables: dict[str, Table] = {}
    for groups, caption in CAPTIONS.items():
        found = table(settings, [group for group in GROUPS if group in groups])
        if found.columns:
            tables[caption] = found
    shown = [_samples(exam, "Real", exam.real, exam.real_classes)]
    (output / "grids").mkdir(exist_ok=True)
    for candidate in candidates:
        images = decode(drawn(exam, candidate, output), exam.codec)
        write_png(grid_of(images, exam.count), output / "grids" / f"{candidate.file}.png")
        shown.append(_samples(exam, f"{candidate.method} {candidate.config}".strip(), images, exam.asked))
    found = Found(settings, tables)
    write_text(output / "table.md", found.markdown)
    write_json(output / "results.json", as_json(settings))
    write_images(output / "report.html", title=title, lead=lead, tables=tables, samples=shown, notes=notes)
    return found


def _samples(exam: Exam, title: str, images: Images, asked: Sequence[int]) -> Samples:
    return Samples.of(title, images, asked, exam.layout.classes, exam.forget)


def as_json(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """What was found, for `results.json` and `run.json`."""
    return table(settings).json()
