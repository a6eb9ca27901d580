"""Take texts down from a running model: add requests to a registry, remove, list, verify and compact them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from divdec.errors import UsageError

if TYPE_CHECKING:
    from divdec.data.records import RecordSet
    from divdec.takedowns.log import Entry
    from divdec.takedowns.registry import Registry

POSITIONAL = ("action", "registry")
EXAMPLE = (
    "divdec forget init takedowns --target models/target --retain retain.jsonl\n"
    "  divdec forget add takedowns --id case-17 --file article.txt --reference 'letter of 3 May'\n"
    "  divdec forget list takedowns"
)
# The options that each action reads; another one given with it is a mistake.
READS = {
    "init": ("retain", "target", "order"),
    "add": ("id", "file", "reference", "target", "no_measure"),
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
    """The model to be steered: a folder or hub id (init). Requests are measured on it; where it has moved to (add)."""
    no_measure: bool = False
    """Do not measure on the target whether the texts are still recited, where it cannot be loaded; the registry keeps
    that the request was not measured (add)."""
    order: int | None = None
    """Length of the longest n-grams, 2 to 5 (init; 5 where it is not given: the longer, the less else is touched)."""
    history: bool = False
    """List all that has happened instead of what is in force (list)."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        for name in ("id", "file", "reference", "retain", "target", "no_measure", "order", "history"):
            if getattr(self, name) not in (None, False) and name not in READS[self.action]:
                takers = ", ".join(action for action, names in READS.items() if name in names)
                raise UsageError(
                    f"--{name.replace('_', '-')} has no meaning for {self.action}; it belongs to: {takers}"
                )
        needed = {"init": ("retain", "target"), "add": ("id", "file"), "remove": ("id",)}
        for name in needed.get(self.action, ()):
            if getattr(self, name) is None:
                raise UsageError(f"{self.action} needs --{name}")


def run(settings: Settings) -> int:
    """Do what is asked; 1 where `verify` finds something wrong, or `add` something that is still recited."""
    from divdec.takedowns.registry import Registry

    if settings.action == "init":
        return _init(settings)
    registry = Registry(settings.registry)
    if settings.action == "verify":
        return _verify(settings, registry)
    if settings.action == "add":
        return _add(settings, registry)
    if settings.action == "remove":
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


def _add(settings: Settings, registry: Registry) -> int:
    from divdec.data.records import read_records

    assert settings.id is not None
    assert settings.file is not None
    place = None if settings.no_measure else _target_of(settings, registry)
    texts = read_records(settings.file)
    entry = registry.add(settings.id, texts, settings.reference or "")
    lines = [f"{entry.id}: {entry.tokens:,} tokens are taken down, {entry.ngrams:,} n-grams"]
    if entry.held:
        copies = "a copy" if entry.copies == 1 else f"up to {entry.copies} copies"
        lines.append(f"the retain set holds {copies} of passages of these texts, left out of it from now on")
    if entry.spans:
        spans = "a shorter span" if entry.spans == 1 else f"{entry.spans} shorter spans"
        lines.append(
            f"the retain set shares {spans} with these texts, which may be repeated: is a text almost the same?"
        )
    if place is None:
        lines.append("not measured on the target (--no-measure): whether it is still recited is not known")
        _say(settings, vars(entry), "\n".join(lines))
        return 0
    if not settings.json:
        print("\n".join(lines), flush=True)  # in force: loading the target may take its time
    measured = _measured(settings, registry, entry, texts, place)

    from divdec.evaluation.verbatim import measured_text

    if settings.json:
        print(json.dumps(vars(entry) | {"measured": measured}, ensure_ascii=False))
    else:
        print(measured_text(measured))
    return 1 if measured["recited_after"] else 0


