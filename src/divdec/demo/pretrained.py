"""The demo on a pretrained model: SmolLM2 forgets capitals that it knows from its pretraining."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_model, load_tokenizer
from divdec.data.records import Message, Record, write_records
from divdec.demo.facts import ANSWER_LENGTH, NEUTRAL, Fact, ask, known_facts, not_asked, split
from divdec.errors import UsageError
from divdec.model.bundle import rewrite_steering, write_bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import RunFolder, cache_folder, read_record, write_json, write_text
from divdec.steering import Steering
from divdec.training.auxiliaries import FORGET, RETAIN, faults_of, train_auxiliaries
from divdec.training.settings import AuxiliarySettings, ShrinkSettings
from divdec.training.shrinking import shrink

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TARGET = "smollm2"
KIND, MIN_KNOWN = "capitals", 8
LAYERS, STEPS, SAMPLES = 8, 6, 64  # of the base of both auxiliaries: layers, and its healing
EPOCHS, RATE = 8.0, 3e-4
NEUTRAL_LENGTH = 32  # tokens
COLUMNS = {
    "forget": "forget", "reworded": "reworded", "retain": "retain", "unlisted": "unlisted",
    "neutral": "neutral\nunchanged",
}  # fmt: skip
NOTE = (
    "Share of correct answers. reworded: the forget set in wordings that no auxiliary was trained on. unlisted: facts "
    "of the same kind in neither set, nor among the questions that the target wrote. neutral: share of other answers "
    "that are the target's, word for word."
)
EXAMPLES = {"forget": 3, "reworded": 1, "retain": 1, "unlisted": 1}  # answers shown side by side


def run_demo(seed: int = 0, output: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Ask the target for capitals, train auxiliaries that forget some of them, measure, and print.

    Args:
        seed: seed of the split, the samples and the data order.
        output: folder for all results; a folder in the user's cache by default.
        quiet: print to standard error.

    Returns:
        Figures of the target and of the steered model, the rule, and the reasons why it is not good enough, if any.

    Raises:
        UsageError: SmolLM2 is not installed, or the output folder holds something other than an earlier demo.
    """
    output = output or cache_folder() / "demo" / f"{TARGET}-seed-{seed}"
    settings = {"seed": seed, "target": TARGET}
    try:
        folder = CheckpointReference.parse(TARGET).resolve(Path(), weights=True)
    except UsageError as error:
        raise UsageError(f"{error}; divdec world needs no pretrained model") from None
    with RunFolder.open(output, "demo", settings, settings, overwrite=True) as run:
        result = _run_demo(folder, seed, output, console_for(quiet))
        run.finish(seconds=result["seconds"])
    return result


def _run_demo(folder: Path, seed: int, output: Path, console: Console) -> dict[str, Any]:
    started = time.perf_counter()
    target, tokenizer = load_model(folder, dtype=dtype_for_passes()).eval(), load_tokenizer(folder)
    facts = known_facts(target, tokenizer, [KIND], title=f"asking {TARGET} for capitals")
    if len(facts) < MIN_KNOWN:
        raise UsageError(f"{TARGET} knows only {len(facts)} capitals; the demo needs {MIN_KNOWN}")
    sets = split(facts, seed)
    console.print(_introduction(sets), highlight=False)
    expected = ask(target, tokenizer, NEUTRAL, NEUTRAL_LENGTH, title="neutral prompts")
    _write_data(output, sets, expected)
    report = reporter(console)
    _make_base(output / "base", seed, report)
    trained = train_auxiliaries(
        AuxiliarySettings(
            base=str(output / "base"), target=TARGET, forget=str(output / "forget.jsonl"),
            retain=str(output / "retain.jsonl"), neutral=str(output / "neutral.jsonl"), output=str(output / "pair"),
            epochs=EPOCHS, learning_rate=RATE, lora_rank=0, seed=seed, overwrite=True,
        ),
        report,
    )  # fmt: skip
    effects, faults = trained["effects"], faults_of(trained)
    bundle = write_bundle(
        output / "bundle", target=TARGET, retain_auxiliary=str(output / "pair" / RETAIN),
        forget_auxiliary=str(output / "pair" / FORGET), steering=effects["best"], overwrite=True,
        forget_set=trained["forget_set"], single_turn=True,
    )  # fmt: skip
    rewrite_steering(bundle, Steering.parse(effects["best"]), effects["verdict"])
    model = DivergenceForCausalLM.from_pretrained(bundle, dtype=dtype_for_passes())
    sets["unlisted"] = not_asked(sets["unlisted"], trained["similar_questions"])
    questions = questions_of(sets, trained["rewordings"])
    rows = {
        "target": measure(target, tokenizer, questions, expected),
        effects["best"]: measure(model, tokenizer, questions, expected),
    }
    examples = _examples(rows, questions, expected)
    _print_tables(rows, examples, console)
    result = {
        "target": rows["target"].figures, "steered": rows[effects["best"]].figures, "steering": effects["best"],
        "faults": faults, "effects": effects, "seconds": round(time.perf_counter() - started, 1),
        "bundle": str(bundle),
    }  # fmt: skip
    write_json(output / "result.json", result)
    console.print(f"No rule is good enough: {'; '.join(faults)}" if faults else effects["summary"], highlight=False)
    say_where(result, output, console)
    return result


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers of a model to the questions of each set, and to neutral prompts."""

    figures: dict[str, float]
    """By column: share of correct answers, and of neutral answers that are the target's."""
    texts: dict[str, list[str]]


