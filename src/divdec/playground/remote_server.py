"""A running OpenAI-compatible server that answers, with the probabilities that it returns.

A server's client chooses neither rule nor strength.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from divdec.bridge.conversation import plain_prompt
from divdec.data.records import Message
from divdec.errors import UsageError
from divdec.playground.rendering import Token, TokenShift
from divdec.playground.steered_model import ChatOptions
from divdec.remote.client import Endpoint, Refused

TOP_LOGPROBS = 5
TIMEOUT = 300.0  # seconds; a server's queue may be long


class RemoteServer:
    """A model at a server."""

    def __init__(
        self, url: str, options: ChatOptions, *, model: str | None = None, api_key_env: str | None = None
    ) -> None:
        """Connect to a server.

        Args:
            url: such as http://127.0.0.1:8000, with or without /v1.
            options: how answers are generated.
            model: the server's name of the model; the first model by default.
            api_key_env: environment variable that holds the API key; None sends no key.

        Raises:
            UsageError: the server cannot be reached, requires a key, or does not serve the model.
        """
        self.url, self.options = f"{url.rstrip('/').removesuffix('/v1')}/v1", options
        endpoint = Endpoint(self.url, model or "", api_key_env, timeout=TIMEOUT, retries=0)
        with endpoint:
            try:
                models = endpoint.list_models()
            except Refused as error:
                if error.status != 401:
                    raise
                raise UsageError(
                    f"{self.url} requires an API key; set the environment variable DIVDEC_API_KEY to it"
                ) from None
        self.name = model or models[0]
        if self.name not in models:
            raise UsageError(f"{self.url} serves no model {self.name!r}; it serves: {', '.join(models)}")
        self._endpoint = dataclasses.replace(endpoint, model=self.name)

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def answer(self, messages: Sequence[Message], temperature: float = 0.0) -> Iterator[Token]:
        """Stream an answer; a model without a chat template receives a plain prompt.

        Args:
            messages: the conversation.
            temperature: 0 is greedy.

        Raises:
            UsageError: the server cannot be reached, or refuses.
            StreamInterrupted: the answer ends before it is complete.
        """
        if not messages or not messages[-1].content.strip():
            raise UsageError("there is nothing to answer: type a question")
        turns = list(messages[-1:] if self.options.single_turn else messages)
        if self.options.system_prompt:
            turns.insert(0, Message("system", self.options.system_prompt))
        fields = {"max_tokens": self.options.max_new_tokens, "temperature": temperature, "seed": self.options.seed}
        chat = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            for choice in self._endpoint.stream(messages=chat, logprobs=True, top_logprobs=TOP_LOGPROBS, **fields):
                yield from _parse_chat(choice)
        except Refused as error:
            if error.status != 400 or "chat template" not in str(error):
                raise
            prompt = plain_prompt((turn.role, turn.content) for turn in turns)
            for choice in self._endpoint.stream(prompt=prompt, logprobs=TOP_LOGPROBS, **fields):
                yield from _parse_completion(choice)


def _parse_chat(choice: Mapping[str, Any]) -> Iterator[Token]:
    text = (choice.get("delta") or {}).get("content") or ""
    entries = (choice.get("logprobs") or {}).get("content")
    if entries:
        top = {other["token"]: other["logprob"] for other in entries[-1].get("top_logprobs") or ()}
        yield _token(text, entries[-1]["token"], entries[-1]["logprob"], top)
    elif text:
        yield Token(text)


def _parse_completion(choice: Mapping[str, Any]) -> Iterator[Token]:
    text, logprobs = choice.get("text") or "", choice.get("logprobs") or {}
    if logprobs.get("tokens"):
        top = (logprobs.get("top_logprobs") or [None])[-1] or {}
        yield _token(text, logprobs["tokens"][-1], logprobs["token_logprobs"][-1] or 0, top)
    elif text:
        yield Token(text)


def _token(text: str, name: str, logprob: float, top_logprobs: Mapping[str, float]) -> Token:
    others = {other: value for other, value in top_logprobs.items() if other != name}
    alternatives = tuple(TokenShift(str(other), None, None, _probability(value)) for other, value in others.items())
    return Token(text, steered_probability=_probability(logprob), alternatives=alternatives)


def _probability(logprob: float) -> float:
    return math.exp(min(float(logprob), 0.0))
