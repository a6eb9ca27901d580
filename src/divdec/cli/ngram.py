"""`divdec ngram`: count n-grams of a retain and a forget set."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from divdec.cli.loading import check_not_bundle, quiet
from divdec.errors import UsageError
from divdec.options import Overwriting, Printing


def ngram(
    *,
    retain: str,
    forget: str,
    target: str,
    output: str,
    order: int = 3,
    space: Literal["score", "log"] = "score",
    forget_counts: Literal["forget", "both"] = "forget",
    overwriting: Overwriting = Overwriting(),
    printing: Printing = Printing(),
) -> None:
    r"""Count n-grams of a retain and a forget set: experts without training, for verbatim text.

    For example:

        divdec ngram --retain retain.jsonl --forget forget.jsonl \
          --target models/target --output ngrams

    Args:
        retain: Retain set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset.
        forget: Forget set, in the same formats.
        target: The model to steer, for its tokenizer and vocabulary: a folder or hub id.
        output: Folder for the two n-gram models.
        order: Maximum n-gram length, 2 to 5.
        space: Compute the divergence from scores, as in the paper ('score', with alpha 5 to 30), or from log scores
            ('log').
        forget_counts: Data for the forget counts: 'forget' counts the forget set only, as in the paper. 'both' counts
            both sets, so that the divergence is almost 0 in contexts that the forget set does not contain.
        overwriting: whether an earlier result is replaced.
        printing: format of the result.
    """
    from tqdm.auto import tqdm

    from divdec.data.formatting import documents
    from divdec.data.records import overlap, read_records
    from divdec.experts.ngram_fit import check_order, is_pair, write_pair
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
    check_order(order)
    check_not_bundle(target, "--target")
    folder = Path(output).expanduser()
    check_output(folder, overwriting.overwrite, is_pair)
    checkpoint = CheckpointReference.parse(target).resolve(Path(), weights=False)
    sources = [Path(source).expanduser() for source in (retain, forget)]
    check_apart(folder.resolve(), [checkpoint, *(path.resolve() for path in sources if path.exists())])
    tokenizer = load_tokenizer(checkpoint)
    retain_set, forget_set = read_records(retain), read_records(forget)
    if shared := overlap(forget_set, retain_set).records:
        raise UsageError(f"{shared} records of the forget set are in the retain set too: q would know them")
    counted: dict[str, Iterable[Any]] = {
        "retain": documents(retain_set, tokenizer),
        "forget": documents(forget_set, tokenizer),
    }
    if forget_counts == "both":
        counted["forget"] = itertools.chain(counted["forget"], documents(retain_set, tokenizer))
    with (
        output_folder(folder, overwriting.overwrite, is_pair) as temporary,
        tqdm(desc="counting", unit="token", unit_scale=True, disable=None, file=sys.stderr) as bar,
    ):
        models = write_pair(
            temporary, counted, vocabulary_width(load_config(checkpoint)), order=order, space=space,
            tokenizer=vocabulary_sha256(tokenizer), progress=bar.update,
            retain_set=retain_set.label, forget_set=forget_set.label, forget_counts=forget_counts,
        )  # fmt: skip
        figures = {
            f"{side}_{name}": getattr(model, name) for side, model in models.items() for name in ("tokens", "distinct")
        }
        figures["bytes"] = sum(file.stat().st_size for file in temporary.rglob("*.npy"))
        settings = {
            "retain": retain, "forget": forget, "target": target, "output": output, "order": order, "space": space,
            "forget_counts": forget_counts,
        }  # fmt: skip
        write_json(temporary / RECORD, record("ngram", settings, **figures))
    if printing.json:
        print(json.dumps({"ngram": str(folder), **figures}))
        return
    for side, records in (("retain", retain_set), ("forget", forget_set)):
        count = f"{len(records):,} record{'s' if len(records) != 1 else ''}"
        print(f"{side}: {count}, {figures[f'{side}_tokens']:,} tokens, "
              f"{figures[f'{side}_distinct']:,} distinct n-grams")  # fmt: skip
    print(
        f"n-grams: {folder} ({figures['bytes'] / 1e6:.1f} MB)\nnext: divdec bundle --target {target} "
        f"--ngram {folder} --steering linear:10 --output …"
    )
