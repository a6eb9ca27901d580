"""Forward passes over many answers, in which a prompt is read once however many answers to it are scored.

It knows nothing of what the logits are read for, nor of steering: what runs the models is given.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from divdec.data.formatting import IGNORED, Example
from divdec.evaluation.sharding import is_main, number_of_processes, own
from divdec.experts.neural import ReadAhead
from divdec.experts.token_cache import TokenLayer

Forward = Callable[[Tensor, Tensor, None, Any, int], Any]
"""Takes input_ids, attention_mask, no position_ids (models count their own), a cache or None, and logits_to_keep."""
Group = tuple[tuple[int, ...], list[int]]
"""A prompt, and the places of the examples that begin with it."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """What one forward pass gave, and where the labelled tokens are in it."""

    items: list[int]
    """The places of the examples in the pass, a row each."""
    output: Any
    """What `Forward` gave, at the last places of the batch."""
    labels: Int[Tensor, " labelled"]
    """The labelled tokens, row by row."""
    chosen: Bool[Tensor, "batch kept"]
    """Where `output` says how likely they are: at the place before each."""


def passes(
    examples: Sequence[Example],
    forward: Forward,
    new_cache: Callable[[], Cache] | None,
    *,
    batch_size: int,
    title: str | None = None,
) -> Iterator[Pass]:
    """Run the models over every example, or over this process's share of them (`divdec.evaluation.sharding`).

    Args:
        examples: prompt and labelled answer each.
        forward: runs the models.
        new_cache: makes an empty cache for them; with None, or where rows cannot be taken out of it, a prompt is read
            again for every answer to it.
        batch_size: sequences in a pass; those of similar length come together.
        title: what the progress bar is called; None shows none.
    """
    shared = []
    if new_cache is not None and _selectable(new_cache()):
        shared = [group for group in _by_prompt(examples) if len(group[1]) > 1 and group[0]]
    apart = set(range(len(examples))).difference(*(places for _, places in shared))
    hidden = title is None or not is_main()
    with tqdm(total=len(examples), desc=title, unit="item", disable=hidden, dynamic_ncols=True) as bar:
        for places in own(_batches(apart, lambda place: len(examples[place].input_ids), batch_size)):
            yield _pass(places, [examples[place] for place in places], forward)
            bar.update(len(places) * number_of_processes())
        # Prompts that are read together are of one length. Padding them on the left would not do: where positions begin
        # and what shifts them is each architecture's own.
        shared.sort(key=lambda group: len(group[0]))
        together = (
            chosen
            for _, alike in itertools.groupby(shared, key=lambda group: len(group[0]))
            for chosen in _batches(alike, lambda group: 0, batch_size)
        )
        for chosen in own(together):
            assert new_cache is not None
            for found in _after_prompts(examples, chosen, forward, new_cache(), batch_size):
                yield found
                bar.update(len(found.items) * number_of_processes())


def _by_prompt(examples: Sequence[Example]) -> list[Group]:
    """The examples by what they begin with; a prompt's last token is left to the answer that it predicts."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, example in enumerate(examples):
        groups.setdefault(tuple(example.input_ids[: max(example.prompt_length - 1, 0)]), []).append(place)
    return list(groups.items())


def _after_prompts(
    examples: Sequence[Example], groups: Sequence[Group], forward: Forward, cache: Cache, batch_size: int
) -> Iterator[Pass]:
    """Read prompts of one length together, then all answers, each with its prompt's keys and values."""
    prompts = torch.tensor([prompt for prompt, _ in groups])
    start = prompts.shape[1]
    forward(prompts, torch.ones_like(prompts), None, cache, 1)
    row_of = {place: row for row, (_, places) in enumerate(groups) for place in places}
    for places in _batches(row_of, lambda place: len(examples[place].input_ids), batch_size):
        answers = [Example(examples[place].input_ids[start:], examples[place].labels[start:]) for place in places]
        rows = torch.tensor([row_of[place] for place in places])
        yield _pass(places, answers, forward, _selected(cache, rows), start)


def _pass(
    places: list[int],
    examples: Sequence[Example],
    forward: Forward,
    cache: Cache | None = None,
    past: int = 0,
) -> Pass:
    """One forward pass, right-padded; `past` tokens of each row are in the cache."""
    # Nothing is predicted by an answer's last token.
    width = max(len(example.input_ids) for example in examples) - 1
    input_ids = _padded([example.input_ids[:-1] for example in examples], width, 0)
    mask = _padded([[1] * (past + len(example.input_ids) - 1) for example in examples], past + width, 0)
    kept = width + 1 - min(max(example.prompt_length, 1) for example in examples)
    labels = _padded([example.labels[1:] for example in examples], width, IGNORED)[:, width - kept :]
    chosen = labels != IGNORED
    output = forward(input_ids, mask, None, cache, kept)
    return Pass(places, output, labels[chosen], chosen)


def _batches(items: Any, length: Callable[[Any], int], size: int) -> Iterator[list[Any]]:
    order = sorted(items, key=length)
    return (order[start : start + size] for start in range(0, len(order), size))


def _selectable(cache: Cache) -> bool:
    """Whether selecting by batch reaches all that a cache holds: not states of linear attention or convolutions."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer, TokenLayer, ReadAhead)
    return bool(cache.layers) and all(type(layer) in plain for layer in cache.layers)


def _selected(cache: Cache, rows: Int[Tensor, " batch"]) -> Cache:
    """A cache of these rows of another, which stays as it is."""
    # Selecting makes new tensors, so that the copy may begin with the same ones.
    same = {id(value): value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)}
    chosen = copy.deepcopy(cache, same)
    chosen.batch_select_indices(rows)
    return chosen


def _padded(rows: Sequence[Sequence[int]], width: int, filling: int) -> Int[Tensor, "batch width"]:
    return torch.tensor([[*row, *[filling] * (width - len(row))] for row in rows], dtype=torch.long)
