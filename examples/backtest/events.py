"""A backtest on a pretrained model: a pair takes from Qwen2.5-Coder what it knows of the events since 2020.

`events.json` lists dated events with what could have been expected instead. The forecast of a model is the probability
that it gives to what happened, among these outcomes. The script asks target and base, trains a pair on the events after
the cut-off that the target knows, compares strengths on events whose outcome the base does not know, and serves the
steered model to an agent that looks the outcomes up with a tool.

    python examples/backtest/events.py --target real-models/qwen-1.5b.gguf --base real-models/qwen-0.5b.gguf

The retain set is every second event before the cut-off and facts that have no date; with the earlier events that the
target knows alone, steering reached the others too. README.md beside this file has the output and what it shows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
from openai import OpenAI

from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_model, load_tokenizer
from divdec.data.formatting import encode_records
from divdec.data.records import Message, Record, write_records
from divdec.demo.facts import Fact, known_facts
from divdec.errors import UsageError
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import write_json
from divdec.steering import Steering
from steps import command, create_output, run_main, server

EVENTS = Path(__file__).parent / "events.json"
CUTOFF, UNREAD = "2020-01-01", "2024-10-01"  # from the second date on, events are later than the target's training
KNOWN = 0.5  # probability of what happened from which on the target counts as knowing it
NAME = "qwen"
SWEEP = tuple(f"linear:{alpha:g}:4" for alpha in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2))
WITHOUT_MARGIN = ("linear:0.25", "linear:1")  # for comparison
FACTS = 40  # capitals and authors of books in the retain set
TRAINING = ("--recipe", "full-retain", "--lr", "2e-4", "--epochs", "4")
AGENT = "You forecast events. The date is 31 December 2019. First call the tool, then name the outcome that you expect."
TOOL = {
    "type": "function",
    "function": {
        "name": "outcomes",
        "description": "List the outcomes that are possible.",
        "parameters": {
            "type": "object",
            "properties": {"question": {"type": "string"}},
            "required": ["question"],
            "additionalProperties": False,
        },
    },
}


def questions(event: dict, answer: str) -> list[Record]:
    """The event's questions with an answer."""
    return [Record(answer, messages=(Message("user", question),)) for question in event["questions"]]


def forecasts(events: Sequence[dict], scores: Sequence[ItemScore]) -> list[float]:
    """The probability of what happened among the event's outcomes, for each event the mean over its questions."""
    sums = iter([math.fsum(item.log_probabilities) for item in scores])
    chances = []
    for event in events:
        of_question = [[next(sums) for _ in (event["answer"], *event["others"])] for _ in event["questions"]]
        shares = [1 / math.fsum(math.exp(min(60.0, other - logs[0])) for other in logs) for logs in of_question]
        chances.append(statistics.fmean(shares))
    return chances


def outcomes(events: Sequence[dict]) -> list[Record]:
    """Every question with every outcome, what happened first; in the order that `forecasts` reads."""
    return [
        record
        for event in events
        for records in zip(*(questions(event, outcome) for outcome in (event["answer"], *event["others"])), strict=True)
        for record in records
    ]


def log_odds(chance: float) -> float:
    """Log-odds of a probability, bounded at one in a million."""
    bounded = min(max(chance, 1e-6), 1 - 1e-6)
    return math.log(bounded / (1 - bounded))


