"""A request to the engine: sampling parameters, state, and outputs."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from divdec.decoding.processors import SteeredProcessors
from divdec.decoding.speculative import PositionalRandom
from divdec.decoding.text import AnswerText
from divdec.sampling import pick
from divdec.serving.grammar import GrammarMatcher

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. The server checks their ranges; the rule is not among them."""

    max_tokens: int
    """Longest answer, in tokens; 0 only scores the prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    """Least probability of a token, relative to the likeliest one's."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both penalties count the tokens of the answer, not of the prompt, as the OpenAI API defines them."""
    repetition_penalty: float = 1.0
    """Counts the tokens of prompt and answer (Keskar et al. 2019)."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    """Makes the answer reproducible; None draws a seed."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    logprobs: int | None = None
    """Number of likeliest tokens per generated token; None returns no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    grammar: GrammarMatcher | None = None
    """Grammar of the answer, at its start."""
    skip_special_tokens: bool = True
    """Leave the names of special tokens out of the text."""
    shown_tokens: tuple[str, ...] = ()
    """Names of special tokens that the text has even so."""


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the steered model, before temperature, penalties and biases."""

    token: int
    logprob: float
    """At least `MIN_LOGPROB`."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this position, in descending order."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """New part of an answer."""

    text: str = ""
    """Whole characters; empty while a character is incomplete or a stop string may have begun."""
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """Where each token begins in the answer's text, in characters."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if requested."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """In the first output, if requested; None for the first token, which follows nothing."""
    finish_reason: str | None = None
    """'stop' or 'length' in the last output."""
    suppressed: float | None = None
    """In the last output, where it is measured: the largest share of probability that steering took at one token."""


@dataclasses.dataclass
class RequestTiming:
    """Times of one request, in nanoseconds since the epoch, and counts, for its spans."""

    prompt_tokens: int
    queued: int = dataclasses.field(default_factory=time.time_ns)
    prefill: int | None = None
    decode: int | None = None
    """Time of the first token."""
    end: int | None = None
    generated_tokens: int = 0
    suppressed: float | None = None
    """See `RequestOutput.suppressed`."""


class Request:
    """State of one request: tokens, random generator, text, output queue.

    Attributes:
        prompt: token ids of the prompt.
        answer: token ids of the answer so far.
        prompt_logprobs: log-probabilities of the prompt's tokens, once computed.
        outputs: queue of outputs and errors, read on the event loop `loop`.
        aborted: whether the client has gone.
        failed_in_batch: whether a pass with other requests failed, and no token has been generated since.
        timing: filled in while the request runs; None if it is not traced.
        suppressed: largest share of probability that steering took at one token so far, where it is measured.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        loop: asyncio.AbstractEventLoop,
        timing: RequestTiming | None = None,
    ) -> None:
        self.prompt, self.params, self.loop, self.timing = list(prompt), params, loop, timing
        self.answer: list[int] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.outputs: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        self.aborted = self.failed_in_batch = False
        self.suppressed = 0.0
        self.max_tokens = min(params.max_tokens, max_model_len - len(self.prompt))
        """Longest answer within the context."""
        self.grammar = None if params.grammar is None else params.grammar.start()
        self.processors = logits_processors(params, len(self.prompt), self.grammar)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._text = AnswerText(
            tokenizer, params.stop, self.prompt, skip_special=params.skip_special_tokens, shown=params.shown_tokens
        )
        self._uniform = PositionalRandom(torch.device("cpu"), self.seed())

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer

    @property
    def missing_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens per token of the prompt; None if nothing of the prompt is left to compute."""
        return self.params.prompt_logprobs if self.prompt_logprobs is None else None

    def seed(self) -> int:
        """Return the seed of the request, or a random one."""
        return secrets.randbits(62) if self.params.seed is None else self.params.seed

    def sample(self, logits: Float[Tensor, " vocab"]) -> int:
        """Choose the next token from steered logits, processed as the request asks."""
        scores = logits[None]
        if self.processors:
            scores = self.processors(torch.tensor([self.tokens], device=scores.device), scores)  # pyright: ignore[reportArgumentType]
        if self.params.temperature == 0:
            return int(scores.argmax())
        uniform = self._uniform(len(self.answer), 1)[0, 0, 2]
        return int(pick(scores[0].softmax(dim=-1).cpu(), uniform))

    def append_token(self, token: int, logits: Float[Tensor, " vocab"] | None) -> RequestOutput:
        """Append a token to the answer; `logits` are the steered, unprocessed ones, for log-probabilities."""
        self.answer.append(token)
        if self.timing is not None and self.timing.decode is None:
            self.timing.decode = time.time_ns()
        text, reason = self._text.add(token), None
        if self.grammar is not None:
            self.grammar.accept(token)
        if self._text.stopped or token in self._eos_token_ids or (self.grammar and self.grammar.is_complete):
            reason = "stop"
        elif len(self.answer) >= self.max_tokens:
            reason = "length"
        logprobs: tuple[TokenLogprob, ...] = ()
        if self.params.logprobs is not None:
            assert logits is not None
            logprobs = (token_logprob(logits.float().log_softmax(dim=-1), token, self.params.logprobs),)
        return self._output(text, reason, tokens=(token,), offsets=(self._text.start,), logprobs=logprobs)

    def finish_empty(self) -> RequestOutput:
        """Return the output of a request for no tokens, once its prompt has been read."""
        return self._output("", "length")

    def _output(self, text: str, reason: str | None, **fields: Any) -> RequestOutput:
        if reason is not None:
            text += self._text.end()
            reason = "stop" if self._text.stopped else reason
        prompt_logprobs = self.prompt_logprobs if len(self.answer) <= 1 else None  # in the first output alone
        return RequestOutput(text, prompt_logprobs=prompt_logprobs, finish_reason=reason, **fields)


def token_logprob(logprobs: Float[Tensor, " vocab"], token: int, number: int) -> TokenLogprob:
    """Return a token's log-probability and those of the likeliest tokens, as finite numbers."""
    values, tokens = logprobs.topk(min(number, len(logprobs)))
    top = zip(tokens.tolist(), map(_finite, values.tolist()), strict=True)
    return TokenLogprob(token, _finite(float(logprobs[token])), tuple(top))


def _finite(value: float) -> float:
    return MIN_LOGPROB if math.isnan(value) else max(value, MIN_LOGPROB)


class CountPenalty(LogitsProcessor):
    """`frequency_penalty` times a token's count in the answer, and `presence_penalty` if it occurs there."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(
        self, input_ids: Int[Tensor, "rows tokens"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """Return the scores less the penalties."""
        answer = input_ids[:, self._prompt_length :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def logits_processors(
    params: SamplingParams, prompt_length: int, grammar: GrammarMatcher | None = None
) -> SteeredProcessors:
    """Return the processors of a request in vLLM's order: grammar, bias, penalties, temperature, truncation."""
    processors: list[Any] = [] if grammar is None else [grammar]
    if params.logit_bias:
        biases = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(CountPenalty(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.temperature > 0:
        if params.temperature != 1:
            processors.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.min_p > 0:
            processors.append(MinPLogitsWarper(float(params.min_p)))
        if params.top_k > 0:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(float(params.top_p)))
    return SteeredProcessors(processors)
