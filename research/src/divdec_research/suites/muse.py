"""The MUSE suite (News and Books), as OpenUnlearning computes it.

Files: `knowmem/{forget,retain}_qa.jsonl` with `…_qa_icl.jsonl`, `verbmem/forget.jsonl`,
`privleak/{forget,holdout}.jsonl`. A folder with the knowmem files alone (Books) gives the metrics that they allow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations
from divdec.evaluation.metrics import min_k
from divdec.evaluation.questions import (
    continuation,
    decoded,
    token_ids,
)
from divdec.evaluation.results import Results, numbered
from divdec.evaluation.scoring import EvaluatedModel
from divdec_research.suites.metrics import exact_memorization, extraction_strength, rouge
from divdec_research.suites.questions import BenchmarkFormat
from divdec_research.suites.rows import question_in, read_rows, text_in
from divdec_research.suites.settings import MuseSettings
from divdec_research.suites.tofu import (
    BenchmarkSuite,
    Save,
    add_attack_figures,
    data_paths,
    retained_results,
    run_stages,
)

SOURCE = "muse-bench/MUSE-News or muse-bench/MUSE-Books"
KNOWMEM_TOKENS, VERBMEM_TOKENS = 32, 128
# These end an answer in the plain layout; the text is cut there.
STOPS = ("\n\n", "\nQuestion", "Question:")


@dataclasses.dataclass(frozen=True)
class MuseData:
    """The questions and texts in a folder."""

    knowmem: dict[str, tuple[Record, ...]]
    """Questions by 'forget' and 'retain'."""
    shots: dict[str, tuple[Record, ...]]
    """Examples before each of their questions, by 'forget' and 'retain'."""
    verbmem: tuple[Record, ...] = ()
    """Beginnings of forgotten texts, with their continuations."""
    texts: dict[str, tuple[Record, ...]] = dataclasses.field(default_factory=dict)
    """Whole texts by 'forget' and 'holdout', for the membership attack."""


def read_muse(folder: Path, holdout: Path | None = None, limit: int | None = None) -> MuseData:
    """Read MUSE's files; of each set the first `limit` items.

    Texts in `holdout`, which no model has seen, take the place of `privleak/holdout.jsonl`.

    Raises:
        UsageError: the questions are missing, or a line cannot be read (with its number).
    """
    if not folder.is_dir():
        raise UsageError(f"data {folder} is not a folder; it must hold MUSE's files, such as knowmem/forget_qa.jsonl")
    knowledge = folder / "knowmem" if (folder / "knowmem").is_dir() else folder
    knowmem, shots = {}, {}
    for name in ("forget", "retain"):
        knowmem[name] = read_rows(knowledge / f"{name}_qa.jsonl", SOURCE, question_in, limit)
        shots[name] = read_rows(knowledge / f"{name}_qa_icl.jsonl", SOURCE, question_in)

    def read_text(row: Any, location: str) -> Record:
        row = row if isinstance(row, dict) else {"text": row}
        return Record(text_in(row, "text", location), location=location)

    def read_continuation(row: Any, location: str) -> Record:
        return Record(text_in(row, "gt", location), prompt=text_in(row, "prompt", location), location=location)

    verbmem: tuple[Record, ...] = ()
    if (folder / "verbmem" / "forget.jsonl").is_file():
        verbmem = read_rows(folder / "verbmem" / "forget.jsonl", SOURCE, read_continuation, limit)
    files = {"forget": folder / "privleak" / "forget.jsonl", "holdout": holdout or folder / "privleak/holdout.jsonl"}
    texts = {}
    if files["forget"].is_file() and (holdout is not None or files["holdout"].is_file()):
        texts = {name: read_rows(file, SOURCE, read_text, limit) for name, file in files.items()}
        forget = {record.answer for record in texts["forget"]}
        if both := sum(record.answer in forget for record in texts["holdout"]):
            raise UsageError(f"{files['holdout']}: {both} of its texts are also in the forget set; they must differ")
    return MuseData(knowmem, shots, verbmem, texts)


@dataclasses.dataclass
class MuseSuite(BenchmarkSuite):
    """MUSE's data and options for `divdec.evaluation.run.evaluate`."""

    settings: MuseSettings
    data: MuseData
    retained: Results | None
    arrows: ClassVar[dict[str, str]] = {
        "forget_verbmem_ROUGE": "↓", "forget_knowmem_ROUGE": "↓", "retain_knowmem_ROUGE": "↑", "privleak": "→ 0",
        "extraction_strength": "↓",
    }  # fmt: skip

    @classmethod
    def read(cls, settings: MuseSettings) -> MuseSuite:
        """Read data and results of the retrained model.

        Raises:
            UsageError: a file cannot be used.
        """
        return cls(settings, read_muse(*data_paths(settings), settings.limit), retained_results(settings))

    def evaluate(self, model: EvaluatedModel, earlier: list[Results], save: Save) -> list[Results]:
        """Add the figures that are missing in earlier results."""
        return evaluate_muse(
            model, self.data, max_length=self.settings.max_length, batch_size=self.settings.batch_size,
            retain_results=self.retained, earlier=earlier, save=save,
        )  # fmt: skip


