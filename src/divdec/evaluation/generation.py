"""Greedy answers to a set's prompts, in left-padded batches; generated text = what the same prompt gives alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from divdec.data.formatting import Format, encode_prompts, padding_id
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation.sharding import is_main, number_of_processes, own, together
from divdec.experts.neural import device_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COUNTED = (
    "min_new_tokens", "forced_eos_token_id", "max_time", "exponential_decay_length_penalty", "begin_suppress_tokens",
    "stop_strings",
)  # fmt: skip
FIRST_TOKENS = 32  # of an answer that are generated together with all others


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
    """Answer every record's prompt greedily.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        records: what is asked; their answers are not looked at.
        form: how conversations are laid out.
        max_new_tokens: longest answer.
        batch_size: prompts in a batch; they are grouped by length.
        title: what the progress bar is called; None shows none.

    Returns:
        One answer a record, in their order, without special tokens and outer white space.
    """
    prompts = encode_prompts(records, tokenizer, form)
    found = continuations(model, tokenizer, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, title=title)
    return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in found]


def continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    title: str | None = None,
    **options: Any,
) -> list[list[int]]:
    """Continue every prompt greedily.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        prompts: token ids.
        max_new_tokens: longest continuation.
        batch_size: prompts in a batch; they are grouped by length.
        title: what the progress bar is called; None shows none.
        **options: what else `generate` takes, such as `stop_strings`; `do_sample=True` samples.

    Returns:
        The tokens after each prompt, in their order; padding may follow the one that ended them.
    """
    ends = _ends(model)
    if not ends or options or max_new_tokens <= FIRST_TOKENS or _counts_new_tokens(model):
        return _continued(model, tokenizer, prompts, max_new_tokens, batch_size, title, options)
    # Most answers are short, and a batch lasts as long as its longest: those that are not done after a while go on
    # by themselves, for as long again.
    found: list[list[int]] = [[] for _ in prompts]
    unfinished, done, stage = list(range(len(prompts))), 0, FIRST_TOKENS
    while unfinished and done < max_new_tokens:
        so_far = [[*prompts[place], *found[place]] for place in unfinished]
        stage = min(stage, max_new_tokens - done)
        for place, ids in zip(
            unfinished, _continued(model, tokenizer, so_far, stage, batch_size, title, options), strict=True
        ):
            found[place] += ids
        unfinished = [place for place in unfinished if ends.isdisjoint(found[place])]
        done, stage = done + stage, done + stage
    return found


def _counts_new_tokens(model: PreTrainedModel) -> bool:
    """Whether the model's own generation settings depend on how many tokens are new, or on a whole search."""
    configuration = model.generation_config
    return configuration is not None and (
        (configuration.num_beams or 1) > 1 or any(getattr(configuration, name, None) for name in COUNTED)
    )


def _ends(model: PreTrainedModel) -> set[int]:
    configuration = model.generation_config
    ends = configuration.eos_token_id if configuration is not None else None
    return {ends} if isinstance(ends, int) else set(ends or ())


def _continued(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    title: str | None,
    options: dict[str, Any],
    seed: int | None = None,
) -> list[list[int]]:
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    padding = padding_id(tokenizer)
    hidden = title is None or not is_main()

    def of_this_process() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        with (
            torch.inference_mode(),
            tqdm(total=len(order), desc=title, unit="answer", disable=hidden, dynamic_ncols=True) as bar,
        ):
            for start in own(range(0, len(order), batch_size)):
                if seed is not None:
                    # A batch's draws do not depend on which were drawn before it, and by whom.
                    torch.manual_seed(int(np.random.SeedSequence((seed, start)).generate_state(1)[0]))
                places = order[start : start + batch_size]
                input_ids, attention_mask = left_padded([prompts[place] for place in places], padding)
                output = model.generate(  # pyright: ignore[reportCallIssue]
                    input_ids=input_ids.to(device_of(model)),
                    attention_mask=attention_mask.to(device_of(model)),
                    max_new_tokens=max_new_tokens,
                    pad_token_id=padding,
                    tokenizer=tokenizer if options.get("stop_strings") else None,
                    **{"do_sample": False, **options},
                )
                found.update(zip(places, output[:, input_ids.shape[1] :].tolist(), strict=True))
                bar.update(len(places) * number_of_processes())
        return found

    found = together(of_this_process)
    return [found[place] for place in range(len(prompts))]


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
) -> list[list[str]]:
    """Answer every prompt many times by sampling.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        prompts: token ids.
        count: answers a prompt.
        temperature: what logits are divided by, greater than 0.
        top_p: the likeliest tokens that together hold this probability are sampled from; 1 leaves all.
        seed: gives the same answers again where model, prompts and batch size are the same. The generators of the
            CPU and of the model's GPU are left as they were.
        max_new_tokens: longest answer.
        batch_size: answers in a batch; prompts of similar length come together.
        title: what the progress bar is called; None shows none.

    Returns:
        For each prompt `count` answers, without special tokens and outer white space.

    Raises:
        UsageError: a setting is out of range.
    """
    if count < 1 or not 0 < temperature < math.inf or not 0 < top_p <= 1:
        raise UsageError(
            f"sampling: count {count}, temperature {temperature}, top_p {top_p}; accepted: a count of 1 or more, "
            "a temperature greater than 0, a top_p greater than 0 and at most 1"
        )
    # top_k and min_p of 0: a checkpoint's own generation settings would cut the distribution down unasked.
    options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        repeated = [prompt for prompt in prompts for _ in range(count)]
        found = _continued(model, tokenizer, repeated, max_new_tokens, batch_size, title, options, seed)
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in found]
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def left_padded(
    prompts: Sequence[Sequence[int]], padding: int
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"]]:
    """Token ids and attention mask of a batch of prompts that end together."""
    width = max(map(len, prompts))
    ids = [[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)
