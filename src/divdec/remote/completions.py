"""Requests to an OpenAI-compatible /completions endpoint, and their replies as tokens.

Providers differ: prompts are token ids or text, tokens of the reply are named by id or by text, the number of
log-probabilities varies, and a bias shows in them or not. `probe_provider` finds out which.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from divdec.bridge.token_bytes import BYTE_TOKEN, special_tokens, token_bytes
from divdec.endpoint import Endpoint, Refused
from divdec.errors import FailedClosed, UsageError
from divdec.remote.bias import MAX_BIAS

BY_ID = "token_id:"
UNREADABLE = "\ufffd"  # providers write parts of characters so
ROUNDING = 1e-3  # nats that a log-probability may lie above 0
CUT_OFF = -1000.0
# These fields decide which tokens are chosen and what a reply proves; `Completions.complete` sets them.
RESERVED = frozenset(
    (
        "model", "prompt", "max_tokens", "temperature", "top_p", "seed", "logit_bias", "logprobs", "n", "best_of",
        "echo", "stream", "stop", "suffix", "return_tokens_as_token_ids",
    )
)  # fmt: skip
TOP_LOGPROBS = (20, 5, 0)  # most of vLLM and divdec, most of OpenAI, none
UNSUPPORTED = (400, 404, 422, 500, 501)  # statuses with which servers refuse features that they lack
# llama.cpp penalises repetition and truncates by its own defaults, vLLM by those of the checkpoint; both change the
# logits that are steered. Most servers ignore the fields of others.
NEUTRAL = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1}
# The proofs rely on these: `extra` may hold them with these values only.
FIXED = {name: (value,) for name, value in NEUTRAL.items()} | {
    "top_k": (0, -1), "frequency_penalty": (0,), "presence_penalty": (0,),
}  # fmt: skip
SAME_LOGPROB = 0.5  # nats; the bias of the probe moves a log-probability much further


@dataclasses.dataclass(frozen=True)
class ProviderCapabilities:
    """Capabilities of a provider, as `probe_provider` finds out."""

    prompt_ids: bool = True
    """Prompts may be token ids; otherwise text."""
    answer_ids: bool = True
    """Tokens of a reply are named by id (`return_tokens_as_token_ids`); otherwise by text."""
    top_logprobs: int = 20
    """Number of log-probabilities at each position; 0 for none."""
    raw_logprobs: bool = True
    """Log-probabilities are the target's; otherwise they contain the bias."""
    neutral: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Accepted fields that switch off the server's own changes to the logits."""


