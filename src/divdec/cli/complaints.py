"""What the parser says of a command line, in the words of all other messages: what was given, what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

_VALUE = re.compile(r'^Parser key "(?P<key>\w+)": .*(?:Got|Given) value: ?(?P<value>.*)$')
_FILE = re.compile(r'^Parser key "config": File does not exist: (?P<file>.*)$')
_REQUIRED = re.compile(r"^the following arguments are required: (?P<keys>.*)$")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def complaint(message: str, hints: Mapping[str, Any], spelt: Callable[[str], str]) -> str:
    """A message of jsonargparse in our words; as it is where it is of none of the kinds that are known.

    Args:
        message: in one line.
        hints: type by field.
        spelt: how a field is given on the command line, such as `--forget-tokens`.
    """
    if found := _REQUIRED.match(message):
        keys = [spelt(key.strip()) for key in found["keys"].split(",")]
        return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} required"
    if found := _FILE.match(message):
        return f"--config is {found['file']}, which does not exist; accepted: a YAML file with options"
    found = _VALUE.match(message)
    accepted = _accepted(hints.get(found["key"])) if found else None
    return f"{spelt(found['key'])} is {found['value']!r}; accepted: {accepted}" if found and accepted else message


def _accepted(hint: Any) -> str | None:
    """In words; None for a type that has none."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (tuple, list):
        return _accepted(get_args(hint)[0])
    if none := [one for one in get_args(hint) if one is not type(None)]:
        words = [_accepted(one) for one in none]
        return None if None in words else " or ".join(word for word in words if word)
    return _KINDS.get(hint)
