"""Grammars of `response_format` and of forced tool calls, by llguidance: which tokens may follow the reply so far.

A grammar only excludes tokens. A token that the rule suppresses stays suppressed, also where the grammar demands it.
Tool calls are read by transformers' parser in the form of the tokenizer, or else in the Hermes form.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor
from transformers.utils.chat_parsing import ResponseParser

from divdec.errors import FailedClosed, UsageError, first_line

TAGS = ("<tool_call>", "</tool_call>")  # of the Hermes form
HERMES: Mapping[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s{0,8}<tool_call>", "close": "</tool_call>", "repeats": True, "content": "text",
        },
        "content": {"content": "text"},
    },
}  # fmt: skip
"""Response template of the form <tool_call>{"name": …, "arguments": …}</tool_call>, as in Hermes and Qwen."""
Call = dict[str, Any]
# Spaces as models write them. Free whitespace lets a model write spaces until the reply is full.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PREFIX = "failed to compile JSON schema: "  # of llguidance's errors, after a position in the grammar
_MAX_REASON_LENGTH = 300  # characters
_TOO_LARGE = ("panic: ", "Too many ", "recursion limit", "NoExtensionBias")  # in llguidance's errors


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
        matcher.compute_bitmask()  # some grammars fail only here
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
            error = str(self._matcher.get_error())
            reason = error.partition("\n")[0].rpartition(_PREFIX)[2].partition(" Enable ")[0]
            if reason == "regex parse error:" and (cause := re.search(r"(?<=\nerror:).*", error)):
                reason += cause[0]
            if any(words in reason for words in _TOO_LARGE):
                reason = "a schema is too large, nested too deeply or endless; send a smaller one"
            raise UsageError(f"the grammar cannot be used: {reason[:_MAX_REASON_LENGTH]}")


class ToolCallParser:
    """Splits the text of a reply into content and tool calls while it arrives."""

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True
    ) -> None:
        """Prepare.

        Args:
            template: a tokenizer's `response_template`, or `HERMES`.
            prompt: text of the prompt, which may contain the beginning of the reply.
            tools: functions that the reply may call.
            parallel: whether to return more than the first call.
        """
        self._template, self._parallel = dict(template), parallel
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._parser = ResponseParser(self._template, prompt, tools=self._tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._call_text = ""  # of the call that has begun
        self.calls: list[Call] = []

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """Return the content and the calls that end with this text; with `last` the reply ends.

        A call that is cut off, malformed or of an unknown function becomes content, without its tags.
        """
        start, content = len(self.calls), ""
        # By character, so that the events before an error are known.
        for character in text:
            content += self._read(lambda character=character: self._parser.feed(character))
        if last:
            content += self._read(lambda: self._parser.finalize()[1])
        # Templates write a line break after a call.
        return ("" if self.calls and not content.strip() else content), self.calls[start:]

    def _read(self, advance: Any) -> str:
        """Return the content of the parser's next events, and collect the calls."""
        try:
            events: Iterable[Mapping[str, Any]] = advance()
        except (ValueError, LookupError, RecursionError):  # a call of which the template cannot read the arguments
            self._parser = ResponseParser(self._template, "", tools=self._tools)
            return self._end_call(None)
        content = ""
        for event in events:
            in_call, kind = event["field"] == "tool_calls", event["type"]
            if kind == "region_chunk" and in_call:
                self._call_text += event["text"]
            elif kind == "region_chunk" and event["field"] == "content":  # not thoughts
                content += event["text"]
            elif kind == "region_close" and in_call:
                content += self._end_call(event["value"])
        return content

    def _end_call(self, value: Any) -> str:
        """Add a call if it is one, and return the text that is content instead."""
        text, self._call_text = self._call_text.replace(TAGS[0], ""), ""  # a call within a call
        try:
            value, calls = json.loads(value) if isinstance(value, str) else value, list[Call]()
            for item in value if value and isinstance(value, list) else [value]:
                call = item.get("function", item)
                name, arguments = call["name"], call["arguments"]
                if name not in self._names or not isinstance(arguments, dict):
                    return text
                # A client's next turn could not hold half a character.
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
                function = {"name": name, "arguments": written}
                calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return text
        self.calls += calls if self._parallel else calls[: not self.calls]
        return ""
