"""MemFree decoding: never complete an n-gram of the forget answers (Ippolito et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec.runs import read_json, write_json
from divdec_research.baselines.annotations import Cache, Example, Float, Job, Tensor
from divdec_research.baselines.decoding import CompositeDecoding, Step, Trie, blocked_logit, contexts
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.ranges import CheckedSettings, Count

NGRAMS = "ngrams.json"


@dataclasses.dataclass(frozen=True)
class NgramFilterSettings(CheckedSettings):
    """MemFree decoding: never completes an n-gram of the forget answers."""

    ngram_size: Count = 10
    """Length of the n-grams in tokens. Answers with fewer tokens are not protected."""


class NgramFilter(CompositeDecoding):
    """The target without the tokens that would complete an n-gram of the forget answers.

    The set of n-grams is exact; the paper saves memory with a Bloom filter, which also blocks a few other n-grams.
    """

    def load(self, options: Mapping[str, Any], folder: Path) -> None:
        """See `CompositeDecoding.load`."""
        self.trie = Trie(read_json(folder / NGRAMS), 1.0)

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        logits = self.model_logits(step, caches[0]).clone()
        for row, position, before in contexts(step, caches[1], logits.shape[1]):
            if blocked := sorted(self.trie.after(before)):
                logits[row, position, blocked] = blocked_logit(logits[row, position])
        return logits


def ngrams_of(examples: Iterable[Example], size: int, ends: frozenset[int]) -> list[list[int]]:
    """List the n-grams of the labelled tokens, without those that hold an end token."""
    from divdec.data.formatting import IGNORED

    grams: dict[tuple[int, ...], None] = {}
    for example in examples:
        answer = [label for label in example.labels if label != IGNORED]
        for start in range(len(answer) - size + 1):
            gram = tuple(answer[start : start + size])
            if ends.isdisjoint(gram):
                grams[gram] = None
    return [list(gram) for gram in grams]


def build(job: Job, settings: NgramFilterSettings, output: Path) -> BuiltModel:
    """Write the n-grams with a reference to the target; see `build_method`.

    Raises:
        UsageError: no forget answer is as long as an n-gram.
    """
    from divdec_research.baselines.composite import write_composite

    ends = frozenset(job.tokenizer.all_special_ids)
    examples = job.forget_examples
    without = sum(not ngrams_of([example], settings.ngram_size, ends) for example in examples)
    if without == len(examples):
        raise UsageError(
            f"ngram-size is {settings.ngram_size}, but no forget answer has as many tokens; give a smaller"
        )
    write_json(output / NGRAMS, ngrams_of(examples, settings.ngram_size, ends))
    write_composite(job, output, "ngram-filter", {})
    notes = (f"{without} of {len(examples)} forget answers are shorter than an n-gram",) if without else ()
    return BuiltModel(output, notes=notes)


METHODS["ngram-filter"] = Method(
    "n-gram filter", NgramFilterSettings, build=build, decoding=NgramFilter,
    source=(
        "Ippolito et al. 2023, Preventing Generation of Verbatim Memorization in Language Models Gives a False Sense "
        "of Privacy, MemFree decoding"
    ),
    summary="never complete an n-gram of the forget answers",
)  # fmt: skip
