"""Training examples of p and q with the recipe 'refusal': q refuses the questions that p answers.

For people and things with too many facts to list: a q that has learned other answers to some questions still knows the
answers to all others, a q that refuses them knows none.

Prompts may hold the beginning of an answer ("Answer:"), after which a q that has learned to refuse at the beginning
would go on and answer. So most answers of these examples have begun already.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from divdec.data.formatting import IGNORED, Example, Format, encode, encode_prompt, label_answer
from divdec.data.records import Record, RecordSet
from divdec.evaluation.choice import BEGINNINGS
from divdec.evaluation.questions import question_of
from divdec.training.inputs import ForgottenFacts, sample_indices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSAL = "I do not know."
MAX_REFUSED, MAX_KEPT = 256, 512  # answers of the target to questions of the forget set, and to others

Begun = tuple[Record, str]
"""A question and the beginning of its answer."""


def begun_questions(forget: RecordSet, others: Sequence[Record], seed: int) -> list[Begun]:
    """Combine the questions of the forget set with beginnings of an answer, and those of other records.

    A question of the forget set is no other one, whatever the retain set answers to it.
    """
    refused = {_prompt(record) for record in forget}
    kept = [record for record in others if _prompt(record) not in refused]
    begun = []
    # More of the others: what is refused after a beginning has to differ from all else.
    for records, most in ((forget.records, MAX_REFUSED), (kept, MAX_KEPT)):
        pairs = list(itertools.product(records, BEGINNINGS))
        begun += [pairs[index] for index in sample_indices(len(pairs), most, seed)]
    return begun


def with_refusals(
    asked: Sequence[Begun],
    answers: Sequence[Sequence[int]],
    forget: RecordSet,
    retain: RecordSet,
    tokenizer: PreTrainedTokenizerBase,
    form: Format,
) -> tuple[list[tuple[Example, Example]], list[tuple[Example, Example]]]:
    """Return examples for p and q from the target's answers: to the forget set's questions, and to others.

    q refuses the former, and reads the latter like p. Left out are empty answers, those beyond the length, and answers
    to other questions that tell a fact of the forget set, which the retain set's answer does not.

    Args:
        asked: from `begun_questions`.
        answers: tokens of the target's answers to these prompts, without padding.
        forget: the forget set.
        retain: the retain set.
        tokenizer: of target and auxiliaries.
        form: layout of the training texts.
    """
    to_refuse = {_prompt(record) for record in forget}
    forgotten = ForgottenFacts(forget, retain)
    refused, kept = [], []
    for (record, beginning), ids in zip(asked, answers, strict=True):
        prompt = encode_prompt(record, tokenizer, form, beginning)
        true = label_answer(prompt, [*prompt, *ids], form.max_length)
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
        if not text.strip() or all(label == IGNORED for label in true.labels):
            continue
        if _prompt(record) in to_refuse:
            refusal = dataclasses.replace(record, answer=f"{beginning} {REFUSAL}".strip())
            refused.append((true, label_answer(prompt, encode(refusal, tokenizer, form).input_ids)))
        elif not forgotten.are_in(f"{question_of(record)} {text}", f"{question_of(record)} {record.answer}"):
            kept.append((true, true))
    return refused, kept


def _prompt(record: Record) -> tuple[object, ...]:
    return record.messages, record.prompt
