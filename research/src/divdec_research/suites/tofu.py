"""The TOFU suite, with OpenUnlearning's names and its figures per item.

One teacher-forced pass gives every likelihood metric of every setting; one greedy answer per question every ROUGE.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from divdec.checkpoint import CheckpointReference, check_weights, dtype_for_passes, load_model, load_tokenizer
from divdec.data.formatting import IGNORED
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations
from divdec.evaluation.metrics import attack_auc, membership_scores
from divdec.evaluation.questions import decoded
from divdec.evaluation.results import Results, numbered, write_results
from divdec.evaluation.scoring import EvaluatedModel, ItemScore, score
from divdec.runs import settings_hash
from divdec_research.suites.aggregate import UTILITY_PARTS, harmonic_mean
from divdec_research.suites.metrics import (
    closer_to_1_better,
    exact_memorization,
    extraction_strength,
    forget_quality,
    gradient_norm,
    normalised_probability,
    privleak,
    prob_mean,
    rouge,
    true_better,
    truth_ratio,
)
from divdec_research.suites.questions import BenchmarkFormat
from divdec_research.suites.results import FILES, read_results, write_openunlearning
from divdec_research.suites.rows import question_in, read_rows, text_in, texts_in
from divdec_research.suites.settings import BenchmarkSettings, TofuSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPLITS = ("forget01", "forget05", "forget10")
SETS = {"retain": "retain_perturbed", "ra": "real_authors_perturbed", "wf": "world_facts_perturbed"}
ATTACKS = ("loss", "zlib", "min_k", "min_k_plus_plus", "reference", "gradnorm")
FLUENCY_CLASSIFIER = "madhurjindal/autonlp-Gibberish-Detector-492513457"  # OpenUnlearning's
FLUENCY_TOKENS = 32
NEW_TOKENS = 200

Save = Callable[[Sequence[Results]], object]
"""Called with the results of every setting."""


@dataclasses.dataclass(frozen=True)
class TofuQuestion:
    """A question with its right answers and wrong ones."""

    record: Record
    paraphrased: str | None = None
    wrong: tuple[str, ...] = ()

    def answers(self) -> dict[str, list[Record]]:
        """The answers to score, by kind: '' (the right one), PARA (paraphrased), PERT (wrong)."""
        texts = {"": (self.record.answer,), "PARA": (self.paraphrased,), "PERT": self.wrong}
        return {
            kind: [dataclasses.replace(self.record, answer=text) for text in of_kind]
            for kind, of_kind in texts.items()
            if any(of_kind)
        }


@dataclasses.dataclass(frozen=True)
class TofuData:
    """The questions of one forget split, by set: forget, retain, ra (real authors), wf (world facts), holdout."""

    split: str
    sets: dict[str, tuple[TofuQuestion, ...]]


def read_tofu(folder: Path, split: str, holdout: Path | None = None, limit: int | None = None) -> TofuData:
    """Read TOFU's files, named as in the Hugging Face dataset; of each set the first `limit` questions.

    Args:
        folder: holds `{split}_perturbed.json`, the files of `SETS`, and `holdout01.json` etc. without `holdout`.
        split: 'forget01', 'forget05' or 'forget10'.
        holdout: questions that no model has seen, for membership attacks.
        limit: number of questions; None for all.

    Raises:
        UsageError: a file or a column is missing, or a line cannot be read (with its number).
    """
    if not folder.is_dir():
        raise UsageError(f"data {folder} is not a folder; it must hold TOFU's files, such as {split}_perturbed.json")
    present = [known for known in SPLITS if (folder / f"{known}_perturbed.json").is_file()]
    if split not in (present or SPLITS):
        accepted = f"the splits of {folder}: {', '.join(present)}" if present else ", ".join(SPLITS)
        raise UsageError(f"--split is {split!r}; accepted: {accepted}")

    def read(file: Path, paraphrased: bool) -> tuple[TofuQuestion, ...]:
        return read_rows(
            file,
            "locuslab/TOFU",
            lambda row, location: TofuQuestion(
                question_in(row, location),
                text_in(row, "paraphrased_answer", location) if paraphrased else None,
                texts_in(row, "perturbed_answer", location),
            ),
            limit,
        )

    sets = {"forget": read(folder / f"{split}_perturbed.json", True)}
    sets |= {name: read(folder / f"{file}.json", name == "retain") for name, file in SETS.items()}
    default = folder / f"{split.replace('forget', 'holdout')}.json"
    if holdout is not None or default.is_file():
        holdout = holdout or default
        sets["holdout"] = read_rows(holdout, "locuslab/TOFU", lambda *row: TofuQuestion(question_in(*row)), limit)
        forget = {question.record.messages for question in sets["forget"]}
        if both := sum(question.record.messages in forget for question in sets["holdout"]):
            raise UsageError(f"holdout {holdout}: {both} of its questions are also in {split}; they must differ")
    return TofuData(split, sets)


class BenchmarkSuite:
    """Digest of a suite's data, and the output of TOFU and MUSE."""

    settings: Any
    """The suite's `BenchmarkSettings`."""
    data: Any
    outputs: ClassVar[tuple[str, ...]] = FILES[1:]
    arrows: ClassVar[dict[str, str]]
    """The most important figures, each with the direction in which it is better."""

    @property
    def digest(self) -> str:
        """Digest of the data."""
        return settings_hash(self.data)

    def write(self, results: Results, folder: Path) -> None:
        """See `divdec.evaluation.run.Suite.write`."""
        write_results(results, folder)
        if self.settings.openunlearning:
            write_openunlearning(results, folder)

    def headlines(self, results: Results) -> dict[str, str]:
        """See `divdec.evaluation.run.Suite.headlines`."""
        return self.arrows


