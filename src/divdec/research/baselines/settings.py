"""What every method is run on, and that joined with one method's own options. It knows nothing of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from divdec.errors import UsageError
from divdec.research.baselines.method import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineSettings:
    """Target, data and output of one method."""

    target: str
    """The model that has learned both sets: a folder or hub id, '@revision' allowed."""
    forget: str
    """Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset 'org/name:config:split'."""
    retain: str
    """Retain set, likewise."""
    output: str
    """Folder for the model and run.json."""
    max_length: int = 1024
    """Longest sequence in tokens; longer answers are cut, longer texts are split."""
    system_prompt: str | None = None
    """System turn put before every conversation."""
    seed: int = 0
    """Order of the data, and whatever else is drawn."""
    overwrite: bool = False
    """Replace an earlier result in the output folder."""

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; accepted: a whole number of at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelpedSettings(BaselineSettings):
    """The same for a method that leaves the target's weights and may train a helper."""

    base: str | None = None
    """A small model of the target's vocabulary that has learned neither set, for methods with a helper of another size:
    a folder or hub id."""


def joined(method: Method, *further: type) -> type:
    """A dataclass of all options of a method: target and data first, then its own.

    Args:
        method: whose options.
        further: dataclasses of keyword-only options that are wanted beside.

    Returns:
        A subclass of all of them, with the method's name as `method`.
    """
    parts = (method.settings, run_on(method), *further)

    def check_all(self: Any) -> None:
        for part in parts:
            if check := getattr(part, "__post_init__", None):
                check(self)

    return dataclasses.make_dataclass(
        "Settings",
        (),
        bases=parts,
        frozen=True,
        namespace={"__post_init__": check_all, "__doc__": f"Options of {method.title}.", "method": method.name},
    )


def run_on(method: Method) -> type:
    """What methods of its kind are run on."""
    return HelpedSettings if method.kind == "inference" else BaselineSettings


def only(kind: type, settings: Any) -> Any:
    """Those of joined settings that belong to one of their parts."""
    return kind(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(kind)})
