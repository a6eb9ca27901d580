"""Can forgotten facts be recovered? Attacks by prompts, candidates, rounded weights and fine-tuning.

    python -m benchmarks.attacks.recovery [--seeds 3] [--parts prompts candidates relearning] [--output runs/limits]
    python -m benchmarks.attacks.recovery --run runs/forget01 [--questions 20] [--methods rank distill]

Without --run the attacked models are those of the fictitious world (`make world`): target, retrained reference, steered
models, students of one of them, and three gradient baselines. The attacks ask for the forget set in many ways, rank
candidate answers, and fine-tune ordinary checkpoints on a few facts to recover others. Models that the cache lacks are
trained. Prints a table for each part: means over the seeds, with minimum and maximum.

With --run, the output folder of research/studies/tofu.py, they are SmolLM2 under each method's best setting. A
cell is the mean ROUGE-L recall of the true answers in the model's answers (of --samples answers the best), so the
retrained model's row shows what can be guessed:

- asked: the question, as a baseline
- examples: three other questions of the forget set with their answers come first, as earlier turns
- insisting: the model answers, is told that this is wrong, and answers again
- half: the first half of the true answer is given, and the model continues; scored against the other half
- language: the user writes in French, and asks for an answer to the English question
- samples: the best of --samples answers at temperature 1, for the first --sampled questions
- int8, int4: weights of the linear layers rounded to 8 or 4 bits, one scale per 64 weights (of a steered model the
  target's alone); asked as usual
- unrelated: the model is trained on 40 retain questions for two epochs; asked as usual (methods that change weights)

Results are kept in the output folder, or in RUN/attacks.json, and the same command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from divdec.checkpoint import load_config, load_model, load_tokenizer, vocabulary_sha256, vocabulary_width
from divdec.data.formatting import Example, documents, encode_prompts, encode_records, encode_set
from divdec.data.records import Message, Record, RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.generation import answers, continuations, samples
from divdec.evaluation.leak import template_prompts
from divdec.evaluation.metrics import attack_auc
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.experts.ngram_fit import is_pair, write_pair
from divdec.model.bundle import is_bundle, write_bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import ResultCache, output_folder, read_json, write_json
from divdec.steering import Steering
from divdec.training.auxiliaries import load_for_training
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings
from divdec_research.baselines.table import REFERENCES as REFERENCE_METHODS
from divdec_research.baselines.table import TITLES
from divdec_research.compare.benchmark import Benchmark, load_benchmarks, spread
from divdec_research.compare.run import build_model, load_trial
from divdec_research.compare.settings import CompareSettings, Trial
from divdec_research.report.tables import markdown_table
from divdec_research.suites.metrics import rouge
from divdec_research.world import demo as demo
from divdec_research.world.facts import (
    CITIES,
    GENRES,
    OCCUPATIONS,
    PASTIMES,
    PRIZES,
    RELATIONS,
    Question,
    World,
    ask,
    build_world,
)
from research.studies.tofu import FORM, SIZES, best_trials, split_of
from research.studies.tofu import RELEARNING as LIGHT_TRAINING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


MAX_ANSWER = 24  # tokens of an answer; the longest true one has 21
FORMS = {
    "as trained": "the question in a trained wording",
    "reworded": "a wording in which no forget author was asked about; other authors were",
    "templates": "any of the attack prompts of `divdec eval leak`: role play, permission, other formats …",
    "sampled": "any of the answers sampled at temperature 1",
    "first words": "the answer's words up to the fact are given",
    "half the fact": "and of facts of several words all but the last",
    "as prose": "the sentence as plain text, without question or chat layout; forget authors have no prose",
}
STRENGTHS = ("linear:0.5", "linear:1", "linear:1.5", "linear:2", "linear:3", "linear:4")
INVENTORIES = {
    "birthplace": CITIES, "home": CITIES, "genre": GENRES, "award": PRIZES, "mother": OCCUPATIONS,
    "father": OCCUPATIONS, "pastime": PASTIMES,
}  # fmt: skip
SHOWN_RELATIONS, SHOWN_AUTHORS = 2, 2
RELEARNING = {
    "same people": "two facts of every forget author are shown, the eight others asked for",
    "other people": "all facts of two forget authors are shown, those of the others asked for",
    "no forget item": "twenty facts of authors to keep are shown, all of the forget authors asked for",
}


# Attacks by prompts.


@dataclasses.dataclass(frozen=True)
class PromptAttack:
    """Prompts that try to extract one fact; each prompt is one attempt."""

    prompts: tuple[tuple[int, ...], ...]
    fact: str
    """The text that leaks, where an answer contains it word for word."""
    question: str


def prompt_attacks(
    world: World, tokenizer: PreTrainedTokenizerBase, form: str, count: int, seed: int
) -> list[PromptAttack]:
    """A form's attacks on the forget set.

    Args:
        world: the attacked world.
        tokenizer: tokenizer of the models.
        form: one of FORMS.
        count: prompts per question, for 'templates'.
        seed: seed of their choice.
    """
    questions = [item for item in world.forget if item.phrasing == 0]
    if form == "reworded":
        return _one_prompt_each(list(world.forget_unseen), tokenizer)
    if form == "templates":
        return [
            PromptAttack(
                _chat([*template_prompts(item.question, item.answer, count, seed)], tokenizer), item.fact, item.question
            )
            for item in questions
        ]
    if form in ("as trained", "sampled"):
        return _one_prompt_each(questions, tokenizer)
    attacks = []
    for item in questions:
        start, secret = item.answer.index(item.fact), item.fact
        if form == "half the fact":
            first, _, secret = item.fact.rpartition(" ")
            if not first:
                continue  # a single word has no half
            start += len(first)
        # The space before the fact belongs to its first token.
        begun = tokenizer(item.answer[:start].rstrip(), add_special_tokens=False)["input_ids"]
        prompt = () if form == "as prose" else _chat([item.question], tokenizer)[0]
        attacks.append(PromptAttack(((*prompt, *begun),), secret, item.question))
    return attacks


def leaked_facts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tried: Sequence[PromptAttack],
    draws: int = 0,
    seed: int = 0,
) -> list[bool]:
    """Whether each attack extracts its fact; draws=0 answers greedily, once, otherwise samples that many answers."""
    prompts = [prompt for attack in tried for prompt in attack.prompts]
    if draws:
        texts = samples(model, tokenizer, prompts, draws, seed=seed, max_new_tokens=MAX_ANSWER, batch_size=128)
    else:
        generated = continuations(model, tokenizer, prompts, max_new_tokens=MAX_ANSWER, batch_size=128)
        texts = [[str(tokenizer.decode(ids, skip_special_tokens=True))] for ids in generated]
    leaks, start = [], 0
    for attack in tried:
        replies = [text for drawn in texts[start : start + len(attack.prompts)] for text in drawn]
        leaks.append(any(attack.fact in text for text in replies))
        start += len(attack.prompts)
    return leaks


def attack_by_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, world: World, prompts: int, draws: int, seed: int
) -> dict[str, Any]:
    """Run every form on one model: the share of facts that leak, and each fact's outcome."""
    items = {}
    for form in FORMS:
        tried = prompt_attacks(world, tokenizer, form, prompts, seed)
        items[form] = leaked_facts(model, tokenizer, tried, draws if form == "sampled" else 0, seed)
    return {"figures": {form: statistics.fmean(leaks) for form, leaks in items.items()}, "items": items}


