"""Client of a model behind an OpenAI-compatible API: the `openai` package, with the project's errors."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import openai

from divdec.errors import UsageError, first_line

MAX_WAIT = 60  # seconds, as in the openai package
TRANSIENT = frozenset((408, 409, 429))  # the openai package retries these and all 5xx
CONNECT_TIMEOUT = 15.0  # seconds


class Refused(UsageError):
    """The endpoint refuses the request with the given status; retrying does not help."""

    def __init__(self, message: str, status: int = 0) -> None:  # unpickling passes the message alone
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A model at an OpenAI-compatible endpoint; threads may share it. Close it after use, or use a `with` block.

    Its methods raise a `UsageError` if the endpoint cannot be reached, refuses (`Refused`), stays overloaded or replies
    in another format.
    """

    base_url: str
    """URL before '/completions', such as 'http://localhost:8000/v1'."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; None sends no key."""
    timeout: float = 120.0
    """Timeout of one attempt, in seconds."""
    retries: int = 5
    """Retries after a timeout, a failed connection, or status 408, 409, 429 or 5xx; a Retry-After header is obeyed."""

    def __post_init__(self) -> None:
        if set("@?#") & set(self.base_url):
            # URLs are printed and recorded; keys are not.
            raise UsageError(
                "the endpoint's URL holds a user, a password or a query; name an environment variable for the key"
            )
        try:
            parts = urlsplit(self.base_url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            valid = valid and self.base_url.isprintable() and " " not in self.base_url
        except ValueError:  # an unclosed bracket, a port that is not a number
            valid = False
        if not valid:
            raise UsageError(
                f"endpoint {self.base_url!r} is not a URL of http or https; give one such as http://localhost:8000/v1"
            )
        if not 0 < self.timeout < math.inf or self.retries < 0:
            raise UsageError(
                f"timeout is {self.timeout}, retries {self.retries}; accepted: a timeout above 0, retries of 0 or more"
            )

    @functools.cached_property
    def _client(self) -> openai.OpenAI:
        timeout = openai.Timeout(self.timeout, connect=min(self.timeout, CONNECT_TIMEOUT))
        # Each request sends the key that its environment variable holds then, or none.
        client = openai.OpenAI(base_url=self.base_url, api_key="none", timeout=timeout, max_retries=self.retries)
        return _without_custom_headers(client)

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    def complete(self, messages: Iterable[Mapping[str, Any]], max_tokens: int = 512) -> str:
        """Return the model's greedy reply to a conversation."""
        fields = {"temperature": 0.0, "max_tokens": max_tokens}
        content, _ = self._create("chat/completions", {"messages": list(messages)}, fields)
        try:
            reply = content["choices"][0]["message"]["content"] or ""  # null in place of an unfinished thought
        except (KeyError, IndexError, TypeError):
            reply = None
        if not isinstance(reply, str):
            raise UsageError(
                f"endpoint {self.base_url} replied without choices[0].message.content: not OpenAI-compatible"
            )
        return reply

    def create_completion(self, prompt: str | list[int], final: Collection[int] = (), **fields: Any) -> tuple[Any, int]:
        """Return the reply to a request to /completions as JSON, and the number of retries.

        `final` are statuses that mean "refused" here although they are retried elsewhere.
        """
        return self._create("completions", {"prompt": prompt}, fields, final)

    def _create(
        self, path: str, required: dict[str, Any], fields: dict[str, Any], final: Collection[int] = ()
    ) -> tuple[Any, int]:
        key = self._api_key()
        options = {"model": self.model, **required, "extra_headers": _headers(key), "extra_body": fields}
        try:
            response = self._send(self._client, path, options, final)
        except openai.APIError as error:
            raise self._error(path, error, final, key) from None
        except Exception as error:  # half a surrogate pair, a proxy that the HTTP library does not know, a broken URL
            reason = f"{type(error).__name__}: {first_line(error)}".replace(key or "\0", "[key]")
            raise UsageError(f"the request to {self.base_url} cannot be written as JSON or sent ({reason})") from None
        try:
            content = response.http_response.json()
        except (ValueError, RecursionError):
            raise UsageError(f"endpoint {self.base_url} did not reply with JSON: not OpenAI-compatible") from None
        if isinstance(content, dict) and content.get("error") and "choices" not in content:
            reason = str(content["error"]).replace(key or "\0", "[key]")[:300]
            raise UsageError(f"endpoint {self.base_url} replied with an error: {reason}")
        return content, response.retries_taken

    def _send(self, client: openai.OpenAI, path: str, options: dict[str, Any], final: Collection[int]) -> Any:
        if final:
            try:
                return self._send(_without_custom_headers(client.with_options(max_retries=0)), path, options, ())
            except openai.APIStatusError as error:
                if error.status_code in final:
                    raise
                wait = error.response.headers.get("retry-after", "")
                time.sleep(min(int(wait), MAX_WAIT) if wait.isdecimal() else 0)
            except openai.APIConnectionError:
                pass
        resource: Any = client.completions if path == "completions" else client.chat.completions
        return resource.with_raw_response.create(**options)

    def _error(self, path: str, error: openai.APIError, final: Collection[int], key: str | None) -> UsageError:
        url, attempts = f"{self.base_url.rstrip('/')}/{path}", self.retries + 1
        if isinstance(error, openai.APIStatusError):
            status, text = error.status_code, error.response.text
            text = text.replace(key, "[key]") if key else text
            reason = f"status {status}: {text[:300].strip()}"  # cut after the key is replaced, never within it
            if status in final or not (status in TRANSIENT or status >= 500):
                return Refused(f"endpoint {url} refused model {self.model!r} ({reason})", status)
            return UsageError(f"endpoint {url} gave no answer in up to {attempts} attempts ({reason})")
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".rstrip(": ")
        if isinstance(error, openai.APITimeoutError):
            return UsageError(f"endpoint {url} gave no answer in up to {attempts} attempts ({reason})")
        return UsageError(
            f"endpoint {url} cannot be reached in {attempts} attempts ({reason}); is the server running, the URL right?"
        )

    def _api_key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UsageError(f"environment variable {self.api_key_env} is not set; it should hold the API key")
        # The HTTP library would quote the key in its error.
        if not key.isascii() or not key.isprintable():
            raise UsageError(f"the API key in {self.api_key_env} holds characters that no key has")
        return key


def _without_custom_headers(client: openai.OpenAI) -> openai.OpenAI:
    client._custom_headers = {}  # those of OPENAI_CUSTOM_HEADERS are for another provider
    return client


def _headers(key: str | None) -> dict[str, Any]:
    return {
        "Authorization": f"Bearer {key}" if key else openai.Omit(),
        # The openai package reads these from the environment; other providers must not see them.
        "OpenAI-Organization": openai.Omit(),
        "OpenAI-Project": openai.Omit(),
    }