@dataclasses.dataclass
class TofuSuite(BenchmarkSuite):
    """TOFU's data, classifier and reference for `divdec.evaluation.run.evaluate`."""

    settings: TofuSettings
    data: TofuData
    retained: Results | None
    fluency: Fluency | None = None
    reference: PreTrainedModel | None = None
    arrows: ClassVar[dict[str, str]] = {
        "forget_quality": "↑", "forget_truth_ratio": "↑", "forget_Q_A_Prob": "↓", "forget_Q_A_ROUGE": "↓",
        "extraction_strength": "↓", "privleak": "→ 0", "model_utility": "↑",
    }  # fmt: skip

    @classmethod
    def read(cls, settings: TofuSettings, report: Callable[[str], None] = print) -> TofuSuite:
        """Read data and results of the retrained model, and load classifier and reference.

        Raises:
            UsageError: a file or model cannot be used.
        """
        folder, holdout = data_paths(settings)
        retained = retained_results(settings)
        data = read_tofu(folder, settings.split, holdout, settings.limit)
        fluency = _load_fluency(settings.fluency, report)
        reference = None
        if settings.reference is not None:
            checkpoint = CheckpointReference.parse(settings.reference).resolve(Path(), weights=True)
            check_weights(checkpoint)
            reference = load_model(checkpoint, dtype=dtype_for_passes(settings.dtype)).eval()
        return cls(settings, data, retained, fluency, reference)

    def evaluate(self, model: EvaluatedModel, earlier: list[Results], save: Save) -> list[Results]:
        """Add the figures that are missing in earlier results."""
        reference = None if self.reference is None else load_tokenizer(Path(str(self.reference.name_or_path)))
        # The reference scores the model's token ids.
        if reference is not None and reference.get_vocab() != model.tokenizer.get_vocab():
            raise UsageError(f"--reference {self.settings.reference} has another tokenizer than the model")
        return evaluate_tofu(
            model, self.data, BenchmarkFormat.from_settings(model.tokenizer, self.settings, self.settings.max_length),
            batch_size=self.settings.batch_size, retain_results=self.retained, fluency=self.fluency,
            reference=self.reference, earlier=earlier, save=save,
        )  # fmt: skip


def data_paths(settings: BenchmarkSettings) -> tuple[Path, Path | None]:
    """Return the paths of data and holdout."""
    holdout = Path(settings.holdout).expanduser() if settings.holdout else None
    return Path(settings.data).expanduser(), holdout


def retained_results(settings: BenchmarkSettings) -> Results | None:
    """Read the results of the retrained model.

    Raises:
        UsageError: they cannot be read, or are of another suite.
    """
    retained = read_results(settings.retain_results) if settings.retain_results else None
    if retained is not None and retained.suite != settings.suite:
        raise UsageError(f"retain results {settings.retain_results} are of the suite {retained.suite}")
    return retained


def _load_fluency(checkpoint: str | None, report: Callable[[str], None]) -> Fluency | None:
    """Load the classifier. Nobody asked for the default one, so a machine that lacks it measures everything else."""
    if checkpoint == "none":
        return None
    if checkpoint is not None:
        return Fluency(checkpoint)
    try:
        return Fluency(FLUENCY_CLASSIFIER)
    except UsageError:
        report(
            f"fluency is left out: its classifier {FLUENCY_CLASSIFIER} cannot be loaded, neither from the local "
            "Hugging Face cache nor from the hub; give another one with --fluency"
        )
        return None


