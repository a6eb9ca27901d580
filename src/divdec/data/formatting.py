"""Laying records out as tokens: one path for training, scoring and generation.

A tokenizer's chat template is used where it has one, a plain question/answer template otherwise. It knows nothing
of models.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from divdec.bridge.common_prefix import common_length
from divdec.bridge.plain_layout import plain_prompt
from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label that torch's cross entropy leaves out

Text = tuple[str, bool]
"""A text, and whether the tokenizer is to add its special tokens; a chat template has written them itself."""


@dataclasses.dataclass(frozen=True)
class Format:
    """How conversations are laid out."""

    system_prompt: str | None = None
    """A system turn put before every conversation; none by default, nor where the template has no system role."""
    date: str | None = None
    """The date that templates of the Llama 3 family print; the template's own by default."""
    max_length: int = 1024
    """Longest sequence, in tokens: longer answers are cut, longer texts are split."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A record as tokens."""

    input_ids: list[int]
    labels: list[int]
    """The same ids, −100 where nothing is learned or scored: the prompt."""

    @property
    def prompt_length(self) -> int:
        """How many tokens come before the first that is learned or scored."""
        return next((place for place, label in enumerate(self.labels) if label != IGNORED), len(self.labels))


def encode_set(
    records: RecordSet,
    tokenizer: PreTrainedTokenizerBase,
    form: Format = Format(),
) -> list[Example]:
    """Lay a whole set out: one example a record, or packed blocks of `max_length` tokens for plain text.

    Raises:
        UsageError: an answer has no token left, or the tokenizer lacks what the layout needs.
    """
    if records.kind == "text":
        return pack((record.answer for record in records), tokenizer, form.max_length)
    return encode_records(records.records, tokenizer, form)


def encode(record: Record, tokenizer: PreTrainedTokenizerBase, form: Format = Format()) -> Example:
    """Lay one record out; see `encode_records`."""
    return encode_records([record], tokenizer, form)[0]


def encode_records(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format = Format()
) -> list[Example]:
    """Lay each record out as prompt and answer; only the answer and the token that ends it are labelled.

    Raises:
        UsageError: no token of an answer is left, because it has none or because the prompt fills `max_length`.
    """
    prompts = encode_prompts(records, tokenizer, form)
    special = set(tokenizer.all_special_ids)
    found = []
    for record, prompt_ids, whole_ids in zip(records, prompts, _whole_ids(records, tokenizer, form), strict=True):
        # Where a token straddles the boundary, it belongs to the answer: the prompt ends where both agree no more.
        answer_start = common_length(prompt_ids, whole_ids)
        whole_ids = whole_ids[: form.max_length]
        if all(token in special for token in whole_ids[answer_start:]):
            raise UsageError(
                f"{record.place or 'a record'}: no token of the answer is left within {form.max_length} tokens "
                f"(the prompt alone has {len(prompt_ids)})"
            )
        found.append(Example(whole_ids, [IGNORED] * answer_start + whole_ids[answer_start:]))
    return found


def encode_prompt(record: Record, tokenizer: PreTrainedTokenizerBase, form: Format = Format()) -> list[int]:
    """The tokens before one record's answer; see `encode_prompts`."""
    return encode_prompts([record], tokenizer, form)[0]


def encode_prompts(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format = Format()
) -> list[list[int]]:
    """The tokens before each answer, ready to be continued by generation."""
    # A question is often asked with several answers, which its prompt does not depend on.
    asked = [dataclasses.replace(record, answer="") for record in records]
    texts = {record: _prompt_text(record, tokenizer, form) for record in dict.fromkeys(asked)}
    ids = dict(zip(texts, _tokens(list(texts.values()), tokenizer), strict=True))
    return [ids[record] for record in asked]