@dataclasses.dataclass
class UsageStatistics:
    """Requests and tokens so far."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TokenPosition:
    """One token of a reply."""

    token: int
    logprobs: dict[int, float] | None
    """Log-probabilities of the likeliest tokens; None if they prove nothing about the other tokens."""
    floor: float = 0.0
    """Every token with a higher log-probability is in `logprobs`."""
    ambiguous: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    """Tokens whose name is also that of others, with those others: the reply does not say which is meant."""


class UnnamedTokens(UsageError):
    """The provider accepted the request and did not name its tokens as requested."""


class Completions:
    """A model at an endpoint, and its tokenizer."""

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        size: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare.

        Args:
            endpoint: the endpoint.
            tokenizer: the model's tokenizer; a fast one if the provider names tokens by text.
            eos_token_ids: tokens that end a reply. An unnamed end is read as the first, and may be any of them.
            size: number of its tokens, from the first, that a reply may contain; all by default.
            extra: further fields of every request, such as {"top_k": 0} for a server that truncates; those in
                `RESERVED` are refused, and other values than those in `FIXED`.
        """
        if reserved := sorted(RESERVED & set(extra or ())):
            raise UsageError(f"extra holds {', '.join(reserved)}, which a request has already; leave it out")
        for name, accepted in FIXED.items():
            if (extra or {}).get(name, accepted[0]) not in accepted:
                raise UsageError(f"extra holds {name}, which changes what a reply proves; accepted: {accepted[0]}")
        self.usage, self.name = UsageStatistics(), repr(endpoint.model)
        self._lock = threading.Lock()
        self.endpoint, self.tokenizer, self.eos_token_ids, self.extra = endpoint, tokenizer, eos_token_ids, extra or {}
        first, *others = eos_token_ids
        self._unnamed_eos = TokenPosition(first, None, ambiguous={first: frozenset(others)} if others else {})
        self.size = len(tokenizer) if size is None else min(size, len(tokenizer))
        self._by_text: dict[bytes, list[int]] = {}
        self._spaces_shown = False

    def complete(
        self,
        ids: Sequence[int],
        capabilities: ProviderCapabilities,
        bias: Mapping[int, float],
        *,
        tokens: int = 1,
        temperature: float = 0.0,
        seed: int | None = None,
        final: Collection[int] = (),
    ) -> list[TokenPosition]:
        """Continue prompt and answer by up to `tokens` tokens; the last ends the sequence if the model ends there.

        `bias` is added to the logits of its tokens. For `final`, see `Endpoint.create_completion`.

        Raises:
            UsageError: see `Endpoint`; or prompt or reply are not tokens of this tokenizer.
        """
        fields: dict[str, Any] = {
            "max_tokens": tokens,
            "temperature": temperature,
            **({"top_p": 1} if temperature else {}),  # vLLM would use the checkpoint's default
            **capabilities.neutral,
            **self.extra,
        }
        if bias:
            fields["logit_bias"] = {str(token): value for token, value in bias.items()}
        if temperature and seed is not None:
            fields["seed"] = seed
        if capabilities.top_logprobs or capabilities.answer_ids:
            fields["logprobs"] = capabilities.top_logprobs
        if capabilities.answer_ids:
            fields["return_tokens_as_token_ids"] = True
        prompt = list(ids) if capabilities.prompt_ids else self.text_of(ids)
        content, retries = self.endpoint.create_completion(prompt, final, **fields)
        choice, text = self._read_choice(content, len(ids), retries)
        reason = choice.get("finish_reason")
        ended = reason in ("stop", "eos", "eos_token")
        positions = self._read_positions(choice, text, capabilities, ended)
        has_named_end = bool(positions) and positions[-1].token in self.eos_token_ids
        if ended and len(positions) < tokens and not has_named_end:
            positions.append(self._unnamed_eos)
        if not positions:
            raise UsageError(
                f"model {self.name} answered with no token that can be read (finish_reason {reason!r}), "
                "perhaps a part of a character; use a provider that names tokens by id"
            )
        if len(positions) > tokens:
            raise UsageError(f"model {self.name} answered with {len(positions)} tokens; the request allows {tokens}")
        return positions

    @property
    def has_ambiguous_names(self) -> bool:
        """Whether several tokens have one text, such as "z" and the byte token <0x7A>."""
        return not self._spaces_shown or any(len(tokens) > 1 for tokens in self._token_texts().values())

    def retokenize(self, ids: Sequence[int], prompt: int) -> list[int]:
        """Return the tokens that a provider reads from the text of these; the first `prompt` tokens do not change."""
        whole = self._encode(self.text_of(ids[:prompt]) + self._decode(ids[prompt:]))
        return whole if whole[:prompt] == list(ids[:prompt]) else list(ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return a text that the tokenizer reads as these tokens; refuse tokens without one."""
        whole = self._decode(ids)
        for text in (whole, whole.removeprefix(self.tokenizer.bos_token or "")):
            if self._encode(text) == list(ids):
                return text
        raise UsageError(
            f"the prompt cannot be sent as text: {whole[-60:]!r} does not give the same tokens again; "
            "use a provider that accepts token ids"
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def _read_choice(self, content: Any, prompt: int, retries: int) -> tuple[dict[str, Any], str]:
        """Return the first choice and its text, and count the request and its tokens."""
        try:
            choice = content["choices"][0]
            text = choice["text"]
        except (KeyError, IndexError, TypeError):
            choice, text = {}, None
        if not isinstance(text, str):
            raise UsageError(f"endpoint {self.endpoint.base_url} replied without choices[0].text: no completions API")
        usage = content.get("usage") if isinstance(content.get("usage"), dict) else {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        read, written = (number if isinstance(number, int) else 0 for number in counts)
        with self._lock:
            self.usage.requests += 1
            self.usage.retries += retries
            self.usage.prompt_tokens += read or prompt
            self.usage.answer_tokens += written or 1
        return choice, text

    def _read_positions(
        self, choice: dict[str, Any], text: str, capabilities: ProviderCapabilities, ended: bool
    ) -> list[TokenPosition]:
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict) or not isinstance(logprobs.get("tokens"), list):
            if capabilities.answer_ids:
                raise UnnamedTokens(f"model {self.name} did not name its tokens as requested")
            return [self._read_position(text, None, capabilities)] if text else []
        names, top = logprobs["tokens"], logprobs.get("top_logprobs")
        if text and not names:
            raise UnnamedTokens(f"model {self.name} did not name its tokens as requested")
        top = top if isinstance(top, list) else []
        if ended and names[-1:] == [""]:  # the end, from a provider that leaves special tokens out
            names = names[:-1]
        pairs = itertools.zip_longest(names, top[: len(names)])
        return [self._read_position(name, values, capabilities) for name, values in pairs]

    def _read_position(self, name: Any, top: Any, capabilities: ProviderCapabilities) -> TokenPosition:
        token, *others = self._ids(name)
        ambiguous = {token: frozenset(others)} if others else {}
        if not capabilities.top_logprobs or not isinstance(top, dict):
            return TokenPosition(token, None, ambiguous=ambiguous)
        if None in top.values():
            return TokenPosition(token, None, ambiguous=ambiguous)
        for value in top.values():
            if type(value) not in (int, float) or math.isnan(value) or value > ROUNDING:
                raise UsageError(f"model {self.name} returned a log-probability of {value!r}; accepted: up to 0")
        # Every token above the least of those requested is listed. One more, the chosen one, may lie below it. Tokens
        # with one text are listed as one, and a token that cannot be read counts as not listed.
        values = sorted(map(float, top.values()), reverse=True)
        by_id = all(key.startswith(BY_ID) for key in top)
        # If names are texts, the list may lack one that has the text of another, and hold the chosen one in addition.
        chosen_last = not by_id and name in top and float(top[name]) <= values[-1]
        # Values that stand for minus infinity come from a truncation, not from the target.
        if len(values) < capabilities.top_logprobs + chosen_last or values[-1] <= CUT_OFF:
            return TokenPosition(token, None, ambiguous=ambiguous)
        floor = values[capabilities.top_logprobs - 1]
        logprobs: dict[int, float] = {}
        for key, value in top.items():
            try:
                first, *others = self._ids(key)
            except UsageError:
                floor = max(floor, float(value))
                continue
            if first in logprobs:  # named twice
                token_ambiguity = {token: ambiguous[token]} if token in ambiguous else {}
                return TokenPosition(token, None, ambiguous=token_ambiguity)
            logprobs[first] = float(value)
            if others:
                ambiguous[first] = frozenset(others)
        return TokenPosition(token, logprobs if token in logprobs else None, floor, ambiguous)

    def _ids(self, name: Any) -> list[int]:
        """Return the tokens that a name may stand for; the first is the one that the tokenizer writes texts with."""
        tokens: list[int] = []
        if isinstance(name, str) and name.startswith(BY_ID) and name[len(BY_ID) :].isdecimal():
            tokens = [int(name[len(BY_ID) :][:10])]
        elif isinstance(name, str) and UNREADABLE not in name:
            text = name.encode(errors="replace")  # half a surrogate pair is no token
            tokens = list(self._token_texts().get(text, ()))
            self._spaces_shown |= bool(tokens) and text.startswith(b" ")
            if not self._spaces_shown:  # some providers leave out the space at the beginning of a token
                tokens += self._token_texts().get(b" " + text, ())
        if not tokens or not all(0 <= token < self.size for token in tokens):
            raise UsageError(
                f"model {self.name} answered with {name!r}, which is no token of the given tokenizer of "
                f"{self.size} tokens; give the provider's own tokenizer"
            )
        return tokens

    def _token_texts(self) -> dict[bytes, list[int]]:
        if not self._by_text:
            special = {
                token: name.encode() for token, name in special_tokens(self.tokenizer).items() if token < self.size
            }
            plain = {token: text for token, text in enumerate(token_bytes(self.tokenizer)[: self.size]) if text}
            names = self.tokenizer.convert_ids_to_tokens(list(plain))
            # The tokenizer uses a byte token only if no other token has its byte.
            byte_tokens = [token for token, name in zip(plain, names, strict=True) if BYTE_TOKEN.fullmatch(name)]
            for token in dict.fromkeys([*special, *sorted(plain.keys() - set(byte_tokens)), *byte_tokens]):
                self._by_text.setdefault(special.get(token) or plain[token], []).append(token)
        return self._by_text


def probe_provider(completions: Completions, prompt: Sequence[int]) -> ProviderCapabilities:
    """Find out with a few requests of one token what a provider accepts and returns.

    A provider that silently ignores `logit_bias` would answer unsteered; it is refused before anything is answered. Any
    prompt will do.

    Raises:
        UsageError: the provider refuses every form of request.
        FailedClosed: it accepts `logit_bias` and ignores it.
    """
    model = completions.name
    capabilities, position = _probe_neutral(completions, prompt, *_probe_forms(completions, prompt))
    try:
        bias = dict.fromkeys((position.token, *position.ambiguous.get(position.token, ())), -MAX_BIAS)
        (other,) = completions.complete(prompt, capabilities, bias)
    except Refused as error:
        # The same request without a bias was accepted.
        raise UsageError(f"logit_bias is not accepted; use another provider ({error})") from None
    if other.token == position.token:
        raise FailedClosed(
            f"model {model} ignores logit_bias: its first choice, token {position.token}, came again with a bias of "
            f"{-MAX_BIAS:g}; it cannot be steered by biases"
        )
    # The second choice lies at most `MAX_BIAS` below the first, so the same bias must lift it above.
    (lifted,) = completions.complete(prompt, capabilities, {other.token: MAX_BIAS})
    if lifted.token != other.token:
        raise FailedClosed(
            f"model {model} obeys no positive logit_bias: token {other.token}, its second choice, did not come with "
            f"a bias of {MAX_BIAS:g}; it cannot be steered by biases"
        )
    if position.logprobs is not None and other.logprobs is None:
        # Whether log-probabilities contain the bias is unknown, and a wrong guess would prove falsehoods.
        capabilities = dataclasses.replace(capabilities, top_logprobs=0)
    if position.logprobs is not None and other.logprobs is not None:
        suppressed = other.logprobs.get(position.token, -1e9)
        raw = abs(suppressed - position.logprobs[position.token]) < SAME_LOGPROB
        capabilities = dataclasses.replace(capabilities, raw_logprobs=raw)
    return capabilities


def _probe_forms(completions: Completions, prompt: Sequence[int]) -> tuple[ProviderCapabilities, TokenPosition]:
    refused: UsageError | None = None
    for prompt_ids, answer_ids, top_logprobs in itertools.product((True, False), (True, False), TOP_LOGPROBS):
        capabilities = ProviderCapabilities(prompt_ids, answer_ids, top_logprobs)
        try:
            (position,) = completions.complete(prompt, capabilities, {}, final=UNSUPPORTED)
        except Refused as error:
            if error.status not in UNSUPPORTED:
                raise
            refused = error
        except UnnamedTokens as error:  # the provider ignores unknown fields
            refused = error
        else:
            if not top_logprobs or position.logprobs is not None:
                return capabilities, position
    raise refused or UsageError(f"model {completions.name} gives no answer that can be read")


def _probe_neutral(
    completions: Completions, prompt: Sequence[int], capabilities: ProviderCapabilities, position: TokenPosition
) -> tuple[ProviderCapabilities, TokenPosition]:
    """Add the fields that switch off the server's own defaults, if it accepts them."""
    for change in ({}, {"repeat_penalty": None}, {"top_k": -1}, {"top_k": -1, "repeat_penalty": None}):
        fields = {name: value for name, value in {**NEUTRAL, **change}.items() if value is not None}
        neutral = dataclasses.replace(capabilities, neutral=fields)
        try:
            (position,) = completions.complete(prompt, neutral, {}, final=UNSUPPORTED)
        except Refused as error:
            if error.status not in UNSUPPORTED:
                raise
            continue
        return neutral, position
    return capabilities, position  # OpenAI accepts none of these fields
