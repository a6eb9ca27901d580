"""Answer prompts with a model that is reached only through an OpenAI-compatible API, steered by local experts."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.cli.remote_settings import RemoteVerbSettings as Settings
from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.remote.choices import RemoteAnswer
    from divdec.remote.target import RemoteTarget

POSITIONAL = ()
EXAMPLE = "divdec remote --bundle bundle --endpoint https://api.example.com/v1 --model big --key-variable API_KEY"


def run(settings: Settings) -> None:
    """Answer every prompt, and say on standard error what it took."""
    from divdec.cli.loading import quiet
    from divdec.data.formatting import Format, encode_prompts
    from divdec.data.records import prompts_from_lines, read_prompts
    from divdec.remote.answers import Kept
    from divdec.runs import check_output_file, settings_hash

    output = Path(settings.output).expanduser() if settings.output else None
    if output is not None:
        check_output_file(output, settings.overwrite)
        output.parent.mkdir(parents=True, exist_ok=True)  # answers are kept there as they come
    if settings.file:
        prompts = read_prompts(settings.file, chat=settings.chat)
    else:
        prompts = prompts_from_lines(settings.prompt or sys.stdin, chat=settings.chat)
    quiet()
    target = _target(settings)
    encoded = encode_prompts(prompts, target.completions.tokenizer, Format(system_prompt=settings.system_prompt))
    idle = {
        "output": None,
        "overwrite": False,
        "concurrency": 0,
        "retries": 0,
        "timeout": 0,
        "prompt": (),
        "file": None,
    }
    # A bundle may be written anew under its name.
    decisive = {**dataclasses.asdict(settings), **idle, "rule": str(target.steering), "parts": _parts(settings)}
    kept = Kept(output, settings_hash(decisive))
    texts = [prompt.prompt or [dataclasses.asdict(turn) for turn in prompt.messages] for prompt in prompts]
    streaming = output is None and len(prompts) == 1 and not settings.json
    try:
        if streaming:
            for piece in target.stream(encoded[0], **_options(settings, 0)):
                print(piece, end="", flush=True)
            print()
        else:
            for row in _rows(target, encoded, texts, kept, settings):
                if output is None:
                    print(json.dumps(row, ensure_ascii=False) if settings.json else row["text"], flush=True)
        kept.finish(len(prompts), as_json=settings.json)
    finally:
        target.close()
        if target.completions.counts.requests:
            print(_told(target), file=sys.stderr)


def _target(settings: Settings) -> RemoteTarget:
    from divdec.cli.loading import device_map, warn_if_unsteered
    from divdec.remote.bias import BiasLimits
    from divdec.remote.choices import RemoteSettings
    from divdec.remote.client import Endpoint
    from divdec.remote.completions import Completions
    from divdec.remote.sources import Sources, of_bundle, open_sources
    from divdec.remote.target import RemoteTarget
    from divdec.steering import Steering

    endpoint = Endpoint(
        settings.endpoint, settings.model, settings.key_variable, timeout=settings.timeout, retries=settings.retries
    )
    limits = BiasLimits(settings.bias_entries, settings.bias_largest)
    asked = RemoteSettings(settings.method, limits, settings.block, settings.tries)
    device = device_map(settings.device)
    steering = None if settings.steering is None else Steering.parse(settings.steering)
    if settings.bundle is not None:
        sources, stored = of_bundle(settings.bundle, device)
        steering = stored if steering is None else dataclasses.replace(steering, vocabulary=stored.vocabulary)
    else:
        assert settings.tokenizer is not None
        sources = Sources(
            settings.tokenizer, settings.retain, settings.forget, settings.ngram, settings.registry,
            bridge=settings.bridge, device=device,
        )  # fmt: skip
    steering = steering or Steering()  # without effect: a registry needs no rule
    opened = open_sources(sources)
    warn_if_unsteered(steering)
    first, *others = opened.ends
    completions = Completions(endpoint, opened.tokenizer, first, opened.vocab_size, _extra(settings), others)
    return RemoteTarget(
        completions, opened.experts, steering, asked,
        ends=opened.ends, longest=opened.longest, width=opened.vocab_size, takedowns=opened.takedowns,
    )  # fmt: skip


def _parts(settings: Settings) -> str | None:
    """What a bundle refers to, in short."""
    if settings.bundle is None:
        return None
    from divdec.model.loading import find_bundle
    from divdec.runs import file_sha256

    return file_sha256(find_bundle(settings.bundle) / "config.json")


def _extra(settings: Settings) -> dict[str, Any]:
    try:
        found = json.loads(settings.extra or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"extra is {settings.extra!r}; accepted: a JSON object, such as '{{\"top_k\": 0}}'")
    return found


def _options(settings: Settings, place: int) -> dict[str, Any]:
    seed = (settings.seed + place) % 2**32
    return {
        "max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature, "seed": seed,
        "stop": settings.stop,
    }  # fmt: skip


def _rows(target: RemoteTarget, encoded: list[list[int]], texts: list[Any], kept: Any, settings: Settings) -> Iterator:
    """Answers in the prompts' order, several asked for at a time; each is kept as soon as it is there."""
    from concurrent.futures import ThreadPoolExecutor

    from tqdm.auto import tqdm

    from divdec.remote.choices import RemoteAnswer

    stopped = threading.Event()

    def answer(place: int) -> dict[str, Any]:
        if (known := kept.of(place, texts[place])) is not None:
            return known
        found = RemoteAnswer()
        for _ in target.stream(encoded[place], answer=found, **_options(settings, place)):
            if stopped.is_set():
                raise UsageError("stopped")
        row = _row(texts[place], found, target)
        kept.add(place, row)
        return row

    with ThreadPoolExecutor(settings.concurrency) as pool:
        tasks = [pool.submit(answer, place) for place in range(len(encoded))]
        try:
            for task in tqdm(tasks, unit="answer", disable=not sys.stderr.isatty()):
                yield task.result()
        except KeyboardInterrupt:  # after an error the others' answers are waited for, and kept
            stopped.set()
            raise
        finally:
            for task in tasks:
                task.cancel()


def _row(prompt: Any, answer: RemoteAnswer, target: RemoteTarget) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "tokens": [
            {"id": choice.token, "gap": choice.gap, "total_variation": choice.total_variation}
            for choice in answer.choices
        ],
        "exact_tokens": answer.exact_tokens,
        "steering": str(target.steering),
    }


def _told(target: RemoteTarget) -> str:
    counts, sure = target.completions.counts, target.sure
    repeated = f", {counts.retries} of them repeated" if counts.retries else ""
    line = (
        f"{sure.tokens} tokens by {counts.requests} requests{repeated} ({counts.prompt_tokens} prompt tokens, "
        f"{counts.answer_tokens} answer tokens); {sure.exact} proved to be the steered model's"
    )
    if sure.exact < sure.tokens:
        line += f"; the others at most {sure.gap:.3g} nats or a total variation of {sure.total_variation:.3g} off"
    return line
