"""Making the answers of one request: several at once, and within a time limit."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

from divdec.serving.api.errors import ApiError, invalid
from divdec.serving.api.metrics import Metrics
from divdec.serving.api.record import RequestRecord
from divdec.serving.api.schemas import Generation
from divdec.serving.api.vocabulary import Vocabulary
from divdec.serving.engine.engine import Engine
from divdec.serving.engine.requests import Piece, Sampling, TokenLogprob

MOST_TOLD = 1_000_000  # log-probabilities in one request's answers
COLDEST = 1e-5  # below it, division by the temperature overflows, and only the likeliest token is left anyway


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may take."""

    max_tokens: int = 4096
    """Longest answer."""
    max_seconds: float = 300.0
    """Longest time for an answer, the wait in the queue included."""
    max_body_bytes: int = 2 * 1024 * 1024
    """Largest body."""
    max_sequences: int = 160
    """Most answers at once: prompts times n (or best_of)."""
    slowest_reader: float = 60.0
    """Seconds in which a client must take something of its stream."""


class Served:
    """An engine and its tokenizer, by the name that clients give."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.vocabulary = Vocabulary(engine.tokenizer, engine.vocab_size)


@dataclasses.dataclass
class Server:
    """What all endpoints share."""

    models: Mapping[str, Served]
    limits: Limits
    metrics: Metrics

    def find(self, name: str | None) -> Served:
        """The model of this name; the only one where none is given.

        Raises:
            ApiError: there is none of this name.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise invalid("field 'model' is required: several models are served", "model", "missing_required_parameter")
        if name not in self.models:
            told = f"there is no model {name[:200]!r} here; there are: {', '.join(self.models)}"
            raise ApiError(404, told, param="model", code="model_not_found")
        return self.models[name]


@dataclasses.dataclass
class Answer:
    """What has come of one answer so far."""

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Add what has come."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.starts += piece.starts
        self.logprobs += piece.logprobs
        self.prompt_logprobs = piece.prompt_logprobs if piece.prompt_logprobs is not None else self.prompt_logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason

    @property
    def mean_logprob(self) -> float:
        """By which the best of several is chosen."""
        values = [token.logprob for token in self.logprobs]
        return sum(values) / len(values) if values else 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer that is to be made."""

    prompt: Sequence[int]
    sampling: Sampling


def sampling_of(
    asked: Generation, served: Served, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
) -> Sampling:
    """What the engine is asked for the first answer to a prompt; further ones differ in the seed.

    Raises:
        ApiError: a token of logit_bias is outside the vocabulary.
    """
    served.vocabulary.check(asked.logit_bias, "logit_bias")
    return Sampling(
        max_tokens=max_tokens,
        temperature=asked.temperature if asked.temperature >= COLDEST else 0.0,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=dict(asked.logit_bias),
        seed=asked.seed,
        stop=tuple(asked.stop),
        ignore_eos=asked.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def jobs_of(prompts: Iterable[Sequence[int]], sampling: Sampling, times: int) -> list[Job]:
    """So many answers to each prompt; the i-th answer has the i-th seed."""
    seeds = [None if sampling.seed is None else (sampling.seed + number) % 2**63 for number in range(times)]
    return [Job(prompt, dataclasses.replace(sampling, seed=seed)) for prompt in prompts for seed in seeds]


def room(served: Served, prompt: Sequence[int], asked: int | None, default: int | None, limits: Limits) -> int:
    """How long an answer to a prompt may become.

    Args:
        served: the model.
        prompt: token ids.
        asked: what the client asks for; None where it does not.
        default: the longest in that case; None for what is left of the context.
        limits: the server's.

    Raises:
        ApiError: the prompt, or prompt and answer, do not fit the context, or the answer is beyond the limit.
    """
    longest = served.engine.max_model_len
    if asked is not None and asked > limits.max_tokens:
        raise invalid(f"max_tokens is {asked}: this server answers with at most {limits.max_tokens}", "max_tokens")
    if len(prompt) + (1 if asked is None else asked) > longest:
        answer = "" if asked is None else f" and {asked} of the answer"
        raise invalid(
            f"the context has {longest} tokens; the prompt has {len(prompt)}{answer}: shorten them",
            "max_tokens" if asked is not None and len(prompt) < longest else "prompt",
            "context_length_exceeded",
        )
    if asked is not None:
        return asked
    left = min(longest - len(prompt), limits.max_tokens)
    return left if default is None else min(left, default)


def _check_told(jobs: Sequence[Job]) -> None:
    """Refuse what would be more numbers than one answer should hold in memory."""
    told = 0
    for job in jobs:
        for number, tokens in (
            (job.sampling.prompt_logprobs, len(job.prompt)),
            (job.sampling.logprobs, job.sampling.max_tokens),
        ):
            told += 0 if number is None else (1 + number) * tokens
    if told > MOST_TOLD:
        raise invalid(
            f"this asks for up to {told} log-probabilities, of which one request may have {MOST_TOLD}: ask for fewer "
            "answers, tokens or likeliest tokens",
            "logprobs",
        )


async def run(
    server: Server, served: Served, jobs: Sequence[Job], record: RequestRecord
) -> AsyncGenerator[tuple[int, Piece], None]:
    """All pieces of all answers as they come, each with its answer's number.

    Raises:
        Busy, Closing, FailedClosed, UsageError: the engine's, of whichever answer is first.
        TimeoutError: they took longer than the server allows.
    """
    pieces: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def pump(number: int, job: Job) -> None:
        stream = served.engine.generate(job.prompt, job.sampling)
        try:
            async for piece in stream:
                pieces.put_nowait((number, piece))
            pieces.put_nowait((number, None))
        except Exception as error:
            pieces.put_nowait((number, error))
        finally:
            await stream.aclose()

    _check_told(jobs)
    deadline = asyncio.get_running_loop().time() + server.limits.max_seconds
    watched = server.metrics.watch(served.engine.name, len(jobs))
    tasks = [asyncio.create_task(pump(number, job)) for number, job in enumerate(jobs)]
    left = len(tasks)
    try:
        while left:
            async with asyncio.timeout_at(deadline):
                number, found = await pieces.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
                continue
            watched.piece(number, len(found.tokens))
            record.generated_tokens += len(found.tokens)
            if found.finish_reason:
                record.finish_reasons.append(found.finish_reason)
            yield number, found
    finally:
        # Whoever does not get its answer must not keep its rows: closing the engine's generators frees them.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(pieces: AsyncGenerator[tuple[int, Piece], None], count: int) -> list[Answer]:
    """All answers, whole."""
    answers = [Answer() for _ in range(count)]
    try:
        async for number, piece in pieces:
            answers[number].add(piece)
    finally:
        await pieces.aclose()
    return answers


def now() -> int:
    """The time, as answers tell it."""
    return int(time.time())
