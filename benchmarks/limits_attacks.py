"""Attacks on forgotten facts of the demo's world: by prompts, by ranking candidate answers, and by fine-tuning."""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Example, encode_prompts, encode_records
from divdec.data.records import Message, Record
from divdec.data.world import CITIES, GENRES, OCCUPATIONS, PASTIMES, PRIZES, RELATIONS, Question, World, ask
from divdec.evaluation.attack_prompts import template_prompts
from divdec.evaluation.generation import answers, continuations, samples
from divdec.evaluation.metrics import attack_auc, contains_fact
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.steering import Steering
from divdec.training.auxiliaries import load_for_training
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 24  # tokens of an answer; the longest true one has 21
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
    questions = [one for one in world.forget if one.phrasing == 0]
    if form == "reworded":
        return _one_prompt_each(list(world.forget_unseen), tokenizer)
    if form == "templates":
        return [
            PromptAttack(
                _chat([*template_prompts(one.question, one.answer, count, seed)], tokenizer), one.fact, one.question
            )
            for one in questions
        ]
    if form in ("as trained", "sampled"):
        return _one_prompt_each(questions, tokenizer)
    attacks = []
    for one in questions:
        start, secret = one.answer.index(one.fact), one.fact
        if form == "half the fact":
            first, _, secret = one.fact.rpartition(" ")
            if not first:
                continue  # a single word has no half
            start += len(first)
        # The space before the fact belongs to its first token.
        begun = tokenizer(one.answer[:start].rstrip(), add_special_tokens=False)["input_ids"]
        prompt = () if form == "as prose" else _chat([one.question], tokenizer)[0]
        attacks.append(PromptAttack(((*prompt, *begun),), secret, one.question))
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
        texts = samples(model, tokenizer, prompts, draws, seed=seed, max_new_tokens=LONGEST, batch_size=128)
    else:
        generated = continuations(model, tokenizer, prompts, max_new_tokens=LONGEST, batch_size=128)
        texts = [[str(tokenizer.decode(ids, skip_special_tokens=True))] for ids in generated]
    leaks, start = [], 0
    for attack in tried:
        own = [text for drawn in texts[start : start + len(attack.prompts)] for text in drawn]
        leaks.append(any(contains_fact(text, attack.fact) for text in own))
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
    return {"figures": {form: statistics.fmean(own) for form, own in items.items()}, "items": items}


def _one_prompt_each(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> list[PromptAttack]:
    ids = _chat([one.question for one in questions], tokenizer)
    return [PromptAttack((prompt,), one.fact, one.question) for prompt, one in zip(ids, questions, strict=True)]


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
            examples = tuple(encode_records([_record(one) for one in worded], tokenizer))
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
    examples = [example for one in questions for example in one.examples]
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
    for one in questions:
        # Sums, not means: a candidate is as likely as all its tokens together.
        rows.append([sum(item.log_probabilities) for item in items[start : start + len(one.examples)]])
        start += len(one.examples)
    rest = items[start:]
    return {
        **share_at_ends(rows, [one.true for one in questions]),
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
    forget = [one for one in world.forget if one.phrasing == 0]
    retain = [one for one in world.retain if one.phrasing == 0]
    if attack == "same people":
        relations = set(rng.sample(RELATIONS, SHOWN_RELATIONS))
        chosen = [one.relation in relations for one in forget]
    elif attack == "other people":
        people = set(rng.sample(sorted({one.subject for one in forget}), SHOWN_AUTHORS))
        chosen = [one.subject in people for one in forget]
    else:
        people = set(rng.sample(sorted({one.subject for one in retain}), SHOWN_AUTHORS))
        return RelearningSplit(tuple(one for one in retain if one.subject in people), tuple(forget))
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
    texts = answers(model, tokenizer, [_record(one) for one in questions], max_new_tokens=LONGEST, batch_size=64)
    return [contains_fact(text, one.fact) for text, one in zip(texts, questions, strict=True)]


def _record(question: Question) -> Record:
    return Record(question.answer, messages=(Message("user", question.question),))
