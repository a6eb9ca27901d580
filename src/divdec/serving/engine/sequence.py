"""One answer in the making: its tokens, its chance, its text, and to whom it goes.

It knows nothing of models, caches or the rows of a batch.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.decoding.speculative import PositionalRandom
from divdec.decoding.text import AnswerText
from divdec.sampling import pick
from divdec.serving.engine.processors import processors_of
from divdec.serving.engine.requests import LOWEST, Piece, Sampling, TokenLogprob


class Running:
    """An answer from when it is asked for until its last piece.

    Attributes:
        prompt: the prompt's token ids.
        answer: the answer's so far.
        prompt_logprobs: of each of the prompt's tokens, once they are known.
        cancelled: whether nobody waits for it any longer.
        suspect: whether a pass has failed in which it was with others, and it has made no token since.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        tokenizer: Any,
        ends: frozenset[int],
        max_model_len: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.prompt, self.sampling = list(prompt), sampling
        self.answer: list[int] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.cancelled = False
        self.suspect = False
        self.loop = loop
        self.pieces: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        self.most = min(sampling.max_tokens, max_model_len - len(self.prompt))
        """Tokens that the answer has at most."""
        self._ends = frozenset() if sampling.ignore_eos else ends
        self._text = AnswerText(tokenizer, sampling.stop, self.prompt)
        self.processors = processors_of(sampling, len(self.prompt))
        self._uniform = PositionalRandom(1, torch.device("cpu"), self.chance())
        self._told_prompt = False

    def chance(self) -> int:
        """A seed: the request's, or one that nobody knows."""
        return secrets.randbits(62) if self.sampling.seed is None else self.sampling.seed

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer

    @property
    def wants_all(self) -> bool:
        """Whether log-probabilities of the prompt are still to be found."""
        return self.sampling.prompt_logprobs is not None and self.prompt_logprobs is None

    def choose(self, logits: Float[Tensor, " vocab"]) -> int:
        """The next token, from steered logits after what the request asks for."""
        scores = logits[None]
        if self.processors:
            scores = self.processors(torch.tensor([self.tokens], device=scores.device), scores)  # pyright: ignore[reportArgumentType]
        if self.sampling.temperature == 0:
            return int(scores.argmax())
        uniform = self._uniform([0], [len(self.answer)], 1)[0, 0, 2]
        return int(pick(scores[0].softmax(dim=-1).cpu(), uniform))

    def take(self, token: int, logits: Float[Tensor, " vocab"] | None) -> Piece:
        """Add a token to the answer.

        Args:
            token: what was chosen.
            logits: what it was chosen from, steered, before anything that the request asks for; needed only where
                log-probabilities are told.
        """
        self.answer.append(token)
        text = self._text.add(token)
        start = self._text.start
        told: tuple[TokenLogprob, ...] = ()
        if self.sampling.logprobs is not None:
            assert logits is not None
            told = (token_logprob(logits.float().log_softmax(dim=-1), token, self.sampling.logprobs),)
        reason = None
        if self._text.stopped or token in self._ends:
            reason = "stop"
        elif len(self.answer) >= self.most:
            reason = "length"
        return self._piece(text, (token,), (start,), told, reason)

    def end_empty(self) -> Piece:
        """The answer to a request for no tokens, once its prompt has been read."""
        return self._piece("", (), (), (), "length")

    def _piece(
        self,
        text: str,
        tokens: tuple[int, ...],
        starts: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        reason: str | None,
    ) -> Piece:
        if reason is not None:
            text += self._text.end()
            if self._text.stopped:
                reason = "stop"
        prompt = None if self._told_prompt else self.prompt_logprobs
        self._told_prompt = True
        return Piece(text, tokens, starts, logprobs, prompt, reason)


def token_logprob(logprobs: Float[Tensor, " vocab"], token: int, number: int) -> TokenLogprob:
    """A token's log-probability, and those of the likeliest tokens, as numbers that JSON has."""
    values, tokens = logprobs.topk(min(number, len(logprobs)))
    top = zip(tokens.tolist(), map(_finite, values.tolist()), strict=True)
    return TokenLogprob(token, _finite(float(logprobs[token])), tuple(top))


def _finite(value: float) -> float:
    return max(value, LOWEST) if not math.isnan(value) else LOWEST
