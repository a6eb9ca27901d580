"""Write the tables of README.md, docs/ and examples/ whose figures are in benchmarks/results.

    python -m research.studies.tables           # write them into the pages
    python -m research.studies.tables --check   # print how the pages differ from the files, and exit with 1 if they do

In a page a table follows a comment with its name, <!--table:attacks-->, directly; TABLES declares its head and rows.
The page's line below the head, which aligns the columns, stays.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
TABLE = re.compile(r"^<!--table:(\S+)-->\n\|.*\n(\|[-:|]+\n)(?:\|.*\n)*", re.MULTILINE)

# A row is a template, a file, and the keys that lead to its figures. A template may also name the file's other values,
# the last key ({rule}), and the number of facts that the target knows ({known}).
Row = tuple[str, ...]
ANSWERS = "{forget:.2f} | {reworded:.2f} | {retain:.2f} | {unlisted:.2f} | {neutral:.2f} |"
ANSWERS_HEAD = "forget | reworded | retain | unlisted | neutral |"
FORGOTTEN = "| {facts[forget]} of {known} "
SPLIT = "| {facts[forget]} forgotten, {facts[retain]} kept | {rule} | "
CAPITALS: Row = ("real_pair/capitals-0-lora.json", "generated")
ALL_WEIGHTS: Row = ("real_pair/capitals-0-all-first.json", "generated")
SYMBOLS: Row = ("real_pair/symbols-0-lora.json", "generated")
AUTHORS: Row = ("real_pair/authors-0-lora.json", "generated")
PRODUCTS: Row = ("real_pair/products-0-lora.json", "generated")
PEOPLE = (
    "{forget_level1_ROUGE:.2f} | {forget_level2_ROUGE:.2f} | {forget_level3_ROUGE:.2f} | "
    "{neighbor_level1_ROUGE:.2f}, {neighbor_level2_ROUGE:.2f} |"
)
FIVE, THREE = "people/refusal-0.json", "people/refusal-three-0.json"
ATTACKS = (
    "{asked:.2f} | {examples:.2f} | {insisting:.2f} | {begun:.2f} | {french:.2f} | {choice:.2f} | {letters:.2f} | "
    "{reversed:.2f} | "
)
ATTACKED = "real_pair/capitals-0-lora-attacks.json"
STUDENT = "real_pair/capitals-0-lora-student.json"
AGGREGATES = (
    "{openunlearning[agg]:.2f} ({openunlearning[mem]:.2f}/{openunlearning[priv]:.2f}/{openunlearning[utility]:.2f})"
)
TOFU = AGGREGATES + (
    " | {figures[forget_Q_A_Prob]:.2f}, {figures[forget_Q_A_ROUGE]:.2f} | "
    "{figures[retain_Q_A_Prob]:.2f}, {figures[retain_Q_A_ROUGE]:.2f} | {figures[mia_loss]:.2f} |"
)
AUTHOR = AGGREGATES + " | {forget prob:.2f}, {forget ROUGE:.2f} | {retain prob:.2f}, {retain ROUGE:.2f} |"
ONE_AUTHOR: Row = ("tofu/author-qwen-lora.json", "rows")
COMPARED = {"target": "Target", "retrain": "Retrained", "linear": "linear:1.5", "min-likelihood": "min-likelihood"}
QWEN_TOFU: Row = ("tofu/forget01-qwen-lora.json", "rows")

TABLES: Mapping[str, tuple[str, Sequence[Row]]] = {  # the head and the rows of each
    "facts": (
        "| facts forgotten | " + ANSWERS_HEAD,
        [
            (FORGOTTEN + "capitals | " + ANSWERS, *CAPITALS, "linear:1:4:full"),
            (FORGOTTEN + "symbols of chemical elements | " + ANSWERS, *SYMBOLS, "linear:1:1:full"),
            (FORGOTTEN + "authors of books | " + ANSWERS, *AUTHORS, "linear:1.5:4"),
        ],
    ),
    "real-pair": (
        "| pair | rule | " + ANSWERS_HEAD,
        [
            ("| LoRA | **{rule}** | " + ANSWERS, *CAPITALS, "linear:1:4:full"),
            ("| | {rule} | " + ANSWERS, *CAPITALS, "rank:20:3"),
            ("| all weights | {rule} | " + ANSWERS, *ALL_WEIGHTS, "linear:1.5:3"),
            ("| | {rule} | " + ANSWERS, *ALL_WEIGHTS, "rank:20:3"),
        ],
    ),
    "other-facts": (
        "| | rule | " + ANSWERS_HEAD,
        [
            ("| symbols of elements: target | | " + ANSWERS, *SYMBOLS, "target"),
            (SPLIT + ANSWERS, *SYMBOLS, "linear:1:1:full"),
            ("| authors of books: target | | " + ANSWERS, *AUTHORS, "target"),
            (SPLIT + ANSWERS, *AUTHORS, "linear:1.5:4"),
            ("| companies of products: target | | " + ANSWERS, *PRODUCTS, "target"),
            (SPLIT + ANSWERS, *PRODUCTS, "linear:1.5:2"),
        ],
    ),
    "people": (
        "| rule | blanks | questions | attacks | neighbours |",
        [
            ("| five people: target | " + PEOPLE, FIVE, "target"),
            ("| **linear:1.5:2.5:full** | " + PEOPLE, FIVE, "linear-1.5-2.5-full"),
            ("| linear:2.5:1:full | " + PEOPLE, FIVE, "linear-2.5-1-full"),
            ("| three others: target | " + PEOPLE, THREE, "target"),
            ("| **linear:2.5:2.3:full** | " + PEOPLE, THREE, "linear-2.5-2.3-full"),
        ],
    ),
    "attacks": (
        "| | asked | examples first | insisting | begun | in French | choice | by letter | reversed | 8 samples |",
        [
            ("| target | " + ATTACKS + "– |", ATTACKED, "target", "figures"),
            ("| linear:1:4:full | " + ATTACKS + "{samples, any:.2f} |", ATTACKED, "linear:1:4:full", "figures"),
        ],
    ),
    "student": (
        "| | " + ANSWERS_HEAD,
        [
            ("| student | " + ANSWERS, STUDENT, "student", "figures"),
            ("| weights rounded to 4 bits | " + ANSWERS, STUDENT, "student, 4 bits", "figures"),
        ],
    ),
    "author": (
        "| | Agg (Mem/Priv/Utility) | forget: probability, ROUGE | retain: probability, ROUGE |",
        [(f"| {name} | {AUTHOR}", *ONE_AUTHOR, key) for key, name in COMPARED.items()],
    ),
    "tofu": (
        "| | Agg (Mem/Priv/Utility) | forget: probability, ROUGE | retain: probability, ROUGE | AUC of the loss |",
        [
            ("| Target | " + TOFU, *QWEN_TOFU, "target"),
            ("| Retrain | " + TOFU, *QWEN_TOFU, "retrain"),
            ("| {rule} | " + TOFU, *QWEN_TOFU, "linear:1"),
            ("| {rule} | " + TOFU, *QWEN_TOFU, "linear:1.5"),
            ("| {rule} | " + TOFU, *QWEN_TOFU, "linear:1.5:1"),
            ("| {rule} | " + TOFU, *QWEN_TOFU, "rank:20"),
            ("| {rule} | " + TOFU, *QWEN_TOFU, "rank:20:3"),
        ],
    ),
}


def fill_row(results: Path, template: str, file: str, *keys: str) -> str:
    """Return a row with the figures of a file; a key of a list is the `setting` of an entry."""
    figures: Any = json.loads((results / file).read_text(encoding="utf-8"))
    values = {"rule": keys[-1], "known": sum(figures.get("facts", {}).values()), **figures}
    for key in keys:
        if isinstance(figures, list):
            figures = {entry["setting"]: entry for entry in figures}
        figures = figures[key]
    return template.format_map(values | figures)


def fill_tables(page: str, results: Path) -> str:
    """Return a page with its tables as the result files have them."""

    def fill_table(match: re.Match[str]) -> str:
        head, rows = TABLES[match[1]]
        lines = [fill_row(results, *row) for row in rows]
        return f"<!--table:{match[1]}-->\n{head}\n{match[2]}" + "".join(f"{line}\n" for line in lines)

    return TABLE.sub(fill_table, page)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change no page; exit with 1 if one differs from the files"
    )
    options = parser.parse_args(arguments)
    pages = {
        path: path.read_text(encoding="utf-8")
        for path in (root / "README.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("examples/*/README.md")))
    }
    names = {match[1] for page in pages.values() for match in TABLE.finditer(page)}
    if wrong := sorted(names ^ TABLES.keys()):
        parser.exit(
            2, f"tables: {', '.join(wrong)}: not both in TABLES and in a page, in a comment directly above a table\n"
        )
    differing = 0
    for path, before in pages.items():
        after, name = fill_tables(before, root / RESULTS), str(path.relative_to(root))
        if after != before:
            differing += 1
            lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name}, from {RESULTS}"))
            if not options.check:
                path.write_text(after, encoding="utf-8")
    return int(options.check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
