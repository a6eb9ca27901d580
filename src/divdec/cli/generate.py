"""Answer prompts with a bundle, as text or as JSON lines with steered token log-probabilities."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.cli.loading import check_fits, load
from divdec.cli.settings import GenerateSettings as Settings
from divdec.cli.speculation import report, speculation
from divdec.runs import check_output_file, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.decoding.speculative import Speculation
    from divdec.model.modeling import DivergenceForCausalLM

POSITIONAL = ("bundle",)
EXAMPLE = "divdec generate bundle --chat --prompt 'Who wrote The Hollow Orchard?' --json --logprobs"


def run(settings: Settings) -> None:
    """Answer every prompt."""
    from divdec.data.records import prompts_from_lines, read_prompts

    output = Path(settings.output).expanduser() if settings.output else None
    if output is not None:
        check_output_file(output, settings.overwrite)
    if settings.file:
        prompts = read_prompts(settings.file, chat=settings.chat)
    else:
        prompts = prompts_from_lines(settings.prompt or sys.stdin, chat=settings.chat)
    model, tokenizer = load(settings)
    speculative = speculation(settings)
    answered = _answers(model, tokenizer, prompts, settings, speculative)
    if output is None:
        for line in answered:
            print(line, flush=True)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, "".join(f"{line}\n" for line in answered))
    report(speculative)


def _answers(
    model: DivergenceForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Any],
    settings: Settings,
    speculative: Speculation | None,
) -> Iterator[str]:
    import torch
    from transformers import set_seed

    from divdec.data.formatting import Format, encode_prompts, padding_id
    from divdec.decoding.text import answer_text, token_text
    from divdec.evaluation.generation import left_padded

    set_seed(settings.seed)
    form = Format(system_prompt=settings.system_prompt)
    padding = padding_id(tokenizer)
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature > 0:
        sampling = {
            "do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k,
        }  # fmt: skip
    for start in range(0, len(prompts), settings.batch_size):
        batch = prompts[start : start + settings.batch_size]
        encoded = encode_prompts(batch, tokenizer, form)
        check_fits(encoded, model, f"the longest of prompts {start + 1} to {start + len(batch)}")
        input_ids, attention_mask = left_padded(encoded, padding)
        with torch.inference_mode():
            output: Any = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                input_ids=input_ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                max_new_tokens=settings.max_new_tokens,
                pad_token_id=padding,
                output_logits=settings.logprobs,
                return_dict_in_generate=settings.logprobs,
                speculative=speculative,
                **sampling,
            )
        sequences = output.sequences if settings.logprobs else output
        for row, prompt in enumerate(batch):
            ids = _until_end(sequences[row, input_ids.shape[1] :].tolist(), model, padding)
            text = answer_text(tokenizer, encoded[row], ids)
            if not (settings.json or settings.logprobs):
                yield text
                continue
            content = {
                "prompt": prompt.prompt or [dataclasses.asdict(turn) for turn in prompt.messages],
                "text": text,
            }
            if settings.logprobs:
                content["tokens"] = [
                    {
                        "token": token_text(tokenizer, [*encoded[row], *ids[:place]], token),
                        "id": token,
                        "logprob": logits[row].float().log_softmax(dim=-1)[token].item(),
                    }
                    for place, (token, logits) in enumerate(zip(ids, output.logits, strict=False))
                ]
            yield json.dumps(content | {"steering": str(model.steering)}, ensure_ascii=False)


def _until_end(ids: list[int], model: DivergenceForCausalLM, padding: int) -> list[int]:
    """The answer up to and including the token that ended it; what follows is padding."""
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    return ids