def evaluate_tofu(
    model: EvaluatedModel,
    data: TofuData,
    form: BenchmarkFormat | None = None,
    *,
    batch_size: int = 32,
    retain_results: Results | None = None,
    gradient_norms: bool = True,
    fluency: Fluency | None = None,
    reference: PreTrainedModel | None = None,
    earlier: Sequence[Results] | None = None,
    save: Save = lambda results: None,
) -> list[Results]:
    """Evaluate a model on TOFU.

    Args:
        model: the model and its settings.
        data: the questions.
        form: their layout; by default that of the published figures.
        batch_size: sequences in a pass.
        retain_results: results of the retrained model: the reference of forget quality and privacy leakage.
        gradient_norms: compute the attack by gradient norm, which takes a backward pass per item.
        fluency: classifier of the forget set's answers; None leaves fluency out.
        reference: a model for the reference attack (with the same tokenizer); None leaves it out.
        earlier: results of an interrupted run, one per setting; their metrics are not computed again.
        save: called with the results after every stage.

    Returns:
        Results, one per setting.

    Raises:
        UsageError: an item cannot be scored, or the retrained model's results are of another split.
    """
    if retain_results is not None:
        _check_retained(retain_results, data)
    results = list(earlier) if earlier else [Results("", "tofu", split=data.split) for _ in model.settings]
    run = _TofuRun(model, data, form or BenchmarkFormat(model.tokenizer), batch_size, results)
    stages: list[Callable[[], None]] = [run.score_answers]
    reasons: dict[str, str] = {}
    if "holdout" not in data.sets:
        attacks = [f"mia_{attack}" for attack in ATTACKS]
        reasons |= dict.fromkeys((*attacks, "privleak"), "there is no holdout set (--holdout)")
    elif gradient_norms:
        stages.append(run.compute_gradient_norms)
    else:
        reasons["mia_gradnorm"] = "gradient norms were left out"
    stages.append(run.generate_answers)
    if reference is None:
        reasons.setdefault("mia_reference", "there is no reference model (--reference)")
    elif "holdout" in data.sets:
        stages.append(lambda: run.compute_reference_attack(reference))
    if fluency is None:
        reasons["forget_Q_A_gibberish"] = "there is no fluency classifier (--fluency)"
    else:
        stages.append(lambda: run.judge_fluency(fluency))
    if retain_results is None:
        reasons["forget_quality"] = "there are no results of the retrained model (--retain-results)"
    return run_stages(
        stages, results, lambda setting_results: compute_figures(setting_results, retain_results), reasons, save
    )


def run_stages(
    stages: Sequence[Callable[[], None]],
    results: list[Results],
    compute_figures: Callable[[Results], None],
    reasons: dict[str, str],
    save: Save,
) -> list[Results]:
    """Run the stages of a suite, and compute the figures and save the results after each.

    `reasons` say by figure why it cannot be computed.
    """
    for stage in stages:
        stage()
        for setting_results in results:
            compute_figures(setting_results)
        save(results)
    for setting_results in results:
        setting_results.figures |= dict.fromkeys(reasons)
        setting_results.reasons |= reasons
    save(results)
    return results


