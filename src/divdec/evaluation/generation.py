"""Batches of an evaluation, answered with the model's own `generate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from divdec.data.formatting import Format, encode_prompts, left_padded, padding_id
from divdec.data.records import Message, Record, RecordSet
from divdec.decoding.generation import plain_decoding
from divdec.errors import UsageError
from divdec.passes import device_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STAGE = 32  # tokens after which a batch goes on without its finished answers
BATCH_SIZE = 64  # prompts of `first_choices` in a pass
MARK = "\ue000"  # a character of the private use area, which no template contains
QUESTION_LENGTH = 48  # tokens
MAX_ROUNDS = 4
SAMPLED_AT_ONCE = 32  # the samples of a seed depend on it
MAX_THOUGHT = 1024  # tokens after which a reply that thinks first is cut
THOUGHTS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis", "<|channel|>final"),
)  # fmt: skip
"""How checkpoints mark the beginning and the end of a thought before an answer."""


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    *,
    form: Format = Format(),  # noqa: B008
    max_new_tokens: int = 128,
    batch_size: int = 64,
    title: str | None = None,
) -> list[str]:
    """Answer every record's prompt greedily, in the layout `form`; see `continuations`.

    Returns:
        One answer per record, without special tokens and outer white space.
    """
    prompts = encode_prompts(records, tokenizer, form)
    outputs = continuations(
        model, tokenizer, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, title=title
    )
    return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in outputs]


def continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    title: str | None = None,
    seed: int | None = None,
    through_thoughts: bool = False,
    known: Sequence[list[int] | None] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Continue every prompt, greedily by default. Of the checkpoint's generation config only special tokens are used.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        prompts: token ids.
        max_new_tokens: longest continuation.
        batch_size: prompts in a batch; they are grouped by length.
        title: title of the progress bar; None shows none.
        seed: seeds torch's generators before every batch, so that a batch does not depend on earlier batches.
        through_thoughts: give replies that hold a thought and no end `MAX_THOUGHT` more tokens, so that a model that
            thinks first answers, too.
        known: continuations that need no passes, such as those of `unchanged_answers`; None for each other prompt.
        **options: further options of `generate`, such as `stop_strings`; `do_sample=True` samples.

    Returns:
        The tokens after each prompt; padding may follow the end token.
    """
    shared: dict[str, Any] = {"batch_size": batch_size, "title": title, "seed": seed, **options}
    if known is not None:
        missing = [index for index, ids in enumerate(known) if ids is None]
        shared |= {"max_new_tokens": max_new_tokens, "through_thoughts": through_thoughts}
        generated = iter(continuations(model, tokenizer, [prompts[index] for index in missing], **shared))
        return [next(generated) if ids is None else ids for ids in known]
    if through_thoughts:
        outputs = continuations(model, tokenizer, prompts, max_new_tokens=max_new_tokens, **shared)
        room = (getattr(model.config, "max_position_embeddings", None) or math.inf) - max_new_tokens
        thinking = [
            index
            for index, (prompt, ids) in enumerate(zip(prompts, outputs, strict=True))
            if not has_end(model, ids) and thought_of(tokenizer, prompt, ids) and len(prompt) < room
        ]
        longer = [[*prompts[index], *outputs[index]] for index in thinking]
        more = int(min([MAX_THOUGHT, *(room - len(prompts[index]) for index in thinking)]))
        rest = continuations(model, tokenizer, longer, max_new_tokens=more, **shared) if thinking else []
        for index, ids in zip(thinking, rest, strict=True):
            outputs[index] += ids
        return outputs
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    if max_new_tokens > STAGE and not options and (ends := end_tokens(model)):
        # A batch lasts as long as its longest answer, and most answers are short.
        outputs = continuations(model, tokenizer, prompts, max_new_tokens=STAGE, **shared)
        unfinished = [
            index
            for index, ids in enumerate(outputs)
            if ends.isdisjoint(ids) and len(prompts[index]) + len(ids) < longest
        ]
        longer = [[*prompts[index], *outputs[index]] for index in unfinished]
        rest = continuations(model, tokenizer, longer, max_new_tokens=max_new_tokens - STAGE, **shared)
        for index, ids in zip(unfinished, rest, strict=True):
            outputs[index] += ids
        return outputs
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    padding, device = padding_id(tokenizer), device_of(model)
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": padding, **options}
    if options.get("stop_strings"):
        options["tokenizer"] = tokenizer
    by_index: dict[int, list[int]] = {}
    # Alone, because it is cut: beyond its last position a model such as GPT-2 fails.
    long = [index for index in order if len(prompts[index]) + max_new_tokens > longest]
    order = order[: len(order) - len(long)]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    bar = tqdm(total=len(prompts), desc=title, unit="answer", disable=title is None, dynamic_ncols=True)
    with torch.inference_mode(), plain_decoding(model), bar:
        for number, batch in enumerate([*batches, *([index] for index in long)]):
            if seed is not None:
                torch.manual_seed(int(np.random.SeedSequence((seed, number * batch_size)).generate_state(1)[0]))
            input_ids, attention_mask = left_padded([prompts[index] for index in batch], padding)
            options["max_new_tokens"] = int(max(1, min(max_new_tokens, longest - input_ids.shape[1])))
            output = model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), **options
            )
            by_index.update(zip(batch, output[:, input_ids.shape[1] :].tolist(), strict=True))
            bar.update(len(batch))
    return [by_index[index] for index in range(len(prompts))]


