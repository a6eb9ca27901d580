"""Sample training or evaluation data from a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Format
from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError
from divdec.evaluation.generation import answers, samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MARK = "\ue000"  # a character of the private use area, which no template contains
QUESTION_LENGTH = 48  # tokens
MAX_ROUNDS = 4
BATCH_SIZE = 32  # the samples of a seed depend on it


def sample_records(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
    title: str | None = None,
    form: Format = Format(),  # noqa: B008
) -> RecordSet:
    """Sample question/answer pairs from a chat model, or plain texts from a model without a chat template.

    Questions are sampled after the chat template's text before the user's message, and answered greedily (Magpie, arXiv
    2406.08464).

    Args:
        model: any causal language model.
        tokenizer: its tokenizer.
        count: number of records.
        max_new_tokens: maximum length of an answer or text, in tokens.
        seed: seed of the questions or texts.
        title: title of the progress bar; None shows none.
        form: layout of the questions that are answered.

    Raises:
        UsageError: fewer than half of the samples are non-empty and distinct.
    """
    chat = tokenizer.chat_template is not None
    prompt, length = (user_prefix(tokenizer), QUESTION_LENGTH) if chat else (start_ids(tokenizer), max_new_tokens)
    texts: dict[str, None] = {}
    for attempt in range(MAX_ROUNDS):
        missing = count - len(texts)
        [sampled] = samples(
            model, tokenizer, [prompt], missing,
            seed=seed + attempt, max_new_tokens=length, batch_size=BATCH_SIZE, title=title,
        )  # fmt: skip
        texts.update(dict.fromkeys(filter(None, sampled)))
        if len(texts) >= count:
            break
    if not chat:
        return RecordSet("samples", "text", _enough(list(map(Record, texts)), count))
    questions = [Record("", messages=(Message("user", text),)) for text in texts]
    replies = answers(
        model, tokenizer, questions, form=form, max_new_tokens=max_new_tokens, batch_size=BATCH_SIZE, title=title
    )
    records = [
        Record(reply, messages=question.messages) for question, reply in zip(questions, replies, strict=True) if reply
    ]
    return RecordSet("samples", "question/answer", _enough(records, count))


def _enough(records: list[Record], count: int) -> tuple[Record, ...]:
    if 2 * len(records) < count:
        raise UsageError(
            f"only {len(records)} of {count} samples of the model are non-empty and distinct: it stops immediately or "
            "repeats itself; pass text instead (divdec shrink --text, divdec train --neutral)"
        )
    return tuple(records)


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a conversation up to where the user's first message begins; the start token if none."""
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False))
    ids: Any = tokenizer(text.partition(MARK)[0], add_special_tokens=False)["input_ids"]
    return ids or start_ids(tokenizer)


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that begins a text, or the end token of models without one, such as GPT-2."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(token, int):
        raise UsageError(
            "the tokenizer has neither a begin nor an end token to sample from; pass text instead (divdec shrink "
            "--text, divdec train --neutral)"
        )
    return [token]
