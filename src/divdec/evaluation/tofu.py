"""The TOFU suite, as OpenUnlearning computes it (same names, same figures item by item), in as few passes as it takes.

Every teacher-forced metric of every setting reads from one pass over all questions; every ROUGE from one answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from divdec.data.formatting import IGNORED, Example
from divdec.data.records import Record
from divdec.errors import UsageError
from divdec.evaluation import attacks
from divdec.evaluation.layout import Layout, decoded
from divdec.evaluation.memorization import exact_memorization, extraction_strength
from divdec.evaluation.results import Items, Results
from divdec.evaluation.scoring import ItemScore, score
from divdec.evaluation.sharding import own, together
from divdec.evaluation.text import rouge
from divdec.evaluation.tofu_data import Question, TofuData
from divdec.evaluation.tofu_figures import ATTACKS, derive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.evaluation.fluency import Fluency
    from divdec.evaluation.subject import Subject

FLUENCY_TOKENS = 32
NEW_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class TofuOptions:
    """What the suite measures with, beside the model."""

    template: Literal["chat", "plain"] = "chat"
    system_prompt: str | None = "You are a helpful assistant."
    date: str | None = "10 Apr 2025"
    max_length: int = 512
    batch_size: int = 32
    retain_results: Results | None = None
    """Of the retrained model: the reference of forget quality and privacy leakage."""
    gradient_norms: bool = True
    """Measure the attack by gradient norm, a backward pass an item."""


def evaluate_tofu(
    subject: Subject,
    data: TofuData,
    options: TofuOptions = TofuOptions(),
    *,
    fluency: Fluency | None = None,
    reference: PreTrainedModel | None = None,
    earlier: Sequence[Results] | None = None,
    save: Callable[[Sequence[Results]], object] = lambda results: None,
) -> list[Results]:
    """Measure a model on TOFU.

    Args:
        subject: the model and its settings.
        data: the questions.
        options: layout, and the retrained model's results.
        fluency: judges the forget set's answers; None leaves fluency out, and says so.
        reference: a model for the reference attack (of the same tokenizer); None leaves it out.
        earlier: results of a run that was stopped, one a setting; what they hold is not measured again.
        save: told the results after every stage, so that nothing is lost.

    Returns:
        Results, one a setting, in the subject's order.

    Raises:
        UsageError: an item cannot be scored, or the retrained model's results are of another split.
    """
    layout = Layout(
        subject.tokenizer, options.template, options.system_prompt, options.date, max_length=options.max_length
    )
    retained = options.retain_results
    if retained is not None:
        _check_retained(retained, data)
    results = list(earlier) if earlier else [Results("", "tofu", split=data.split) for _ in subject.settings]
    run = _Run(subject, data, layout, options.batch_size, results)
    gradients = [run.gradients] if options.gradient_norms else []
    stages: list[Callable[[], None]] = [run.likelihoods, *gradients, run.answers]
    if reference is not None:
        stages.append(lambda: run.reference(reference))
    if fluency is not None:
        stages.append(lambda: run.fluency(fluency))
    for stage in stages:
        stage()
        for found in results:
            derive(found, retained)
        save(results)
    for found in results:
        _say_what_is_missing(found, data, fluency is not None, reference is not None, options)
    save(results)
    return results


@dataclasses.dataclass
class _Run:
    subject: Subject
    data: TofuData
    layout: Layout
    batch_size: int
    results: list[Results]

    def likelihoods(self) -> None:
        """All that one teacher-forced pass over every question and answer gives."""
        if all("forget_Q_A_Prob" in found.items for found in self.results):
            return
        # Only membership attacks read the vocabulary's moments, and only of these few answers.
        attacked = [key for key in self._answers if key[0] in ("forget", "holdout") and not key[2]]
        others = [key for key in self._answers if key[0] not in ("forget", "holdout") or key[2]]
        for keys, moments in ((attacked, True), (others, False)):
            examples = self.layout.encode_all([record for key in keys for record in self._answers[key]])
            scores = self.subject.scores(
                examples, moments=moments, batch_size=self.batch_size, title="attacked" if moments else "answers"
            )
            for found, items in zip(self.results, scores, strict=True):
                start = 0
                for name, index, kind in keys:
                    stop = start + len(self._answers[name, index, kind])
                    self._take(found, name, str(index), kind, items[start:stop], examples[start])
                    start = stop

    @functools.cached_property
    def _answers(self) -> dict[tuple[str, int, str], list[Record]]:
        """Every text that is scored as an answer, by set, index and kind."""
        return {
            (name, index, kind): [dataclasses.replace(question.record, answer=text) for text in texts]
            for name, questions in self.data.sets.items()
            for index, question in enumerate(questions)
            for kind, texts in _answers(question).items()
        }

    def _take(
        self, found: Results, name: str, index: str, kind: str, items: Sequence[ItemScore], example: Example
    ) -> None:
        if name != "holdout":
            metric = {"": f"{name}_Q_A_Prob", "PARA": f"{name}_Q_A_PARA_Prob", "PERT": f"{name}_Q_A_PERT_Prob"}[kind]
            probabilities, losses = [item.probability for item in items], [item.loss for item in items]
            several = kind == "PERT"
            _items(found, metric)[index] = {
                "prob": probabilities if several else probabilities[0],
                "avg_loss": losses if several else losses[0],
            }
        if kind or name not in ("forget", "holdout"):
            return
        (item,) = items
        text = decoded(self.layout.tokenizer, [label for label in example.labels if label != IGNORED])
        values = {
            "loss": attacks.loss(item),
            "zlib": attacks.zlib_ratio(item, text),
            "min_k": attacks.min_k(item),
            "min_k_plus_plus": attacks.min_k_plus_plus(item),
        }
        if "holdout" in self.data.sets:
            for attack, value in values.items():
                _items(found, f"mia_{attack}.{name}")[index] = {"score": value}
        if name == "forget":
            _items(found, "extraction_strength")[index] = {"score": extraction_strength(item)}
            _items(found, "exact_memorization")[index] = {"score": exact_memorization(item)}

    def gradients(self) -> None:
        """The gradient norm of every forget and holdout answer."""
        if "holdout" not in self.data.sets:
            return
        for setting, found in zip(self.subject.settings, self.results, strict=True):
            if "mia_gradnorm.holdout" in found.items:
                continue
            model = self.subject.under(setting)
            for name in ("forget", "holdout"):
                examples = self.layout.encode_all([question.record for question in self.data.sets[name]])
                norms = together(
                    lambda model=model, examples=examples: {
                        index: attacks.gradient_norm(model, example) for index, example in own(enumerate(examples))
                    }
                )
                found.items[f"mia_gradnorm.{name}"] = {str(index): {"score": norms[index]} for index in sorted(norms)}

    def reference(self, model: PreTrainedModel) -> None:
        """How much less likely the answers are than a model that has not seen them finds them."""
        if "holdout" not in self.data.sets or all("mia_reference.holdout" in found.items for found in self.results):
            return
        for name in ("forget", "holdout"):
            examples = self.layout.encode_all([question.record for question in self.data.sets[name]])
            scores = score(model, examples, batch_size=self.batch_size, title="reference")
            for found in self.results:
                own = found.items[f"mia_loss.{name}"]
                found.items[f"mia_reference.{name}"] = {
                    str(index): {"score": own[str(index)]["score"] - item.loss} for index, item in enumerate(scores)
                }

    def answers(self) -> None:
        """Greedy answers to every question, and their ROUGE against the true ones."""
        names = [name for name in self.data.sets if name != "holdout"]
        asked = [(name, question) for name in names for question in self.data.sets[name]]
        prompts = self.layout.prompts([question.record for _, question in asked])
        tokenizer = self.layout.tokenizer
        for setting, found in zip(self.subject.settings, self.results, strict=True):
            if all(f"{name}_Q_A_ROUGE" in found.items for name in names):
                continue
            # All sets together: the fewer batches, the fewer steps.
            generated = self.subject.continuations(
                setting,
                prompts,
                max_new_tokens=NEW_TOKENS,
                batch_size=4 * self.batch_size,
                title=f"generating {setting or ''}".strip(),
            )
            for name in names:
                rows = [
                    (decoded(tokenizer, ids).strip(), decoded(tokenizer, prompt))
                    for (own, _), ids, prompt in zip(asked, generated, prompts, strict=True)
                    if own == name
                ]
                self._compare(found, name, [text for text, _ in rows], [prompt for _, prompt in rows])

    def _compare(self, found: Results, name: str, texts: Sequence[str], inputs: Sequence[str]) -> None:
        for index, (question, text) in enumerate(zip(self.data.sets[name], texts, strict=True)):
            truths = {f"{name}_Q_A_ROUGE": question.record}
            if name == "forget" and question.paraphrased is not None:
                truths[f"{name}_Q_A_PARA_ROUGE"] = dataclasses.replace(question.record, answer=question.paraphrased)
            for metric, record in truths.items():
                truth = self.layout.truth(record)
                shown = {"input": inputs[index], "ground_truth": truth, "generation": text}
                _items(found, metric)[str(index)] = rouge(text, truth) | shown

    def fluency(self, judge: Fluency) -> None:
        """How fluent the forget set's answers are."""
        for found in self.results:
            if "forget_Q_A_gibberish" in found.items:
                continue
            texts = [str(text) for text in found.scores("forget_Q_A_ROUGE", "generation")]
            values = judge.probabilities(texts, max_length=FLUENCY_TOKENS)
            found.items["forget_Q_A_gibberish"] = {
                str(index): {"score": value, "generation": text}
                for index, (text, value) in enumerate(zip(texts, values, strict=True))
            }