def pack(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[Example]:
    """Join texts, each ended by the tokenizer's end token, and split them into blocks of `length` tokens.

    The last block is shorter; nothing is dropped, since what is dropped would not be forgotten.
    """
    stream: list[int] = []
    ends = _end(tokenizer)
    for text in texts:
        (ids,) = _tokens([(text, True)], tokenizer)
        if not ids:
            raise UsageError("a text has no token")
        stream += ids
        if ids[-1:] != ends:
            stream += ends
    if len(stream) < 2:
        raise UsageError("a plain text of a single token leaves nothing to predict")
    blocks = [stream[start : start + length] for start in range(0, len(stream), length)]
    # A block of one token has nothing to predict: the token before it is repeated, and still predicted only once,
    # for the first token of a block never is.
    if len(blocks[-1]) == 1:
        blocks[-1] = blocks[-2][-1:] + blocks[-1]
    return [Example(block, list(block)) for block in blocks]


def count_cut(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format) -> int:
    """How many records are longer than `max_length` tokens, so that their answers are cut."""
    return sum(len(ids) > form.max_length for ids in _whole_ids(records, tokenizer, form))


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills batches up; that which ends texts where the tokenizer has none for padding."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if not isinstance(padding, int):
        raise UsageError("the tokenizer has neither a padding token nor one that ends a text")
    return padding


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that ends a text, as a list of one; empty where the tokenizer has none."""
    end = tokenizer.eos_token_id
    return [end] if isinstance(end, int) else []


def _whole_ids(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format) -> list[list[int]]:
    """The tokens of prompts and answers together, up to what ends the answer."""
    ends = _end(tokenizer)
    found = []
    for ids in _tokens([_whole_text(record, tokenizer, form) for record in records], tokenizer):
        # Some templates write a line break after the token that ends the answer; it is never generated.
        places = [place for place, token in enumerate(ids) if [token] == ends]
        if places and not str(tokenizer.decode(ids[places[-1] + 1 :])).strip():
            ids = ids[: places[-1] + 1]
        found.append(ids if ids[-1:] == ends else ids + ends)
    return found


def _prompt_text(record: Record, tokenizer: PreTrainedTokenizerBase, form: Format) -> Text:
    if record.messages and tokenizer.chat_template:
        return _template(_turns(record, tokenizer, form), tokenizer, form, add_generation_prompt=True), False
    return _plain_prompt(record, form), True


def _whole_text(record: Record, tokenizer: PreTrainedTokenizerBase, form: Format) -> Text:
    if record.messages and tokenizer.chat_template:
        turns = [*_turns(record, tokenizer, form), {"role": "assistant", "content": record.answer}]
        return _template(turns, tokenizer, form, add_generation_prompt=False), False
    return _plain_prompt(record, form) + (" " if record.messages else "") + record.answer, True


def _plain_prompt(record: Record, form: Format) -> str:
    """The layout without a chat template; it ends without a space, which belongs to the answer's first token."""
    if not record.messages:
        return record.prompt or ""
    system = [("system", form.system_prompt)] if form.system_prompt else []
    asked = [("assistant" if turn.role == "assistant" else "user", turn.content) for turn in record.messages]
    return plain_prompt([*system, *asked])


def has_system_role(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template lays a system turn out as one: it does not refuse, drop, or take it for a user's turn.

    Of a template that does not, standard error is told once, for a system prompt is then left out.
    """
    template = str(tokenizer.chat_template)
    if template not in _SYSTEM_ROLES:
        _SYSTEM_ROLES[template] = _lays_out_system_turns(tokenizer)
        if not _SYSTEM_ROLES[template]:
            print("warning: the chat template has no system role: the system prompt is left out", file=sys.stderr)
    return _SYSTEM_ROLES[template]


_SYSTEM_ROLES: dict[str, bool] = {}
"""By template."""


def _lays_out_system_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    def laid_out(role: str) -> str:
        turns = [{"role": role, "content": "first turn"}, {"role": "user", "content": "second turn"}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    try:
        text = laid_out("system")
    except TemplateError:
        return False
    try:
        return "first turn" in text and text != laid_out("user")
    except TemplateError:  # turns of users and assistants must alternate
        return "first turn" in text


def _turns(record: Record, tokenizer: PreTrainedTokenizerBase, form: Format) -> list[dict[str, str]]:
    turns = record.messages
    if form.system_prompt and turns[0].role != "system" and has_system_role(tokenizer):
        turns = (Message("system", form.system_prompt), *turns)
    return [{"role": message.role, "content": message.content} for message in turns]


def _template(
    turns: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    form: Format,
    *,
    add_generation_prompt: bool,
) -> str:
    options: dict[str, Any] = {"date_string": form.date} if form.date else {}
    try:
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise UsageError(f"the chat template refuses turns of {roles}: {first_line(error)}") from None
    assert isinstance(text, str)
    return text


def _tokens(texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        places = [place for place, text in enumerate(texts) if text[1] is special]
        if not places:
            continue
        batch: Any = tokenizer([texts[place][0] for place in places], add_special_tokens=special)
        for place, ids in zip(places, batch["input_ids"], strict=True):
            # Some tokenizers end every text themselves; a prompt must stay open.
            while special and ids and ids[-1] == tokenizer.eos_token_id:
                ids.pop()
            found[place] = ids
    return found
