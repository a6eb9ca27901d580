"""Asking an OpenAI-compatible /completions endpoint to go on, and reading its answer as tokens.

It knows nothing of experts or rules. Providers differ in what they take and tell: token ids or text as the prompt, ids
or texts of tokens in the answer, how many log-probabilities, and whether a bias shows in them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from divdec.bridge.token_bytes import BYTE_TOKEN, token_bytes
from divdec.errors import UsageError
from divdec.remote.client import Endpoint

BY_ID = "token_id:"
_UNREADABLE = "\ufffd"
_ROUNDING = 1e-3  # nats that a log-probability may lie above 0
_CUT_OFF = -1000.0
# What decides which tokens come, and what an answer proves; a request has them from whoever asks.
OWN = frozenset(
    (
        "model", "prompt", "max_tokens", "temperature", "top_p", "seed", "logit_bias", "logprobs", "n", "best_of",
        "echo", "stream", "stop", "suffix", "return_tokens_as_token_ids",
    )
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a provider takes and tells, as `divdec.remote.probe` finds out."""

    prompt_ids: bool = True
    """It takes a prompt as token ids; otherwise as text."""
    answer_ids: bool = True
    """It names an answer's tokens by id (`return_tokens_as_token_ids`); otherwise by text."""
    top_logprobs: int = 20
    """How many log-probabilities it tells at each position; 0 for none."""
    raw_logprobs: bool = True
    """They are the target's own; otherwise the bias is in them."""
    neutral: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Fields that turn off what a server would do to the logits by its own defaults, as far as it takes them."""


@dataclasses.dataclass
class Counts:
    """What was asked of a provider. Threads may add at the same time."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        """Count more of some."""
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)


@dataclasses.dataclass(frozen=True)
class Position:
    """One token of a reply."""

    token: int
    told: dict[int, float] | None
    """Log-probabilities by token id, the likeliest; None where too few can be told apart to be sure of the others."""
    floor: float = 0.0
    """Log-probability above which every token was told."""
    alike: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    """For tokens here whose name others have too: those others. Which of them was meant is not sure."""


class Unnamed(UsageError):
    """The provider took the request, and did not name its tokens as it was asked to."""


class Completions:
    """A model at an endpoint, and the tokenizer that it is known to use."""

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: Any,
        end: int,
        size: int | None = None,
        extra: Mapping[str, Any] | None = None,
        other_ends: Collection[int] = (),
    ) -> None:
        """Prepare.

        Args:
            endpoint: where the model is.
            tokenizer: the model's own; a fast one where the provider talks in texts.
            end: the token that ends an answer.
            size: how many of its tokens may come, from the first; all by default.
            extra: further fields of every request, such as {"top_k": 0} for a server that samples among few.
            other_ends: further tokens that end an answer; which of them it was is not sure where it is not named.

        Raises:
            UsageError: a further field is one that requests have already.
        """
        if taken := sorted(OWN & set(extra or ())):
            raise UsageError(f"extra holds {', '.join(taken)}, which a request has already; leave it out")
        self.counts = Counts()
        self.endpoint = endpoint
        self.tokenizer, self.end, self.extra = tokenizer, end, dict(extra or {})
        self._unnamed_end = Position(end, None, alike={end: frozenset(other_ends)} if other_ends else {})
        self.size = len(tokenizer) if size is None else min(size, len(tokenizer))
        self._by_text: dict[bytes, list[int]] = {}
        self._tells_spaces = False

    def ask(
        self,
        ids: Sequence[int],
        abilities: Abilities,
        bias: Mapping[int, float],
        *,
        tokens: int = 1,
        temperature: float = 0.0,
        seed: int | None = None,
        final: Collection[int] = (),
    ) -> list[Position]:
        """What the model goes on with: up to `tokens` tokens, the last of them the end token where it ends.

        Args:
            ids: prompt and answer so far.
            abilities: what the provider takes and tells.
            bias: added to the logits of these tokens.
            tokens: how many at most.
            temperature: 0 for the likeliest.
            seed: of sampling.
            final: see `Endpoint.create_completion`.

        Raises:
            Refused, Unavailable: see `Endpoint.create_completion`.
            UsageError: the prompt cannot be written as text, or the reply cannot be read as this tokenizer's tokens.
        """
        body: dict[str, Any] = {
            "max_tokens": tokens,
            "temperature": temperature,
            **({"top_p": 1} if temperature else {}),  # vLLM would take the model's own default
            **abilities.neutral,
            **self.extra,
        }
        if bias:
            body["logit_bias"] = {str(token): value for token, value in bias.items()}
        if temperature and seed is not None:
            body["seed"] = seed
        if abilities.top_logprobs or abilities.answer_ids:
            body["logprobs"] = abilities.top_logprobs
        if abilities.answer_ids:
            body["return_tokens_as_token_ids"] = True
        prompt = list(ids) if abilities.prompt_ids else self.text_of(ids)
        reply, retries = self.endpoint.create_completion(prompt, final, **body)
        self.counts.add(requests=1, retries=retries)
        choice, text = self._read(reply, len(ids))
        reason = choice.get("finish_reason")
        found = self._positions(choice, text, abilities, ended=reason == "stop")
        if reason == "stop" and len(found) < tokens and (not found or found[-1].token != self.end):
            found.append(self._unnamed_end)
        if not found:
            raise UsageError(
                f"model {self.endpoint.model!r} answered with no token that can be read (finish_reason {reason!r}): "
                "a part of a character, perhaps; a provider that names tokens by id is needed"
            )
        if len(found) > tokens:
            raise UsageError(
                f"model {self.endpoint.model!r} answered with {len(found)} tokens where {tokens} were asked for"
            )
        return found

    @property
    def has_names_alike(self) -> bool:
        """Whether several tokens read alike, such as "z" and the byte token <0x7A>."""
        return not self._tells_spaces or any(len(tokens) > 1 for tokens in self._texts().values())

    def canonical(self, ids: Sequence[int], prompt: int) -> list[int]:
        """The tokens that a provider who is given text reads instead of these, of which the first `prompt` stay."""
        whole = self._encoded(self.text_of(ids[:prompt]) + self._decoded(ids[prompt:]))
        return whole if whole[:prompt] == list(ids[:prompt]) else list(ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text that the model's tokenizer reads as these tokens.

        Raises:
            UsageError: there is none.
        """
        whole = self._decoded(ids)
        start = self.tokenizer.bos_token or ""
        for text in (whole, whole.removeprefix(start)):
            if self._encoded(text) == list(ids):
                return text
        raise UsageError(
            f"the prompt cannot be sent as text: {whole[-60:]!r} does not give the same tokens again; "
            "a provider that takes token ids is needed"
        )

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def _read(self, content: Any, prompt: int) -> tuple[dict[str, Any], str]:
        """The first choice and its text."""
        try:
            choice = content["choices"][0]
            text = choice["text"]
        except (KeyError, IndexError, TypeError):
            content, choice, text = {}, {}, None
        if not isinstance(text, str):
            raise UsageError(f"endpoint {self.endpoint.base_url} replied without choices[0].text: no completions API")
        usage = content.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        counted = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        read, written = (number if isinstance(number, int) else 0 for number in counted)
        self.counts.add(prompt_tokens=read or prompt, answer_tokens=written or 1)
        return choice, text

    def _positions(self, choice: dict[str, Any], text: str, abilities: Abilities, ended: bool) -> list[Position]:
        told = choice.get("logprobs")
        if not isinstance(told, dict) or not isinstance(told.get("tokens"), list):
            if abilities.answer_ids:
                raise Unnamed(f"model {self.endpoint.model!r} did not name its tokens, as it was asked to")
            return [self._position(text, None, abilities)] if text else []
        names, top = told["tokens"], told.get("top_logprobs")
        if text and not names:
            raise Unnamed(f"model {self.endpoint.model!r} did not name its tokens, as it was asked to")
        top = top if isinstance(top, list) else []
        if ended and names[-1:] == [""]:  # the end, by a provider that leaves special tokens out
            names = names[:-1]
        return [self._position(name, here, abilities) for name, here in itertools.zip_longest(names, top[: len(names)])]

    def _position(self, name: Any, top: Any, abilities: Abilities) -> Position:
        token, *others = self._ids(name)
        alike = {token: frozenset(others)} if others else {}
        if not abilities.top_logprobs or not isinstance(top, dict):
            return Position(token, None, alike=alike)
        for value in top.values():
            if type(value) not in (int, float) or math.isnan(value) or value > _ROUNDING:
                raise UsageError(
                    f"model {self.endpoint.model!r} told a log-probability of {value!r}; accepted: up to 0"
                )
        # Every token above the least of those asked for was told. One more, the chosen one, may lie below it; two that
        # read alike are told as one, and one that cannot be read is like one that was not told.
        values = sorted(map(float, top.values()), reverse=True)
        by_id = all(key.startswith(BY_ID) for key in top)
        # Where names are texts, as many as were asked for may be one fewer that read alike, and the chosen one.
        at_the_end = not by_id and name in top and float(top[name]) <= values[-1]
        # What stands for minus infinity was cut off by the provider: such values are not the target's.
        if len(values) < abilities.top_logprobs + at_the_end or values[-1] <= _CUT_OFF:
            return Position(token, None, alike=alike)
        floor = values[abilities.top_logprobs - 1]
        told: dict[int, float] = {}
        for key, value in top.items():
            try:
                first, *others = self._ids(key)
            except UsageError:
                floor = max(floor, float(value))
                continue
            if first in told:  # named twice
                return Position(token, None, alike={token: alike[token]} if token in alike else {})
            told[first] = float(value)
            if others:
                alike[first] = frozenset(others)
        return Position(token, told if token in told else None, floor, alike)

    def _ids(self, name: Any) -> list[int]:
        """The tokens that a name in a reply may stand for, the one that texts are made of first."""
        found: list[int] = []
        if isinstance(name, str) and name.startswith(BY_ID) and name[len(BY_ID) :].isdecimal():
            found = [int(name[len(BY_ID) :][:10])]
        elif isinstance(name, str) and _UNREADABLE not in name:  # providers write parts of characters so
            text = name.encode(errors="replace")  # half a surrogate pair is no token
            found = list(self._texts().get(text, ()))
            self._tells_spaces |= bool(found) and text.startswith(b" ")
            if not self._tells_spaces:  # some leave out the space with which a token begins
                found += self._texts().get(b" " + text, ())
        if not found or not all(0 <= token < self.size for token in found):
            raise UsageError(
                f"model {self.endpoint.model!r} answered with {name!r}, which is no token of the tokenizer of "
                f"{self.size} tokens that was given; give the provider's own tokenizer"
            )
        return found

    def _texts(self) -> dict[bytes, list[int]]:
        if not self._by_text:
            special = {
                token: str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.tokenizer.all_special_ids
            }
            found = {token: text.encode() for token, text in special.items() if token < self.size}
            plain = {token: text for token, text in enumerate(token_bytes(self.tokenizer)[: self.size]) if text}
            names = self.tokenizer.convert_ids_to_tokens(list(plain))
            # Texts are made of byte tokens only where no other token has their byte.
            byte_tokens = [token for token, name in zip(plain, names, strict=True) if BYTE_TOKEN.fullmatch(name)]
            by_text: dict[bytes, list[int]] = {}
            for token in dict.fromkeys([*found, *sorted(plain.keys() - set(byte_tokens)), *byte_tokens]):
                by_text.setdefault(found.get(token) or plain[token], []).append(token)
            self._by_text = by_text
        return self._by_text
