"""Count n-grams of a retain and a forget set: experts that cost nothing, for verbatim text."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.data.records import RecordSet

POSITIONAL = ()
EXAMPLE = "divdec ngram --retain retain.jsonl --forget forget.jsonl --target models/target --output ngrams"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec ngram`."""

    retain: str
    """Retain set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset."""
    forget: str
    """Forget set, likewise."""
    target: str
    """The model to be steered, for its tokenizer and vocabulary: a folder or hub id."""
    output: str
    """Folder for the two models."""
    order: int = 3
    """Length of the longest n-grams, 2 to 5."""
    space: Literal["score", "log"] = "score"
    """Divergence of the scores, as in the paper (alpha 5 to 30), or of their logarithms."""
    forget_counts: Literal["forget", "both"] = "forget"
    """What the forget model counts: the forget set alone, as in the paper, or retain and forget set, so that the
    divergence is almost 0 wherever the forget set has nothing to say."""
    overwrite: bool = False
    """Replace an earlier result in the output folder."""
    json: bool = False
    """Print one JSON object."""


def run(settings: Settings) -> None:
    """Read, count, and say how much there is."""
    import itertools

    from tqdm.auto import tqdm

    from divdec.cli.loading import quiet
    from divdec.data.formatting import documents
    from divdec.data.records import overlap, read_records
    from divdec.experts.ngram_fit import check_order
    from divdec.experts.ngram_folder import is_pair, write_pair
    from divdec.model.checkpoint import (
        CheckpointReference,
        check_apart,
        load_config,
        load_tokenizer,
        vocabulary_sha256,
        vocabulary_width,
    )
    from divdec.runs import RECORD, check_output, output_folder, record, write_json

    quiet()
    check_order(settings.order)
    output = Path(settings.output).expanduser()
    check_output(output, settings.overwrite, is_pair)
    place = CheckpointReference.parse(settings.target).resolve(Path(), weights=False)
    given = [Path(text).expanduser() for text in (settings.retain, settings.forget)]
    check_apart(output.resolve(), [place, *(path.resolve() for path in given if path.exists())])
    tokenizer = load_tokenizer(place)
    retain, forget = read_records(settings.retain), read_records(settings.forget)
    if shared := overlap(forget, retain).records:
        raise UsageError(f"{shared} records of the forget set stand in the retain set too: q would know them")
    counted: dict[str, Iterable[Any]] = {"retain": documents(retain, tokenizer), "forget": documents(forget, tokenizer)}
    if settings.forget_counts == "both":
        counted["forget"] = itertools.chain(counted["forget"], documents(retain, tokenizer))
    with (
        output_folder(output, settings.overwrite, is_pair) as folder,
        tqdm(desc="counting", unit="token", unit_scale=True, disable=None, file=sys.stderr) as bar,
    ):
        models = write_pair(
            folder, counted, vocabulary_width(load_config(place)), order=settings.order, space=settings.space,
            tokenizer=vocabulary_sha256(tokenizer), progress=bar.update,
            retain_set=retain.label, forget_set=forget.label, forget_counts=settings.forget_counts,
        )  # fmt: skip
        figures = {
            f"{side}_{name}": getattr(model, name) for side, model in models.items() for name in ("tokens", "distinct")
        }
        figures["bytes"] = sum(file.stat().st_size for file in folder.rglob("*.npy"))
        write_json(folder / RECORD, record("ngram", settings, **figures))
    if settings.json:
        print(json.dumps({"ngram": str(output), **figures}))
        return
    for side, records in (("retain", retain), ("forget", forget)):
        print(f"{side}: {_size(records)}, {figures[f'{side}_tokens']:,} tokens, "
              f"{figures[f'{side}_distinct']:,} distinct n-grams")  # fmt: skip
    print(
        f"n-grams: {output} ({figures['bytes'] / 1e6:.1f} MB)\nnext: divdec bundle --target {settings.target} "
        f"--ngram {output} --steering linear:10 --output …"
    )


def _size(records: RecordSet) -> str:
    return f"{len(records):,} record{'s' if len(records) != 1 else ''}"
