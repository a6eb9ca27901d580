"""`divdec generate`: answer prompts with a bundle. Its prompt options are those of `divdec remote` too."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from divdec.cli.loading import ExpertDevices, load
from divdec.errors import UsageError
from divdec.options import (
    RARE,
    ModelLoading,
    OutputFile,
    Printing,
    Sampling,
    SpeculativeDecoding,
    SteeringChoice,
    check_at_least,
    read_template_kwargs,
)
from divdec.runs import resumable_items, settings_hash, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.data.records import Record
    from divdec.model.modeling import DivergenceForCausalLM


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts, and how they are laid out."""

    prompt: tuple[str, ...] = ()
    """One or more prompts. Without --prompt and --file, prompts are read from standard input, one per line. Write a
    prompt that starts with a dash as --prompt='-…'."""
    file: str | None = None
    """File of prompts: .txt (one per line), or .jsonl with question, instruction, prompt, messages or conversations."""
    raw: bool = False
    """Continue prompts as plain text, without the tokenizer's chat template."""
    system_prompt: str | None = None
    """System prompt of every conversation."""
    chat_template_kwargs: Annotated[str | None, RARE] = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        if self.prompt and self.file:
            raise UsageError("give --prompt or --file, not both")
        if self.raw and self.system_prompt is not None:
            raise UsageError("--system-prompt is a turn of a conversation; leave it out with --raw")
        if read_template_kwargs(self.chat_template_kwargs) and self.raw:
            raise UsageError("--chat-template-kwargs are for the chat template; leave them out with --raw")

    def read(self, tokenizer: PreTrainedTokenizerBase) -> list[Record]:
        """Read the prompts: user turns where the tokenizer has a chat template, plain text otherwise."""
        from divdec.data.records import prompts_from_lines, read_prompts

        chat = not self.raw and bool(tokenizer.chat_template)
        if self.file:
            return read_prompts(self.file, chat=chat, raw=self.raw)
        return prompts_from_lines(self.prompt or sys.stdin, chat=chat)

    def encode(self, prompts: list[Record], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the token ids of each prompt."""
        from divdec.data.formatting import Format, check_template_kwargs, encode_prompts

        kwargs = read_template_kwargs(self.chat_template_kwargs)
        check_template_kwargs(tokenizer, kwargs)
        return encode_prompts(prompts, tokenizer, Format(self.system_prompt, chat_template_kwargs=kwargs))


def generate(
    bundle: str,
    *,
    prompts: Prompts = Prompts(),
    sampling: Sampling = Sampling(),
    choice: SteeringChoice = SteeringChoice(),
    logprobs: bool = False,
    printing: Printing = Printing(),
    output: OutputFile = OutputFile(),
    batch_size: int | None = None,
    speculation: SpeculativeDecoding = SpeculativeDecoding(),
    loading: ModelLoading = ModelLoading(),
    experts: ExpertDevices = ExpertDevices(),
) -> None:
    """Answer prompts with a bundle, as text or as JSON lines with the steered model's log-probabilities.

    If the tokenizer has a chat template, divdec applies it.

    For example:

        divdec generate bundle --prompt 'Who wrote The Hollow Orchard?'

    Args:
        bundle: The bundle: a folder or hub id.
        logprobs: Add each token's log-probability under the steered model, before temperature (implies --json).
        batch_size: Prompts answered at once: by default 16, or 1 with --speculative, because a batch has no drafts.
    """
    from transformers import set_seed

    from divdec.checkpoint import load_tokenizer
    from divdec.model.loading import answer_digests, find_bundle

    batch_size = batch_size if batch_size is not None else 1 if speculation.speculative else 16
    check_at_least("batch_size", batch_size, 1)
    as_json = printing.json or logprobs
    file = output.prepare()
    records = prompts.read(load_tokenizer(find_bundle(bundle)))
    model, tokenizer = load(bundle, loading, choice, experts)
    encoded = prompts.encode(records, tokenizer)
    rooms = [room_for_answer(ids, model, f"prompt {number}") for number, ids in enumerate(encoded, start=1)]
    layout = dataclasses.replace(prompts, prompt=(), file=None)  # prompts are compared one by one
    decides = [*map(dataclasses.asdict, (layout, sampling, speculation, loading)), as_json, logprobs, batch_size]
    files = None if file is None else answer_digests(find_bundle(bundle), verified=not loading.no_verify)
    lines: list[str] = []
    with resumable_items(file, settings_hash([decides, model.rule, files])) as finished:
        for group in _groups(rooms, sampling.max_new_tokens, batch_size):
            if not all(number in finished and finished.items[number]["ids"] == encoded[number] for number in group):
                set_seed((sampling.seed + group[0]) % 2**32)
                room, batch = min(rooms[number] for number in group), [encoded[number] for number in group]
                arguments = generation_arguments(sampling, tokenizer, room) | {"speculative": speculation.draft_length}
                answers = _answers(model, tokenizer, batch, arguments, stop=sampling.stop, logprobs=logprobs)
                for number, (text, tokens) in zip(group, answers, strict=True):
                    line = _as_json(records[number], text, tokens, model) if as_json else text
                    finished.add({"key": number, "ids": encoded[number], "line": line})
            for number in group:
                lines.append(finished.items[number]["line"])
                if file is None:
                    print(lines[-1], flush=True)
        if file is not None:
            write_text(file, "".join(f"{line}\n" for line in lines))


def _groups(rooms: Sequence[float], length: int, batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of prompts to answer together; alone where an answer may reach the end of the context."""
    for start in range(0, len(rooms), batch_size):
        group = list(range(start, min(start + batch_size, len(rooms))))
        fits = all(rooms[number] >= length for number in group)
        yield from [group] if fits else ([number] for number in group)


def generation_arguments(sampling: Sampling, tokenizer: PreTrainedTokenizerBase, room: float) -> dict[str, Any]:
    """Return the arguments of `model.generate` for sampling options and an answer of at most `room` tokens."""
    length = int(min(sampling.max_new_tokens, room))
    arguments: dict[str, Any] = {"max_new_tokens": length, "do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        arguments |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    if sampling.stop:
        arguments |= {"stop_strings": list(sampling.stop), "tokenizer": tokenizer}
    return arguments


def room_for_answer(prompt: Sequence[int], model: DivergenceForCausalLM, what: str) -> float:
    """Return the number of tokens from the end of a prompt to that of the shortest context of the models.

    Raises:
        UsageError: there are none.
    """
    positions = model.config.max_position_embeddings or math.inf
    if len(prompt) >= positions:
        raise UsageError(f"{len(prompt)} tokens are too many for {positions} positions of the models: shorten {what}")
    return positions - len(prompt)


def _answers(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    arguments: dict[str, Any],
    *,
    stop: tuple[str, ...],
    logprobs: bool,
) -> Iterator[tuple[str, list[dict[str, Any]] | None]]:
    """Answer prompts together, and yield each answer with, if asked for, its tokens' log-probabilities."""
    import torch

    from divdec.data.formatting import left_padded, padding_id
    from divdec.decoding.generation import plain_decoding
    from divdec.decoding.text import AnswerText, token_text
    from divdec.evaluation.generation import without_padding

    padding = padding_id(tokenizer)
    input_ids, attention_mask = left_padded(prompts, padding)
    with torch.inference_mode(), plain_decoding(model):
        result: Any = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            pad_token_id=padding,
            output_logits=logprobs,
            return_dict_in_generate=True,
            **arguments,
        )
    for row, prompt in enumerate(prompts):
        ids = without_padding(model, result.sequences[row, input_ids.shape[1] :].tolist())
        answer = AnswerText(tokenizer, stop, prompt)
        pieces = [answer.add(token) for token in ids if not answer.stopped]
        tokens = None
        if logprobs:
            tokens = [
                {
                    "token": token_text(tokenizer, [*prompt, *ids[:position]], token),
                    "id": token,
                    "logprob": logits[row].float().log_softmax(dim=-1)[token].item(),
                }
                for position, (token, logits) in enumerate(zip(ids[: len(pieces)], result.logits, strict=False))
            ]
        yield "".join(pieces) + answer.end(), tokens


def _as_json(record: Record, text: str, tokens: list[dict[str, Any]] | None, model: DivergenceForCausalLM) -> str:
    content: dict[str, Any] = {
        "prompt": record.prompt or [dataclasses.asdict(turn) for turn in record.messages],
        "text": text,
    }
    content |= {} if tokens is None else {"tokens": tokens}
    return json.dumps(content | {"steering": model.rule}, ensure_ascii=False)