def _target_of(settings: Settings, registry: Registry) -> Path:
    """The folder of the model that a request is measured on."""
    from divdec.model.checkpoint import CheckpointReference

    try:
        if settings.target is not None:
            return CheckpointReference.parse(settings.target).resolve(Path(), weights=True)
        return registry.target()
    except UsageError as error:
        raise UsageError(
            f"{error}; nothing was added: say where the target is (--target), or --no-measure where it cannot be loaded"
        ) from None


def _measured(settings: Settings, registry: Registry, entry: Entry, texts: RecordSet, place: Path) -> dict[str, Any]:
    from divdec.cli.loading import device_map, quiet
    from divdec.evaluation.verbatim import measure
    from divdec.model.checkpoint import check_weights, load_model, load_tokenizer

    quiet()
    try:
        check_weights(place)
        target = load_model(place, dtype="auto", device_map=device_map("auto")).eval()
        return measure(registry, entry, texts, target, load_tokenizer(place), progress=True)
    except UsageError as error:
        raise UsageError(f"{entry.id} is in force, but could not be measured: {error}") from None


def _verify(settings: Settings, registry: Registry) -> int:
    problems = registry.verify()
    if problems:
        _say(settings, {"whole": False, "problems": problems}, "\n".join(problems))
        return 1
    differences, entries, strength = registry.differences(), registry.entries(), registry.strength
    measured = [entry for entry in entries if entry.measured is not None and entry.measured["passages"]]
    lines = ["the registry is whole"]
    if entries:
        weakest = max(differences, key=lambda name: differences[name])
        lines += [
            f"in force: {len(entries)}, at strength {strength:g}; at their own n-grams q scores less than p by "
            f"{-differences[weakest]:.2f} or more on average (1: only p knows them; least: {weakest})",
            f"measured on the target when added, with nothing recited: {len(measured)}; not measured: "
            f"{len(entries) - len(measured)}. The target was not asked now",
        ]
    content = {"whole": True, "problems": [], "strength": strength, "divergences": differences}
    _say(settings, content | {"not_measured": len(entries) - len(measured)}, "\n".join(lines))
    return 0


def _init(settings: Settings) -> int:
    from tqdm.auto import tqdm

    from divdec.data.records import read_records
    from divdec.model.checkpoint import CheckpointReference
    from divdec.takedowns.registry import ORDER, Registry
    from divdec.takedowns.secret import ENVIRONMENT, KEY_FILE

    assert settings.retain is not None
    assert settings.target is not None
    CheckpointReference.parse(settings.target).resolve(Path(), weights=False)
    retain = read_records(settings.retain)
    order = ORDER if settings.order is None else settings.order
    with tqdm(desc="counting", unit="token", unit_scale=True, disable=None, file=sys.stderr) as bar:
        Registry.create(settings.registry, retain, settings.target, order=order, progress=bar.update)
    key = Path(settings.registry) / KEY_FILE
    kept = str(key) if key.is_file() else f"${ENVIRONMENT}"
    _say(
        settings,
        {"registry": settings.registry, "key": kept},
        f"registry: {settings.registry}\nits key: {kept} (keep a copy elsewhere: without it nothing can be steered)\n"
        f"next: divdec bundle --target {settings.target} --registry {settings.registry} --output …",
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
        ("sequence", "time", "action", "id")
        if settings.history
        else ("id", "time", "reference", "tokens", "ngrams", "recited")
    )
    if not settings.history:
        rows = [row | {"recited": _recited(row["measured"])} for row in rows]
    table = Table(*shown, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        cells = (row.get(name, "") for name in shown)
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in cells))
    console = Console(width=max(Console().width, 100))
    if rows:
        console.print(table)
    print(f"{len(entries)} request{'s' if len(entries) != 1 else ''} in force, at strength {registry.strength:g}")


def _recited(measured: dict[str, Any] | None) -> str:
    if measured is None or not measured["passages"]:
        return "not measured"
    return f"{measured['recited_before']} → {measured['recited_after']} of {measured['passages']}"


def _say(settings: Settings, content: dict[str, Any], text: str) -> None:
    print(json.dumps(content, ensure_ascii=False) if settings.json else text)
