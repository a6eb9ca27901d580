"""A running server of the OpenAI API that answers a viewer, with what such a server tells: text and probabilities.

It can name neither rule nor strength: a client must not choose them. It knows nothing of pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from divdec.bridge.plain_layout import plain_prompt
from divdec.data.records import Message
from divdec.errors import UsageError
from divdec.playground.steered import Manner
from divdec.playground.tokens import Other, Token
from divdec.remote.client import Endpoint

TOP = 5  # likeliest tokens that are asked for
PATIENCE = httpx.Timeout(300.0, connect=15.0)  # seconds; a queue may be long


class Broken(RuntimeError):
    """The server went away, or gave up, while it answered; what had come until then stands."""


class OverHttp:
    """A server's model as the page uses it."""

    def __init__(self, url: str, manner: Manner, *, model: str | None = None, key: str | None = None) -> None:
        """Ask the server what it serves.

        Args:
            url: such as http://127.0.0.1:8000, with or without /v1.
            manner: how answers are made; the seed goes along with each request.
            model: what the server calls the model; the first that it serves by default.
            key: what the server wants as a bearer token.

        Raises:
            UsageError: the server cannot be reached, wants a key, or serves no such model.
        """
        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        Endpoint(self.url, model or "")  # refuses what is no URL
        self.manner = manner
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError("the API key holds characters that no key has")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=PATIENCE, headers=headers)
        try:
            served = self._models()
            self.name = model or served[0]
            if self.name not in served:
                raise UsageError(f"{self.url} serves no model {self.name!r}; it serves: {', '.join(served)}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def answer(self, messages: Sequence[Message], temperature: float = 0.0) -> Iterator[Token]:
        """Stream an answer.

        Args:
            messages: the conversation.
            temperature: 0 is greedy.

        Raises:
            UsageError: the server cannot be reached, or refuses.
            Broken: it went away in the middle.
        """
        if not messages or not messages[-1].content.strip():
            raise UsageError("there is nothing to answer: type a question")
        turns = [*self._system(), *(messages[-1:] if self.manner.single_turn else messages)]
        body = {
            "model": self.name,
            "max_tokens": self.manner.max_new_tokens,
            "temperature": temperature,
            "seed": self.manner.seed,
            "stream": True,
        }
        spoken = [{"role": turn.role, "content": turn.content} for turn in turns]
        asked = {**body, "messages": spoken, "logprobs": True, "top_logprobs": TOP}
        try:
            yield from self._stream("chat/completions", asked, _of_chat)
        except NoTemplate:
            prompt = plain_prompt((turn.role, turn.content) for turn in turns)
            yield from self._stream("completions", {**body, "prompt": prompt, "logprobs": TOP}, _of_completion)

    def _system(self) -> list[Message]:
        return [Message("system", self.manner.system_prompt)] if self.manner.system_prompt else []

    def _models(self) -> list[str]:
        try:
            response = self._client.get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise UsageError(f"{self.url} cannot be reached ({_reason(error)}); is the server up?") from None
        if response.status_code == 401:
            raise UsageError(f"{self.url} wants an API key; put it into the environment as DIVDEC_API_KEY")
        try:
            found = [str(card["id"]) for card in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            found = []
        if not response.is_success or not found:
            raise UsageError(f"{self.url}/models names no model (status {response.status_code}); give a server's URL")
        return found

    def _stream(self, path: str, body: Mapping[str, Any], read: Any) -> Iterator[Token]:
        begun = False
        try:
            with self._client.stream("POST", f"{self.url}/{path}", json=dict(body)) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    event = _event(data)
                    begun = True
                    yield from read(event)
        except httpx.HTTPError as error:
            if not begun:
                raise UsageError(f"{self.url} cannot be reached ({_reason(error)}); is the server up?") from None
            raise Broken(f"the server went away in the middle of the answer ({_reason(error)})") from None
        raise Broken("the server ended the answer before its end")


class NoTemplate(UsageError):
    """The server's model has no chat template: it takes plain prompts only."""


def _refusal(response: httpx.Response) -> UsageError:
    try:
        error = response.json()["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    if response.status_code == 400 and "chat template" in message:
        return NoTemplate(message)
    return UsageError(f"the server refuses: {message}")


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise Broken("the server sent something that is no event of the OpenAI API")
    if "error" in event:
        said = event["error"].get("message") if isinstance(event["error"], dict) else event["error"]
        raise Broken(f"the server stopped in the middle of the answer: {said}")
    return event


def _of_chat(event: Mapping[str, Any]) -> Iterator[Token]:
    for choice in event.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") or ""
        told = ((choice.get("logprobs") or {}).get("content")) or ()
        if told:
            last = told[-1]
            others = {str(other["token"]): float(other["logprob"]) for other in last.get("top_logprobs") or ()}
            yield _token(text, str(last["token"]), float(last["logprob"]), others)
        elif text:
            yield Token(text)


def _of_completion(event: Mapping[str, Any]) -> Iterator[Token]:
    for choice in event.get("choices") or ():
        text, told = choice.get("text") or "", choice.get("logprobs") or {}
        if told.get("tokens"):
            top = (told.get("top_logprobs") or [None])[-1] or {}
            yield _token(text, str(told["tokens"][-1]), float(told["token_logprobs"][-1] or 0), top)
        elif text:
            yield Token(text)


def _token(text: str, name: str, logprob: float, others: Mapping[str, float]) -> Token:
    likely = tuple(Other(other, after=_probability(float(value))) for other, value in others.items() if other != name)
    return Token(text, after=_probability(logprob), others=likely)


def _probability(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
