"""A running server that answers on the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from divdec.data.formatting import plain_prompt
from divdec.data.records import Message
from divdec.endpoint import Endpoint, Refused
from divdec.errors import UsageError
from divdec.playground.models import NO_QUESTION, ChatOptions
from divdec.playground.rendering import Token, TokenShift
from divdec.serving.logprobs import REFUSED

TOP_LOGPROBS = 5
TIMEOUT = 300.0  # seconds; a server's queue may be long


class RemoteServer:
    """A model at an OpenAI-compatible server, which sets rule and strength."""

    def __init__(
        self, url: str, options: ChatOptions, *, model: str | None = None, api_key_env: str | None = None
    ) -> None:
        """Connect to a server, such as http://127.0.0.1:8000, with or without /v1; it must serve the model.

        Without `model`, its first model answers. `api_key_env` is the environment variable that holds the API key.
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
        self._chat = self._logprobs = self._seeds = True  # until the server refuses

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def answer(self, messages: Sequence[Message], temperature: float = 0.0) -> Iterator[Token]:
        """Stream an answer; a model without a chat template receives a plain prompt. Errors are those of `Endpoint`."""
        if not messages or not messages[-1].content.strip():
            raise UsageError(NO_QUESTION)
        turns = list(messages[-1:] if self.options.single_turn else messages)
        if self.options.system_prompt:
            turns.insert(0, Message("system", self.options.system_prompt))
        fields = {"max_tokens": self.options.max_new_tokens, "temperature": temperature}
        while True:
            seed = {"seed": self.options.seed} if self._seeds or temperature == 0 else {}
            try:
                yield from (self._stream_chat if self._chat else self._stream_text)(turns, fields | seed)
                return
            except Refused as error:
                if error.status != 400:
                    raise
                if self._chat and "chat template" in str(error):
                    self._chat = False
                elif self._seeds and REFUSED in str(error) and "'seed'" in str(error):
                    self._seeds = False
                elif self._logprobs and REFUSED in str(error):
                    self._logprobs = False
                else:
                    raise

    def _stream_chat(self, turns: Sequence[Message], fields: Mapping[str, Any]) -> Iterator[Token]:
        chat = [{"role": turn.role, "content": turn.content} for turn in turns]
        asked: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if self._logprobs else {}
        if self.options.chat_template_kwargs:
            asked["chat_template_kwargs"] = self.options.chat_template_kwargs
        for choice in self._endpoint.stream(messages=chat, **asked, **fields):
            entries = (choice.get("logprobs") or {}).get("content") or [{}]
            top = {other["token"]: other["logprob"] for other in entries[-1].get("top_logprobs") or ()}
            text = (choice.get("delta") or {}).get("content")
            yield from _read_token(text, entries[-1].get("token"), entries[-1].get("logprob"), top)

    def _stream_text(self, turns: Sequence[Message], fields: Mapping[str, Any]) -> Iterator[Token]:
        prompt = plain_prompt((turn.role, turn.content) for turn in turns)
        asked: dict[str, Any] = {"logprobs": TOP_LOGPROBS} if self._logprobs else {}
        for choice in self._endpoint.stream(prompt=prompt, **asked, **fields):
            logprobs = choice.get("logprobs") or {}
            name, logprob, top = (
                (logprobs.get(field) or [None])[-1] for field in ("tokens", "token_logprobs", "top_logprobs")
            )
            yield from _read_token(choice.get("text"), name, logprob, top or {})


def _read_token(
    text: str | None, name: str | None, logprob: float | None, top_logprobs: Mapping[str, float]
) -> Iterator[Token]:
    """Yield the token of a chunk, if it has one; without a name it has no probabilities."""
    if name is None:
        if text:
            yield Token(text)
        return
    others = {str(other): math.exp(min(value, 0.0)) for other, value in top_logprobs.items() if other != name}
    alternatives = tuple(TokenShift(other, steered_probability=value) for other, value in others.items())
    yield Token(text or "", steered_probability=math.exp(min(logprob or 0.0, 0.0)), alternatives=alternatives)