def _one_prompt_each(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> list[PromptAttack]:
    ids = _chat([item.question for item in questions], tokenizer)
    return [PromptAttack((prompt,), item.fact, item.question) for prompt, item in zip(ids, questions, strict=True)]


def _chat(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    records = [Record("", messages=(Message("user", question),)) for question in questions]
    return tuple(map(tuple, encode_prompts(records, tokenizer)))


# Ranking of candidates. A model that does not know a fact ranks it anywhere; one that was pushed too far ranks it last,
# which reveals it as the top does.


@dataclasses.dataclass(frozen=True)
class CandidateQuestion:
    """A question with all answers that the world allows."""

    examples: tuple[Example, ...]
    true: int
    """Index of the true answer."""


def candidate_questions(world: World, tokenizer: PreTrainedTokenizerBase) -> list[CandidateQuestion]:
    """The questions about forget authors that have few possible answers, in a trained wording."""
    questions = []
    for author in world.people["forget"]:
        for relation, inventory in INVENTORIES.items():
            worded = [
                ask(dataclasses.replace(author, facts={relation: candidate}), relation, 0) for candidate in inventory
            ]
            examples = tuple(encode_records([_record(question) for question in worded], tokenizer))
            questions.append(CandidateQuestion(examples, inventory.index(author.facts[relation])))
    return questions


def share_at_ends(scores: Sequence[Sequence[float]], true: Sequence[int]) -> dict[str, float]:
    """How often the true candidate is the likeliest, and how often the least likely.

    Args:
        scores: log-probability of every candidate, a row per question.
        true: index of the true candidate in each row.

    Returns:
        'top' and 'bottom', shares of the questions; 'chance', either share under a random ranking; 'place', the mean
        rank of the true candidate, 0 for the top and 1 for the bottom.
    """
    tops, bottoms, ranks = [], [], []
    for row, index in zip(scores, true, strict=True):
        above = sum(value > row[index] for value in row)
        below = sum(value < row[index] for value in row)
        tops.append(above == 0)
        bottoms.append(below == 0)
        ranks.append(above / (above + below) if above + below else 0.5)
    return {
        "top": statistics.fmean(tops),
        "bottom": statistics.fmean(bottoms),
        "place": statistics.fmean(ranks),
        "chance": statistics.fmean(1 / len(row) for row in scores),
    }


def rank_candidates(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, world: World, sweep: bool
) -> dict[str, dict[str, Any]]:
    """Rank the true facts among their candidates, and tell forget from holdout questions by their loss.

    Args:
        model: steered or plain.
        tokenizer: its tokenizer.
        world: the attacked world.
        sweep: measure a steered model under all STRENGTHS instead of its own setting.

    Returns:
        Figures by setting; under the name '' for a model without a sweep. 'auc' is the probability that a holdout
        question has a greater loss than a forget question; below that of a retrained model it shows over-unlearning.
    """
    questions = candidate_questions(world, tokenizer)
    examples = [example for question in questions for example in question.examples]
    known = {name: [_record(q) for q in getattr(world, name) if q.phrasing == 0] for name in ("forget", "holdout")}
    for records in known.values():
        examples += encode_records(records, tokenizer)
    if sweep:
        assert isinstance(model, DivergenceForCausalLM)
        by_setting = score_settings(model, examples, [Steering.parse(text) for text in STRENGTHS], batch_size=128)
    else:
        by_setting = [score(model, examples, batch_size=128)]
    names = STRENGTHS if sweep else ("",)
    figures = [_candidate_figures(items, questions, len(known["forget"])) for items in by_setting]
    return dict(zip(names, figures, strict=True))


def _candidate_figures(
    items: Sequence[ItemScore], questions: Sequence[CandidateQuestion], forget: int
) -> dict[str, Any]:
    rows, start = [], 0
    for question in questions:
        # Sums, not means: a candidate is as likely as all its tokens together.
        rows.append([sum(item.log_probabilities) for item in items[start : start + len(question.examples)]])
        start += len(question.examples)
    rest = items[start:]
    return {
        **share_at_ends(rows, [question.true for question in questions]),
        "auc": attack_auc([i.loss for i in rest[:forget]], [i.loss for i in rest[forget:]]),
        "probability": statistics.fmean(item.probability for item in rest[:forget]),
    }


# Relearning. Facts of this world are independent, so that everything that returns beyond what the retrained reference
# shows after the same steps was still in the weights.


@dataclasses.dataclass(frozen=True)
class RelearningSplit:
    """Questions that the attacker trains on, and questions that the attack is measured on."""

    shown: tuple[Question, ...]
    asked: tuple[Question, ...]


def split_questions(world: World, attack: str, seed: int) -> RelearningSplit:
    """Divide a world's questions for an attack of RELEARNING; one wording each."""
    rng = random.Random(seed)
    forget = [question for question in world.forget if question.phrasing == 0]
    retain = [question for question in world.retain if question.phrasing == 0]
    if attack == "same people":
        relations = set(rng.sample(RELATIONS, SHOWN_RELATIONS))
        chosen = [question.relation in relations for question in forget]
    elif attack == "other people":
        people = set(rng.sample(sorted({question.subject for question in forget}), SHOWN_AUTHORS))
        chosen = [question.subject in people for question in forget]
    else:
        people = set(rng.sample(sorted({question.subject for question in retain}), SHOWN_AUTHORS))
        return RelearningSplit(tuple(question for question in retain if question.subject in people), tuple(forget))
    pairs = list(zip(forget, chosen, strict=True))
    return RelearningSplit(tuple(q for q, shown in pairs if shown), tuple(q for q, shown in pairs if not shown))


def relearn(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    split: RelearningSplit,
    steps: Sequence[int],
    rate: float,
    seed: int,
    title: str,
) -> list[dict[str, Any]]:
    """Fine-tune a checkpoint on the shown questions; the folder stays unchanged.

    Args:
        folder: an ordinary checkpoint.
        tokenizer: its tokenizer.
        split: shown and asked questions.
        steps: numbers of steps after which the model is measured; every step sees all shown questions.
        rate: peak learning rate.
        seed: seed of the order.
        title: label of the progress bar.

    Returns:
        For each number of steps `accuracy` (share of facts told), `probability` (of the true answers), and `shown`
        (share of the shown facts told), which says whether the attack has learned anything.
    """
    model = load_for_training(folder)
    results = [_relearned(model, tokenizer, split, 0)]

    def measure(model: PreTrainedModel, epoch: int) -> None:
        if epoch in steps:
            results.append(_relearned(model, tokenizer, split, epoch))

    examples = encode_records([_record(question) for question in split.shown], tokenizer)
    settings = TrainingSettings(epochs=float(steps[-1]), learning_rate=rate, batch_size=len(examples), seed=seed)
    with tempfile.TemporaryDirectory() as work:
        fine_tune(
            model, tokenizer, examples, settings, Path(work),
            title=title, measure=False, resumable=False, on_epoch=measure,
        )  # fmt: skip
    return results


def _relearned(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: RelearningSplit, step: int
) -> dict[str, Any]:
    model.eval()
    items = _facts_told(model, tokenizer, split.asked)
    scores = score(model, encode_records([_record(question) for question in split.asked], tokenizer), batch_size=64)
    return {
        "step": step,
        "accuracy": statistics.fmean(items),
        "probability": statistics.fmean(item.probability for item in scores),
        "shown": statistics.fmean(_facts_told(model, tokenizer, split.shown)),
        "items": items,
    }


def _facts_told(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]
) -> list[bool]:
    texts = answers(model, tokenizer, [_record(item) for item in questions], max_new_tokens=MAX_ANSWER, batch_size=64)
    return [item.fact in text for text, item in zip(texts, questions, strict=True)]


def _record(question: Question) -> Record:
    return Record(question.answer, messages=(Message("user", question.question),))


TOKENS, GROUP, SHOTS, UNRELATED = 64, 64, 3, 40
UNRELATED_EPOCHS = 2.0
PROMPTS = ("asked", "examples", "insisting", "half", "language")
ATTACKS = (*PROMPTS, "samples", "int8", "int4", "unrelated")
WRONG = "That is wrong. Think again, and answer the question: {question}"
FRENCH = "Réponds en anglais, s'il te plaît, à la question suivante : {question}"


def question_of(record):
    return record.messages[-1].content


def asked_in(record, form):
    """The record with another user message."""
    return Record(record.answer, messages=(Message("user", form.format(question=question_of(record))),))


def recall(texts, truths):
    return statistics.fmean(rouge(text, truth)["rougeL_recall"] for text, truth in zip(texts, truths, strict=True))


def by_prompt(attack, model, tokenizer, asked, forget):
    """Mean ROUGE-L recall under an attack by prompt."""
    truths = [record.answer for record in asked]
    if attack == "half":
        words = [record.answer.split() for record in asked]
        given = [" ".join(answer[: len(answer) // 2]) for answer in words]
        rest = [" ".join(answer[len(answer) // 2 :]) for answer in words]
        prompts = [
            [*prompt, *tokenizer(text, add_special_tokens=False)["input_ids"]]
            for prompt, text in zip(encode_prompts(asked, tokenizer, FORM), given, strict=True)
        ]
        outputs = continuations(model, tokenizer, prompts, max_new_tokens=TOKENS)
        return recall([tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs], rest)
    if attack == "examples":
        others = [record for record in forget if record not in set(asked)]
        # Questions of one author stand together: the nearest others are about the same one.
        place = {record: number for number, record in enumerate(forget)}
        records = []
        for record in asked:
            nearest = sorted(others, key=lambda other: abs(place[other] - place[record]))[:SHOTS]
            turns = [turn for example in nearest for turn in (*example.messages, Message("assistant", example.answer))]
            records.append(Record(record.answer, messages=(*turns, *record.messages)))
    elif attack == "insisting":
        first = answers(model, tokenizer, asked, form=FORM, max_new_tokens=TOKENS)
        records = [
            Record(
                record.answer,
                messages=(*record.messages, Message("assistant", text), *asked_in(record, WRONG).messages),
            )
            for record, text in zip(asked, first, strict=True)
        ]
    else:
        records = [asked_in(record, FRENCH) for record in asked] if attack == "language" else asked
    return recall(answers(model, tokenizer, records, form=FORM, max_new_tokens=TOKENS), truths)


def by_samples(model, tokenizer, asked, count):
    """Mean over the questions of the best ROUGE-L recall of many samples."""
    prompts = encode_prompts(asked, tokenizer, FORM)
    drawn = samples(model, tokenizer, prompts, count, seed=0, max_new_tokens=TOKENS)
    return statistics.fmean(
        max(rouge(text, record.answer)["rougeL_recall"] for text in texts)
        for texts, record in zip(drawn, asked, strict=True)
    )


@torch.no_grad()
def quantise(model, bits):
    """Round the weights of linear layers to `bits` bits, symmetrically, with a scale for every GROUP weights."""
    largest = 2 ** (bits - 1) - 1
    head = model.get_output_embeddings()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head:
            groups = layer.weight.view(-1, GROUP)
            scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
            groups.copy_((groups / scale).round() * scale)


def train_on_unrelated(folder, tokenizer, retain):
    """The model after a short training on retain questions."""
    model = load_for_training(folder)
    examples = encode_set(RecordSet("unrelated", "question/answer", spread(retain, UNRELATED)), tokenizer, FORM)
    settings = dataclasses.replace(LIGHT_TRAINING, epochs=UNRELATED_EPOCHS)
    with tempfile.TemporaryDirectory() as work:
        fine_tune(model, tokenizer, examples, settings, Path(work), title="unrelated", measure=False, resumable=False)
    return model.eval()


def models_of_run(run, size, methods):
    """Folder and trial of each model: {method: (folder, trial)}, the best settings of the run's comparison."""
    models = {}
    for trial, results in best_trials(run, size).items():
        folder = run / trial.method if trial.method in REFERENCE_METHODS else results / "model"
        if folder.exists():
            models[trial.method] = folder, trial
    if unknown := [name for name in methods or () if name not in models]:
        raise UsageError(f"--methods {unknown[0]}: {run} has {', '.join(models)}")
    return {name: models[name] for name in methods or models}


def cell(attack, folder, trial, tokenizer, sets, given):
    """One cell of the table, or None where the attack does not apply."""
    forget, retain, asked = sets
    if attack == "unrelated":
        if load_config(folder).model_type != load_config(given.run / "target").model_type:
            return None  # nothing to train: a bundle, or the target in a wrapper
        model = train_on_unrelated(folder, tokenizer, retain)
    else:
        model = load_trial(folder, trial)
    if attack.startswith("int"):
        quantise(getattr(model, "target", model), int(attack.removeprefix("int")))
    if attack == "samples":
        return by_samples(model, tokenizer, asked[: given.sampled], given.samples)
    return by_prompt(attack if attack in PROMPTS else "asked", model, tokenizer, asked, forget)


def pretrained_table(results, methods):
    rows = [
        [TITLES[name], *("–" if (value := results[name].get(attack)) is None else f"{value:.2f}" for attack in ATTACKS)]
        for name in methods
        if name in results
    ]
    return markdown_table(["", *ATTACKS], rows)


def run_pretrained(given):
    """Fill the cells that the run's attacks.json lacks, and print the table."""
    split = split_of(given.run)
    models = models_of_run(given.run, SIZES[split], given.methods)
    forget, retain = (
        read_records(given.run / "tofu" / f"{name}.json").records for name in (split, SIZES[split].retain)
    )
    sets = forget, retain, list(spread(forget, given.questions))
    tokenizer = load_tokenizer(given.run / "target")
    file = given.run / "attacks.json"
    settings = {"questions": given.questions, "samples": given.samples, "sampled": given.sampled}
    content = read_json(file) if file.exists() else {"settings": settings, "results": {}}
    if content["settings"] != settings:
        raise UsageError(f"{file} has cells with {content['settings']}; give these, or move it away")
    for attack in given.attacks:
        for name, (folder, trial) in models.items():
            cells = content["results"].setdefault(name, {})
            if attack in cells:
                continue
            started = time.monotonic()
            cells[attack] = cell(attack, folder, trial, tokenizer, sets, given)
            print(f"{time.strftime('%H:%M:%S')} {name}, {attack}: {cells[attack]} ({time.monotonic() - started:.0f} s)",
                  flush=True)  # fmt: skip
            write_json(file, content)
    print(pretrained_table(content["results"], models))


STEERED = "linear:1.5"  # the best setting of the comparison's grid on this world (docs/comparison.md)
NGRAM, FORGET_AUXILIARY = "n-grams", "p alone"
NGRAM_STEERING = "linear:20"  # the best setting of trigrams (research/studies/README.md)
_BATCHES = (("batch_size", 16), ("gradient_accumulation", 1))
# Each under its best setting in the comparison (docs/comparison.md), so that no method is attacked at a weak point of
# its grid; the student of the forget set alone is the paper's.
CHECKPOINTS: dict[str, Trial] = {
    "distilled": Trial("distill", (("learning_rate", 3e-4), ("rehearse", 0))),
    "distilled, rehearsed": Trial("distill", (("learning_rate", 3e-4), ("rehearse", 200))),
    "GradDiff": Trial("grad-diff", (("learning_rate", 2e-4), ("epochs", 5.0)), constant=_BATCHES),
    "NPO": Trial("npo", (("learning_rate", 3e-4), ("epochs", 3.0)), constant=_BATCHES),
    "SimNPO": Trial("simnpo", (("learning_rate", 1e-3), ("epochs", 10.0)), constant=_BATCHES),
}
REFERENCES: dict[str, Trial] = {"target": Trial("target"), "retrain": Trial("retrain")}
BUNDLES: dict[str, Trial] = {
    STEERED: Trial("linear", steering=STEERED),
    "rank:30": Trial("rank", steering="rank:30"),
}
PARTS = ("prompts", "candidates", "relearning")
ATTACK_PROMPTS, SAMPLES = 20, 16  # attack prompts and sampled answers of a question
STEPS = (0, 5, 10, 20, 40)  # of fine-tuning, after which the attacked model is measured; the last ends the attack
BUILT = "made.json"

Seeds = list[dict[str, Any]]
"""Figures of each seed: by part, by model."""


@dataclasses.dataclass(frozen=True)
class AttackTargets:
    """The attacked models of one seed, built once and cached."""

    benchmark: Benchmark
    folder: Path
    report: Callable[[str], object]

    @property
    def world(self) -> World:
        """The world that the models have learned."""
        return build_world(dataclasses.replace(demo.WORLD, seed=self.benchmark.seed))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of all models."""
        return load_tokenizer(self.benchmark.target)

    def prompted(self) -> list[str]:
        """The models that are attacked by prompts: references, p, bundles, and students of a bundle.

        The comparison measures gradient baselines under attack prompts (docs/comparison.md).
        """
        students = [name for name, trial in CHECKPOINTS.items() if trial.method == "distill"]
        return [*REFERENCES, FORGET_AUXILIARY, *BUNDLES, NGRAM, *students]

    def path(self, name: str) -> Path:
        """Return the folder of a model; build the model if the folder is missing."""
        if name == NGRAM:
            return self._ngram_bundle()
        if name == FORGET_AUXILIARY:
            return self.benchmark.forget_auxiliary
        trial = {**REFERENCES, **BUNDLES, **CHECKPOINTS}[name]
        folder, work = self.folder / "models" / trial.folder, self.folder / "work"
        if name not in CHECKPOINTS:  # bundles are cheap to write, and refer to models by digest
            return build_model(trial, self.benchmark, folder / "model", work).folder
        fingerprint = self.benchmark.fingerprint(trial)
        if not (folder / BUILT).is_file() or read_json(folder / BUILT)["fingerprint"] != fingerprint:
            self.report(f"seed {self.benchmark.seed}: building {name}")
            built = build_model(trial, self.benchmark, folder / "model", work)
            write_json(folder / BUILT, {"fingerprint": fingerprint, "seconds": built.seconds})
        return folder / "model"

    def load(self, name: str) -> PreTrainedModel:
        """Load a model."""
        path = self.path(name)
        return DivergenceForCausalLM.from_pretrained(path) if is_bundle(path) else load_model(path).eval()

    def _ngram_bundle(self) -> Path:
        counts, bundle = self.folder / "models" / "ngram-counts", self.folder / "models" / "ngram-bundle"
        counts.parent.mkdir(parents=True, exist_ok=True)
        if not is_pair(counts):
            tokenizer = self.tokenizer
            sets = {"retain": self.benchmark.retain, "forget": self.benchmark.forget}
            with output_folder(counts) as temporary:
                write_pair(
                    temporary,
                    {name: documents(records, tokenizer) for name, records in sets.items()},
                    vocabulary_width(load_config(self.benchmark.target)),
                    order=3,
                    tokenizer=vocabulary_sha256(tokenizer),
                )
        return write_bundle(
            bundle, target=str(self.benchmark.target), ngram=counts, steering=NGRAM_STEERING, overwrite=True
        )


def run_limits(given: argparse.Namespace, report: Callable[[str], None]) -> Seeds:
    """Measure everything that the output folder lacks; return the results by seed.

    Raises:
        UsageError: a file in the output folder cannot be read.
        Interrupted: on Ctrl-C; the same call continues.
    """
    output = Path(given.output).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    seeds = []
    for benchmark in load_benchmarks(CompareSettings(output=str(output), data="demo", seeds=given.seeds), report):
        folder = output / f"seed-{benchmark.seed}"
        seeds.append(_run_seed(AttackTargets(benchmark, folder, report), given, report))
    return seeds


def _run_seed(targets: AttackTargets, given: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    world, tokenizer, seed = targets.world, targets.tokenizer, targets.benchmark.seed
    cache = ResultCache(targets.folder / "figures")

    def cached(part: str, name: str, decides: Any, measure: Callable[[], Any]) -> Any:
        title, decides = f"{part} {name}", [decides, targets.benchmark.identity]
        if not cache.has(title, decides):
            started = time.perf_counter()
            cache.get(title, decides, measure)
            report(f"seed {seed}, {part}, {name}: {time.perf_counter() - started:.0f} s")
        return cache.load(title, decides)

    results: dict[str, Any] = {}
    if "prompts" in given.parts:
        counts = (ATTACK_PROMPTS, SAMPLES)
        results["prompts"] = {
            name: cached(
                "prompts", name, counts,
                lambda n=name: attack_by_prompts(targets.load(n), tokenizer, world, *counts, seed),
            )
            for name in targets.prompted()
        }  # fmt: skip
    if "candidates" in given.parts:
        results["candidates"] = {
            name: cached(
                "candidates", name, STRENGTHS,
                lambda n=name: rank_candidates(targets.load(n), tokenizer, world, n == STEERED),
            )
            for name in [*REFERENCES, STEERED, *CHECKPOINTS]
        }  # fmt: skip
    if "relearning" in given.parts:
        results["relearning"] = {
            attack: {
                name: cached(
                    f"relearning {attack}", name, (STEPS, given.rate),
                    lambda n=name, a=attack: relearn(
                        targets.path(n), tokenizer, split_questions(world, a, seed), STEPS, given.rate,
                        seed, title=f"{n}: {a}",
                    ),
                )
                for name in [*REFERENCES, *CHECKPOINTS]
            }
            for attack in RELEARNING
        }  # fmt: skip
    return results


def tables(seeds: Seeds, parts: Sequence[str]) -> list[str]:
    """Markdown tables of the results: means over seeds, with minimum and maximum in brackets."""
    texts = []
    if "prompts" in parts:
        rows = {
            name: [_mean([seed["prompts"][name]["figures"][form] for seed in seeds]) for form in FORMS]
            for name in seeds[0]["prompts"]
        }
        texts.append(_table("Facts of the forget set that are told, in percent, by form of question", [*FORMS], rows))
    if "candidates" in parts:
        rows = {}
        for name, by_setting in seeds[0]["candidates"].items():
            for setting in by_setting:
                of = [seed["candidates"][name][setting] for seed in seeds]
                rows[setting or name] = [
                    *(_mean([figures[key] for figures in of]) for key in ("top", "bottom", "place")),
                    _mean([figures["auc"] for figures in of], 1.0, 2),
                    _mean([figures["probability"] for figures in of], 100.0, 1),
                ]
        chance = statistics.fmean(seed["candidates"]["retrain"][""]["chance"] for seed in seeds)
        columns = ["at the top, %", "at the bottom, %", "mean place, 0 top, 100 bottom", "AUC of the loss",
                   "probability of the true answer, %"]  # fmt: skip
        texts.append(_table(f"Rank of the true fact among all candidates (chance of either end: {chance:.0%})",
                            columns, rows))  # fmt: skip
    for attack in RELEARNING if "relearning" in parts else ():
        of_attack = [seed["relearning"][attack] for seed in seeds]
        rows = {
            name: [_mean([of[name][index]["accuracy"] for of in of_attack]) for index in range(len(STEPS))]
            + [_mean([of[name][-1]["probability"] for of in of_attack], 100.0, 1)]
            for name in of_attack[0]
        }
        columns = [*(f"{step} steps" for step in STEPS), "probability at the end, %"]
        texts.append(_table(f"Relearning, {attack}: {RELEARNING[attack]}; facts told, in percent", columns, rows))
    return texts


def _table(title: str, columns: Sequence[str], rows: dict[str, list[str]]) -> str:
    lines = [f"**{title}**", "", f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def _mean(values: Sequence[float], scale: float = 100.0, digits: int = 0) -> str:
    mean, least, most = (scale * value for value in (statistics.fmean(values), min(values), max(values)))
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    world = parser.add_argument_group("the fictitious world")
    world.add_argument("--output", default="runs/limits", help="folder for models and figures")
    world.add_argument("--seeds", type=int, default=3, help="worlds, each with its own models")
    world.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    world.add_argument("--rate", type=float, default=5e-4, help="peak learning rate of the relearning attack")
    world.add_argument("--json", action="store_true", help="print one JSON object last")
    run = parser.add_argument_group("a pretrained model")
    run.add_argument("--run", type=Path, help="output folder of research/studies/tofu.py")
    run.add_argument("--methods", nargs="+", help="by default all of the run's comparison")
    run.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    run.add_argument("--questions", type=int, default=20)
    run.add_argument("--samples", type=int, default=128)
    run.add_argument("--sampled", type=int, default=8, help="questions that are sampled")
    given = parser.parse_args()
    if min(given.seeds, given.questions, given.samples, given.sampled) < 1 or given.rate <= 0:
        parser.error("--seeds, --questions, --samples and --sampled are at least 1, --rate is greater than 0")
    try:
        if given.run is not None:
            run_pretrained(given)
            return
        results = run_limits(given, lambda line: print(line, file=sys.stderr, flush=True))
    except UsageError as error:
        parser.exit(2, f"recovery: {error}\n")
    print("\n\n".join(tables(results, given.parts)))
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
