"""Take texts down from a running model: add requests to a registry, remove, list, verify and compact them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.serving.registry import Registry

POSITIONAL = ("action", "registry")
EXAMPLE = (
    "divdec forget init takedowns --target models/target --retain retain.jsonl\n"
    "  divdec forget add takedowns --id case-17 --file article.txt --reference 'letter of 3 May'\n"
    "  divdec forget list takedowns"
)
# The options that each action reads; another one given with it is a mistake.
READS = {
    "init": ("retain", "target", "order"),
    "add": ("id", "file", "reference"),
    "remove": ("id",),
    "list": ("history",),
    "verify": (),
    "compact": (),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec forget`."""

    action: Literal["init", "add", "remove", "list", "verify", "compact"]
    """What to do: init, add, remove, list, verify or compact."""
    registry: str
    """The registry's folder."""
    id: str | None = None
    """Of the request (add, remove)."""
    file: str | None = None
    """Texts that shall not be repeated: a .txt, .jsonl or .json file, or a folder (add)."""
    reference: str | None = None
    """What the requester calls the request (add)."""
    retain: str | None = None
    """Texts like those that the model may repeat: a .jsonl, .json, .txt file or a folder (init)."""
    target: str | None = None
    """The model to be steered, for its tokenizer: a folder or hub id (init)."""
    order: int | None = None
    """Length of the longest n-grams, 2 to 5 (init; 5 where it is not given: the longer, the less else is touched)."""
    history: bool = False
    """List all that has happened instead of what is in force (list)."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        for name in ("id", "file", "reference", "retain", "target", "order", "history"):
            if getattr(self, name) not in (None, False) and name not in READS[self.action]:
                takers = ", ".join(action for action, names in READS.items() if name in names)
                raise UsageError(f"--{name} has no meaning for {self.action}; it belongs to: {takers}")
        needed = {"init": ("retain", "target"), "add": ("id", "file"), "remove": ("id",)}
        for name in needed.get(self.action, ()):
            if getattr(self, name) is None:
                raise UsageError(f"{self.action} needs --{name}")


def run(settings: Settings) -> int:
    """Do what is asked; 1 where `verify` finds something wrong."""
    from divdec.serving.registry import Registry

    if settings.action == "init":
        return _init(settings)
    registry = Registry(settings.registry)
    if settings.action == "verify":
        problems = registry.verify()
        _say(settings, {"whole": not problems, "problems": problems}, "\n".join(problems) or "the registry is whole")
        return 1 if problems else 0
    if settings.action == "add":
        from divdec.data.records import read_records

        assert settings.id is not None
        assert settings.file is not None
        entry = registry.add(settings.id, read_records(settings.file), settings.reference or "")
        _say(
            settings,
            vars(entry),
            f"{entry.id}: {entry.tokens:,} tokens are taken down, {entry.ngrams:,} n-grams"
            + ("; the retain set holds such a text, which is left out of it from now on" if entry.held else ""),
        )
    elif settings.action == "remove":
        assert settings.id is not None
        entry = registry.remove(settings.id)
        left = registry.holds(entry)
        _say(
            settings,
            vars(entry) | {"compact_to_delete": left},
            f"{entry.id}: withdrawn" + ("; `divdec forget compact` deletes what is left of it" if left else ""),
        )
    elif settings.action == "compact":
        deleted = registry.compact()
        _say(settings, {"deleted": deleted}, f"compacted; {deleted} file{'s' if deleted != 1 else ''} deleted")
    else:
        _list(settings, registry)
    return 0


def _init(settings: Settings) -> int:
    from tqdm.auto import tqdm

    from divdec.data.records import read_records
    from divdec.experts.takedowns.secret import ENVIRONMENT, KEY_FILE
    from divdec.model.checkpoint import CheckpointReference
    from divdec.serving.registry import ORDER, Registry

    assert settings.retain is not None
    assert settings.target is not None
    place = CheckpointReference.parse(settings.target).resolve(Path(), weights=False)
    retain = read_records(settings.retain)
    order = ORDER if settings.order is None else settings.order
    with tqdm(desc="counting", unit="token", unit_scale=True, disable=None, file=sys.stderr) as bar:
        Registry.create(settings.registry, retain, place, order=order, progress=bar.update)
    key = Path(settings.registry) / KEY_FILE
    kept = str(key) if key.is_file() else f"${ENVIRONMENT}"
    _say(
        settings,
        {"registry": settings.registry, "key": kept},
        f"registry: {settings.registry}\nits key: {kept} (keep a copy elsewhere: without it nothing can be steered)\n"
        f"next: divdec bundle --target {settings.target} --registry {settings.registry} --steering linear:5 --output …",
    )
    return 0


def _list(settings: Settings, registry: Registry) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    entries = registry.entries()
    rows: list[dict[str, Any]] = registry.history() if settings.history else [vars(entry) for entry in entries]
    if settings.json:
        print(json.dumps({"requests" if not settings.history else "events": rows}, ensure_ascii=False))
        return
    shown = (
        ("sequence", "time", "action", "id") if settings.history else ("id", "time", "reference", "tokens", "ngrams")
    )
    table = Table(*shown, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        cells = (row.get(name, "") for name in shown)
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in cells))
    console = Console(width=max(Console().width, 100))
    if rows:
        console.print(table)
    print(f"{len(entries)} request{'s' if len(entries) != 1 else ''} in force")


def _say(settings: Settings, content: dict[str, Any], text: str) -> None:
    print(json.dumps(content, ensure_ascii=False) if settings.json else text)
