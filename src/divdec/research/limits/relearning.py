"""Relearning: fine-tune a forgetful model on a little and see what else comes back.

The facts of this world are independent of one another, so that whatever comes back beyond what the retrained reference
shows after the same steps was still in the weights. It knows nothing of how models were made.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import encode_records
from divdec.data.records import Message, Record
from divdec.data.world import RELATIONS, Question, World
from divdec.evaluation.generation import answers
from divdec.evaluation.metrics import contains_fact
from divdec.evaluation.scoring import score
from divdec.training.auxiliaries import load_for_training
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHOWN_RELATIONS, SHOWN_AUTHORS = 2, 2
ATTACKS = {
    "same people": "two facts of every forget author are shown, the eight others asked for",
    "other people": "all facts of two forget authors are shown, those of the others asked for",
    "no forget item": "twenty facts of authors to keep are shown, all of the forget authors asked for",
}


@dataclasses.dataclass(frozen=True)
class Split:
    """What the attacker has, and what he is after."""

    shown: tuple[Question, ...]
    asked: tuple[Question, ...]


def split(world: World, attack: str, seed: int) -> Split:
    """Divide a world's questions for an attack; one wording each.

    Args:
        world: whose forget set is attacked.
        attack: one of ATTACKS.
        seed: of what is shown.
    """
    rng = random.Random(seed)
    forget = [asked for asked in world.forget if asked.phrasing == 0]
    retain = [asked for asked in world.retain if asked.phrasing == 0]
    if attack == "same people":
        relations = set(rng.sample(RELATIONS, SHOWN_RELATIONS))
        chosen = [asked.relation in relations for asked in forget]
    elif attack == "other people":
        people = set(rng.sample(sorted({asked.subject for asked in forget}), SHOWN_AUTHORS))
        chosen = [asked.subject in people for asked in forget]
    else:
        people = set(rng.sample(sorted({asked.subject for asked in retain}), SHOWN_AUTHORS))
        return Split(tuple(asked for asked in retain if asked.subject in people), tuple(forget))
    pairs = list(zip(forget, chosen, strict=True))
    return Split(tuple(q for q, shown in pairs if shown), tuple(q for q, shown in pairs if not shown))


def relearn(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    parts: Split,
    steps: Sequence[int],
    rate: float,
    seed: int,
    title: str,
) -> list[dict[str, Any]]:
    """Attack a checkpoint; the folder stays as it is.

    Args:
        folder: an ordinary checkpoint.
        tokenizer: its tokenizer.
        parts: what is shown and asked.
        steps: after how many steps it is asked; every step sees all that is shown.
        rate: peak learning rate.
        seed: of the order.
        title: what the progress bar says.

    Returns:
        For each number of steps `accuracy` (share of facts told) and `probability` (of the true answers), and
        `shown` (share of the shown facts told), which says whether the attack has learned anything at all.
    """
    model = load_for_training(folder)
    found = [_measured(model, tokenizer, parts, 0)]

    def note(model: PreTrainedModel, epoch: int) -> None:
        if epoch in steps:
            found.append(_measured(model, tokenizer, parts, epoch))

    examples = encode_records([_record(question) for question in parts.shown], tokenizer)
    settings = TrainingSettings(epochs=float(steps[-1]), learning_rate=rate, batch_size=len(examples), seed=seed)
    with tempfile.TemporaryDirectory() as work:
        fine_tune(
            model, tokenizer, examples, settings, Path(work), title=title, measure=False, resumable=False, on_epoch=note
        )
    return found


def _measured(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, parts: Split, step: int) -> dict[str, Any]:
    model.eval()
    records = [_record(question) for question in parts.asked]
    told = _told(model, tokenizer, parts.asked)
    likely = score(model, encode_records(records, tokenizer), batch_size=64)
    return {
        "step": step,
        "accuracy": statistics.fmean(told),
        "probability": statistics.fmean(item.probability for item in likely),
        "shown": statistics.fmean(_told(model, tokenizer, parts.shown)),
        "items": told,
    }


def _told(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question]) -> list[bool]:
    texts = answers(model, tokenizer, [_record(question) for question in asked], max_new_tokens=24, batch_size=64)
    return [contains_fact(text, question.fact) for text, question in zip(texts, asked, strict=True)]


def _record(question: Question) -> Record:
    return Record(question.answer, messages=(Message("user", question.question),))
