"""The MUSE suite (News and Books), as OpenUnlearning computes it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import IGNORED, Example
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation import attacks
from divdec.evaluation.layout import Layout, decoded
from divdec.evaluation.memorization import exact_memorization, extraction_strength
from divdec.evaluation.muse_data import MuseData
from divdec.evaluation.privacy import attack_auc, privleak
from divdec.evaluation.results import Items, Results
from divdec.evaluation.text import rouge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.evaluation.subject import Subject

KNOWMEM_TOKENS, VERBMEM_TOKENS = 32, 128
# What ends an answer in the plain layout; the text is cut there.
STOPS = ("\n\n", "\nQuestion", "Question:")
TEXT_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class MuseOptions:
    """What the suite measures with, beside the model."""

    max_length: int = 512
    """Longest prompt with its examples, in tokens."""
    batch_size: int = 32
    retain_results: Results | None = None
    """Of the retrained model: the reference of privacy leakage."""


def evaluate_muse(
    subject: Subject,
    data: MuseData,
    options: MuseOptions = MuseOptions(),
    *,
    earlier: Sequence[Results] | None = None,
    save: Callable[[Sequence[Results]], object] = lambda results: None,
) -> list[Results]:
    """Measure a model on MUSE; see `divdec.evaluation.tofu.evaluate_tofu` for the arguments.

    Returns:
        Results, one a setting.

    Raises:
        UsageError: a prompt does not fit `max_length`, so that a question or an answer would be cut away.
    """
    results = list(earlier) if earlier else [Results("", "muse") for _ in subject.settings]
    layouts = {
        name: Layout(subject.tokenizer, "plain", shots=shots, max_length=options.max_length)
        for name, shots in data.shots.items()
    }
    # First of all, so that a prompt that does not fit is found before anything is measured.
    truths = {name: [layouts[name].truth(record) for record in records] for name, records in data.knowmem.items()}
    run = _Run(subject, data, layouts, truths, options.batch_size, results)
    for stage in (run.likelihoods, run.knowledge, run.verbatim):
        stage()
        for found in results:
            _derive(found, options.retain_results)
        save(results)
    for found in results:
        if not data.verbmem:
            _leave_out(found, "there is no verbmem/forget.jsonl", "forget_verbmem_ROUGE", "extraction_strength",
                       "exact_memorization")  # fmt: skip
        if not data.texts:
            _leave_out(found, "there are no privleak/forget.jsonl and holdout.jsonl", "mia_min_k", "privleak")
    save(results)
    return results


@dataclasses.dataclass(frozen=True)
class _Run:
    subject: Subject
    data: MuseData
    layouts: dict[str, Layout]
    truths: dict[str, list[str]]
    batch_size: int
    results: list[Results]

    def likelihoods(self) -> None:
        """One teacher-forced pass over continuations and whole texts."""
        tokenizer = self.subject.tokenizer
        sets = {"verbmem": self.data.verbmem, **self.data.texts}
        if all("extraction_strength" in f.items or "mia_min_k.forget" in f.items for f in self.results):
            return
        examples = {name: [continuation(record, tokenizer) for record in records] for name, records in sets.items()}
        flat = [example for group in examples.values() for example in group]
        if not flat:
            return
        scores = self.subject.scores(flat, moments=False, batch_size=self.batch_size, title="teacher-forced")
        for found, items in zip(self.results, scores, strict=True):
            start = 0
            for name, group in examples.items():
                own = items[start : start + len(group)]
                start += len(group)
                if name == "verbmem":
                    found.items["extraction_strength"] = _numbered(map(extraction_strength, own))
                    found.items["exact_memorization"] = _numbered(map(exact_memorization, own))
                else:
                    found.items[f"mia_min_k.{name}"] = _numbered(map(attacks.min_k, own))

    def knowledge(self) -> None:
        """Answers to questions about the texts, after ten examples."""
        for name, records in self.data.knowmem.items():
            layout = self.layouts[name]
            prompts = [layout.prompt(record) for record in records]
            self._generate(f"{name}_knowmem_ROUGE", prompts, self.truths[name], KNOWMEM_TOKENS, STOPS)

    def verbatim(self) -> None:
        """How beginnings of the forgotten texts are continued."""
        tokenizer = self.subject.tokenizer
        prompts = [_ids(tokenizer, record.prompt or "") for record in self.data.verbmem]
        truths = [decoded(tokenizer, example.input_ids[example.prompt_length :]).strip()
                  for example in (continuation(record, tokenizer) for record in self.data.verbmem)]  # fmt: skip
        if prompts:
            self._generate("forget_verbmem_ROUGE", prompts, truths, VERBMEM_TOKENS, ())

    def _generate(
        self, metric: str, prompts: list[list[int]], truths: list[str], tokens: int, stops: tuple[str, ...]
    ) -> None:
        tokenizer = self.subject.tokenizer
        for setting, found in zip(self.subject.settings, self.results, strict=True):
            if metric in found.items:
                continue
            options: dict[str, Any] = {"stop_strings": list(stops)} if stops else {}
            generated = self.subject.continuations(
                setting, prompts, max_new_tokens=tokens, batch_size=self.batch_size, title=metric, **options
            )
            for index, (ids, truth) in enumerate(zip(generated, truths, strict=True)):
                text = _cut(decoded(tokenizer, ids), stops)
                shown = {
                    "input": decoded(tokenizer, prompts[index]), "ground_truth": truth, "generation": text,
                }  # fmt: skip
                found.items.setdefault(metric, {})[str(index)] = rouge(text, truth) | shown


def continuation(record: Record, tokenizer: PreTrainedTokenizerBase, longest: int = TEXT_TOKENS) -> Example:
    """Prompt and continuation as tokens, the continuation labelled; no token ends it (OpenUnlearning's completions).

    Args:
        record: a prompt and its completion, or a whole text without a prompt.
        tokenizer: adds its own special tokens.
        longest: tokens kept after the prompt.
    """
    prompt = record.prompt or ""
    before = _ids(tokenizer, prompt) if prompt else []
    whole = _ids(tokenizer, f"{prompt} {record.answer}" if prompt else record.answer)
    whole = whole[: len(before) + longest]
    masked = max(len(before), 1)
    if len(whole) - masked < 2:
        raise UsageError(f"{record.place}: there is nothing to predict")
    return Example(whole, [IGNORED] * masked + whole[masked:])


def _derive(found: Results, retained: Results | None) -> None:
    for metric in found.items:
        field = "rougeL_f1" if metric.endswith("ROUGE") else "score"
        values = found.scores(metric, field)
        found.figures[metric] = statistics.fmean(value for value in values if value == value)
    forget, holdout = (found.items.get(f"mia_min_k.{name}") for name in ("forget", "holdout"))
    if forget and holdout:
        auc = attack_auc(*(found.scores(f"mia_min_k.{name}", "score") for name in ("forget", "holdout")))
        found.figures["mia_min_k"] = auc
        expected = 0.5 if retained is None else retained.figures.get("mia_min_k")
        if expected is not None:
            found.figures["privleak"] = privleak(auc, expected)


def _leave_out(found: Results, reason: str, *metrics: str) -> None:
    for metric in metrics:
        found.figures[metric] = None
        found.reasons[metric] = reason


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text.strip()


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])  # pyright: ignore[reportArgumentType]


def _numbered(values: Any) -> Items:
    return {str(index): {"score": value} for index, value in enumerate(values)}
