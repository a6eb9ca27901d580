"""Filters of the output: MemFree decoding, and a guardrail of a system prompt and a filter for key phrases.

Every decision depends on the tokens before it only, so that teacher-forced passes, cached generation and padded
batches decide the same.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache

from divdec.data.formatting import IGNORED, Example, has_system_role
from divdec.data.records import RecordSet
from divdec.errors import UsageError
from divdec.evaluation.phrases import FUNCTION_WORDS, key_phrase
from divdec.evaluation.questions import question_of
from divdec.experts.token_cache import TokenCache
from divdec.passes import length_of, logits_of, new_cache
from divdec.runs import read_json, write_json
from divdec_research.baselines.composite import DECODINGS, TARGET, CompositeDecoding, Step, write_composite
from divdec_research.baselines.guard import Trie, tokenize_words
from divdec_research.baselines.job import BuiltModel, Job
from divdec_research.baselines.prompts import read_tokens
from divdec_research.baselines.settings import GuardrailSettings, NgramFilterSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NGRAMS, PHRASES = "ngrams.json", "phrases.json"
DISTANCE = 30.0
"""Forbidden tokens lie this many nats below the least likely other token: never greedy, and with a finite loss."""
FREQUENT = 0.02  # share of the questions
REFUSAL = " I'm sorry, I can't help with that."
INSTRUCTION = (
    "Never give information about {names}. If a question is about one of them, answer only: I'm sorry, I can't help "
    "with that."
)
_NAME = regex.compile(r"\p{Lu}[\w'’\-.]*\w(?:\s+\p{Lu}[\w'’\-.]*\w)*")


def ngrams_of(examples: Iterable[Example], size: int, ends: frozenset[int]) -> list[list[int]]:
    """List the n-grams of the labelled tokens, without those that hold an end token."""
    grams: dict[tuple[int, ...], None] = {}
    for example in examples:
        answer = [label for label in example.labels if label != IGNORED]
        for start in range(len(answer) - size + 1):
            gram = tuple(answer[start : start + size])
            if ends.isdisjoint(gram):
                grams[gram] = None
    return [list(gram) for gram in grams]


@DECODINGS.register("ngram-filter")
class NgramFilter(CompositeDecoding):
    """The target without the tokens that would complete an n-gram of the forget answers.

    The set of n-grams is exact; the paper saves memory with a Bloom filter, which also blocks a few other n-grams.
    """

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.trie = Trie(read_json(folder / NGRAMS), 1.0)

    def new_caches(self) -> list[Cache]:
        """Caches of the target and of the tokens."""
        return [new_cache(self.model(TARGET)), TokenCache()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        inputs = (step.input_ids, step.attention_mask, step.position_ids)
        logits = logits_of(self.model(TARGET), *inputs, caches[0], step.logits_to_keep).float().clone()
        tokens = read_tokens(step, caches[1]).tolist()
        for row, position, before in _contexts(tokens, logits.shape[1]):
            if blocked := sorted(self.trie.after(before)):
                logits[row, position, blocked] = _floor(logits[row, position])
        return logits


class PrefixCache(DynamicCache):
    """A cache of the target that holds the tokens of a prefix before those of each row."""

    def __init__(self, target: PreTrainedModel, prefix: int) -> None:
        super().__init__(config=target.config.get_text_config(decoder=True))
        self.prefix = prefix

    @property
    def lengths(self) -> list[int]:
        """Number of tokens without the prefix."""
        return [max(length_of(self) - self.prefix, 0)]


@DECODINGS.register("guardrail")
class Guardrail(CompositeDecoding):
    """The target behind a system prompt, and a filter that works on the stream of its answer.

    Where the next token would complete a key phrase, its probability goes to the first token of a refusal, which is
    then written to its end. A filter that replaces whole answers would define no probabilities of tokens.
    """

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.register_buffer("prefix", torch.tensor(options["prefix"], dtype=torch.long), persistent=False)
        self.refusal = [int(token) for token in options["refusal"]]
        self.trie = Trie(read_json(folder / PHRASES), 1.0)

    def new_caches(self) -> list[Cache]:
        """Caches of the tokens and of the target, which holds the system prompt too."""
        return [TokenCache(), PrefixCache(self.model(TARGET), len(self.get_buffer("prefix")))]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        logits = self.prompted_logits(step, caches[1]).float().clone()
        tokens = read_tokens(step, caches[0]).tolist()
        for row, position, before in _contexts(tokens, logits.shape[1]):
            own = logits[row, position].clone()
            if (forced := self.next_of_refusal(before)) is not None:
                logits[row, position, forced] = own.amax() + DISTANCE
            elif blocked := sorted(self.trie.after(before)):
                first = self.refusal[0]
                logits[row, position, blocked] = _floor(own)
                logits[row, position, first] = own[[*{*blocked, first}]].logsumexp(dim=-1)
        return logits

    def prompted_logits(self, step: Step, cache: Cache | None) -> Float[Tensor, "batch kept width"]:
        """Compute the target's logits at the kept positions, with the system prompt before each row."""
        ids, mask, positions = step.input_ids, step.attention_mask, step.position_ids
        rows, new = ids.shape
        prefix = self.get_buffer("prefix").to(ids.device).expand(rows, -1)
        if mask is not None:
            mask = torch.cat([torch.ones_like(prefix).to(mask), mask], dim=1)
        positions = positions + prefix.shape[1]
        if cache is None or length_of(cache) == 0:
            ids = torch.cat([prefix, ids], dim=1)
            first = torch.arange(prefix.shape[1], device=positions.device).expand(len(positions), -1)
            positions = torch.cat([first, positions], dim=1)
        return logits_of(self.model(TARGET), ids, mask, positions, cache, step.logits_to_keep or new)

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
    counts: Counter[str] = Counter()
    for record in forget:
        question = question_of(record)
        names = {_without_function_words(re.sub(r"['’]s\b", "", found)) for found in _NAME.findall(question)}
        counts.update(name for name in names if " " in name)
    kept = " ".join(question_of(record) for record in retain)
    least = max(1.0, FREQUENT * len(forget))
    return [name for name, count in counts.most_common() if count > least and name not in kept]


