"""Scored results of TOFU and MUSE by method and setting, from result folders and comparisons."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from divdec.errors import UsageError
from divdec.evaluation.results import SUMMARY, Results
from divdec.runs import read_json
from divdec_research.baselines.table import DIVDEC, METHODS, REFERENCES, TITLES, Kind, kind_of
from divdec_research.figures.registry import FigureRequest, Source, missing_data, run_path
from divdec_research.report.scores import MEASURES, SCORES, Entry, Interval, Scorer
from divdec_research.suites.aggregate import AGGREGATES
from divdec_research.suites.results import Identity, find_results, identify, read_results

COMPARISON = "comparison.json"
_CHECKPOINT = re.compile(r"checkpoint-\d+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodResult(Identity):
    """Scores of a method under one setting, which is written as in the paper's figures."""

    values: Mapping[str, float | None]
    intervals: Mapping[str, Interval]
    source: Source
    suite: str
    title: str = ""
    """Name in the paper's tables."""
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a value is missing."""
    seeds: int = 1
    """Number of seeds of which the values are means."""

    @property
    def kind(self) -> Kind:
        """Whether it is a reference, Divergence Decoding or another method."""
        return kind_of(self.method)

    @property
    def label(self) -> str:
        """Method and setting."""
        return f"{self.title}  {self.setting}".strip()


def load_results(request: FigureRequest, figure: str) -> dict[str, list[MethodResult]]:
    """Load and score all results in runs, by suite.

    A folder named 'target' or 'retrain' is the reference of its suite. Of runs with a `comparison.json` only that is
    read: its values are means over seeds, with their intervals.

    Raises:
        UsageError: a run holds no results, or a suite has several targets or retrained models.
    """
    results: list[MethodResult] = []
    folders: dict[Path, tuple[Source, Results]] = {}
    roles = {role: path for role in REFERENCES if (path := getattr(request, role)) is not None}
    for run in (*request.runs, *roles.values()):
        path = run_path(run)
        comparison = path if path.name == COMPARISON else path / COMPARISON
        if comparison.is_file():
            results += _read_comparison(Source(comparison, path), request.scoring.variant)
            continue
        if path.is_dir() and not any(path.iterdir()):
            raise missing_data(request.runs, figure, "folders that `divdec eval` or OpenUnlearning wrote")
        for folder in find_results(run):
            read = read_results(folder)
            if read.suite in SCORES:
                folders.setdefault(folder.resolve(), (Source(_result_file(folder, read.suite), path), read))
    role_folders = {role: {folder.resolve() for folder in find_results(path)} for role, path in roles.items()}
    for suite in SCORES:
        results += _score(
            {path: pair for path, pair in folders.items() if pair[1].suite == suite}, role_folders, request
        )
    suites = [suite for suite in SCORES if any(result.suite == suite for result in results)]
    return {suite: _add_titles([result for result in results if result.suite == suite]) for suite in suites}


def best_settings(results: Sequence[MethodResult], name: str) -> list[MethodResult]:
    """Return the best setting of each method by a measure; results without a value are ignored."""
    by_title: dict[str, list[MethodResult]] = {}
    for result in results:
        if result.values.get(name) is not None:
            by_title.setdefault(result.title, []).append(result)
    return [best_setting(method_results, name) for method_results in by_title.values()]


def best_setting(results: Sequence[MethodResult], name: str) -> MethodResult:
    """Return the best of one method's results, which all have a value; of equal ones the first.

    Only results on as many seeds as any of them are compared: the best of many settings on the seed of their search
    is not a mean over seeds.
    """
    seeds, better = max(result.seeds for result in results), max if MEASURES[name].better == "higher" else min
    return better((result for result in results if result.seeds == seeds), key=lambda result: result.values[name] or 0)


def with_values(results: Sequence[MethodResult], *names: str) -> list[MethodResult]:
    """Return the results that have all of these values.

    Raises:
        UsageError: none has; the error says why, if that is known.
    """
    complete = [result for result in results if all(result.values.get(name) is not None for name in names)]
    if complete:
        return complete
    # The reason of an aggregate is that a part of it is missing; the reason of the part is more specific.
    parts = [name for name in AGGREGATES if not name.startswith("agg")]
    wanted = [*(parts if any(name.startswith("agg") for name in names) else ()), *names]
    reasons = [result.reasons[name] for result in results for name in wanted if name in result.reasons]
    why = f": {reasons[0]}" if reasons else ""
    hint = "; of summaries alone --variant dd-paper can be computed" if "truth_ratio" in why else ""
    raise UsageError(f"no result has {' and '.join(MEASURES[name].short for name in names)}{why}{hint}")


def source_names(results: Sequence[MethodResult]) -> tuple[str, ...]:
    """Return the names of the files that results come from."""
    return tuple(dict.fromkeys(result.source.name for result in results))


def _score(
    folders: Mapping[Path, tuple[Source, Results]], roles: Mapping[str, set[Path]], request: FigureRequest
) -> list[MethodResult]:
    identities = {
        path: Identity(role)
        if (role := next((role for role in roles if path in roles[role]), None))
        else _identify(results, path, source.run)
        for path, (source, results) in folders.items()
    }
    references: dict[str, tuple[Source, Results]] = {}
    for path in folders:
        role, source = identities[path].method, folders[path][0]
        if role in REFERENCES and (role not in roles or path in roles[role]):
            if role in references:
                raise UsageError(
                    f"{source.name} and {references[role][0].name} are both results of the {role}; give one with "
                    f"--{role}, or one seed's folder"
                )
            references[role] = folders[path]
    target, retrain = (references[role][1] if role in references else None for role in REFERENCES)
    scorer = Scorer(target, retrain, request.scoring.variant, request.scoring.bootstrap())
    scored_results = []
    for path, (source, results) in folders.items():
        scored = scorer.score(Entry(path.name, path, results))
        identity, title = identities[path], ""
        if identity.method in REFERENCES and not (results is target or results is retrain):
            identity, title = Identity(path.name), path.name  # the options name another one
        scored_results.append(
            MethodResult(
                **vars(identity), values=scored.values, intervals=scored.intervals, source=source, suite=results.suite,
                title=title, reasons=scored.aggregates.reasons,
            )
        )  # fmt: skip
    return scored_results


def _read_comparison(source: Source, variant: str) -> list[MethodResult]:
    content = read_json(source.path)
    if not isinstance(content, dict) or not isinstance(content.get("grid"), list):
        raise UsageError(f"{source.path} is not a comparison of `divdec compare`")
    suite = content["suite"]
    recorded = content.get("variant")
    if suite == "tofu" and recorded != variant:
        raise UsageError(f"{source.path} holds aggregates of the variant {recorded}; give --variant {recorded}")
    results = []
    for row in content["grid"]:
        method, setting, rule, strength = row["method"], row["setting"], None, None
        if method in ("linear", "rank") and setting.startswith(f"{method}:"):
            rule, strength = method, float(setting.split(":")[1])
            setting = _strength_text(rule, strength)
        intervals = {name: (low, high) for name, (low, high) in row["intervals"].items()}
        results.append(
            MethodResult(
                method, setting.replace("_", " "), rule=rule, strength=strength,
                values=row["values"], intervals=intervals, source=source, suite=suite,
                seeds=len(row.get("seeds", ())),
            )
        )  # fmt: skip
    return results


def _identify(results: Results, folder: Path, run: Path) -> Identity:
    """Identity from `run.json`; of the paper's files from their names."""
    identity = identify(results, folder)
    if identity.rule in ("linear", "rank") and identity.strength is not None:
        family = identity.family.removeprefix("dd_")
        return dataclasses.replace(
            identity,
            setting=_strength_text(identity.rule, identity.strength),
            family="" if family in ("linear", "rank") else family,
        )
    if "method" not in results.about:
        return _published_identity(folder, run)
    known = identity.method in (*METHODS, *REFERENCES, *DIVDEC)
    return Identity(identity.method, identity.setting if known else "")


