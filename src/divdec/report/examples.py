"""Answers of several models to the same questions, side by side. It knows items of results, no figures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from divdec.report.collect import Entry

# What is forgotten comes first; of `count` examples each set gets its share.
SETS = {
    "tofu": {
        "forget_Q_A_ROUGE": ("forget set", 0.75, "rougeL_recall"),
        "retain_Q_A_ROUGE": ("retain set", 0.25, "rougeL_recall"),
    },
    "muse": {
        "forget_verbmem_ROUGE": ("forget set, verbatim", 0.375, "rougeL_f1"),
        "forget_knowmem_ROUGE": ("forget set, knowledge", 0.375, "rougeL_f1"),
        "retain_knowmem_ROUGE": ("retain set, knowledge", 0.25, "rougeL_f1"),
    },
}
# A chat template's turns without its special tokens, and OpenUnlearning's plain layout.
CHAT = re.compile(r".*user\n+(?P<question>.+?)\n*assistant(?:\s*<think>\s*</think>)?", flags=re.DOTALL)
PLAIN = re.compile(r"(?:.*\n)?Question: (?P<question>.+?)\n+Answer:", flags=re.DOTALL)
LONGEST_PROMPT, LONGEST_ANSWER, SHOWN = 400, 360, 300  # characters


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one model answered."""

    name: str
    role: str | None
    text: str
    rouge: float
    """ROUGE-L against the true answer."""

    @property
    def parts(self) -> tuple[str, str]:
        """The text in two: what is shown at once, and the rest of a long one."""
        if len(self.text) <= LONGEST_ANSWER:
            return self.text, ""
        # A word is not torn, unless it is one that never ends.
        cut = max(self.text.rfind(" ", 0, SHOWN), SHOWN - 40)
        return self.text[:cut], self.text[cut:]


@dataclasses.dataclass(frozen=True)
class Example:
    """One question, its true answer, and the models' answers."""

    set: str
    index: str
    question: str
    truth: str
    answers: tuple[Answer, ...]


def examples(entries: Sequence[Entry], count: int) -> list[Example]:
    """Questions that every one of the models answered.

    Where a target is among them, those that it answers best come first: there forgetting has something to do.
    Otherwise they are spread evenly over the set.

    Args:
        entries: target, results, retrained model, in the order in which they are shown.
        count: how many questions, over all sets.
    """
    found: list[Example] = []
    sets = SETS[entries[0].results.suite]
    at_hand = {metric: _shared(entries, metric) for metric in sets}
    at_hand = {metric: indices for metric, indices in at_hand.items() if indices}
    weight = sum(sets[metric][1] for metric in at_hand)
    for place, (metric, indices) in enumerate(at_hand.items()):
        title, share, field = sets[metric]
        last = place == len(at_hand) - 1
        wanted = count - len(found) if last else round(count * share / weight)
        target = [entry.results.items[metric] for entry in entries if entry.role == "target"]
        if target:
            chosen = sorted(indices, key=lambda index, items=target[0]: -_rouge(items[index], field))[:wanted]
        else:
            number = min(wanted, len(indices))
            chosen = [indices[step * len(indices) // number] for step in range(number)]
        found += [_example(entries, metric, index, title, field) for index in chosen]
    return found


def question_of(prompt: str) -> str:
    """The question alone, of a prompt with a chat's turns or with examples before it; else the prompt's end."""
    text = prompt.strip()
    for pattern in (CHAT, PLAIN):
        if found := pattern.fullmatch(text):
            text = found["question"].strip()
            break
    return text if len(text) <= LONGEST_PROMPT else f"… {text[-LONGEST_PROMPT:]}"


def _shared(entries: Sequence[Entry], metric: str) -> list[str]:
    """The indices of items that every model has, with the same true answer, in order."""
    found = [entry.results.items.get(metric) or {} for entry in entries]
    whole = [index for index in found[0] if len({_truth(items.get(index)) for items in found} - {None}) == 1]
    whole = [index for index in whole if all(_truth(items.get(index)) for items in found)]
    return sorted(whole, key=lambda index: (len(index), index))


def _truth(item: Any) -> str | None:
    """An item's true answer without its white space, which tokenizers differ in; None where it holds no texts."""
    if not isinstance(item, dict) or not all(
        isinstance(item.get(name), str) for name in ("ground_truth", "generation")
    ):
        return None
    return re.sub(r"\s", "", item["ground_truth"])


def _example(entries: Sequence[Entry], metric: str, index: str, title: str, field: str) -> Example:
    items = [entry.results.items[metric][index] for entry in entries]
    answers = tuple(
        Answer(entry.name, entry.role, item["generation"].strip(), _rouge(item, field))
        for entry, item in zip(entries, items, strict=True)
    )
    prompt, truth = (str(items[0].get(name) or "") for name in ("input", "ground_truth"))
    return Example(title, index, question_of(prompt), truth, answers)


def _rouge(item: dict[str, Any], field: str) -> float:
    value = item.get(field)
    return float(value) if isinstance(value, int | float) else 0.0