@dataclasses.dataclass
class _TofuRun:
    model: EvaluatedModel
    data: TofuData
    form: BenchmarkFormat
    batch_size: int
    results: list[Results]

    def score_answers(self) -> None:
        """Compute the metrics of one teacher-forced pass over every question and answer."""
        if all("forget_Q_A_Prob" in results.items for results in self.results):
            return
        answers = {
            (name, index, kind): records
            for name, questions in self.data.sets.items()
            for index, question in enumerate(questions)
            for kind, records in question.answers().items()
        }
        # Only membership attacks read the vocabulary's moments, and only of these few answers.
        attacked = [key for key in answers if key[0] in ("forget", "holdout") and not key[2]]
        others = [key for key in answers if key not in set(attacked)]
        for keys, moments in ((attacked, True), (others, False)):
            examples = self.form.encode([record for key in keys for record in answers[key]])
            scores = self.model.scores(
                examples, moments=moments, batch_size=self.batch_size, title="attacked" if moments else "answers"
            )
            for results, items in zip(self.results, scores, strict=True):
                start = 0
                for name, index, kind in keys:
                    count = len(answers[name, index, kind])
                    if name != "holdout":
                        _add_likelihoods(results, name, str(index), kind, items[start : start + count])
                    if moments:
                        labels = [label for label in examples[start].labels if label != IGNORED]
                        self._add_attacks(results, name, str(index), items[start], decoded(self.form.tokenizer, labels))
                    start += count

    def _add_attacks(self, results: Results, name: str, index: str, item: ItemScore, text: str) -> None:
        if "holdout" in self.data.sets:
            for attack, value in membership_scores(item, text).items():
                results.add_item(f"mia_{attack}.{name}", index, score=value)
        if name == "forget":
            results.add_item("extraction_strength", index, score=extraction_strength(item))
            results.add_item("exact_memorization", index, score=exact_memorization(item))

    def compute_gradient_norms(self) -> None:
        """Compute the gradient norm of every forget and holdout answer."""
        for setting, results in zip(self.model.settings, self.results, strict=True):
            if "mia_gradnorm.holdout" in results.items:
                continue
            # Gradients need a finite loss, as likelihoods do (`score_settings`).
            model = self.model.under(setting and dataclasses.replace(setting, fill="soft"))
            for name in ("forget", "holdout"):
                examples = self.form.encode([question.record for question in self.data.sets[name]])
                results.items[f"mia_gradnorm.{name}"] = numbered(gradient_norm(model, each) for each in examples)

    def compute_reference_attack(self, model: PreTrainedModel) -> None:
        """Compute the difference between the loss and that of a model that has not seen the answers."""
        if all("mia_reference.holdout" in results.items for results in self.results):
            return
        for name in ("forget", "holdout"):
            examples = self.form.encode([question.record for question in self.data.sets[name]])
            scores = score(model, examples, batch_size=self.batch_size, title="reference")
            for results in self.results:
                losses = results.scores(f"mia_loss.{name}", "score")
                differences = [loss - item.loss for loss, item in zip(losses, scores, strict=True)]
                results.items[f"mia_reference.{name}"] = numbered(differences)

    def generate_answers(self) -> None:
        """Answer every question greedily, and compute ROUGE against the true answers."""
        names = [name for name in self.data.sets if name != "holdout"]
        questions = [(name, index, question) for name in names for index, question in enumerate(self.data.sets[name])]
        prompts = self.form.prompts([question.record for *_, question in questions])
        for setting, results in zip(self.model.settings, self.results, strict=True):
            if all(f"{name}_Q_A_ROUGE" in results.items for name in names):
                continue
            title = f"generating {setting or ''}".strip()
            # All sets together: fewer batches take fewer steps.
            outputs = continuations(
                self.model.under(setting), self.model.tokenizer, prompts,
                max_new_tokens=NEW_TOKENS, batch_size=4 * self.batch_size, title=title,
            )  # fmt: skip
            for (name, index, question), prompt, ids in zip(questions, prompts, outputs, strict=True):
                text = decoded(self.form.tokenizer, ids).strip()
                records = question.answers()
                truths = {f"{name}_Q_A_ROUGE": question.record}
                if name == "forget" and "PARA" in records:
                    truths["forget_Q_A_PARA_ROUGE"] = records["PARA"][0]
                for metric, record in truths.items():
                    truth = self.form.truth(record)
                    texts = {"input": decoded(self.form.tokenizer, prompt), "ground_truth": truth, "generation": text}
                    results.add_item(metric, str(index), **rouge(text, truth), **texts)

    def judge_fluency(self, judge: Fluency) -> None:
        for results in self.results:
            if "forget_Q_A_gibberish" in results.items:
                continue
            texts = [str(text) for text in results.scores("forget_Q_A_ROUGE", "generation")]
            values = judge.probabilities(texts, max_length=FLUENCY_TOKENS)
            for index, (text, value) in enumerate(zip(texts, values, strict=True)):
                results.add_item("forget_Q_A_gibberish", str(index), score=value, generation=text)


def _add_likelihoods(results: Results, name: str, index: str, kind: str, items: Sequence[ItemScore]) -> None:
    metric = f"{name}_Q_A_{kind}_Prob" if kind else f"{name}_Q_A_Prob"
    probabilities, losses = [item.probability for item in items], [item.loss for item in items]
    if kind == "PERT":
        results.add_item(metric, index, prob=probabilities, avg_loss=losses)
    else:
        results.add_item(metric, index, prob=probabilities[0], avg_loss=losses[0])


def _check_retained(retained: Results, data: TofuData) -> None:
    if retained.split not in (None, data.split):
        raise UsageError(f"retain results {retained.name} are of split {retained.split}, not of {data.split}")
    count, expected = len(retained.items.get("forget_truth_ratio", ())), len(data.sets["forget"])
    if count != expected:
        raise UsageError(
            f"retain results {retained.name} hold {count} truth ratios of the forget set, but {data.split} has "
            f"{expected} questions here: they are of another split, another --limit, or a summary alone"
        )