def _published_identity(folder: Path, run: Path) -> Identity:
    """Method and setting by the folder names of the paper's files, such as `npo_4e-6/checkpoint-26`.

    The method is that of the deepest folder named after one; the rest of the names is the setting.
    """
    if folder.name.lower() in REFERENCES:
        return Identity(folder.name.lower())
    names = {**{name.replace("-", ""): name for name in METHODS}, "distill": "distill"}
    parts = [name for name in folder.parts[len(run.resolve().parts) - 1 :] if not _CHECKPOINT.fullmatch(name)]
    for index in reversed(range(len(parts))):
        for name in sorted(names, key=len, reverse=True):
            pattern = "[-_]?".join(map(re.escape, name))
            if match := re.match(rf"{pattern}(?![a-z])[-_]?", parts[index], flags=re.IGNORECASE):
                setting = " ".join(filter(None, (parts[index][match.end() :], *parts[index + 1 :])))
                return Identity(names[name], setting)
    return Identity(parts[-1])


def _add_titles(results: list[MethodResult]) -> list[MethodResult]:
    """Set titles, with the family if a method has several."""
    families: dict[str, set[str]] = {}
    for result in results:
        families.setdefault(result.method, set()).add(result.family)
    titled = []
    for result in results:
        title = result.title or TITLES.get(result.method, result.method)
        family = f" ({result.family})" if result.family and len(families[result.method]) > 1 else ""
        titled.append(dataclasses.replace(result, title=f"{title}{family}"))
    return titled


def _strength_text(rule: str, value: float) -> str:
    return f"{'α' if rule == 'linear' else 'k'} = {value:g}"


def _result_file(folder: Path, suite: str) -> Path:
    names = (SUMMARY, f"{suite.upper()}_EVAL.json", f"{suite.upper()}_SUMMARY.json")
    return next(folder / name for name in names if (folder / name).is_file())
