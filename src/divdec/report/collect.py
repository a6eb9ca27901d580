"""Collect the results that a page shows, with their names and roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from divdec.errors import UsageError
from divdec.evaluation.results import Identity, Results, find_results, identify, read_results

REPORTED = ("tofu", "muse")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One result of a page."""

    name: str
    folder: Path
    results: Results
    setting: Identity | None = None
    """Rule and strength, if the result is a point of a sweep."""
    role: Literal["target", "retrain"] | None = None


def collect(runs: Sequence[str], target: str | None = None, retrain: str | None = None) -> list[Entry]:
    """Read all results at or below paths, each once: the target first, then the retrained model, then the runs.

    Args:
        runs: folders that hold results, or hold folders that do.
        target: results of the target.
        retrain: results of the model retrained without the forget set.

    Raises:
        UsageError: a folder holds no results, target or retrain hold several, or they are not all of one suite, TOFU
            or MUSE.
    """
    roles: dict[Literal["target", "retrain"], Path] = {}
    if target is not None:
        roles["target"] = _only("target", target)
    if retrain is not None:
        roles["retrain"] = _only("retrain", retrain)
    known = {folder.resolve() for folder in roles.values()}
    folders = []
    for folder in (folder for run in runs for folder in find_results(run)):
        if folder.resolve() not in known:
            known.add(folder.resolve())
            folders.append(folder)
    if not folders:
        raise UsageError("there is no result besides target and retrain; give a folder of results to report")
    entries = [Entry(role, folder, read_results(folder), role=role) for role, folder in roles.items()]
    for folder, name in zip(folders, _names(folders, set(roles)), strict=True):
        results = read_results(folder)
        identity = identify(results, folder)
        entries.append(Entry(name, folder, results, identity if identity.strength is not None else None))
    suite = entries[0].results.suite
    for entry in entries:
        if entry.results.suite not in REPORTED:
            raise UsageError(
                f"{entry.folder} holds results of {entry.results.suite}; accepted: {' and '.join(REPORTED)}"
            )
        if entry.results.suite != suite:
            raise UsageError(
                f"{entry.folder} holds results of {entry.results.suite}, but {entries[0].folder} of {suite}; "
                "give results of one suite"
            )
    return entries


def _only(role: str, path: str) -> Path:
    folders = find_results(path)
    if len(folders) > 1:
        raise UsageError(f"{role} {path} holds {len(folders)} results, such as {folders[0]}; give one of them")
    return folders[0]


def _names(folders: Sequence[Path], taken: Collection[str]) -> list[str]:
    """The folders' names, with as many of their parents' names as distinguish them."""
    paths = [folder.absolute() for folder in folders]
    depths = [1] * len(paths)
    while True:
        names = ["/".join(path.parts[-depth:]) for path, depth in zip(paths, depths, strict=True)]
        ambiguous = [
            index
            for index, name in enumerate(names)
            if (names.count(name) > 1 or name in taken) and depths[index] < len(paths[index].parts)
        ]
        if not ambiguous:
            return names
        for index in ambiguous:
            depths[index] += 1
