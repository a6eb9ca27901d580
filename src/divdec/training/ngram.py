"""`divdec ngram`: count the n-grams of a retain and a forget set."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from divdec.errors import UsageError
from divdec.options import OutputFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramSettings(OutputFolder):
    """Options of `divdec ngram`."""

    retain: str
    """Retain set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset."""
    forget: str
    """Forget set, in the same formats."""
    target: str
    """The model to steer, for its tokenizer and vocabulary: a folder, GGUF file or hub id."""
    order: int = 3
    """Maximum n-gram length, 2 to 5."""
    forget_counts: Literal["forget", "both"] = "forget"
    """Data for the forget counts: 'forget' counts the forget set only, as in the paper. 'both' counts both sets, so
    that the divergence is almost 0 in contexts that the forget set does not contain."""


def count_ngrams(settings: NgramSettings) -> dict[str, int]:
    """Count n-grams, and write the pair into a folder.

    Returns:
        Records, tokens and distinct n-grams of each set, and the bytes of the counts.

    Raises:
        UsageError: a setting is not accepted, the sets share records, or the output would replace something else.
    """
    from tqdm.auto import tqdm

    from divdec.checkpoint import (
        CheckpointReference,
        check_apart,
        load_config,
        load_tokenizer,
        vocabulary_sha256,
        vocabulary_width,
    )
    from divdec.data.formatting import documents
    from divdec.data.records import overlap, read_records
    from divdec.experts.ngram_fit import check_order, is_pair, write_pair
    from divdec.runs import RECORD, check_output, output_folder, record, write_json

    check_order(settings.order)
    folder = Path(settings.output).expanduser()
    check_output(folder, settings.overwrite, is_pair)
    checkpoint = CheckpointReference.parse(settings.target).resolve(Path(), weights=False)
    sources = [Path(source).expanduser() for source in (settings.retain, settings.forget)]
    check_apart(folder.resolve(), [checkpoint, *(path.resolve() for path in sources if path.exists())])
    tokenizer = load_tokenizer(checkpoint)
    sets = {"retain": read_records(settings.retain), "forget": read_records(settings.forget)}
    if shared := overlap(sets["forget"], sets["retain"]).records:
        raise UsageError(f"{shared} records of the forget set are in the retain set too: q would know them")
    counted: dict[str, Iterable[Any]] = {name: documents(records, tokenizer) for name, records in sets.items()}
    if settings.forget_counts == "both":
        counted["forget"] = itertools.chain(counted["forget"], documents(sets["retain"], tokenizer))
    with (
        output_folder(folder, settings.overwrite, is_pair) as temporary,
        tqdm(desc="counting", unit="token", unit_scale=True, disable=None, file=sys.stderr) as bar,
    ):
        models = write_pair(
            temporary, counted, vocabulary_width(load_config(checkpoint)), order=settings.order,
            tokenizer=vocabulary_sha256(tokenizer), progress=bar.update, forget_counts=settings.forget_counts,
            **{f"{name}_set": records.label for name, records in sets.items()},
        )  # fmt: skip
        figures = {
            f"{side}_{name}": getattr(model, name) for side, model in models.items() for name in ("tokens", "distinct")
        }
        figures["bytes"] = sum(file.stat().st_size for file in temporary.rglob("*.npy"))
        write_json(temporary / RECORD, record("ngram", settings, **figures))
    return figures | {f"{name}_records": len(records) for name, records in sets.items()}
