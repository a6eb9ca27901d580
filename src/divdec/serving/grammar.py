"""Grammars of `response_format` and of forced tool calls, by llguidance: which tokens may follow the reply so far.

A grammar only excludes tokens. A token that the rule suppresses stays suppressed, also where the grammar demands it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from divdec.errors import FailedClosed, UsageError, first_line

TAGS = ("<tool_call>", "</tool_call>")  # of the Hermes form
# Spaces as models write them. Free whitespace lets a model write spaces until the reply is full.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PREFIX = "failed to compile JSON schema: "  # of llguidance's errors, after a position in the grammar
_MAX_REASON_LENGTH = 300  # characters


class GrammarConflict(FailedClosed):
    """The rule suppresses every token that the grammar allows."""


def make_grammar(
    schema: Mapping[str, Any] | None,
    tools: Mapping[str, Mapping[str, Any]],
    added_tokens: Mapping[str, int],
    *,
    parallel: bool,
) -> str:
    """Return the grammar of a reply in llguidance's dialect of Lark.

    Args:
        schema: JSON schema that the reply may follow; None for tool calls alone.
        tools: JSON schema of the arguments, by name of a function that the reply may call, in the Hermes form.
        added_tokens: ids of the tokenizer's added tokens, which llguidance takes for special ones, by text.
        parallel: whether the reply may hold several calls.
    """
    # The calls' schemas are separate rules, so that their references (#/$defs/…) stay valid.
    call = [f'"{{\\"name\\": \\"{name}\\", \\"arguments\\": " args{i} "}}"' for i, name in enumerate(tools)]
    replies = ["reply"] if schema is not None else []
    replies += ['call ("\\n" call)*' if parallel else "call"] if tools else []
    rules = [f"start: {' | '.join(replies)}"]
    rules += [f"reply: {_json(schema)}"] if schema is not None else []
    start, end = (f"<[{added_tokens[tag]}]>" if tag in added_tokens else f'"{tag}"' for tag in TAGS)
    rules += [f'call: {start} "\\n" ({" | ".join(call)}) "\\n" {end}'] if tools else []
    rules += [f"args{index}: {_json({**schema, 'type': 'object'})}" for index, schema in enumerate(tools.values())]
    return "\n".join(rules)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _LAYOUT})


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Read the tokenizer's vocabulary, which takes about a second for 150,000 tokens.

        The tokens that end a reply are possible where the grammar is complete.

        Raises:
            UsageError: llguidance cannot read the tokenizer.
        """
        from llguidance.hf import from_tokenizer

        try:
            ends = sorted(eos_token_ids) or None
            self._tokenizer = from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), ends)
        except Exception as error:  # pyo3 raises various types
            raise UsageError(f"grammars are not offered for this model's tokenizer: {first_line(error)}") from None

    def compile(self, lark: str) -> GrammarMatcher:
        """Compile a grammar.

        Raises:
            UsageError: a schema is wrong, or has a keyword that llguidance does not support.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        return GrammarMatcher(matcher)


class GrammarMatcher(LogitsProcessor):
    """Position in a grammar, and the logits processor that excludes the tokens that cannot follow."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._check()

    def start(self) -> GrammarMatcher:
        """Return a copy for another reply."""
        return GrammarMatcher(self._matcher.deep_copy())

    @property
    def is_complete(self) -> bool:
        """Whether nothing more can follow."""
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Move on by a token."""
        self._matcher.consume_token(token)
        self._check()

    def __call__(
        self, input_ids: Int[Tensor, "1 tokens"], scores: Float[Tensor, "1 vocab"]
    ) -> Float[Tensor, "1 vocab"]:
        """Return the scores with −inf for tokens that cannot follow.

        Raises:
            GrammarConflict: no token is left.
            UsageError: the grammar is too large to follow.
        """
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        bits = (words[:, None] >> torch.arange(8)) & 1
        masked = scores.masked_fill(bits.flatten()[: scores.shape[1]].eq(0).to(scores.device), -torch.inf)
        if not bool((masked > -torch.inf).any()):
            raise GrammarConflict("the rule suppresses every token that the grammar allows; nothing else is answered")
        return masked

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).partition("\n")[0]
            raise UsageError(f"the grammar cannot be used: {reason.rpartition(_PREFIX)[2][:_MAX_REASON_LENGTH]}")
