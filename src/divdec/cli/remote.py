"""`divdec remote`: steer a model behind an OpenAI-compatible API with local experts."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from divdec.cli.generate import Prompts
from divdec.errors import UsageError
from divdec.options import RARE, Decoding, OutputFile, Printing, check_at_least

if TYPE_CHECKING:
    from divdec.remote.experts import ExpertSources, LoadedExperts
    from divdec.remote.target import RemoteAnswer, RemoteTarget
    from divdec.runs import ResumableOutput
    from divdec.steering import Steering


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteExperts:
    """The experts, from a bundle or one by one."""

    bundle: str | None = None
    """Bundle of experts, tokenizer and rule; its target's weights are not loaded."""
    steering: str | None = None
    """The rule: linear:ALPHA or rank:K, both also with :MARGIN; the bundle's by default. Not needed for a bundle with
    only a registry."""
    tokenizer: str | None = None
    """Without a bundle: the provider's tokenizer, a folder or hub id."""
    retain_auxiliary: str | None = None
    """Without a bundle: q, which has not seen the forget set."""
    forget_auxiliary: str | None = None
    """Without a bundle: p, which has seen it."""
    bridge: bool = False
    """Without a bundle: the auxiliaries have another tokenizer than the provider."""
    ngram: str | None = None
    """Without a bundle: folder of an n-gram pair (`divdec ngram`)."""
    registry: str | None = None
    """Without a bundle: folder of a registry of takedown requests (`divdec takedown`)."""

    def check(self) -> None:
        """Refuse experts that are incomplete or given twice."""
        if (self.bundle is None) == (self.tokenizer is None):
            raise UsageError(
                "give either --bundle, or --tokenizer with experts (--retain-auxiliary and --forget-auxiliary, "
                "--ngram, --registry)"
            )
        models = (self.retain_auxiliary, self.forget_auxiliary, self.ngram)
        if self.bundle is None and self.steering is None and any(models):
            raise UsageError("--steering is required without a bundle: linear:ALPHA[:MARGIN] or rank:K[:MARGIN]")
        if self.bundle is not None and any((*models, self.registry, self.bridge)):
            raise UsageError(
                "a bundle names its experts: leave out --retain-auxiliary, --forget-auxiliary, --ngram, --registry "
                "and --bridge"
            )


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Provider:
    """The API, and how it is used."""

    endpoint: str
    """Base URL of the API without '/completions', such as http://localhost:8000/v1."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the API key."""
    method: Literal["bias", "candidates"] = "bias"
    """'bias' steers with logit_bias. 'candidates' sends no bias and chooses among the most likely tokens in the
    reply."""
    block: int = 1
    """Number of tokens per request. divdec keeps the tokens for which the steered choice is proved to be the same."""
    concurrency: int = 4
    """Prompts answered at the same time."""
    bias_entries: Annotated[int, RARE] = 300
    """Maximum number of logit_bias entries that the provider accepts."""
    bias_largest: Annotated[float, RARE] = 100.0
    """Largest value of an entry."""
    tries: Annotated[int, RARE] = 4
    """Maximum number of requests per token. With 1, every answer is accepted and its error bound is reported."""
    retries: Annotated[int, RARE] = 5
    """Repetitions of a request after a timeout, a dropped connection, or status 429 or 5xx."""
    timeout: Annotated[float, RARE] = 120.0
    """Longest wait for a reply, in seconds."""
    extra: Annotated[str | None, RARE] = None
    """Additional JSON fields for every request, such as '{"top_k": 0}' for a server that limits sampling by default."""

    def __post_init__(self) -> None:
        check_at_least("concurrency", self.concurrency, 1)


def remote(
    provider: Provider,
    *,
    experts: RemoteExperts = RemoteExperts(),
    prompts: Prompts = Prompts(),
    decoding: Decoding = Decoding(),
    printing: Printing = Printing(),
    output: OutputFile = OutputFile(),
    device: str = "auto",
) -> None:
    r"""Steer a model behind an OpenAI-compatible API.

    With --output, a stopped run keeps the finished answers, and the same command resumes it.

    For example:

        divdec remote --bundle bundle --endpoint https://api.example.com/v1 \
          --model big --api-key-env API_KEY --prompt 'Who wrote it?'

    Args:
        provider: the API.
        experts: the experts.
        prompts: the prompts.
        decoding: how answers are decoded.
        printing: format of the answers.
        output: where the answers go.
        device: Where the auxiliaries run: auto, cpu, cuda, …
    """
    from divdec.cli.loading import quiet
    from divdec.remote.experts import load_experts, source_digests
    from divdec.runs import LOCK, ResumableOutput, lock_file, settings_hash, unlock_file, write_text

    experts.check()
    file = output.prepare()
    quiet()
    sources, steering = _sources(experts, device)
    loaded = load_experts(sources)
    target = _target(provider, loaded, steering)
    records = prompts.read(target.completions.tokenizer)
    encoded = prompts.encode(records, target.completions.tokenizer)
    decisive = {
        "provider": dataclasses.asdict(dataclasses.replace(provider, concurrency=1, retries=0, timeout=0)),
        "experts": dataclasses.asdict(experts),
        "prompts": dataclasses.asdict(dataclasses.replace(prompts, prompt=(), file=None)),
        "decoding": dataclasses.asdict(decoding),
        "json": printing.json,
        "device": device,
        "rule": str(target.steering),
    }
    lines: list[str] = []
    texts = [record.prompt or [dataclasses.asdict(turn) for turn in record.messages] for record in records]
    partial = lock = None
    answers = ResumableOutput(None)
    try:
        if file is not None:
            busy = f"another `divdec remote` is writing {file}; wait for it, or give another --output"
            lock = lock_file(file.with_name(f".{file.name}{LOCK}"), busy)
            partial = file.with_name(f"{file.name}.partial")
            # Models and registries may change under their names.
            answers = ResumableOutput(partial, settings_hash([decisive, source_digests(sources, loaded)]))
        if file is None and len(records) == 1 and not printing.json:
            for piece in target.stream(encoded[0], **_arguments(decoding, 0)):
                print(piece, end="", flush=True)
            print()
        else:
            for row in _rows(target, encoded, texts, answers, decoding, provider.concurrency):
                lines.append(json.dumps(row, ensure_ascii=False) if printing.json else row["text"])
                if file is None:
                    print(lines[-1], flush=True)
        if file is not None and partial is not None:
            write_text(file, "".join(f"{line}\n" for line in lines))
            partial.unlink()
    finally:
        if lock is not None:
            unlock_file(lock)
        target.close()
        if target.completions.usage.requests:
            print(_summary(target), file=sys.stderr)


