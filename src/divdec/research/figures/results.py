"""Results of TOFU and MUSE by method and setting, scored, from folders and comparisons. It draws nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from divdec.errors import UsageError
from divdec.evaluation.aggregate import AGGREGATES, Bootstrap
from divdec.evaluation.results import SUMMARY, Results, find_results, identify, read_results
from divdec.report.measures import MEASURES, best_index
from divdec.report.plots.panels import Kind
from divdec.report.scores import Scorer
from divdec.research.baselines.registry import methods
from divdec.research.figures.drawn import Asked, Source, nothing, place_of
from divdec.runs import read_json

COMPARISON = "comparison.json"
OWN = {"linear": "Linear DD", "rank": "Rank DD", "distill": "Distill DD"}
REFERENCES = {"target": "Target", "retrain": "Retrain"}
SUITES = ("tofu", "muse")
NO_SETTING = "(no setting is best)"
_CHECKPOINT = re.compile(r"checkpoint-\d+")

Rule = Literal["linear", "rank"]


@dataclasses.dataclass(frozen=True)
class Result:
    """A method under one setting."""

    method: str
    """Its key: of `OWN`, `REFERENCES` or the baselines; another model's name."""
    title: str
    """As the paper's tables call it."""
    setting: str
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float]]
    source: Source
    suite: str
    rule: Rule | None = None
    strength: float | None = None
    """α or k."""
    family: str = ""
    """Which auxiliaries steer, as folders are called."""
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a value is missing."""
    seeds: int = 1
    """Over how many the values are means."""

    @property
    def kind(self) -> Kind:
        """Whose it is."""
        return "reference" if self.method in REFERENCES else "ours" if self.method in OWN else "other"

    @property
    def label(self) -> str:
        """Method and setting."""
        return f"{self.title}  {self.setting}".strip()


def results_of(asked: Asked, figure: str) -> dict[str, list[Result]]:
    """All results in runs, scored, by suite.

    A folder called 'target' or 'retrain' (or within one) is the reference of its suite. Runs that hold a
    `comparison.json` are read from that: its values are means over seeds, with their intervals.

    Raises:
        UsageError: a run holds no results, or a suite has several targets or retrained models.
    """
    found: dict[str, list[Result]] = {}
    folders: dict[Path, tuple[Source, Results]] = {}
    for given in (*asked.runs, *(role for role in (asked.target, asked.retrain) if role is not None)):
        place = place_of(given)
        comparison = place if place.name == COMPARISON else place / COMPARISON
        if comparison.is_file():
            found.setdefault("tofu", []).extend(_compared(Source(comparison, place), asked.variant))
            continue
        if place.is_dir() and not any(place.iterdir()):
            raise nothing(asked.runs, figure, "folders that `divdec eval` or OpenUnlearning wrote")
        for folder in find_results(given):
            results = read_results(folder)
            if results.suite in SUITES:
                folders.setdefault(folder.resolve(), (Source(_file_of(folder, results.suite), place), results))
    roles = {
        role: {folder.resolve() for folder in find_results(given)}
        for role, given in (("target", asked.target), ("retrain", asked.retrain))
        if given is not None
    }
    for suite in SUITES:
        own = {folder: pair for folder, pair in folders.items() if pair[1].suite == suite}
        if own:
            found.setdefault(suite, []).extend(_scored(own, roles, asked))
    return {suite: _told_apart(results) for suite, results in found.items()}


def best(results: Sequence[Result], name: str) -> list[Result]:
    """Of each method the setting that is best by a measure; those without a value are left out.

    Only those that were measured on as many seeds as any of the method stand for it: the best of many settings on the
    seed where they were searched is no mean over seeds. A method of which no setting is best (see
    `measures.best_index`) has one of the highest, which says so where its setting would stand.
    """
    by_title: dict[str, list[Result]] = {}
    for result in results:
        if result.values.get(name) is not None:
            by_title.setdefault(result.title, []).append(result)
    return [best_one(own, name) for own in by_title.values()]


def best_one(results: Sequence[Result], name: str) -> Result:
    """The best of one method's results, which all have a value; see `best`."""
    seeds = max(result.seeds for result in results)
    own = [result for result in results if result.seeds == seeds]
    measure, values = MEASURES[name], [result.values[name] for result in own]
    index = best_index(values, measure.better, measure.digits)
    if index is not None:
        return own[index]
    first = min if measure.better == "lower" else max
    found = first(own, key=lambda result: result.values[name] or 0.0)
    return found if found.kind == "reference" else dataclasses.replace(found, setting=NO_SETTING, strength=None)


def with_value(results: Sequence[Result], *names: str) -> list[Result]:
    """Those that have all of these values.

    Raises:
        UsageError: none has; it says why, where that is known.
    """
    found = [result for result in results if all(result.values.get(name) is not None for name in names)]
    if found:
        return found
    # An aggregate's own reason is that a part is missing; the part's says why.
    parts = [name for name in AGGREGATES if not name.startswith("agg")]
    asked = [*(parts if any(name.startswith("agg") for name in names) else ()), *names]
    reasons = [result.reasons[name] for result in results for name in asked if name in result.reasons]
    lacking = " and ".join(MEASURES[name].short for name in names)
    why = f": {reasons[0]}" if reasons else ""
    hint = "; of summaries alone --variant dd-repo can be computed" if "truth_ratio" in why else ""
    raise UsageError(f"no result has {lacking}{why}{hint}")


def sources_of(results: Sequence[Result]) -> tuple[str, ...]:
    """Names of the files that results come from."""
    return tuple(dict.fromkeys(result.source.name for result in results))


