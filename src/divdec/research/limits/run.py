"""All attacks on all models of some seeds, each figure kept as soon as it is there, and the tables of them.

It knows the order of the work and nothing of how an attack is done.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from divdec.research.limits.asking import FORMS, ask_all
from divdec.research.limits.candidates import rank_all
from divdec.research.limits.relearning import ATTACKS, relearn, split
from divdec.research.limits.settings import CHECKPOINTS, REFERENCES, STEERED, STRENGTHS, LimitsSettings
from divdec.research.limits.subjects import Lineup
from divdec.research.methods.arena import arenas
from divdec.research.methods.settings import CompareSettings
from divdec.runs import read_json, settings_hash, write_json

Seeds = list[dict[str, Any]]
"""What each seed gave: by part, by model."""


def run_limits(settings: LimitsSettings, report: Callable[[str], None]) -> Seeds:
    """Measure what is not there yet.

    Args:
        settings: what and where.
        report: told a line a piece of work.

    Returns:
        The figures seed by seed.

    Raises:
        UsageError: something in the output folder cannot be read.
        Interrupted: Ctrl-C; the same call goes on where it stopped.
    """
    output = Path(settings.output).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    found: Seeds = []
    for arena in arenas(CompareSettings(output=str(output), data="demo", seeds=settings.seeds), report):
        folder = output / f"seed-{arena.seed}"
        found.append(_seed(Lineup(arena, folder, report), settings, folder, report))
    return found


def _seed(lineup: Lineup, settings: LimitsSettings, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    world, tokenizer, seed = lineup.world, lineup.tokenizer, lineup.arena.seed
    place = folder / "figures"
    place.mkdir(parents=True, exist_ok=True)

    def kept(part: str, name: str, decides: Any, measure: Callable[[], Any]) -> Any:
        key = settings_hash([part, name, decides, lineup.arena.identity])
        path = place / f"{part}-{name.replace(' ', '-').replace(',', '').replace(':', '-')}-{key}.json"
        if not path.is_file():
            started = time.perf_counter()
            measured = measure()
            write_json(path, {"figures": measured, "seconds": round(time.perf_counter() - started, 1)})
            report(f"seed {seed}, {part}, {name}: {time.perf_counter() - started:.0f} s")
        return read_json(path)["figures"]

    found: dict[str, Any] = {}
    if "prompts" in settings.parts:
        asked = (settings.prompts, settings.samples)
        found["prompts"] = {
            name: kept("prompts", name, asked, lambda n=name: ask_all(lineup.open(n), tokenizer, world, *asked, seed))
            for name in lineup.steered()
        }
    if "candidates" in settings.parts:
        names = [*REFERENCES, STEERED, *CHECKPOINTS]
        found["candidates"] = {
            name: kept(
                "candidates", name, STRENGTHS, lambda n=name: rank_all(lineup.open(n), tokenizer, world, n == STEERED)
            )
            for name in names
        }
    if "relearning" in settings.parts:
        found["relearning"] = {
            attack: {
                name: kept(
                    f"relearning-{attack}", name, (settings.steps, settings.rate),
                    lambda n=name, a=attack: relearn(
                        lineup.place(n), tokenizer, split(world, a, seed), settings.steps, settings.rate, seed,
                        title=f"{n}: {a}",
                    ),
                )
                for name in [*REFERENCES, *CHECKPOINTS]
            }
            for attack in ATTACKS
        }  # fmt: skip
    return found


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of means over seeds."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"**{self.title}**", "", f"| | {' | '.join(self.columns)} |", f"|---|{'---:|' * len(self.columns)}"]
        return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in self.rows.items())])


def tables(seeds: Seeds, settings: LimitsSettings) -> list[Table]:
    """What was found, as tables: means over seeds, in brackets the least and the most of them."""
    made = []
    if "prompts" in settings.parts:
        rows = {
            name: [_mean([seed["prompts"][name]["figures"][form] for seed in seeds]) for form in FORMS]
            for name in seeds[0]["prompts"]
        }
        made.append(
            Table("Facts of the forget set that are told, in percent, by how they are asked for", [*FORMS], rows)
        )
    if "candidates" in settings.parts:
        rows = {}
        for name, by_setting in seeds[0]["candidates"].items():
            for setting in by_setting:
                of = [seed["candidates"][name][setting] for seed in seeds]
                rows[setting or name] = [
                    *(_mean([figures[key] for figures in of]) for key in ("top", "bottom", "place")),
                    _mean([figures["auc"] for figures in of], 1.0, 2),
                    _mean([figures["probability"] for figures in of], 100.0, 1),
                ]
        chance = statistics.fmean(seed["candidates"]["retrain"][""]["chance"] for seed in seeds)
        made.append(
            Table(
                f"Where the true fact stands among all candidates (chance of either end: {chance:.0%})",
                ["at the top, %", "at the bottom, %", "mean place, 0 top, 100 bottom", "AUC of the loss",
                 "probability of the true answer, %"], rows,
            )
        )  # fmt: skip
    for attack in ATTACKS if "relearning" in settings.parts else ():
        of_attack = [seed["relearning"][attack] for seed in seeds]
        rows = {
            name: [_mean([of[name][place]["accuracy"] for of in of_attack]) for place in range(len(settings.steps))]
            + [_mean([of[name][-1]["probability"] for of in of_attack], 100.0, 1)]
            for name in of_attack[0]
        }
        columns = [*(f"{step} steps" for step in settings.steps), "probability at the end, %"]
        made.append(Table(f"Relearning, {attack}: {ATTACKS[attack]}; facts told, in percent", columns, rows))
    return made


def _mean(values: Sequence[float], scale: float = 100.0, digits: int = 0) -> str:
    mean, least, most = (scale * value for value in (statistics.fmean(values), min(values), max(values)))
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"