def _sources(experts: RemoteExperts, device: str) -> tuple[ExpertSources, Steering]:
    from divdec.cli.loading import device_map
    from divdec.remote.experts import ExpertSources, sources_from_bundle
    from divdec.steering import Steering

    where = device_map(device)
    steering = None if experts.steering is None else Steering.parse(experts.steering)
    if experts.bundle is not None:
        sources, stored = sources_from_bundle(experts.bundle, where)
        return sources, stored if steering is None else dataclasses.replace(steering, vocabulary=stored.vocabulary)
    assert experts.tokenizer is not None
    sources = ExpertSources(
        experts.tokenizer, experts.retain_auxiliary, experts.forget_auxiliary, experts.ngram, experts.registry,
        bridge=experts.bridge, device=where,
    )  # fmt: skip
    return sources, steering or Steering()  # without effect: a registry needs no rule


def _target(provider: Provider, loaded: LoadedExperts, steering: Steering) -> RemoteTarget:
    from divdec.cli.loading import warn_if_unsteered
    from divdec.endpoint import Endpoint
    from divdec.remote.bias import BiasLimits
    from divdec.remote.target import RemoteSettings, RemoteTarget

    endpoint = Endpoint(
        provider.endpoint, provider.model, provider.api_key_env, timeout=provider.timeout, retries=provider.retries
    )
    limits = BiasLimits(provider.bias_entries, provider.bias_largest)
    settings = RemoteSettings(provider.method, limits, provider.block, provider.tries)
    warn_if_unsteered(steering)
    return RemoteTarget(endpoint, loaded, steering, settings, _extra(provider))


def _extra(provider: Provider) -> dict[str, Any]:
    try:
        fields = json.loads(provider.extra or "{}")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise UsageError(f"--extra is {provider.extra!r}; accepted: a JSON object, such as '{{\"top_k\": 0}}'")
    return fields


def _arguments(decoding: Decoding, number: int) -> dict[str, Any]:
    """Return the sampling arguments of one prompt, which has its own seed."""
    return {
        "max_new_tokens": decoding.max_new_tokens,
        "temperature": decoding.temperature,
        "seed": (decoding.seed + number) % 2**32,
        "stop": decoding.stop,
    }


def _rows(
    target: RemoteTarget,
    encoded: list[list[int]],
    texts: list[Any],
    answers: ResumableOutput,
    decoding: Decoding,
    concurrency: int,
) -> Iterator[dict[str, Any]]:
    """Yield answers in the prompts' order, from several requests at a time; `answers` stores each complete one."""
    from concurrent.futures import ThreadPoolExecutor

    from tqdm.auto import tqdm

    from divdec.remote.target import RemoteAnswer

    stopped = threading.Event()

    def answer(number: int) -> dict[str, Any]:
        if number in answers and answers.items[number]["row"]["prompt"] == texts[number]:
            return answers.items[number]["row"]
        result = RemoteAnswer()
        for _ in target.stream(encoded[number], answer=result, **_arguments(decoding, number)):
            if stopped.is_set():
                raise UsageError("stopped")
        row = _row(texts[number], result, target)
        answers.add({"key": number, "row": row})
        return row

    with ThreadPoolExecutor(concurrency) as pool:
        tasks = [pool.submit(answer, number) for number in range(len(encoded))]
        try:
            for task in tqdm(tasks, unit="answer", disable=not sys.stderr.isatty()):
                yield task.result()
        except KeyboardInterrupt:  # after an error the other answers are completed and stored
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


def _summary(target: RemoteTarget) -> str:
    counts, statistics = target.completions.usage, target.exactness
    repeated = f", {counts.retries} of them repeated" if counts.retries else ""
    line = (
        f"{statistics.tokens} tokens by {counts.requests} requests{repeated} ({counts.prompt_tokens} prompt tokens, "
        f"{counts.answer_tokens} answer tokens); {statistics.exact} proved to be the steered model's"
    )
    if statistics.exact < statistics.tokens:
        line += (
            f"; the others at most {statistics.gap:.3g} nats or a total variation of "
            f"{statistics.total_variation:.3g} off"
        )
    return line
