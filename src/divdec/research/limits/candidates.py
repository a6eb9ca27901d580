"""Where the true fact stands among all that it could be: knowledge at the top, a trace of the unlearning at the bottom.

Whoever may read probabilities can compare candidates. A model that does not know a fact puts it anywhere; one that was
pushed too far puts it last, which tells it as surely as the top does. It knows nothing of how models were made.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Example, encode_records
from divdec.data.records import Message, Record
from divdec.data.world import CITIES, GENRES, OCCUPATIONS, PASTIMES, PRIZES, World, ask
from divdec.evaluation.metrics import attack_auc
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.limits.settings import STRENGTHS
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

INVENTORIES = {
    "birthplace": CITIES, "home": CITIES, "genre": GENRES, "award": PRIZES, "mother": OCCUPATIONS,
    "father": OCCUPATIONS, "pastime": PASTIMES,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Choice:
    """One question with all the answers that the world allows."""

    examples: tuple[Example, ...]
    true: int
    """Place of the true one."""


def choices(world: World, tokenizer: PreTrainedTokenizerBase) -> list[Choice]:
    """The questions about the forget authors that have a short list of possible answers, in a trained wording."""
    found = []
    for author in world.people["forget"]:
        for relation, inventory in INVENTORIES.items():
            worded = [
                ask(dataclasses.replace(author, facts={relation: candidate}), relation, 0) for candidate in inventory
            ]
            records = [Record(asked.answer, messages=(Message("user", asked.question),)) for asked in worded]
            examples = tuple(encode_records(records, tokenizer))
            found.append(Choice(examples, inventory.index(author.facts[relation])))
    return found


def share_at_ends(scores: Sequence[Sequence[float]], true: Sequence[int]) -> dict[str, float]:
    """How often the true candidate is the likeliest, and how often the least likely.

    Args:
        scores: log-probability of every candidate, a row a question.
        true: place of the true candidate in each row.

    Returns:
        'top' and 'bottom', shares of the questions; 'chance', what either would be if candidates were ranked blindly;
        'place', the mean place of the true one, 0 for the top and 1 for the bottom.
    """
    tops, bottoms, places = [], [], []
    for row, place in zip(scores, true, strict=True):
        above = sum(value > row[place] for value in row)
        below = sum(value < row[place] for value in row)
        tops.append(above == 0)
        bottoms.append(below == 0)
        places.append(above / (above + below) if above + below else 0.5)
    return {
        "top": statistics.fmean(tops),
        "bottom": statistics.fmean(bottoms),
        "place": statistics.fmean(places),
        "chance": statistics.fmean(1 / len(row) for row in scores),
    }


def rank_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, world: World, sweep: bool
) -> dict[str, dict[str, Any]]:
    """Places of the true facts, and how well loss tells forget from holdout questions.

    Args:
        model: steered or plain.
        tokenizer: its tokenizer.
        world: whose forget authors are asked about.
        sweep: measure a steered model under all of STRENGTHS instead of its own setting.

    Returns:
        Figures by setting; one under the name '' for a model without a sweep. 'auc' is the chance that a holdout
        question has a greater loss than a forget question: below that of a retrained model it shows over-unlearning.
    """
    asked = choices(world, tokenizer)
    flat = [example for choice in asked for example in choice.examples]
    known = {name: [_record(q) for q in getattr(world, name) if q.phrasing == 0] for name in ("forget", "holdout")}
    for records in known.values():
        flat += encode_records(records, tokenizer)
    if sweep:
        assert isinstance(model, DivergenceForCausalLM)
        by_setting = score_settings(model, flat, [Steering.parse(text) for text in STRENGTHS], batch_size=128)
    else:
        by_setting = [score(model, flat, batch_size=128)]
    names = STRENGTHS if sweep else ("",)
    return {name: _figures(items, asked, len(known["forget"])) for name, items in zip(names, by_setting, strict=True)}


def _figures(items: Sequence[ItemScore], asked: Sequence[Choice], forget: int) -> dict[str, Any]:
    rows, start = [], 0
    for choice in asked:
        found = items[start : start + len(choice.examples)]
        # Sums, not means: a candidate of several tokens is as likely as its tokens together.
        rows.append([sum(item.log_probabilities) for item in found])
        start += len(choice.examples)
    rest = items[start:]
    return {
        **share_at_ends(rows, [choice.true for choice in asked]),
        "auc": attack_auc([i.loss for i in rest[:forget]], [i.loss for i in rest[forget:]]),
        "probability": statistics.fmean(item.probability for item in rest[:forget]),
    }


def _record(question: Any) -> Record:
    return Record(question.answer, messages=(Message("user", question.question),))