def _scored(folders: dict[Path, tuple[Source, Results]], roles: dict[str, set[Path]], asked: Asked) -> list[Result]:
    by_role: dict[str, tuple[Source, Results]] = {}
    for folder, (source, results) in folders.items():
        for role in REFERENCES:
            given = roles.get(role)
            if folder in given if given is not None else _role(results, folder) == role:
                if role in by_role:
                    raise UsageError(
                        f"{source.name} and {by_role[role][0].name} are both results of the {role}; give one with "
                        f"--{role}, or one seed's folder"
                    )
                by_role[role] = (source, results)
    target, retrain = (by_role[role][1] if role in by_role else None for role in REFERENCES)
    scorer = Scorer(target, retrain, asked.variant, Bootstrap(asked.level, asked.draws, asked.seed))
    found = []
    for folder, (source, results) in folders.items():
        scored = scorer.scored(results)
        role = next((role for role, (_, of) in by_role.items() if of is results), None)
        named = _named(results, folder, source.run, role)
        found.append(
            Result(
                **named, values=scored.values, intervals=scored.intervals, source=source, suite=results.suite,
                reasons=scored.scores.reasons,
            )
        )  # fmt: skip
    return found


def _compared(source: Source, variant: str) -> list[Result]:
    content = read_json(source.path)
    if not isinstance(content, dict) or not isinstance(content.get("grid"), list):
        raise UsageError(f"{source.path} is not a comparison of `divdec compare`")
    if content["variant"] != variant:
        raise UsageError(
            f"{source.path} holds aggregates of the variant {content['variant']}; give --variant {content['variant']}"
        )
    found = []
    for line in content["grid"]:
        setting = line["setting"]
        rule, _, strength = setting.partition(":")
        steered = rule in ("linear", "rank") and line["method"] == rule
        found.append(
            Result(
                line["method"],
                title_of(line["method"]),
                _strength(rule, float(strength.split(":")[0])) if steered else _short(setting),
                line["values"],
                {name: (ends[0], ends[1]) for name, ends in line["intervals"].items()},
                source,
                "tofu",
                rule if steered else None,  # pyright: ignore[reportArgumentType]
                float(strength.split(":")[0]) if steered else None,
                seeds=len(line.get("seeds", ())),
            )
        )
    return found


def _short(setting: str) -> str:
    """Options as a person would write them."""
    return setting.replace("learning_rate", "lr").replace("_", " ")


def _named(results: Results, folder: Path, run: Path, role: str | None) -> dict[str, Any]:
    """Method, title, setting and what else its folder says of a result."""
    if role is not None:
        return {"method": role, "title": REFERENCES[role], "setting": ""}
    known = titles()
    setting = identify(results, folder)
    told = results.about.get("method")
    if told in known and told not in OWN:
        return {"method": told, "title": known[told], "setting": str(results.about.get("setting") or "")}
    if setting.rule in ("linear", "rank") and setting.strength is not None:
        family = re.sub(r"^dd_", "", setting.family)
        return {
            "method": setting.rule, "title": OWN[setting.rule], "rule": setting.rule, "strength": setting.strength,
            "setting": _strength(setting.rule, setting.strength),
            "family": "" if family in ("linear", "rank") else family,
        }  # fmt: skip
    # The deepest folder that is called as a method is; what follows in the names is the setting.
    parts = [part for part in folder.parts[len(run.resolve().parts) - 1 :] if not _CHECKPOINT.fullmatch(part)]
    for place in range(len(parts) - 1, -1, -1):
        if matched := _method(parts[place]):
            key, rest = matched
            return {"method": key, "title": known[key], "setting": " ".join(filter(None, (rest, *parts[place + 1 :])))}
    return {"method": parts[-1], "title": parts[-1], "setting": ""}


def _method(part: str) -> tuple[str, str] | None:
    """Which method a folder is called after, and what follows in its name."""
    known = {**{name.replace("-", ""): name for name in methods()}, "distill": "distill"}
    for flat in sorted(known, key=len, reverse=True):
        pattern = "[-_]?".join(map(re.escape, flat))
        if found := re.match(rf"{pattern}(?![a-z])[-_]?", part, flags=re.IGNORECASE):
            return known[flat], part[found.end() :]
    return None


def _role(results: Results, folder: Path) -> str | None:
    told = results.about.get("method")
    if told in REFERENCES:
        return str(told)
    return folder.name.lower() if folder.name.lower() in REFERENCES else None


def _told_apart(results: list[Result]) -> list[Result]:
    """A family is part of a title where one rule has several."""
    families: dict[str, set[str]] = {}
    for result in results:
        families.setdefault(result.title, set()).add(result.family)
    return [
        dataclasses.replace(result, title=f"{result.title} ({result.family})")
        if result.family and len(families[result.title]) > 1
        else result
        for result in results
    ]


def titles() -> dict[str, str]:
    """What each method is called in the paper's tables, by its key."""
    return {**REFERENCES, **OWN, **{name: method.title for name, method in methods().items()}}


def title_of(method: str) -> str:
    """The same of one; a key that is not known is its own title."""
    return titles().get(method) or method


def _strength(rule: str, value: float) -> str:
    return f"{'α' if rule == 'linear' else 'k'} = {value:g}"


def _file_of(folder: Path, suite: str) -> Path:
    names = (SUMMARY, f"{suite.upper()}_EVAL.json", f"{suite.upper()}_SUMMARY.json")
    return next(folder / name for name in names if (folder / name).is_file())
