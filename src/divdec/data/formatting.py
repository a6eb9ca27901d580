"""Tokenize records: one path for training, scoring and generation.

A conversation is laid out with the tokenizer's chat template if it has one, and with a plain question/answer template
otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from divdec.data.records import Message, Record, RecordSet, checked_text
from divdec.errors import UsageError, first_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label that torch's cross entropy ignores
BATCH = 256  # records tokenized at once
TOOL_MARK = "zqx tool xqz"  # in place of a tool's turn, to see whether a template shows it
# Errors of templates that do not accept the messages; a template is a program and can raise any of these.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

Text = tuple[str, bool]
"""A text, and whether the tokenizer adds special tokens. Chat templates write them into the text."""


@dataclasses.dataclass(frozen=True)
class Format:
    """Layout of conversations."""

    system_prompt: str | None = None
    """System prompt of every conversation, if the template has a system role."""
    date: str | None = None
    """Date for chat templates that contain one, such as those of the Llama 3 family. By default the template's date."""
    max_length: int = 1024
    """Maximum sequence length in tokens. Longer answers are truncated, longer texts are split."""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of the chat template, such as `{"enable_thinking": False}`."""


WHOLE = Format(max_length=1 << 40)
"""A layout without truncation."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A record as tokens."""

    input_ids: list[int]
    labels: list[int]
    """Copy of the ids, with −100 at the prompt's tokens, which are neither trained on nor scored."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first labelled token."""
        return next((index for index, label in enumerate(self.labels) if label != IGNORED), len(self.labels))


def plain_prompt(turns: Iterable[tuple[str, str]]) -> str:
    """Lay out a conversation for a tokenizer without a chat template, up to where the next answer begins.

    The text ends without a space, which belongs to the answer's first token.

    Args:
        turns: role and content of each turn; a system turn is a line without a label.
    """
    lines = []
    for role, content in turns:
        label = {"system": "", "assistant": "Answer: "}.get(role, "Question: ")
        lines.append(f"{label}{content}")
    return "\n".join([*lines, "Answer:"])


def encode_set(records: RecordSet, tokenizer: PreTrainedTokenizerBase, form: Format = Format()) -> list[Example]:
    """Tokenize a set: one example per record, or packed blocks of `max_length` tokens for plain text.

    Raises:
        UsageError: truncation removed a whole answer, or the tokenizer does not support the layout.
    """
    if records.kind == "text":
        return pack((record.answer for record in records), tokenizer, form.max_length)
    return encode_records(records.records, tokenizer, form)


def encode(record: Record, tokenizer: PreTrainedTokenizerBase, form: Format = Format()) -> Example:
    """Tokenize one record; see `encode_records`."""
    return encode_records([record], tokenizer, form)[0]


def encode_records(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format = Format()
) -> list[Example]:
    """Tokenize each record as prompt and answer; the answer and its end token are labelled.

    Raises:
        UsageError: no token of an answer is left, because it is empty or because the prompt fills `max_length`.
    """
    if tokenizer.chat_template and any(record.messages for record in records):
        _warn_of_dropped_text(tokenizer, form)
    prompts = encode_prompts(records, tokenizer, form)
    special = set(tokenizer.all_special_ids)
    examples = []
    for record, prompt_ids, whole_ids in zip(records, prompts, _whole_ids(records, tokenizer, form), strict=True):
        example = label_answer(prompt_ids, whole_ids, form.max_length)
        if all(token in special for token in example.input_ids[example.prompt_length :]):
            raise UsageError(
                f"{record.location or 'a record'}: no token of the answer is left within {form.max_length} tokens "
                f"(the prompt alone has {len(prompt_ids)})"
            )
        examples.append(example)
    return examples


def label_answer(prompt_ids: Sequence[int], whole_ids: list[int], max_length: int | None = None) -> Example:
    """Label the answer's tokens, up to `max_length` tokens of the whole.

    A token across the boundary belongs to the answer: the prompt ends where the two sequences diverge.
    """
    start = common_prefix_length(prompt_ids, whole_ids)
    whole_ids = whole_ids[:max_length]
    return Example(whole_ids, [IGNORED] * start + whole_ids[start:])