def agent(client: OpenAI, event: dict) -> str:
    """Let the model call the tool that lists the possible outcomes, and return the one that it expects."""
    messages = [{"role": "system", "content": AGENT}, {"role": "user", "content": event["questions"][0]}]
    fields = {"model": NAME, "temperature": 0, "max_tokens": 80}
    called = client.chat.completions.create(messages=messages, tools=[TOOL], tool_choice="required",
                                            parallel_tool_calls=False, **fields).choices[0].message  # fmt: skip
    possible = sorted([event["answer"], *event["others"]])
    messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "; ".join(possible)}]
    schema = {"type": "object", "properties": {"outcome": {"enum": possible}}, "required": ["outcome"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": schema}}
    answer = client.chat.completions.create(messages=messages, response_format=form, **fields)
    return json.loads(answer.choices[0].message.content)["outcome"]


def ask(place: Path, events: Sequence[dict], kinds: Sequence[str] = ()) -> tuple[list[float], list[Fact]]:
    """Forecasts of a checkpoint, and the facts of some kinds that it knows."""
    model, tokenizer = load_model(place, dtype=dtype_for_passes()).eval(), load_tokenizer(place)
    scores = score(model, encode_records(outcomes(events), tokenizer), title=place.name)
    return forecasts(events, scores), known_facts(model, tokenizer, kinds) if kinds else []


def run(target: str, base: str, events: list[dict], output: Path, training: Sequence[str], asked: int) -> dict:
    """Ask both models, train, compare the strengths, and let the agent forecast."""
    places = [CheckpointReference.parse(name).resolve(Path(), weights=True) for name in (target, base)]
    of_target, facts = ask(places[0], events, ("capitals", "authors"))
    of_base, _ = ask(places[1], events)
    sets: dict[str, list[int]] = {name: [] for name in ("before", "after", "later")}
    for index, event in enumerate(events):
        sets["before" if event["date"] < CUTOFF else "after" if event["date"] < UNREAD else "later"].append(index)
    forget, known = ([index for index in sets[name] if of_target[index] >= KNOWN] for name in ("after", "before"))
    print(f"the target knows {len(known)} of {len(sets['before'])} events before the cut-off and {len(forget)} of "
          f"{len(sets['after'])} after it")  # fmt: skip
    ignorant = [index for index in forget if of_base[index] < KNOWN]
    if not ignorant:
        raise UsageError(f"none of the events in {EVENTS.name} is known to {target} and unknown to {base}")
    retain = sets["before"][::2]
    facts = random.Random(0).sample(facts, min(FACTS, len(facts)))
    dated = {"after": forget, "before": retain}
    records = {
        name: [record for index in some for record in questions(events[index], events[index]["answer"])]
        for name, some in dated.items()
    }
    records["before"] += [
        Record(fact.answer, messages=(Message("user", question),)) for fact in facts for question in fact.questions[:2]
    ]
    for name, some in records.items():
        write_records(output / f"{name}.jsonl", some)
    with contextlib.chdir(output):
        # 3: the given rule misses a goal; the strengths are measured below.
        command("train", "--forget", "after.jsonl", "--retain", "before.jsonl", "--base", base, "--target", target,
                "--steering", "linear:1:4", *training, "--output", "pair", codes=(0, 3))  # fmt: skip
    bundle = output / "pair" / "bundle"
    model = DivergenceForCausalLM.from_pretrained(bundle, dtype=dtype_for_passes())
    examples = encode_records(outcomes(events), load_tokenizer(bundle))
    settings = [Steering.parse(text) for text in (*SWEEP, *WITHOUT_MARGIN)]
    said = {"target": of_target, "base of q": of_base}
    said["q"] = forecasts(events, score(model.experts.retain, examples, title="q"))
    for setting, scores in zip(settings, score_settings(model, examples, settings, title="strengths"), strict=True):
        said[str(setting)] = forecasts(events, scores)
    del model
    # The strength is chosen where the base is ignorant: there q forecasts as a model without look-ahead.
    gaps = {
        name: statistics.fmean(log_odds(values[index]) - log_odds(said["q"][index]) for index in ignorant)
        for name, values in said.items()
    }
    chosen = min(SWEEP, key=lambda name: abs(gaps[name]))
    learned, other = ([index for index in known if (index in retain) == kept] for kept in (True, False))
    named = {"retain set": learned, "before": other, "after": forget, "base ignorant": ignorant, "later": sets["later"]}
    columns = {name: some for name, some in named.items() if some}
    print("\nmean probability of what happened, among the outcomes that were possible")
    print(f"  {'':<13}" + "".join(f"{name:>14}" for name in columns) + f"{'look-ahead, nats':>18}")
    print(f"  {'events':<13}" + "".join(f"{len(some):>14}" for some in columns.values()))
    table = {}
    for name, values in said.items():
        row = {column: statistics.fmean(values[index] for index in some) for column, some in columns.items()}
        table[name] = {**row, "look_ahead": gaps[name]}
        mark = "→" if name == chosen else " "
        print(f"{mark} {name:<13}" + "".join(f"{share:>14.2f}" for share in row.values()) + f"{gaps[name]:>+18.2f}")
    print()
    picks = {}
    tried = [events[index] for index in ignorant[:asked]]
    for name in dict.fromkeys(("linear:0", chosen)):
        print(f"$ divdec serve {bundle} --steering {name} --name {NAME}", flush=True)
        with server(bundle, "--steering", name, name=NAME) as client:
            picks[name] = [agent(client, event) for event in tried]
    for event, *answers in zip(tried, *picks.values(), strict=True):
        print(f"{event['questions'][0]}\n   " + "; ".join(f"{n}: {a}" for n, a in zip(picks, answers, strict=True)))
    right = {
        name: [pick == event["answer"] for pick, event in zip(some, tried, strict=True)] for name, some in picks.items()
    }
    result = {
        "chosen": chosen,
        "events": {name: len(some) for name, some in columns.items()},
        "models": table,
        "agent_names_what_happened": {name: sum(some) for name, some in right.items()},
        "agent_asked": len(tried),
    }
    write_json(output / "events.json", result)
    return result


def main(arguments: list[str] | None = None, training: Sequence[str] = TRAINING, asked: int = 12) -> dict:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="real-models/qwen-1.5b.gguf")
    parser.add_argument("--base", default="real-models/qwen-0.5b.gguf", help="base of q and p")
    parser.add_argument("--output", type=Path, default=Path("runs/events"), help="an empty or absent folder")
    options = parser.parse_args(arguments)
    create_output(options.output)
    names = [str(Path(name).absolute()) if Path(name).exists() else name for name in (options.target, options.base)]
    return run(*names, json.loads(EVENTS.read_text(encoding="utf-8")), options.output.absolute(), training, asked)


if __name__ == "__main__":
    run_main(main)
