"""What a model answers to everything that a course asks, item by item, kept so that nothing is asked twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from divdec.evaluation.generation import answers
from divdec.evaluation.metrics import contains_fact, rouge
from divdec.model.checkpoint import load_model
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.measure import Questions
from divdec.research.sequential_material import Course
from divdec.runs import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Scores = dict[str, list[float]]
"""By the name of what was asked, each item's score from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Examiner:
    """Asks a model everything, unless an earlier call has."""

    course: Course
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    report: Callable[[str], None]

    def plain(self, name: str, checkpoint: Path) -> Scores:
        """Scores of an ordinary checkpoint."""
        return self._asked(name, lambda: load_model(checkpoint).eval())

    def steered(self, name: str, bundle: Path) -> Scores:
        """Scores of a bundle."""
        return self._asked(name, lambda: DivergenceForCausalLM.from_pretrained(bundle))

    def names(self) -> list[str]:
        """The models that were measured."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def items(self, name: str) -> list[dict[str, Any]]:
        """A model's answers with their scores, a row each."""
        rows = read_json(self.folder / f"{name}.json")
        return [
            {"model": name, "asked": asked, "index": index, **item}
            for asked, items in rows.items()
            for index, item in enumerate(items)
        ]

    def _asked(self, name: str, load: Callable[[], PreTrainedModel]) -> Scores:
        path = self.folder / f"{name}.json"
        if not path.is_file():
            model = load()
            total = sum(len(questions.records) for questions in self.course.asked)
            with tqdm(total=total, desc=f"{name:<26}", unit="answer", dynamic_ncols=True) as bar:
                rows = {}
                for questions in self.course.asked:
                    rows[questions.name] = self._items(model, questions)
                    bar.update(len(questions.records))
            self.folder.mkdir(exist_ok=True)
            write_json(path, rows)
        else:
            self.report(f"{name}: already measured")
        return {asked: [item["score"] for item in items] for asked, items in read_json(path).items()}

    def _items(self, model: PreTrainedModel, questions: Questions) -> list[dict[str, Any]]:
        texts = answers(
            model, self.tokenizer, questions.records, form=self.course.form, max_new_tokens=self.course.max_new_tokens
        )
        if questions.facts is not None:
            scores = [float(contains_fact(text, fact)) for text, fact in zip(texts, questions.facts, strict=True)]
        else:
            scores = [
                rouge(text, record.answer)["rougeL_f1"] for text, record in zip(texts, questions.records, strict=True)
            ]
        return [{"score": score, "answer": text} for score, text in zip(scores, texts, strict=True)]
