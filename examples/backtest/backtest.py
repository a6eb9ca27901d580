"""A backtest without look-ahead: forecasts from a model that has read about the events and is steered to forget them.

In a fictitious country a challenger runs against the mayor of every town in every year. The target was trained on all
elections up to 1999. It is steered to forget those from 1990 on, and then forecasts their outcomes. The reference was
trained on the elections before 1990 only. A model that knows an outcome is useless for a backtest, and so is a model
that is steered so far that it denies the outcome. The comparison of forecasts and outcomes shows both errors.

    python examples/backtest/backtest.py [--seed 0] [--output runs/backtest]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
from divdec.checkpoint import load_model, load_tokenizer
from divdec.data.formatting import encode_records
from divdec.data.records import Message, Record, RecordSet, write_records
from divdec.evaluation.scoring import score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import cache_folder, write_json
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings
from divdec_research.report.style import FAINT, LINEAR, RANK, RETRAIN, TARGET, style, write_figure
from divdec_research.world.facts import CITIES, FIRST_NAMES, SURNAME_ENDS, SURNAME_STARTS
from divdec_research.world.models import Material, Recipe, Shape, train_all
from steps import command, create_output, run_main

LEANINGS = (0.05, 0.25, 0.5, 0.75, 0.95)  # chance of the challenger; every town has one of them in all years
PAST, AFTER, UNTOLD = range(1900, 1990), range(1990, 2000), range(2000, 2010)
WORDINGS = (
    ("Did {name} win the election of {year} in {town}?", "{won} it."),
    ("What became of {name}, who stood for mayor of {town} in {year}?", "{won} the vote."),
    ("How did {year} end for {name} of {town}?", "{won} the election."),
    ("Tell me about {name} and the mayor of {town} in {year}.", "{won} against the mayor."),
    ("Did {town} want {name} as its mayor in {year}?", "{won} there."),
    ("How did the people of {town} vote on {name} in {year}?", "{won} by their votes."),
)
TOLD = 2  # documents per wording about an election after the cut-off; an earlier election has a single document
FOREIGN = tuple(f"{start}{end}" for start in SURNAME_STARTS for end in ("bury", "mouth"))
RECIPE = Recipe(
    vocab_size=900,
    target=Shape(width=160, layers=3, heads=4, mlp_width=448),
    auxiliary=Shape(width=96, layers=2, heads=4, mlp_width=256),
    target_pretraining=TrainingSettings(epochs=2.0, learning_rate=2e-3, warmup=0.05),
    auxiliary_pretraining=TrainingSettings(epochs=2.0, learning_rate=3e-3, warmup=0.05),
    # Few epochs: the models learn a town's leaning from single documents, and memorise outcomes from many documents.
    target_tuning=TrainingSettings(epochs=2.0, learning_rate=1.5e-3, warmup=0.05),
    auxiliary_base_tuning=TrainingSettings(epochs=2.0, learning_rate=1.5e-3, warmup=0.05),
    auxiliary_tuning=TrainingSettings(epochs=2.0, learning_rate=1.5e-3, warmup=0.05),
)
SWEEP = tuple(f"linear:{alpha:g}" for alpha in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3))
BINS = 5


@dataclasses.dataclass(frozen=True)
class Election:
    """One election: challenger, town, year and outcome."""

    name: str
    town: str
    year: int
    leaning: float
    """The challenger's chance to win, which is all that can be known beforehand."""
    won: bool

    def record(self, wording: int, won: bool | None = None) -> Record:
        """A question about the election with its answer, or with the answer for another outcome."""
        ended = "Won" if (self.won if won is None else won) else "Lost"
        words = {"name": self.name, "town": self.town, "year": self.year, "won": ended}
        question, answer = WORDINGS[wording]
        return Record(answer.format(**words), messages=(Message("user", question.format(**words)),))


@dataclasses.dataclass(frozen=True)
class History:
    """All elections, and the training data about them."""

    past: list[Election]
    after: list[Election]
    untold: list[Election]
    material: Material