def common_prefix_length(sequence: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    length = min(len(sequence), len(other))
    if sequence[:length] == other[:length]:
        return length
    return next((index for index in range(length) if sequence[index] != other[index]), length)


def encode_prompt(
    record: Record, tokenizer: PreTrainedTokenizerBase, form: Format = Format(), beginning: str = ""
) -> list[int]:
    """Tokenize the prompt of one record; see `encode_prompts`.

    With the beginning of an answer ("Answer:"), the ids are those of a whole answer that begins so.
    """
    if not beginning:
        return encode_prompts([record], tokenizer, form)[0]
    texts = beginning, f"{beginning} I do not know."
    first, second = (encode(dataclasses.replace(record, answer=text), tokenizer, form).input_ids for text in texts)
    return first[: common_prefix_length(first, second)]


def encode_prompts(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format = Format()
) -> list[list[int]]:
    """Tokenize the prompt of each record, ready for generation."""
    # A question often has several answers, and its prompt does not depend on them.
    prompts = [dataclasses.replace(record, answer="") for record in records]
    texts = {record: _text(record, tokenizer, form, answered=False) for record in dict.fromkeys(prompts)}
    ids = dict(zip(texts, _tokens(list(texts.values()), tokenizer), strict=True))
    return [ids[record] for record in prompts]


def pack(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[Example]:
    """Join texts, each followed by the tokenizer's end token, and split them into blocks of `length` tokens.

    The last block may be shorter. No token is dropped, because a dropped token would not be forgotten.
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
    # A block of one token has nothing to predict: the token before it is repeated. It is still predicted only once,
    # because the first token of a block never is.
    if len(blocks[-1]) == 1:
        blocks[-1] = blocks[-2][-1:] + blocks[-1]
    return [Example(block, list(block)) for block in blocks]


def documents(records: RecordSet, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Tokenize each record as one document: a text without special tokens, or a conversation with its layout.

    Raises:
        UsageError: a text has no token.
    """
    for start in range(0, len(records), BATCH):
        batch = records.records[start : start + BATCH]
        if records.kind != "text":
            yield from (example.input_ids for example in encode_records(batch, tokenizer, WHOLE))
            continue
        encoded: Any = tokenizer([record.answer for record in batch], add_special_tokens=False, verbose=False)
        for record, ids in zip(batch, encoded["input_ids"], strict=True):
            if not ids:
                raise UsageError(f"{record.location or 'a record'}: the text is empty")
            _check_tokens(ids, tokenizer)
            yield ids


def count_cut(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format) -> int:
    """Count the records with more than `max_length` tokens, whose answers are truncated."""
    return sum(len(ids) > form.max_length for ids in _whole_ids(records, tokenizer, form))


def padded(rows: Sequence[Sequence[int]], value: int, *, left: bool = False) -> Tensor:
    """Pad rows to the length of the longest, on the right or on the left: int64 [batch, width]."""
    import torch  # here, because counting n-grams and the registry need no torch
    from torch.nn.utils.rnn import pad_sequence

    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side="left" if left else "right")


def left_padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left, and return token ids and attention mask: int64 [batch, width] each."""
    return padded(prompts, padding, left=True), padded([[1] * len(prompt) for prompt in prompts], 0, left=True)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or the end token if the tokenizer has no padding token."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if not isinstance(padding, int):
        raise UsageError("the tokenizer has neither a padding token nor one that ends a text")
    return padding


def template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the names that `chat_template_kwargs` may set in a tokenizer's chat template."""
    if not tokenizer.chat_template:
        return set()
    from transformers import PreTrainedTokenizerBase

    reserved = {"messages", "raise_exception", "strftime_now", *tokenizer.special_tokens_map}
    reserved |= set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    try:
        return _undeclared(tokenizer.get_chat_template()) - reserved
    except (TemplateError, ValueError) as error:
        raise UsageError(f"the chat template cannot be read ({first_line(error)}); correct it") from None


@functools.lru_cache(maxsize=64)
def _undeclared(template: str) -> set[str]:
    # The tag is transformers' own and has no effect on the text.
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return meta.find_undeclared_variables(environment.parse(source))


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Refuse variables that a chat template does not read, and that would have no effect.

    Raises:
        UsageError: names the variable, and those that the template has.
    """
    if unknown := sorted(set(kwargs) - (known := template_variables(tokenizer))):
        accepted = f"accepted: {', '.join(sorted(known))}" if known else "it has none; leave it out"
        raise UsageError(
            f"chat_template_kwargs has {unknown[0]!r}, which is no variable of the model's chat template; {accepted}"
        )


def _warn_of_dropped_text(tokenizer: PreTrainedTokenizerBase, form: Format) -> None:
    """Warn once if a prompt ends with text, such as '<think>', that the template leaves out of a finished turn."""
    key = json.dumps([str(tokenizer.chat_template), dict(form.chat_template_kwargs)], default=str)
    if key in _DROPPED:
        return
    turns = (Message("user", "first turn"),)
    try:
        prompt = _render(turns, tokenizer, form)
        finished = _render((*turns, Message("assistant", "second turn")), tokenizer, form, add_generation_prompt=False)
    except UsageError:  # the template needs other turns
        prompt = finished = ""
    _DROPPED[key] = prompt[common_prefix_length(prompt, finished) :].strip()
    if _DROPPED[key]:
        print(
            f"warning: the chat template ends prompts with {_DROPPED[key]!r} and leaves it out of finished turns: "
            "models learn answers without this text and are asked for answers after it. Turn it off with "
            "--chat-template-kwargs if the template has a variable for it, or use a template that keeps it",
            file=sys.stderr,
        )


_DROPPED: dict[str, str] = {}
"""By template and variables."""


def has_system_role(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template has a system role: it does not reject, drop or rewrite a system turn as a user turn.

    If it has none, warn once on standard error that the system prompt is dropped.
    """
    template = str(tokenizer.chat_template)
    if template not in _SYSTEM_ROLES:
        _SYSTEM_ROLES[template] = _formats_system_turns(tokenizer)
        if not _SYSTEM_ROLES[template]:
            print("warning: the chat template has no system role: the system prompt is left out", file=sys.stderr)
    return _SYSTEM_ROLES[template]


_SYSTEM_ROLES: dict[str, bool] = {}
"""By template."""


def _formats_system_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    def formatted(role: str) -> str:
        turns = [{"role": role, "content": "first turn"}, {"role": "user", "content": "second turn"}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    try:
        text = formatted("system")
    except TemplateError:
        return False
    try:
        return "first turn" in text and text != formatted("user")
    except TemplateError:  # turns of users and assistants must alternate
        return "first turn" in text


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end token as a list of one; empty if the tokenizer has none."""
    end = tokenizer.eos_token_id
    return [end] if isinstance(end, int) else []


def _whole_ids(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, form: Format) -> list[list[int]]:
    """The tokens of prompts and answers, up to the token that ends the answer."""
    ends, added = _end(tokenizer), tokenizer.added_tokens_decoder
    special = {*ends, *(token for token, text in added.items() if text.special)}
    whole = []
    for ids in _tokens([_text(record, tokenizer, form, answered=True) for record in records], tokenizer):
        # Some templates write a line break after the end token, such as Gemma's <end_of_turn>; no model generates it.
        stop = next((index + 1 for index in reversed(range(len(ids))) if ids[index] in special), 0)
        ids = ids[:stop] if stop and not str(tokenizer.decode(ids[stop:])).strip() else ids
        whole.append(ids if ids[-1:] == ends else ids + ends)  # generation may end with the end token alone
    return whole


def _text(record: Record, tokenizer: PreTrainedTokenizerBase, form: Format, *, answered: bool) -> Text:
    """Lay out the prompt of a record, or prompt and answer; a prompt without a chat template ends without a space."""
    if not (record.messages and tokenizer.chat_template):
        text = record.prompt or ""
        if record.messages:
            check_template_kwargs(tokenizer, form.chat_template_kwargs)
            system = [("system", form.system_prompt)] if form.system_prompt else []
            turns = [("assistant" if turn.role == "assistant" else "user", turn.content) for turn in record.messages]
            text = plain_prompt([*system, *turns])
        # The space belongs to the answer's first token.
        return text + (" " if record.messages else "") + record.answer if answered else text, True
    messages = (*record.messages, Message("assistant", record.answer)) if answered else record.messages
    try:
        return _render(messages, tokenizer, form, add_generation_prompt=not answered), False
    except UsageError as error:
        raise UsageError(": ".join(filter(None, (record.location, str(error))))) from None


def encode_conversation(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    form: Format = Format(),
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    **options: bool,
) -> list[int]:
    """Tokenize messages, which may hold tool calls and their results, with the tokenizer's chat template.

    Args:
        messages: messages as chat templates read them.
        tokenizer: a tokenizer with a chat template.
        form: layout of conversations; the system prompt is not used.
        tools: functions that the model may call.
        **options: of `apply_chat_template`, such as `continue_final_message`.

    Raises:
        UsageError: the chat template refuses the messages, or leaves out a part of the message to continue.
    """
    text = _apply_template(messages, tokenizer, form, **options, **({"tools": list(tools)} if tools else {}))
    return _tokens([(text, False)], tokenizer)[0]


def _render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, form: Format, **options: bool) -> str:
    """Lay out messages with the chat template, by default up to where the next answer begins."""
    if form.system_prompt and messages[0].role != "system" and has_system_role(tokenizer):
        messages = (Message("system", form.system_prompt), *messages)
    turns = [dataclasses.asdict(message) for message in messages]
    if any(turn["role"] == "tool" for turn in turns):
        marked = [turn | ({"content": TOOL_MARK} if turn["role"] == "tool" else {}) for turn in turns]
        if TOOL_MARK not in _apply_template(marked, tokenizer, form, **options):
            raise UsageError("the chat template leaves out the turn of a tool")
    return _apply_template(turns, tokenizer, form, **options)


def _apply_template(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, form: Format, **options: Any
) -> str:
    check_template_kwargs(tokenizer, form.chat_template_kwargs)
    arguments: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **options}
    arguments |= {"date_string": form.date} if form.date else {}
    arguments |= form.chat_template_kwargs
    try:
        text = tokenizer.apply_chat_template(list(messages), **arguments)  # pyright: ignore[reportArgumentType]
    except TEMPLATE_ERRORS as error:
        if options.get("continue_final_message") and not isinstance(error, TemplateError):
            raise UsageError("the chat template leaves out a part of the message to continue") from None
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(f"the chat template refuses turns of {roles}: {first_line(error)}") from None
    return checked_text(str(text), "the conversation")


def _tokens(texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    all_ids: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        indices = [index for index, text in enumerate(texts) if text[1] is special]
        if not indices:
            continue
        batch: Any = tokenizer([texts[index][0] for index in indices], add_special_tokens=special)
        for index, ids in zip(indices, batch["input_ids"], strict=True):
            # Some tokenizers end every text themselves; a prompt must stay open.
            ends = special and not texts[index][0].endswith(str(tokenizer.eos_token))
            while ends and ids and ids[-1] == tokenizer.eos_token_id:
                ids.pop()
            _check_tokens(ids, tokenizer)
            all_ids[index] = ids
    return all_ids


def _check_tokens(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a text with a special token for which the model has no embedding, such as Gemma 3's placeholder."""
    missing: dict[int, str] = getattr(tokenizer, "tokens_without_logits", {})  # see `load_tokenizer`
    if missing and (token := next((missing[token] for token in ids if token in missing), None)) is not None:
        raise UsageError(
            f"a text holds the special token {token!r}, for which the model has no embedding: leave it out"
        )
