"""How a conversation is laid out for models whose tokenizer has no chat template."""

from __future__ import annotations

from collections.abc import Iterable


def plain_prompt(turns: Iterable[tuple[str, str]]) -> str:
    """Questions and answers up to where the next answer begins; its first token brings the space.

    Args:
        turns: role and content; what a system turn says stands on a line of its own.
    """
    lines = []
    for role, content in turns:
        label = {"system": "", "assistant": "Answer: "}.get(role, "Question: ")
        lines.append(f"{label}{content}")
    return "\n".join([*lines, "Answer:"])