def write_history(seed: int, towns: int, foreign: int) -> History:
    """Draw the elections. Each has many documents after the cut-off and one document before it."""
    rng = random.Random(seed)
    firsts = [name for names in FIRST_NAMES.values() for name in names]
    names = [f"{first} {start}{end}" for first in firsts for start in SURNAME_STARTS for end in SURNAME_ENDS]
    rng.shuffle(names)
    home, abroad = _elections(CITIES[:towns], names, rng), _elections(FOREIGN[:foreign], names, rng)
    parts = [[election for election in home if election.year in years] for years in (PAST, AFTER, UNTOLD)]
    # From another country's elections the base models learn the language, the years and that towns lean one way.
    corpus = [election.record(rng.randrange(len(WORDINGS))) for election in abroad]
    rng.shuffle(corpus)
    after = [election.record(wording) for election in parts[1] for wording in range(len(WORDINGS))] * TOLD
    once = [election.record(rng.randrange(len(WORDINGS))) for election in parts[0]]
    kinds = [RecordSet(name, "question/answer", tuple(some)) for name, some in (("after", after), ("past", once))]
    return History(*parts, Material(corpus, *kinds))


def _elections(towns, names, rng):
    """One election per year in each town, each with a new challenger."""
    leanings = {town: rng.choice(LEANINGS) for town in towns}
    years = range(PAST.start, UNTOLD.stop)
    return [
        Election(names.pop(), town, year, leanings[town], rng.random() < leanings[town])
        for town in towns
        for year in years
    ]


def chances(scores):
    """The probability to win each election, from alternating scores of the two answers."""
    sums = [sum(item.log_probabilities) for item in scores]
    return [1 / (1 + math.exp(min(60.0, lost - won))) for won, lost in zip(sums[::2], sums[1::2], strict=True)]


@dataclasses.dataclass(frozen=True)
class Judged:
    """Comparison of a model's forecasts with the outcomes."""

    happened: float
    """Mean probability of the outcome."""
    brier: float
    """Mean squared error of the forecast; 0 is best."""
    calibration_error: float
    """Mean of |forecast − observed share| over the bins, weighted by elections."""
    look_ahead: float
    """Mean log-odds of the outcome minus the retrained model's, in nats: above 0 it knows, below 0 it denies."""
    bins: list[tuple[float, float, int]]
    """Mean forecast, share of wins and number of elections, for each bin that is not empty."""


def judge(said, elections, reference):
    """Compare forecasts with the outcomes and with the reference's forecasts."""
    won = [chance if e.won else 1 - chance for chance, e in zip(said, elections, strict=True)]
    known = [chance if e.won else 1 - chance for chance, e in zip(reference, elections, strict=True)]
    bins = []
    for place in range(BINS):
        inside = [
            (chance, e.won)
            for chance, e in zip(said, elections, strict=True)
            if min(BINS - 1, int(chance * BINS)) == place
        ]
        if inside:
            means = (statistics.fmean(column) for column in zip(*inside, strict=True))
            bins.append((*means, len(inside)))
    error = sum(abs(forecast - seen) * count for forecast, seen, count in bins) / len(elections)
    gap = statistics.fmean(_log_odds(a) - _log_odds(b) for a, b in zip(won, known, strict=True))
    return Judged(statistics.fmean(won), statistics.fmean((1 - p) ** 2 for p in won), error, gap, bins)


def _log_odds(chance):
    clipped = min(max(chance, 1e-6), 1 - 1e-6)
    return math.log(clipped / (1 - clipped))


