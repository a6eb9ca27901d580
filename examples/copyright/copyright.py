"""Take down a text that a pretrained model recites: the MIT licence and Qwen2.5-Coder-1.5B-Instruct.

Nobody trained the model for this example; it learned the licence in its pretraining. The script serves the model, lets
a client read the licence from it, and takes the licence down while the client reads. Then it measures what changed,
asks as a scheduled canary does, attacks the request for a signed report, and withdraws it.

    python examples/copyright/copyright.py --target real-models/qwen-1.5b.gguf --output runs/copyright
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
from openai import OpenAI

from divdec.demo.facts import NEUTRAL
from divdec.takedowns.registry import Registry
from steps import command, create_output, run_main, server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LICENCE = HERE / "mit.txt"
NAME = "qwen"
LENGTH = 48  # tokens of a reply
PARAPHRASES = (
    "In your own words, what does the MIT licence allow?",
    "Does the MIT licence come with a warranty?",
    "What must I keep when I copy software under the MIT licence?",
)


def recited(text: str, original: str) -> int:
    """Number of words at the beginning of a reply that continue the original."""
    count = 0
    for word, expected in zip(text.split(), original.split(), strict=False):
        if word != expected:
            break
        count += 1
    return count


def continue_licence(client: OpenAI, prompt: str) -> str:
    """Continue a text greedily."""
    completion = client.completions.create(model=NAME, prompt=prompt, max_tokens=LENGTH, temperature=0)
    return completion.choices[0].text


def answers(client: OpenAI, questions: tuple[str, ...]) -> list[str]:
    """Greedy chat answers."""
    return [
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": question}], max_tokens=LENGTH, temperature=0
        ).choices[0].message.content or ""
        for question in questions
    ]  # fmt: skip


def start_of(text: str, words: int) -> tuple[str, str]:
    """Split a text into its first words and the rest."""
    parts = text.split(" ")
    return " ".join(parts[:words]), " ".join(parts[words:])


def read_while_taken_down(client: OpenAI, prompt: str, rest: str, registry: Path) -> str:
    """Stream the licence; after ten words add the request, and return what the client received."""
    text, process = "", None
    words = [sys.executable, "-m", "divdec.cli", "takedown", "add", str(registry), "--id", "case-1", "--file", LICENCE]
    stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=160, temperature=0, stream=True)
    for event in stream:
        text += event.choices[0].text
        if process is None and recited(text, rest) >= 10:
            process = subprocess.Popen([*map(str, words), "--no-measure"], stdout=subprocess.DEVNULL)
    assert process is not None, "the model did not recite the text"
    process.wait()
    return text


def run(target: str, output: Path, questions: tuple[str, ...]) -> dict[str, object]:
    """Run the example, and return its figures."""
    registry, bundle = output / "takedowns", output / "live"
    keep = output / "texts-to-keep"
    keep.mkdir()
    shutil.copy(ROOT / "LICENSE", keep / "apache.txt")  # the model may go on reciting this one
    for page in ("limits.md", "serving.md"):
        shutil.copy(ROOT / "docs" / page, keep / page)
    licence = LICENCE.read_text(encoding="utf-8")
    prompt, rest = start_of(licence, 20)
    apache, apache_rest = start_of(" ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split()), 30)

    command("takedown", "init", registry, "--target", target, "--retain", keep)
    command("bundle", "--target", target, "--registry", registry, "--output", bundle)
    with server(bundle, name=NAME) as client:
        before = continue_licence(client, prompt)
        print(f"\nBefore, given {prompt[-40:]!r}:\n   {before.strip()}\n")
        kept = answers(client, questions), answers(client, PARAPHRASES), continue_licence(client, apache)
        stream = read_while_taken_down(client, prompt, rest, registry)
        print(f"A client was reading when the request took effect:\n   {stream.strip()}\n")
        command("takedown", "remove", registry, "--id", "case-1")
        started = time.perf_counter()
        command("takedown", "add", registry, "--id", "case-2", "--file", LICENCE, "--reference", "letter of 3 May")
        seconds = time.perf_counter() - started
        after = continue_licence(client, prompt)
        print(f"\nAfter:\n   {after.strip()}\n")
        now = answers(client, questions), answers(client, PARAPHRASES), continue_licence(client, apache)
        for question, old, new in zip(PARAPHRASES, kept[1], now[1], strict=True):
            print(f"{question}\n   before: {old.strip()}\n   now:    {new.strip()}")
        # 1: another spelling, or an attack, still brings passages back, which `add` does not measure.
        command(
            "takedown", "canary", registry, "--id", "case-2", "--file", LICENCE, "--endpoint",
            str(client.base_url).rstrip("/"), "--model", NAME, codes=(0, 1),
        )  # fmt: skip
        report = output / "case-2.html"
        command("takedown", "report", registry, "--id", "case-2", "--file", LICENCE, "--output", report, codes=(0, 1))
        command("takedown", "check", report, "--public-key", Registry(registry).public_key)
        command("takedown", "remove", registry, "--id", "case-2")
        again = continue_licence(client, prompt)
    return {
        "words recited before, while reading, after, and when withdrawn": [
            recited(text, rest) for text in (before, stream, after, again)
        ],
        "words of the Apache licence recited before and after": [
            recited(text, apache_rest) for text in (kept[2], now[2])
        ],
        "other answers unchanged": f"{sum(a == b for a, b in zip(kept[0], now[0], strict=True))} of {len(questions)}",
        "seconds to add and measure": round(seconds, 1),
    }


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="real-models/qwen-1.5b.gguf")
    parser.add_argument("--output", type=Path, default=Path("runs/copyright"))
    parser.add_argument("--questions", type=int, default=len(NEUTRAL), help="number of other answers to compare")
    options = parser.parse_args(arguments)
    create_output(options.output)
    figures = run(options.target, options.output.absolute(), NEUTRAL[: options.questions])
    print(json.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    run_main(main)
