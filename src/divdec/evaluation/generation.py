"""Generate answers to a set's prompts in left-padded batches, with the model's own `generate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from divdec.data.formatting import Format, encode_prompts, left_padded, padding_id
from divdec.data.records import Record
from divdec.errors import UsageError, first_line
from divdec.evaluation.sharding import is_main, number_of_processes, own, together
from divdec.experts.neural import device_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STAGE = 32  # tokens after which a batch goes on without its finished answers
# Settings of a checkpoint that count new tokens, and so differ between one call of `generate` and several.
COUNTED = (
    "min_new_tokens", "forced_eos_token_id", "max_time", "exponential_decay_length_penalty", "begin_suppress_tokens",
    "stop_strings",
)  # fmt: skip


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
    **options: Any,
) -> list[list[int]]:
    """Continue every prompt, greedily by default.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        prompts: token ids.
        max_new_tokens: longest continuation.
        batch_size: prompts in a batch; they are grouped by length.
        title: title of the progress bar; None shows none.
        seed: seeds torch's generators before every batch, so that a batch depends neither on earlier batches nor on
            the process.
        **options: further options of `generate`, such as `stop_strings`; `do_sample=True` samples.

    Returns:
        The tokens after each prompt; padding may follow the end token.
    """
    if max_new_tokens > STAGE and not options and (ends := _ends(model)):
        # A batch lasts as long as its longest answer, and most answers are short.
        shared: dict[str, Any] = {"batch_size": batch_size, "title": title}
        outputs = continuations(model, tokenizer, prompts, max_new_tokens=STAGE, **shared)
        unfinished = [index for index, ids in enumerate(outputs) if ends.isdisjoint(ids)]
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
    hidden = title is None or not is_main()

    def own_batches() -> dict[int, list[int]]:
        outputs: dict[int, list[int]] = {}
        bar = tqdm(total=len(order), desc=title, unit="answer", disable=hidden, dynamic_ncols=True)
        with torch.inference_mode(), bar:
            for start in own(range(0, len(order), batch_size)):
                if seed is not None:
                    torch.manual_seed(int(np.random.SeedSequence((seed, start)).generate_state(1)[0]))
                batch = order[start : start + batch_size]
                input_ids, attention_mask = left_padded([prompts[index] for index in batch], padding)
                output = model.generate(  # pyright: ignore[reportCallIssue]
                    input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), **options
                )
                outputs.update(zip(batch, output[:, input_ids.shape[1] :].tolist(), strict=True))
                bar.update(len(batch) * number_of_processes())
        return outputs

    outputs = together(own_batches)
    return [outputs[index] for index in range(len(prompts))]


def _ends(model: PreTrainedModel) -> set[int]:
    """The tokens that end an answer; empty if greedy decoding cannot be split into several calls."""
    settings = model.generation_config
    if settings is None or any(getattr(settings, name, None) for name in COUNTED) or (settings.num_beams or 1) > 1:
        return set()
    ends = settings.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


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
    """Sample `count` answers to every prompt; see `continuations`.

    The same model, prompts, batch size and seed give the same answers. The checkpoint's own sampling settings are not
    used, and the generators of the CPU and of the model's GPU are restored.

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
        # top_k and min_p of 0: a checkpoint's generation settings would truncate the distribution.
        outputs = continuations(
            model, tokenizer, [prompt for prompt in prompts for _ in range(count)], max_new_tokens=max_new_tokens,
            batch_size=batch_size, title=title, seed=seed, do_sample=True, temperature=temperature, top_p=top_p,
            top_k=0, min_p=0.0,
        )  # fmt: skip
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in outputs]
    return [texts[start : start + count] for start in range(0, len(texts), count)]


class Fluency:
    """A text classifier whose class 0 means fluent text (OpenUnlearning's classifier_prob)."""

    def __init__(self, checkpoint: str) -> None:
        """Load the classifier and its tokenizer from a folder or hub id.

        Raises:
            UsageError: it cannot be loaded.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        options: dict[str, Any] = {"trust_remote_code": False}
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, **options)
            self.model: Any = AutoModelForSequenceClassification.from_pretrained(
                checkpoint, use_safetensors=True, dtype=torch.float32, **options
            ).eval()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"fluency classifier {checkpoint!r} cannot be loaded ({first_line(error)}); give a local folder, "
                "or --fluency none to leave fluency out"
            ) from None

    def probabilities(self, texts: Sequence[str], *, max_length: int, batch_size: int = 32) -> list[float]:
        """Compute the probability that each text is fluent, from its first `max_length` tokens."""
        starts = range(0, len(texts), batch_size)
        batches = together(
            lambda: {start: self._batch(texts[start : start + batch_size], max_length) for start in own(starts)}
        )
        return [value for start in starts for value in batches[start]]

    def _batch(self, texts: Sequence[str], max_length: int) -> list[float]:
        batch = self.tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_length)
        with torch.inference_mode():
            logits = self.model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
        return logits.softmax(dim=-1)[:, 0].tolist()