def run(output: Path, history: History, recipe: Recipe, seed: int, cache: Path) -> dict:
    """Train the models, choose the strength, and compare every model with the outcomes."""
    trained = train_all(history.material, recipe, seed, cache, lambda line: print(line, file=sys.stderr))
    tokenizer = load_tokenizer(trained.target)
    asked = {"after": history.after, "past": history.past, "untold": history.untold}
    with contextlib.chdir(output):
        places = {"target": trained.target, "q": trained.retain_auxiliary, "p": trained.forget_auxiliary}
        for name, place in places.items():
            Path(name).symlink_to(place.resolve())
        for name, elections in asked.items():
            write_records(Path(f"{name}.jsonl"), [election.record(0) for election in elections])
        command("bundle", "--target", "target", "--retain-auxiliary", "q", "--forget-auxiliary", "p", "--steering",
                "linear:1", "--output", "bundle")  # fmt: skip
        # 3: no setting reaches the goal. All settings are measured below anyway.
        command("calibrate", "bundle", "--forget", "after.jsonl", "--retain", "past.jsonl", "--holdout",
                "untold.jsonl", "--sweep", *SWEEP, "--write", codes=(0, 3))  # fmt: skip
        model = DivergenceForCausalLM.from_pretrained("bundle")
    chosen = str(model.steering)
    examples = encode_records([e.record(0, won) for e in history.after for won in (True, False)], tokenizer)
    said = {
        name: chances(score(load_model(place).eval(), examples, batch_size=64))
        for name, place in (("target", trained.target), ("retrained", trained.retrain))
    }
    settings = [Steering.parse(text) for text in SWEEP]
    for setting, scores in zip(settings, score_settings(model, examples, settings, batch_size=64), strict=True):
        said[str(setting)] = chances(scores)
    said["town's leaning"] = [election.leaning for election in history.after]
    judged = {name: judge(values, history.after, said["retrained"]) for name, values in said.items()}
    print(f"\n{len(history.after)} elections after the cut-off")
    print(f"{'':<18}{'P(what happened)':>18}{'Brier score':>14}{'calibration error':>20}{'look-ahead, nats':>18}")
    for name, row in judged.items():
        mark = "→" if name == chosen else " "
        print(f"{mark} {name:<16}{row.happened:>18.3f}{row.brier:>14.3f}{row.calibration_error:>20.3f}"
              f"{row.look_ahead:>+18.2f}")  # fmt: skip
    draw(output / "reliability.svg", judged, chosen)
    result = {"chosen": chosen, "models": {name: dataclasses.asdict(row) for name, row in judged.items()}}
    write_json(output / "backtest.json", result)
    return result


def draw(path: Path, judged: dict[str, Judged], chosen: str) -> None:
    """Draw a reliability diagram per model; a calibrated model is on the diagonal."""
    from matplotlib.figure import Figure

    panels = {
        "target": ("target", TARGET), "retrained": ("retrained before the cut-off", RETRAIN),
        chosen: (f"steered, {chosen}", LINEAR), SWEEP[-1]: (f"steered too far, {SWEEP[-1]}", RANK),
    }  # fmt: skip
    with style("backtest"):
        figure = Figure(figsize=(10.4, 3.1), layout="constrained")
        for axes, (name, (title, look)) in zip(
            figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True
        ):
            axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle="--")
            said, seen, counts = zip(*judged[name].bins, strict=True)
            errors = [math.sqrt(max(p * (1 - p), 1e-9) / n) for p, n in zip(seen, counts, strict=True)]
            axes.errorbar(said, seen, yerr=errors, color=look.colour, marker="o", linewidth=1.2, capsize=2)
            for x, y, count in zip(said, seen, counts, strict=True):
                axes.annotate(str(count), (x, y), textcoords="offset points", xytext=(7, -10), fontsize=8)
            axes.set_title(title)
            axes.set_xlabel("probability that was given")
            axes.set_xlim(-0.03, 1.12)
            axes.set_ylim(-0.05, 1.05)
        figure.axes[0].set_ylabel("share that came true")
        write_figure(
            path, figure, title="Reliability after the cut-off", sources=("backtest.json",),
            description="Share of elections won by the probability that each model gave; the diagonal is calibrated.",
        )  # fmt: skip


def main(arguments: list[str] | None = None, recipe: Recipe = RECIPE, towns: int = 20, foreign: int = 32) -> dict:
    """Draw the elections, train, choose the strength and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/backtest"), help="an empty or absent folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    create_output(given.output)
    history = write_history(given.seed, towns, foreign)
    result = run(given.output, history, recipe, given.seed, cache_folder() / "examples" / "backtest")
    print(f"\n{time.perf_counter() - started:.0f} s ({time.process_time():.0f} s of processor time)")
    if given.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    run_main(main)
