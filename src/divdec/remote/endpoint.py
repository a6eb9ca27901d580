"""A model behind an OpenAI-compatible endpoint, reached patiently: repeated requests, obeyed waits, plain errors.

It knows nothing of what is asked. The API key is read from an environment variable and never shown.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from divdec.errors import UsageError

TRANSIENT = frozenset((408, 409, 429, 500, 502, 503, 504, 529))
LONGEST_PAUSE = 60.0


class Refused(UsageError):
    """The endpoint will not have the request (`status` 4xx): to repeat it is of no use."""

    def __init__(self, message: str, status: int = 0) -> None:  # whoever unpickles it gives the message alone
        super().__init__(message)
        self.status = status


class Unavailable(UsageError):
    """The endpoint gave no answer in any attempt; `status` is its last, None where there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where completions are had, and how patiently. Close it after use, or use it in a `with` block."""

    base_url: str
    """What stands before '/completions', such as 'http://localhost:8000/v1'."""
    model: str
    """The model's name at the endpoint."""
    api_key_variable: str | None = None
    """Environment variable that holds the API key; None sends none."""
    timeout: float = 120.0
    """Longest wait for an answer, in seconds."""
    retries: int = 5
    """How often a request is repeated after a timeout, a dropped connection, or status 429 or 5xx."""
    pause: float = 1.0
    """Wait before the first repetition, in seconds; it doubles each time. A longer Retry-After is obeyed."""
    on_retry: Callable[[str], None] | None = None
    """Called before each repetition, with what went wrong."""

    def __post_init__(self) -> None:
        if set("@?#") & set(self.base_url):
            # A URL is printed and recorded; a key is not.
            raise UsageError(
                "the endpoint's URL holds a user, a password or a query; name an environment variable for the key"
            )
        try:
            parts = urlsplit(self.base_url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            httpx.URL(self.base_url)
        except (ValueError, httpx.InvalidURL):  # a bracket left open, a port that is no number, a line's end
            usable = False
        if not usable:
            raise UsageError(
                f"endpoint {self.base_url!r} is not a URL of http or https; give one such as http://localhost:8000/v1"
            )
        if not 0 < self.timeout < math.inf or self.retries < 0 or not 0 <= self.pause < math.inf:
            raise UsageError("an endpoint's timeout is greater than 0, its retries and pause are 0 or more")

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> str:
        """The model's reply to a conversation. Threads may call it at the same time.

        Args:
            messages: turns with role and content.
            temperature: of sampling; 0 is greedy.
            max_tokens: longest reply.
            seed: of sampling; endpoints may ignore it.

        Raises:
            UsageError: the endpoint cannot be reached, refuses, stays overloaded, or replies in another format.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        if seed is not None:
            body["seed"] = seed
        return self._text(self.post("chat/completions", body))

    def post(self, path: str, body: Mapping[str, Any], final: Collection[int] = ()) -> httpx.Response:
        """The answer to one request. Threads may call it at the same time.

        Args:
            path: what stands behind the base URL, such as 'completions'.
            body: the request.
            final: statuses that are a refusal here, though others would ask again.

        Raises:
            Refused: the endpoint will not have it.
            Unavailable: it stays overloaded or broken.
            UsageError: it cannot be reached.
        """
        key = self._key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = self._url(path)
        trouble, status = "", None
        for attempt in range(self.retries + 1):
            wait = self.pause * 2**attempt
            try:
                response = self._client.post(url, json=dict(body), headers=headers)
            except ValueError as error:  # half a character, or a number that JSON does not have
                raise UsageError(f"the request cannot be written as JSON ({type(error).__name__})") from None
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.ProxyError) as error:
                raise UsageError(
                    f"endpoint {url} cannot be reached ({_reason(error)}); is the server up, the URL right?"
                ) from None
            except httpx.RequestError as error:
                trouble, status = _reason(error), None
            else:
                status = response.status_code
                if response.is_success:
                    return response
                said = response.text.replace(key, "[key]") if key else response.text
                trouble = f"status {status}: {said[:300].strip()}"  # cut afterwards: half of a key is not replaced
                if status not in TRANSIENT or status in final:
                    raise Refused(f"endpoint {url} refused model {self.model!r} ({trouble})", status)
                wait = max(wait, _retry_after(response))
            if attempt < self.retries:
                if self.on_retry is not None:
                    self.on_retry(trouble)
                time.sleep(min(wait, LONGEST_PAUSE))
        raise Unavailable(f"endpoint {url} gave no answer in {self.retries + 1} attempts ({trouble})", status)

    @functools.cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=httpx.Timeout(self.timeout, connect=min(self.timeout, 15.0)))

    def _url(self, path: str) -> str:
        return f"{self.base_url.rstrip('/')}/{path}"

    def _key(self) -> str | None:
        if self.api_key_variable is None:
            return None
        key = os.environ.get(self.api_key_variable, "").strip()
        if not key:
            raise UsageError(f"environment variable {self.api_key_variable} is not set; it should hold the API key")
        # The HTTP library would quote it in its own error.
        if not key.isascii() or not key.isprintable():
            raise UsageError(f"the API key in {self.api_key_variable} holds characters that no key has")
        return key

    def _text(self, response: httpx.Response) -> str:
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            url = self._url("chat/completions")
            raise UsageError(f"endpoint {url} replied without choices[0].message.content: not OpenAI-compatible")
        return text


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 where it names none or a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
