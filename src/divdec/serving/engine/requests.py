"""What a client may ask of an engine, and what it gets back; neither rule nor strength is among it.

It knows nothing of HTTP, nor of how requests are batched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one answer is to be made. What is out of range is refused by the server before it gets here."""

    max_tokens: int
    """Longest answer, in tokens; 0 answers nothing, and only scores the prompt."""
    temperature: float = 1.0
    """0 answers greedily."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    """Least probability of a token, as a share of the likeliest one's."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both count the tokens of the answer, not of the prompt, as the OpenAI API defines them."""
    repetition_penalty: float = 1.0
    """Counts the tokens of prompt and answer (Keskar et al. 2019)."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    """A number gives the same answer each time; None draws one."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    ignore_eos: bool = False
    """Go on after the token that ends a text."""
    logprobs: int | None = None
    """How many of the likeliest tokens are told at each place, beside the one taken; None: nothing is told."""
    prompt_logprobs: int | None = None
    """Likewise for the prompt's tokens."""


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the steered model, before temperature, penalties and biases."""

    token: int
    logprob: float
    """At least `LOWEST`."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens here, the likeliest first."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What has been added to an answer."""

    text: str = ""
    """Whole characters; may be empty while some are still to come, or a stop string may have begun."""
    tokens: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    """Where each token begins in the answer's text, in characters."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """In the first piece, where they were asked for; None for the first token, which follows nothing."""
    finish_reason: str | None = None
    """'stop' or 'length' in the last piece."""
