"""What every training run does with what it is given, before a model is loaded.

It knows nothing of recipes, methods or losses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState

from divdec.data.formatting import Example, Format, count_cut, encode_set
from divdec.data.records import RecordSet, overlap
from divdec.errors import UsageError
from divdec.model.checkpoint import CheckpointReference, check_plain, check_weights, load_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Report = Callable[[str], None]


def begin(report: Report) -> tuple[PartialState, Report]:
    """Join the processes of this run, one or many, of which the main one speaks for all."""
    # accelerate joins CPU processes only if it is told that there is nothing else; whoever asks first decides.
    state = PartialState(cpu=not torch.accelerator.is_available())
    return state, report if state.is_main_process else _silent


def checkpoint(reference: str, part: str) -> Path:
    """The folder of a model that can be trained.

    Args:
        reference: a folder or hub id, '@revision' allowed.
        part: what it is, for messages.

    Raises:
        UsageError: it is not there, holds no weights, or is made of several checkpoints.
    """
    folder = CheckpointReference.parse(reference).resolve(Path(), weights=True)
    check_plain(folder, part)
    check_weights(folder)
    return folder


def longest(max_length: int, model: Path, report: Report) -> int:
    """How long sequences may be, in tokens: `max_length`, but no longer than the model was built for."""
    positions = getattr(load_config(model).get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None or max_length <= positions:
        return max_length
    report(f"note: sequences are cut to {positions} tokens, the longest that {model.name} was built for")
    return positions


def report_set(role: str, records: RecordSet, report: Report) -> None:
    """Say what a set holds."""
    blank = f", {records.blank} blank ones left out" if records.blank else ""
    report(f"{role} set: {len(records)} {records.kind} records from {records.name}{blank}")


def report_sets(forget: RecordSet, retain: RecordSet, consequence: str, report: Report) -> None:
    """Say what both sets hold, and what they share.

    Args:
        forget: the forget set.
        retain: the retain set.
        consequence: what follows from records that stand in both.
        report: told a line each.

    Raises:
        UsageError: they are the same.
    """
    report_set("forget", forget, report)
    report_set("retain", retain, report)
    if forget.sha256 == retain.sha256:
        raise UsageError("forget set and retain set hold the same records: nothing would be left to forget")
    shared = overlap(forget, retain)
    if shared.records or shared.prompts:
        report(
            f"warning: {shared.records} of {len(forget)} forget records stand in the retain set too "
            f"({shared.prompts} share a prompt): {consequence}"
        )


def report_cut(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format, report: Report) -> None:
    """Warn of records that are longer than the layout allows; plain texts are split instead."""
    if records.kind != "text" and (cut := count_cut(records.records, tokenizer, form)):
        report(f"warning: {cut} records of {records.name} are cut to {form.max_length} tokens (--max-length)")


def encoded(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format, report: Report) -> list[Example]:
    """A set as tokens, with a warning of what is cut."""
    report_cut(records, tokenizer, form, report)
    return encode_set(records, tokenizer, form)


def _silent(line: str) -> None:
    pass