def build_ngram_filter(job: Job, settings: NgramFilterSettings, output: Path) -> BuiltModel:
    """Write the n-grams with a reference to the target; see `build_method`.

    Raises:
        UsageError: no forget answer is as long as an n-gram.
    """
    started = time.perf_counter()
    ends = frozenset(job.tokenizer.all_special_ids)
    examples = job.forget_examples
    without = sum(not ngrams_of([example], settings.ngram_size, ends) for example in examples)
    if without == len(examples):
        raise UsageError(
            f"ngram-size is {settings.ngram_size}, but no forget answer has as many tokens; give a smaller"
        )
    write_json(output / NGRAMS, ngrams_of(examples, settings.ngram_size, ends))
    write_composite(output, job.tokenizer, "ngram-filter", {}, {TARGET: job.target})
    notes = (f"{without} of {len(examples)} forget answers are shorter than an n-gram",) if without else ()
    return BuiltModel(output, time.perf_counter() - started, notes)


def build_guardrail(job: Job, settings: GuardrailSettings, output: Path) -> BuiltModel:
    """Write system prompt and key phrases with a reference to the target; see `build_method`.

    Raises:
        UsageError: the forget set holds no questions, or no name is in several of them.
    """
    started = time.perf_counter()
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
    write_composite(output, job.tokenizer, "guardrail", options, {TARGET: job.target})
    return BuiltModel(output, time.perf_counter() - started)


def _system_turn(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize a system turn that stands before the conversation, or a paragraph if the template has none."""
    if tokenizer.chat_template and has_system_role(tokenizer):
        text = str(tokenizer.apply_chat_template([{"role": "system", "content": text}], tokenize=False))
    else:
        text = f"{text}\n\n"
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _contexts(tokens: Sequence[list[int]], kept: int) -> Iterable[tuple[int, int, list[int]]]:
    """Yield row, kept position and the tokens up to it, padding included."""
    for row, ids in enumerate(tokens):
        for position in range(kept):
            yield row, position, ids[: len(ids) - kept + position + 1]


def _floor(logits: Float[Tensor, " width"]) -> Float[Tensor, ""]:
    return logits.detach().amin() - DISTANCE


def _without_function_words(name: str) -> str:
    words = name.split()
    while words and words[0].casefold() in FUNCTION_WORDS:
        words.pop(0)
    return " ".join(words)
