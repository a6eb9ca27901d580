"""The eligible vocabulary of the rank rule: the tokens that occur in given files, as the paper restricts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from divdec.data.formatting import Format, encode_records
from divdec.data.records import RecordSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WHOLE = Format(max_length=1 << 40)  # an eligible token must not be lost to a cut


def tokens_in(sets: Iterable[RecordSet], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids of all tokens that occur in the records, ascending; prompts count as much as answers."""
    found: set[int] = set()
    for records in sets:
        for example in encode_records(records.records, tokenizer, WHOLE):
            found.update(example.input_ids)
    return tuple(sorted(found))