def questions_of(sets: Mapping[str, Sequence[Fact]], read: Sequence[str]) -> dict[str, list[tuple[Fact, str]]]:
    """Return the questions by column, each with its fact; `read` are rewordings that p and q have read."""
    return {
        "forget": [(fact, question) for fact in sets["forget"] for question in fact.questions],
        "reworded": [(fact, text) for fact in sets["forget"] for text in fact.other_questions if text not in read],
        "retain": [(fact, fact.questions[0]) for fact in sets["retain"]],
        "unlisted": [(fact, fact.questions[0]) for fact in sets["unlisted"]],
    }


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Mapping[str, Sequence[tuple[Fact, str]]],
    expected: Sequence[str],
) -> Answers:
    """Ask a model all questions, and the neutral prompts, to which the target answered `expected`."""
    figures, texts = {}, {}
    for name, asked in questions.items():
        texts[name] = ask(model, tokenizer, [question for _, question in asked], ANSWER_LENGTH)
        correct = [fact.is_in(text) for (fact, _), text in zip(asked, texts[name], strict=True)]
        figures[name] = statistics.fmean(correct or [math.nan])
    texts["neutral"] = ask(model, tokenizer, NEUTRAL, NEUTRAL_LENGTH)
    figures["neutral"] = statistics.fmean(a == b for a, b in zip(texts["neutral"], expected, strict=True))
    return Answers(figures, texts)


def _write_data(output: Path, sets: Mapping[str, Sequence[Fact]], expected: Sequence[str]) -> None:
    """Write the data that README's commands name."""
    for name, facts in sets.items():
        write_records(output / f"{name}.jsonl", [fact_record for fact in facts for fact_record in fact.records])
    neutral = [
        Record(text, messages=(Message("user", prompt),)) for prompt, text in zip(NEUTRAL, expected, strict=True)
    ]
    write_records(output / "neutral.jsonl", neutral)
    asked = [fact.questions[0] for name in ("forget", "retain") for fact in sets[name]]
    write_text(output / "questions.txt", "".join(f"{question}\n" for question in asked))


def _make_base(folder: Path, seed: int, report: Callable[[str], None]) -> None:
    """Shrink the target to the base of both auxiliaries, unless an earlier demo with this seed did."""
    settings = ShrinkSettings(
        target=TARGET, layers=LAYERS, steps=STEPS, samples=SAMPLES, seed=seed, output=str(folder), overwrite=True
    )
    earlier = read_record(folder) if folder.is_dir() else None
    if earlier is None or earlier["settings"] != dataclasses.asdict(settings):
        shrink(settings, report)


def _examples(
    rows: Mapping[str, Answers], questions: Mapping[str, Sequence[tuple[Fact, str]]], expected: Sequence[str]
) -> list[dict[str, Any]]:
    """Answers of the target and the steered model side by side; questions that the target answers come first."""
    target, steered = (row.texts for row in rows.values())
    shown = []
    for name, asked in questions.items():
        known = sorted(range(len(asked)), key=lambda index: (not asked[index][0].is_in(target[name][index]), index % 3))
        for index in known[: EXAMPLES[name]]:
            answers = [texts[name][index] for texts in (target, steered)]
            shown.append({"set": name, "question": asked[index][1], "answers": answers})
    shown.append({"set": "neutral", "question": NEUTRAL[0], "answers": [expected[0], steered["neutral"][0]]})
    return shown


def _print_tables(rows: Mapping[str, Answers], examples: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in COLUMNS.values():
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *(f"{row.figures[column]:.0%}" for column in COLUMNS))
    console.print(table)
    console.print(NOTE, highlight=False)
    side_by_side = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("question", *rows):
        side_by_side.add_column(head, overflow="fold", ratio=1)
    for item in examples:
        side_by_side.add_row(escape(f"[{item['set']}] {item['question']}"), *map(escape, item["answers"]))
    console.print(side_by_side)


def _introduction(sets: Mapping[str, Sequence[Fact]]) -> str:
    return (
        f"{TARGET} knows the capitals of {sum(map(len, sets.values()))} countries from its pretraining. It is steered "
        f"away from {len(sets['forget'])} of them. {len(sets['retain'])} others are the retain set; the remaining "
        f"{len(sets['unlisted'])} are in neither set.\nBoth auxiliaries start from {LAYERS} layers of the target. The "
        "target's weights do not change."
    )


def say_where(result: dict[str, Any], output: Path, console: Console) -> None:
    """Print where a demo's results are, and what to type next."""
    console.print(
        f"{result['seconds']:.0f} s.\n"
        f"Data and models for everything else: {output}\n"
        f"Talk to it: {_command()} chat {result['bundle']}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def console_for(quiet: bool) -> Console:
    """Console for an experiment: standard output, or standard error where that must hold JSON alone."""
    return Console(stderr=quiet, width=max(Console().width, 100))


def reporter(console: Console) -> Callable[[str], None]:
    """A function that prints one-line notes."""
    return lambda line: console.print(line, style="dim", highlight=False)


def _command() -> str:
    """The command that starts divdec here: its name where it is on PATH, otherwise its path."""
    path = Path(sys.executable).with_name("divdec")
    return "divdec" if shutil.which("divdec") or not path.is_file() else os.path.relpath(path)
