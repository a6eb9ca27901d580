"""Tool calls in replies, read by transformers' parser in the form of the tokenizer, or else in the Hermes form."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from divdec.serving.grammar import TAGS

HERMES: Mapping[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "text",
        },
        "content": {"content": "text"},
    },
}  # fmt: skip
"""Response template of the form <tool_call>{"name": …, "arguments": …}</tool_call>, as in Hermes and Qwen."""
Call = dict[str, Any]


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
        except ValueError:  # a call of which the template cannot read the arguments
            self._parser = ResponseParser(self._template, "", tools=self._tools)
            return self._end_call(None)
        content = ""
        for event in events:
            in_call, kind = event["field"] == "tool_calls", event["type"]
            if kind == "region_chunk" and in_call:
                self._call_text += event["text"]
            elif kind == "region_chunk":
                content += event["text"]
            elif kind == "region_close" and in_call:
                content += self._end_call(event["value"])
        return content

    def _end_call(self, value: Any) -> str:
        """Add a call if it is one, and return the text that is content instead."""
        text, self._call_text = self._call_text.replace(TAGS[0], ""), ""  # a call within a call
        try:
            value = json.loads(value) if isinstance(value, str) else value
            call = value.get("function", value)
            name, arguments = call["name"], call["arguments"]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return text
        if name not in self._names or not isinstance(arguments, dict):
            return text
        if self._parallel or not self.calls:
            # A client's next turn could not hold half a character.
            written = json.dumps(arguments, ensure_ascii=False).encode(errors="replace").decode()
            function = {"name": name, "arguments": written}
            self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        return ""
