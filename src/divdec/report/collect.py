"""Finds results in folders, and tells from a result's steering or its folder's name which setting it is of.

It knows nothing of figures.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from divdec.errors import UsageError
from divdec.evaluation.results import SUMMARY, Results, read_results

FILES = (SUMMARY, "TOFU_EVAL.json", "TOFU_SUMMARY.json", "MUSE_EVAL.json", "MUSE_SUMMARY.json")
REPORTED = ("tofu", "muse")
DEPTH = 3  # a run, a model in it, a setting of that

STEERING = re.compile(r"(?P<rule>linear|rank):(?P<value>[^:]+)(?::(?P<fill>soft|hard))?")
# 'linear-1.5' and 'rank-20-soft' are our folders, '1B-alpha-1.5' and '1B-topk-20' those of the paper's code.
NAME = re.compile(
    r"(?:(?P<family>.+)[-_])?(?P<rule>linear|alpha|rank|topk)-(?P<value>-?\d+(?:\.\d+)?)(?:-(?P<fill>soft|hard))?"
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A point of a sweep."""

    rule: Literal["linear", "rank", "scal", "sust"]
    """The rule that steers; or that the results are steps of a sequence of forget sets."""
    value: float
    """α of the linear rule, k of the rank rule; a step's number."""
    family: str
    """What is steered; settings of one rule and one family are points of one curve."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One result, as the page calls it."""

    name: str
    folder: Path
    results: Results
    setting: Setting | None = None
    role: Literal["target", "retrain"] | None = None


def collect(runs: Sequence[str], target: str | None = None, retrain: str | None = None) -> list[Entry]:
    """Read all results at these places, each once: the target first, then the retrained model, then the runs.

    Args:
        runs: folders that hold results, or hold folders that do.
        target: results of the target.
        retrain: results of the model retrained without the forget set.

    Raises:
        UsageError: a folder holds no results, target or retrain hold several, or they are not all of one suite, TOFU
            or MUSE.
    """
    roles = {}
    for role, given in (("target", target), ("retrain", retrain)):
        if given is not None:
            folders = find(given)
            if len(folders) > 1:
                raise UsageError(f"{role} {given} holds {len(folders)} results, such as {folders[0]}; give one of them")
            roles[role] = folders[0]
    own = [folder for run in runs for folder in find(run)]
    known = {folder.resolve() for folder in roles.values()}
    own = [folder for folder in own if not (folder.resolve() in known or known.add(folder.resolve()))]
    if not own:
        raise UsageError("there is no result beside target and retrain; give a folder of results to report")
    entries = [Entry(role, folder, read_results(folder), role=role) for role, folder in roles.items()]
    for folder, name in zip(own, _names(own, set(roles)), strict=True):
        results = read_results(folder)
        entries.append(Entry(name, folder, results, setting_of(results, folder)))
    for entry in entries:
        if entry.results.suite not in REPORTED:
            raise UsageError(
                f"{entry.folder} holds results of {entry.results.suite}; accepted: {' and '.join(REPORTED)}"
            )
        if entry.results.suite != entries[0].results.suite:
            raise UsageError(
                f"{entry.folder} holds results of {entry.results.suite}, but {entries[0].folder} of "
                f"{entries[0].results.suite}; give results of one suite"
            )
    return entries


def find(given: str) -> list[Path]:
    """The folders at or below a place that hold results, in the order of their names, 2 before 10.

    Raises:
        UsageError: there is none.
    """
    place = Path(given).expanduser()
    if not place.is_dir():
        raise UsageError(f"results {given} is not a folder; give one that `divdec eval` or OpenUnlearning wrote")
    found = _below(place, DEPTH)
    if not found:
        raise UsageError(f"{given} holds no results, nor do the folders in it; looked for {', '.join(FILES)}")
    return found


def setting_of(results: Results, folder: Path) -> Setting | None:
    """The setting that a result says it is of, or that its folder is named after; None where there is neither."""
    sequence, step = results.about.get("sequence"), results.about.get("step")
    if sequence in ("scal", "sust") and isinstance(step, int):
        return Setting(sequence, float(step), folder.absolute().parent.name)
    steering, model = results.about.get("steering"), results.about.get("model")
    told = STEERING.fullmatch(steering) if isinstance(steering, str) else None
    found = told or NAME.fullmatch(folder.name)
    if found is None:
        return None
    try:
        value = float(found["value"])
    except ValueError:
        return None
    rule = "linear" if found["rule"] in ("linear", "alpha") else "rank"
    if told:
        family = Path(model).name if isinstance(model, str) else folder.absolute().parent.name
    else:
        family = found["family"] or folder.absolute().parent.name
    return Setting(rule, value, f"{family} hard" if found["fill"] == "hard" else family)


def _below(place: Path, depth: int) -> list[Path]:
    if any((place / name).is_file() for name in FILES):
        return [place]
    if not depth:
        return []
    folders = [child for child in place.iterdir() if child.is_dir() and not child.name.startswith(".")]
    return [found for child in sorted(folders, key=_natural) for found in _below(child, depth - 1)]


def _natural(path: Path) -> list[tuple[float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(float(part), "") if place % 2 else (-1.0, part) for place, part in enumerate(parts)]


def _names(folders: Sequence[Path], taken: Collection[str]) -> list[str]:
    """The folders' names, with the folders above them as far as it takes to tell them apart."""
    paths = [folder.absolute() for folder in folders]
    depths = [1] * len(paths)
    while True:
        names = ["/".join(path.parts[-depth:]) for path, depth in zip(paths, depths, strict=True)]
        alike = [
            place
            for place, name in enumerate(names)
            if (names.count(name) > 1 or name in taken) and depths[place] < len(paths[place].parts)
        ]
        if not alike:
            return names
        for place in alike:
            depths[place] += 1
