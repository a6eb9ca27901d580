"""Guardrail: forbid the topic in a system prompt, and refuse where an answer would tell a key phrase."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import regex

from divdec.data.records import RecordSet
from divdec.errors import UsageError
from divdec.evaluation.phrases import FUNCTION_WORDS, key_phrase
from divdec.runs import read_json, write_json
from divdec_research.baselines.annotations import Cache, Float, Job, PreTrainedTokenizerBase, Tensor
from divdec_research.baselines.decoding import (
    DISTANCE,
    TARGET,
    CompositeDecoding,
    Step,
    Trie,
    blocked_logit,
    contexts,
    tokenize_words,
)
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.ranges import CheckedSettings

PHRASES = "phrases.json"
FREQUENT = 0.02  # share of the questions
REFUSAL = " I'm sorry, I can't help with that."
INSTRUCTION = (
    "Never give information about {names}. If a question is about one of them, answer only: I'm sorry, I can't help "
    "with that."
)
_NAME = regex.compile(r"\p{Lu}[\w'’\-.]*\w(?:\s+\p{Lu}[\w'’\-.]*\w)*")


@dataclasses.dataclass(frozen=True)
class GuardrailSettings(CheckedSettings):
    """A system prompt that forbids the topic, and a filter of the output."""

    mode: Literal["prompt", "filter", "both"] = "both"
    """'prompt' puts a system prompt with the names of the forget questions before the conversation. 'filter' continues
    an answer with a refusal where it would complete a key phrase of a forget answer."""


class Guardrail(CompositeDecoding):
    """The target behind a system prompt, and a filter that works on the stream of its answer.

    Where the next token would complete a key phrase, its probability goes to the first token of a refusal, which is
    then written to its end. A filter that replaces whole answers would define no probabilities of tokens.
    """

    def load(self, options: Mapping[str, Any], folder: Path) -> None:
        """See `CompositeDecoding.load`."""
        import torch

        self.prefix = torch.tensor(options["prefix"], dtype=torch.long)
        self.refusal = [int(token) for token in options["refusal"]]
        self.trie = Trie(read_json(folder / PHRASES), 1.0)

    def new_caches(self) -> list[Cache]:
        """Caches of the tokens and of the target, which holds the system prompt too."""
        from divdec_research.baselines.composite import PrefixCache

        return [self.new_token_cache(), PrefixCache(self.models[TARGET], len(self.prefix))]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        logits = self.prompted_logits(step, caches[1]).float().clone()
        for row, position, before in contexts(step, caches[0], logits.shape[1]):
            original_logits = logits[row, position].clone()
            if (forced := self.next_of_refusal(before)) is not None:
                logits[row, position, forced] = original_logits.amax() + DISTANCE
            elif blocked := sorted(self.trie.after(before)):
                first = self.refusal[0]
                logits[row, position, blocked] = blocked_logit(original_logits)
                logits[row, position, first] = original_logits[[*{*blocked, first}]].logsumexp(dim=-1)
        return logits

    def prompted_logits(self, step: Step, cache: Cache | None) -> Float[Tensor, "batch kept width"]:
        """Compute the target's logits at the kept positions, with the system prompt before each row."""
        import torch

        from divdec.passes import length_of, logits_of

        ids, mask, positions = step.input_ids, step.attention_mask, step.position_ids
        rows, new = ids.shape
        prefix = self.prefix.to(ids.device).expand(rows, -1)
        if mask is not None:
            mask = torch.cat([torch.ones_like(prefix).to(mask), mask], dim=1)
        positions = positions + prefix.shape[1]
        if cache is None or length_of(cache) == 0:
            ids = torch.cat([prefix, ids], dim=1)
            first = torch.arange(prefix.shape[1], device=positions.device).expand(len(positions), -1)
            positions = torch.cat([first, positions], dim=1)
        return logits_of(self.models[TARGET], ids, mask, positions, cache, step.logits_to_keep or new)

    def next_of_refusal(self, before: Sequence[int]) -> int | None:
        """Return the next token of a refusal that has begun, or None."""
        for written in range(min(len(self.refusal) - 1, len(before)), 0, -1):
            start = len(before) - written
            if list(before[start:]) == self.refusal[:written] and self.trie.after(before[:start]):
                return self.refusal[written]
        return None


def names_of(forget: RecordSet, retain: RecordSet) -> list[str]:
    """List the names of the forget questions' subjects, the most frequent first.

    A subject's name has two words or more. More than 2 % of the forget questions contain it, at least two of them, and
    no retain question.
    """
    from divdec.evaluation.questions import question_of

    counts: Counter[str] = Counter()
    for record in forget:
        question = question_of(record)
        names = {_without_function_words(re.sub(r"['’]s\b", "", candidate)) for candidate in _NAME.findall(question)}
        counts.update(name for name in names if " " in name)
    kept = " ".join(question_of(record) for record in retain)
    least = max(1.0, FREQUENT * len(forget))
    return [name for name, count in counts.most_common() if count > least and name not in kept]


def build(job: Job, settings: GuardrailSettings, output: Path) -> BuiltModel:
    """Write system prompt and key phrases with a reference to the target; see `build_method`.

    Raises:
        UsageError: the forget set holds no questions, or no name is in several of them.
    """
    from divdec.evaluation.questions import question_of
    from divdec_research.baselines.composite import write_composite

    names = names_of(job.forget, job.retain)
    if settings.mode != "filter" and not names:
        raise UsageError(
            f"no name is in two questions of forget set {job.forget.name} and in none of the retain set, so a system "
            "prompt has nothing to name; give --mode filter"
        )
    phrases = dict.fromkeys(key_phrase(question_of(record), record.answer) for record in job.forget)
    words = tokenize_words(phrases, job.tokenizer) if settings.mode != "prompt" else []
    prefix = (
        [] if settings.mode == "filter" else _system_turn(INSTRUCTION.format(names=", ".join(names)), job.tokenizer)
    )
    refusal: Any = job.tokenizer(REFUSAL, add_special_tokens=False)["input_ids"]
    end = job.tokenizer.eos_token_id
    write_json(output / PHRASES, words)
    options = {"prefix": prefix, "refusal": [*refusal, *([end] if isinstance(end, int) else [])]}
    write_composite(job, output, "guardrail", options)
    return BuiltModel(output)


def _system_turn(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize a system turn that stands before the conversation, or a paragraph if the template has none."""
    from divdec.data.formatting import has_system_role

    if tokenizer.chat_template and has_system_role(tokenizer):
        text = str(tokenizer.apply_chat_template([{"role": "system", "content": text}], tokenize=False))
    else:
        text = f"{text}\n\n"
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _without_function_words(name: str) -> str:
    words = name.split()
    while words and words[0].casefold() in FUNCTION_WORDS:
        words.pop(0)
    return " ".join(words)


METHODS["guardrail"] = Method(
    "Guardrail", GuardrailSettings, build=build, decoding=Guardrail,
    source="Thaker et al. 2024, Guardrail Baselines for Unlearning in LLMs",
    summary="forbid the topic in a system prompt, and refuse where an answer would tell a key phrase of the forget set",
)  # fmt: skip