def evaluate_muse(
    model: EvaluatedModel,
    data: MuseData,
    *,
    max_length: int = 512,
    batch_size: int = 32,
    retain_results: Results | None = None,
    earlier: Sequence[Results] | None = None,
    save: Save = lambda results: None,
) -> list[Results]:
    """Evaluate a model on MUSE; see `divdec_research.suites.tofu.evaluate_tofu` for the arguments.

    Raises:
        UsageError: a prompt with its examples does not fit `max_length`, so that an answer would be cut.
    """
    results = list(earlier) if earlier else [Results("", "muse") for _ in model.settings]
    run = _MuseRun(model, data, batch_size, results)
    stages = [run.score_texts]
    for name, records in data.knowmem.items():
        form = BenchmarkFormat(model.tokenizer, "plain", shots=data.shots[name], max_length=max_length)
        truths = [form.truth(record) for record in records]  # first, so that a prompt that does not fit is refused
        metric, prompts = f"{name}_knowmem_ROUGE", form.prompts(records)
        stages.append(functools.partial(run.generate, metric, prompts, truths, KNOWMEM_TOKENS, STOPS))
    stages.append(run.continue_texts)
    reasons: dict[str, str] = {}
    if not data.verbmem:
        metrics = ("forget_verbmem_ROUGE", "extraction_strength", "exact_memorization")
        reasons |= dict.fromkeys(metrics, "there is no verbmem/forget.jsonl")
    if not data.texts:
        reasons |= dict.fromkeys(("mia_min_k", "privleak"), "there are no privleak/forget.jsonl and holdout.jsonl")

    return run_stages(
        stages, results, lambda setting_results: compute_figures(setting_results, retain_results), reasons, save
    )


def compute_figures(results: Results, retained: Results | None = None) -> None:
    """Compute every figure that the items allow: means, the AUC and PrivLeak."""
    for metric in results.items:
        results.figures[metric] = results.mean(metric, "rougeL_f1" if metric.endswith("ROUGE") else "score")
    add_attack_figures(results, ("mia_min_k",), retained)


@dataclasses.dataclass(frozen=True)
class _MuseRun:
    model: EvaluatedModel
    data: MuseData
    batch_size: int
    results: list[Results]

    def score_texts(self) -> None:
        """Compute the metrics of one teacher-forced pass over continuations and whole texts."""
        if all(
            "extraction_strength" in results.items or "mia_min_k.forget" in results.items for results in self.results
        ):
            return
        sets = {"verbmem": self.data.verbmem, **self.data.texts}
        examples = [continuation(record, self.model.tokenizer) for records in sets.values() for record in records]
        if not examples:
            return
        scores = self.model.scores(examples, moments=False, batch_size=self.batch_size, title="teacher-forced")
        for results, items in zip(self.results, scores, strict=True):
            remaining = iter(items)
            for name, records in sets.items():
                of_set = list(itertools.islice(remaining, len(records)))
                if name == "verbmem":
                    results.items["extraction_strength"] = numbered(map(extraction_strength, of_set))
                    results.items["exact_memorization"] = numbered(map(exact_memorization, of_set))
                else:
                    results.items[f"mia_min_k.{name}"] = numbered(map(min_k, of_set))

    def continue_texts(self) -> None:
        """Continue the beginnings of the forgotten texts."""
        tokenizer = self.model.tokenizer
        prompts = [token_ids(tokenizer, record.prompt or "") for record in self.data.verbmem]
        examples = [continuation(record, tokenizer) for record in self.data.verbmem]
        truths = [decoded(tokenizer, example.input_ids[example.prompt_length :]).strip() for example in examples]
        if prompts:
            self.generate("forget_verbmem_ROUGE", prompts, truths, VERBMEM_TOKENS, ())

    def generate(
        self, metric: str, prompts: list[list[int]], truths: list[str], max_new_tokens: int, stops: tuple[str, ...]
    ) -> None:
        """Continue the prompts, up to a stop, and compute ROUGE against the truths."""
        tokenizer = self.model.tokenizer
        options: dict[str, Any] = {"stop_strings": list(stops)} if stops else {}
        for setting, results in zip(self.model.settings, self.results, strict=True):
            if metric in results.items:
                continue
            outputs = continuations(
                self.model.under(setting), tokenizer, prompts,
                max_new_tokens=max_new_tokens, batch_size=self.batch_size, title=metric, **options,
            )  # fmt: skip
            for index, (prompt, ids, truth) in enumerate(zip(prompts, outputs, truths, strict=True)):
                text = decoded(tokenizer, ids)
                for stop in stops:
                    text = text.split(stop)[0]
                text = text.strip()
                texts = {"input": decoded(tokenizer, prompt), "ground_truth": truth, "generation": text}
                results.add_item(metric, str(index), **rouge(text, truth), **texts)
