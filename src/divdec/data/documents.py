"""Records as documents of token ids, for what counts tokens instead of training on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import encode_records
from divdec.data.records import RecordSet
from divdec.data.vocabulary import WHOLE
from divdec.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256  # records laid out at once


def documents(records: RecordSet, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The tokens of each record: texts as they stand, conversations as the tokenizer's chat template lays them out.

    Raises:
        UsageError: a text holds no token.
    """
    for start in range(0, len(records), BATCH):
        batch = records.records[start : start + BATCH]
        if records.kind != "text":
            yield from (example.input_ids for example in encode_records(batch, tokenizer, WHOLE))
            continue
        encoded: Any = tokenizer([record.answer for record in batch], add_special_tokens=False, verbose=False)
        for record, ids in zip(batch, encoded["input_ids"], strict=True):
            if not ids:
                raise UsageError(f"{record.place or 'a record'}: the text is empty")
            yield ids
