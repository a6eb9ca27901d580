"""Compare unlearning methods on a pretrained model, one of them your own: Qwen2.5-Coder-1.5B forgets capitals.

The target is asked for the capitals that it knows; a fifth of them is to be forgotten, two fifths are the retain set,
and the rest is in neither set. Gradient methods train LoRA adapters of the target on these sets. divdec trains its pair
from the small sibling. Then every model answers all questions, and the answers are counted and plotted.

    python examples/research/research.py --target real-models/qwen-1.5b.gguf --base real-models/qwen-0.5b.gguf

The same command continues a stopped run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
import min_likelihood  # noqa: F401  registers the method
from transformers import PreTrainedModel

from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_model, load_tokenizer
from divdec.data.records import write_records
from divdec.demo.facts import NEUTRAL, ask, known_facts, split
from divdec.errors import UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import read_json, write_json
from divdec_research.report.style import LINEAR, OTHERS, TARGET, style, write_figure
from steps import command, run_main

METHODS = ("min-likelihood", "npo", "simnpo")
LORA = ("--lora-rank", "16", "--lr", "2e-4", "--epochs", "4", "--batch-size", "8", "--gradient-accumulation", "1")
COLUMNS = ("forget", "reworded", "retain", "unlisted", "neutral")
ANSWER = 20  # tokens


def questions(sets: dict, column: str) -> list[tuple[object, str]]:
    """Return the facts and questions of a column."""
    if column == "neutral":
        return [(None, question) for question in NEUTRAL]
    if column == "reworded":
        return [(fact, question) for fact in sets["forget"] for question in fact.other_questions]
    if column == "forget":
        return [(fact, question) for fact in sets["forget"] for question in fact.questions]
    return [(fact, fact.questions[0]) for fact in sets[column]]


def measure(model: PreTrainedModel, tokenizer, sets: dict, of_target: dict | None) -> dict:
    """Ask all questions: the share of answers that state the fact, and of neutral answers that are the target's."""
    texts, shares = {}, {}
    for column in COLUMNS:
        asked = questions(sets, column)
        texts[column] = ask(model, tokenizer, [question for _, question in asked], ANSWER, title=column)
        if column == "neutral":
            same = [text == old for text, old in zip(texts[column], (of_target or texts)["neutral"], strict=True)]
        else:
            same = [fact.is_in(text) for (fact, _), text in zip(asked, texts[column], strict=True)]
        shares[column] = sum(same) / len(same)
    return {"shares": shares, "texts": texts}


@contextlib.contextmanager
def kept(path: Path) -> Iterator[dict]:
    """Read the results so far, and write them when the block ends."""
    results = read_json(path) if path.is_file() else {}
    yield results
    write_json(path, results)


def run(target: str, base: str, kind: str, methods: Sequence[str], output: Path, bundle: Path | None,
        lora: Sequence[str], pair: Sequence[str]) -> dict:  # fmt: skip
    """Write the sets, apply every method, and compare the answers."""
    path = output / "research.json"
    place = CheckpointReference.parse(target).resolve(Path(), weights=True)
    tokenizer = load_tokenizer(place)
    model = load_model(place, dtype=dtype_for_passes()).eval()
    sets = split(known_facts(model, tokenizer, [kind], title="asking the target"), seed=0)
    print("known facts: " + ", ".join(f"{len(facts)} {name}" for name, facts in sets.items()))
    with kept(path) as results:
        if "target" not in results:
            results["target"] = measure(model, tokenizer, sets, None)
        before = results["target"]["texts"]
    del model
    with contextlib.chdir(output):
        for name in ("forget", "retain"):
            write_records(Path(f"{name}.jsonl"), [record for fact in sets[name] for record in fact.records])
        data = ("--forget", "forget.jsonl", "--retain", "retain.jsonl", "--target", target)
        for name in methods:
            with kept(path) as results:
                if name not in results:
                    command("baseline", name, *data, *lora, "--output", name)
                    model = load_model(Path(name) / "model", dtype=dtype_for_passes()).eval()
                    results[name] = measure(model, tokenizer, sets, before)
                    shutil.rmtree(Path(name) / "model")  # 3 GB; its record stays
        with kept(path) as results:
            if "divdec" not in results:
                if bundle is None:
                    # 3: no measured rule reaches its goal; the figures are shown below.
                    command("train", *data, "--base", base, *pair, "--output", "pair", codes=(0, 3))
                place = bundle or Path("pair/bundle")
                steered = DivergenceForCausalLM.from_pretrained(place, dtype=dtype_for_passes())
                results["divdec"] = measure(steered, tokenizer, sets, before) | {"rule": str(steered.steering)}
    shares = {name: result["shares"] for name, result in results.items()}
    print(f"\n{'':<16}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, row in shares.items():
        print(f"{name:<16}" + "".join(f"{row[column]:>10.2f}" for column in COLUMNS))
    draw(output / "research.svg", shares)
    return shares


def draw(path: Path, shares: dict[str, dict[str, float]]) -> None:
    """Plot what each method forgets against what it keeps of facts in neither set."""
    from matplotlib.figure import Figure

    with style("research"):
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, row in shares.items():
            look = {"divdec": LINEAR, "target": TARGET}.get(name, OTHERS)
            axes.scatter(1 - row["reworded"], row["unlisted"], color=look.colour)
            axes.annotate(name, (1 - row["reworded"], row["unlisted"]), textcoords="offset points", xytext=(6, 4))
        axes.set_xlabel("share of reworded questions not answered")
        axes.set_ylabel("share of unlisted facts kept")
        axes.set_xlim(-0.05, 1.25)
        axes.set_ylim(-0.05, 1.08)
        write_figure(path, figure, title="What is forgotten, and what is kept", sources=("research.json",),
                     description="Each method: forgotten facts to the right, other facts kept upwards.")  # fmt: skip


def main(arguments: list[str] | None = None, lora: Sequence[str] = LORA, pair: Sequence[str] = ()) -> dict:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="real-models/qwen-1.5b.gguf")
    parser.add_argument("--base", default="real-models/qwen-0.5b.gguf", help="base of divdec's pair")
    parser.add_argument("--kind", default="capitals", help="kind of facts in divdec/demo/facts.json")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="names of divdec baseline list")
    parser.add_argument("--output", type=Path, default=Path("runs/research"))
    parser.add_argument(
        "--bundle", type=Path, help="a bundle that was trained on the same sets, instead of training one"
    )
    options = parser.parse_args(arguments)
    if options.output.exists() and any(options.output.iterdir()) and not (options.output / "research.json").is_file():
        raise UsageError(f"output {options.output} is in use; give the name of an empty or absent folder")
    options.output.mkdir(parents=True, exist_ok=True)
    names = [str(Path(name).absolute()) if Path(name).exists() else name for name in (options.target, options.base)]
    bundle = options.bundle and options.bundle.absolute()
    return run(*names, options.kind, options.methods, options.output.absolute(), bundle, lora, pair)


if __name__ == "__main__":
    run_main(lambda: print(json.dumps(main())))
