"""Greedy answers to a set's prompts, in left-padded batches; generated text = what the same prompt gives alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from divdec.data.formatting import Format, encode_prompt, padding_id
from divdec.data.records import Record

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    prompts = [encode_prompt(record, tokenizer, form) for record in records]
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    padding = padding_id(tokenizer)
    found: dict[int, str] = {}
    with (
        torch.inference_mode(),
        tqdm(total=len(order), desc=title, unit="answer", disable=title is None, dynamic_ncols=True) as bar,
    ):
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            input_ids, attention_mask = left_padded([prompts[place] for place in places], padding)
            output = model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=input_ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=padding,
            )
            texts = tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)
            found.update(zip(places, map(str.strip, texts), strict=True))
            bar.update(len(places))
    return [found[place] for place in range(len(records))]


def left_padded(
    prompts: Sequence[Sequence[int]], padding: int
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"]]:
    """Token ids and attention mask of a batch of prompts that end together."""
    width = max(map(len, prompts))
    ids = [[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)
