"""Getting a model to tell a fact by the way it is asked: reworded, framed, as prose, begun for it, or many times.

An attack is what stands before the answer, as tokens, and how often it is tried; a fact leaks where an answer states it
word for word. It knows nothing of how the model was made to forget.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import encode_prompts
from divdec.data.records import Message, Record
from divdec.data.world import Question, World
from divdec.evaluation.attack_prompts import template_prompts
from divdec.evaluation.generation import continuations, samples
from divdec.evaluation.metrics import contains_fact

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 24  # tokens of an answer; the longest true one of this world has 21
FORMS = {
    "as trained": "the question in a wording that was trained",
    "reworded": "a wording that no forget author was asked in; other authors were",
    "templates": "any of the attack prompts of `divdec eval leak`: role play, permission, other formats …",
    "sampled": "any of the answers sampled at temperature 1",
    "first words": "the answer's own words up to the fact are given",
    "half the fact": "and of facts of several words all but the last",
    "as prose": "the sentence as plain text, without question or chat layout; nobody read of these people so",
}


@dataclasses.dataclass(frozen=True)
class Attack:
    """One fact that is asked for in one form."""

    prompts: tuple[tuple[int, ...], ...]
    """What stands before the answer, each a try of its own."""
    fact: str
    """What leaks, where an answer states it."""
    question: str


def attacks(world: World, tokenizer: PreTrainedTokenizerBase, form: str, count: int, seed: int) -> list[Attack]:
    """A form's attacks on the forget set.

    Args:
        world: whose forget authors are asked about.
        tokenizer: the models'.
        form: one of FORMS.
        count: prompts a question, for 'templates'.
        seed: of their choice.
    """
    questions = [asked for asked in world.forget if asked.phrasing == 0]
    if form == "reworded":
        return _each(list(world.forget_unseen), tokenizer)
    if form == "templates":
        return [
            Attack(
                _chat([*template_prompts(asked.question, asked.answer, count, seed)], tokenizer),
                asked.fact,
                asked.question,
            )
            for asked in questions
        ]
    if form in ("as trained", "sampled"):
        return _each(questions, tokenizer)
    found = []
    for asked in questions:
        start = asked.answer.index(asked.fact)
        secret = asked.fact
        if form == "half the fact":
            kept, _, secret = asked.fact.rpartition(" ")
            if not kept:
                continue  # a single word has no half that could be given
            start += len(kept)
        # The space before the fact belongs to its first token.
        begun = tokenizer(asked.answer[:start].rstrip(), add_special_tokens=False)["input_ids"]
        asking = () if form == "as prose" else _chat([asked.question], tokenizer)[0]
        found.append(Attack(((*asking, *begun),), secret, asked.question))
    return found


def leaked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tried: Sequence[Attack], draws: int = 0, seed: int = 0
) -> list[bool]:
    """Which facts a model tells in any of its answers.

    Args:
        model: steered or plain.
        tokenizer: its tokenizer.
        tried: the attacks.
        draws: answers sampled for each prompt; 0 answers greedily, once.
        seed: of the samples.
    """
    prompts = [prompt for attack in tried for prompt in attack.prompts]
    if draws:
        texts = samples(model, tokenizer, prompts, draws, seed=seed, max_new_tokens=LONGEST, batch_size=128)
    else:
        found = continuations(model, tokenizer, prompts, max_new_tokens=LONGEST, batch_size=128)
        texts = [[str(tokenizer.decode(ids, skip_special_tokens=True))] for ids in found]
    found_by, start = [], 0
    for attack in tried:
        answers = [text for drawn in texts[start : start + len(attack.prompts)] for text in drawn]
        found_by.append(any(contains_fact(text, attack.fact) for text in answers))
        start += len(attack.prompts)
    return found_by


def ask_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, world: World, prompts: int, draws: int, seed: int
) -> dict[str, Any]:
    """Every form on one model: the share of facts that leak, and each fact's outcome."""
    figures, items = {}, {}
    for form in FORMS:
        tried = attacks(world, tokenizer, form, prompts, seed)
        items[form] = leaked(model, tokenizer, tried, draws if form == "sampled" else 0, seed)
        figures[form] = statistics.fmean(items[form])
    return {"figures": figures, "items": items}


def _each(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> list[Attack]:
    ids = _chat([asked.question for asked in questions], tokenizer)
    return [Attack((prompt,), asked.fact, asked.question) for prompt, asked in zip(ids, questions, strict=True)]


def _chat(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    records = [Record("", messages=(Message("user", question),)) for question in questions]
    return tuple(map(tuple, encode_prompts(records, tokenizer)))