@torch.inference_mode()
def first_choices(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    count: int,
) -> list[list[int]]:
    """Return the `count` likeliest next tokens after each prompt, the likeliest first."""
    padding, device = padding_id(tokenizer), device_of(model)
    choices: list[list[int]] = []
    with plain_decoding(model):
        for start in range(0, len(prompts), BATCH_SIZE):
            input_ids, attention_mask = left_padded(prompts[start : start + BATCH_SIZE], padding)
            logits = model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), do_sample=False,
                max_new_tokens=1, pad_token_id=padding, return_dict_in_generate=True, output_logits=True,
            ).logits[0]  # fmt: skip
            choices += logits.topk(min(count, logits.shape[-1])).indices.tolist()
    return choices


def without_padding(model: PreTrainedModel, ids: Sequence[int]) -> list[int]:
    """Cut a continuation after its end token, which padding may follow."""
    ends = end_tokens(model)
    end = next((index for index, token in enumerate(ids, start=1) if token in ends), len(ids))
    return list(ids[:end])


def ends_in_thought(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]
) -> bool:
    """Whether a reply was cut within a thought, which it or the end of its prompt began."""
    return not has_end(model, ids) and thought_of(tokenizer, prompt, ids) == "open"


def thought_of(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]
) -> Literal["open", "closed"] | None:
    """Whether a reply holds a thought that has no end, or one that has; None without a thought."""
    if ids and thought_of(tokenizer, prompt, ()) == "closed":  # the template switches thinking off
        prompt = ()
    # The prompt's last tokens are the template's: a question may hold such a mark, too.
    text = str(tokenizer.decode([*prompt[-4:], *ids], skip_special_tokens=False))
    for begin, end in THOUGHTS:
        if begin in text:
            return "open" if text.rfind(begin) > text.rfind(end) else "closed"
    return None


def has_end(model: PreTrainedModel, ids: Sequence[int]) -> bool:
    """Whether a continuation ended by itself."""
    return not end_tokens(model).isdisjoint(ids)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end an answer."""
    ends = None if model.generation_config is None else model.generation_config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    title: str | None = None,
    through_thoughts: bool = False,
) -> list[list[str]]:
    """Sample `count` answers to every prompt; see `continuations`.

    The same model, prompts, batch size and seed give the same answers. The generators of the CPU and of the model's GPU
    are restored.

    Returns:
        For each prompt `count` answers, without special tokens and outer white space.

    Raises:
        UsageError: count, temperature or top_p is out of range.
    """
    if count < 1 or not 0 < temperature < math.inf or not 0 < top_p <= 1:
        raise UsageError(
            f"sampling: count {count}, temperature {temperature}, top_p {top_p}; accepted: a count of 1 or more, "
            "a temperature greater than 0, a top_p greater than 0 and at most 1"
        )
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        outputs = continuations(
            model, tokenizer, [prompt for prompt in prompts for _ in range(count)], max_new_tokens=max_new_tokens,
            batch_size=batch_size, title=title, seed=seed, through_thoughts=through_thoughts, do_sample=True,
            temperature=temperature, top_p=top_p, top_k=0,
        )  # fmt: skip
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in outputs]
    return [texts[start : start + count] for start in range(0, len(texts), count)]


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
            seed=seed + attempt, max_new_tokens=length, batch_size=SAMPLED_AT_ONCE, title=title,
        )  # fmt: skip
        texts.update(dict.fromkeys(filter(None, sampled)))
        if len(texts) >= count:
            break
    if not chat:
        return RecordSet("samples", "text", _enough(list(map(Record, texts)), count))
    questions = [Record("", messages=(Message("user", text),)) for text in texts]
    replies = answers(
        model, tokenizer, questions, form=form, max_new_tokens=max_new_tokens, batch_size=SAMPLED_AT_ONCE, title=title
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