def _say_what_is_missing(found: Results, data: TofuData, fluency: bool, reference: bool, options: TofuOptions) -> None:
    reasons: dict[str, str] = {}
    if not fluency:
        reasons["forget_Q_A_gibberish"] = "fluency was left out (--fluency none)"
    if "holdout" not in data.sets:
        reasons |= {f"mia_{attack}": "there is no holdout set (--holdout)" for attack in ATTACKS}
        reasons["privleak"] = "there is no holdout set (--holdout)"
    elif not reference:
        reasons["mia_reference"] = "there is no reference model (--reference)"
    if "holdout" in data.sets and not options.gradient_norms:
        reasons["mia_gradnorm"] = "gradient norms were left out"
    if options.retain_results is None:
        reasons["forget_quality"] = "there are no results of the retrained model (--retain-results)"
    for metric, reason in reasons.items():
        found.figures[metric] = None
        found.reasons[metric] = reason


def _check_retained(retained: Results, data: TofuData) -> None:
    if retained.split not in (None, data.split):
        raise UsageError(f"retain results {retained.name} are of split {retained.split}, not of {data.split}")
    count, expected = len(retained.items.get("forget_truth_ratio", ())), len(data.sets["forget"])
    if count != expected:
        raise UsageError(
            f"retain results {retained.name} hold {count} truth ratios of the forget set, but {data.split} has "
            f"{expected} questions here: they are of another split, another --limit, or a summary alone"
        )


def _answers(question: Question) -> dict[str, tuple[str, ...]]:
    """The texts that are scored as answers to a question: its own, a paraphrase, wrong ones."""
    texts: dict[str, tuple[str, ...]] = {"": (question.record.answer,)}
    if question.paraphrased is not None:
        texts["PARA"] = (question.paraphrased,)
    if question.wrong:
        texts["PERT"] = question.wrong
    return texts


def _items(found: Results, metric: str) -> Items:
    return found.items.setdefault(metric, {})