def compute_figures(results: Results, retained: Results | None = None) -> None:
    """Compute every figure that the items allow: ratios, means, AUCs and model utility."""
    for name, aggregate in {"forget": closer_to_1_better, **dict.fromkeys(SETS, true_better)}.items():
        right = f"{name}_Q_A_PARA_Prob" if name in ("forget", "retain") else f"{name}_Q_A_Prob"
        wrong = f"{name}_Q_A_PERT_Prob"
        if not {right, wrong} <= results.items.keys():
            continue
        losses = list(zip(results.scores(right, "avg_loss"), results.scores(wrong, "avg_loss"), strict=True))
        metric = "forget_truth_ratio" if name == "forget" else f"{name}_Truth_Ratio"
        ratios = [truth_ratio(correct, wrongs) for correct, wrongs in losses]
        results.items[metric] = numbered(ratios)
        results.figures[metric] = statistics.fmean(map(aggregate, ratios))
        if name == "forget":
            results.figures["forget_truth_ratio_true_better"] = statistics.fmean(map(true_better, ratios))
            means = [prob_mean(correct, wrongs) for correct, wrongs in losses]
            results.figures["forget_truth_ratio_prob_mean"] = statistics.fmean(means)
        if name in ("ra", "wf"):
            pairs = zip(results.scores(right, "prob"), results.scores(wrong, "prob"), strict=True)
            shares = [normalised_probability(correct, wrongs) for correct, wrongs in pairs]
            results.items[f"{name}_Q_A_Prob_normalised"] = numbered(shares, "prob")
    for metric in results.items:
        if metric not in results.figures or not metric.endswith(("Truth_Ratio", "truth_ratio")):
            results.figures[metric] = results.mean(
                metric, "prob" if "Prob" in metric else "rougeL_recall" if "ROUGE" in metric else "score"
            )
    add_attack_figures(results, [f"mia_{attack}" for attack in ATTACKS], retained)
    if retained is not None and "forget_truth_ratio" in results.items:
        ratios, references = (run.scores("forget_truth_ratio", "score") for run in (results, retained))
        results.figures["forget_quality"] = forget_quality(ratios, references)
    utilities = [value for metric in UTILITY_PARTS if (value := results.figures.get(metric)) is not None]
    if len(utilities) == len(UTILITY_PARTS):
        results.figures["model_utility"] = float(harmonic_mean(utilities))


def add_attack_figures(results: Results, attacks: Sequence[str], retained: Results | None) -> None:
    """Compute the AUC of each attack whose items exist, and PrivLeak."""
    for attack in attacks:
        sets = (f"{attack}.forget", f"{attack}.holdout")
        if all(results.items.get(name) for name in sets):
            results.figures[attack] = attack_auc(*(results.scores(name, "score") for name in sets))
    auc = results.figures.get("mia_min_k")
    if auc is not None:
        expected = 0.5 if retained is None else retained.figures.get("mia_min_k")
        if expected is not None:
            results.figures["privleak"] = privleak(auc, expected)


class Fluency:
    """A text classifier whose class 0 means fluent text (OpenUnlearning's classifier_prob)."""

    def __init__(self, checkpoint: str) -> None:
        """Load the classifier and its tokenizer from a folder or hub id.

        Raises:
            UsageError: it cannot be loaded.
        """
        from transformers import AutoModelForSequenceClassification

        try:
            folder = CheckpointReference.parse(checkpoint).resolve(Path(), weights=True)
            self.tokenizer: Any = load_tokenizer(folder)
            self.model: Any = load_model(folder, AutoModelForSequenceClassification, dtype=torch.float32)
        except UsageError as error:
            raise UsageError(
                f"fluency classifier {checkpoint!r} cannot be loaded ({error}); give a local folder, "
                "or --fluency none to leave fluency out"
            ) from None

    def probabilities(self, texts: Sequence[str], *, max_length: int, batch_size: int = 32) -> list[float]:
        """Compute the probability that each text is fluent, from its first `max_length` tokens."""
        starts = range(0, len(texts), batch_size)
        return [p for start in starts for p in self._batch(texts[start : start + batch_size], max_length)]

    def _batch(self, texts: Sequence[str], max_length: int) -> list[float]:
        batch = self.tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_length)
        with torch.inference_mode():
            logits = self.model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
        return logits.softmax(dim=-1)[:, 0].tolist()
