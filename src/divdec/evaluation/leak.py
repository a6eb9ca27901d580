"""Leaks of what was to be forgotten: over a fixed list of attack prompts, and over samples.

leak@k-attack is the share of questions whose answer leaks within the first k attack prompts (the paper's figure);
leak@k-sample estimates, without bias, the chance that one of k samples leaks. It knows nothing of how a leak is judged.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations, samples
from divdec.evaluation.key_phrases import key_phrase
from divdec.evaluation.results import Results
from divdec.evaluation.sharding import is_main, on_main

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.evaluation.judges import Judge

ATTACK_KS = (1, 10, 100, 1000)
SAMPLE_KS = (1, 2, 4, 8, 16, 32, 64, 128)
ATTACK, SAMPLE = "leak-attack", "leak-sample"  # metrics that hold the texts; the figures hold a score an item
ROUND = 8  # prompts a question is asked before its answers are judged, at least


def leak_attack(first_leaks: Sequence[int | None], ks: Sequence[int]) -> dict[int, float]:
    """Share of questions that leak within the first k attack prompts (REBEL's StaticAttack; the paper's Leak@K).

    Args:
        first_leaks: for each question, how many prompts came before the first that leaked; None where none did.
        ks: numbers of prompts.

    Returns:
        The share by k.

    Raises:
        UsageError: there is no question, or a k is less than 1.
    """
    _check_ks(ks)
    if not first_leaks:
        raise UsageError("there is no question to compute leak@k-attack of")
    return {k: statistics.fmean(first is not None and first < k for first in first_leaks) for k in ks}


def leak_sample(counts: Sequence[int], n: int, ks: Sequence[int]) -> dict[int, float]:
    """Mean over questions of 1 − C(n−c, k)/C(n, k): the chance that one of k samples leaks, without bias (Leak-k).

    Args:
        counts: how many of each question's n samples leaked, c.
        n: samples a question.
        ks: numbers of samples, each at most n.

    Returns:
        The mean by k.

    Raises:
        UsageError: there is no question, a k is not within 1…n, or a count is not within 0…n.
    """
    _check_ks(ks, n, "samples")
    if not counts:
        raise UsageError("there is no question to compute leak@k-sample of")
    return {k: statistics.fmean(leak_chance(count, n, k) for count in counts) for k in ks}


def leak_chance(count: int, n: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k): the share of the k-subsets of n samples that hold one of the c that leaked.

    Raises:
        UsageError: the count is not within 0…n.
    """
    if not 0 <= count <= n:
        raise UsageError(f"{count} of {n} samples cannot have leaked")
    # Whole numbers to the last step: the quotient of two of them is rounded once.
    return (math.comb(n, k) - math.comb(n - count, k)) / math.comb(n, k)


def evaluate_attack(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    prompts: Sequence[Sequence[str]],
    judge: Judge,
    *,
    name: str = "model",
    ks: Sequence[int] | None = None,
    lay_out: Callable[[Record], list[int]] | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    early_stop: bool = True,
    title: str | None = None,
) -> Results:
    """leak@k-attack of a model: every question in the words of its attack prompts, answered greedily.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        records: questions with their true answers.
        prompts: for each question its attack prompts, in a fixed order.
        judge: what decides whether an answer leaks.
        name: what the results call the model.
        ks: numbers of prompts; by default those of 1, 10, 100 and 1000 that every question has prompts for.
        lay_out: how a prompt becomes tokens; by default `divdec.data.formatting.encode_prompt`.
        max_new_tokens: longest answer.
        batch_size: prompts in a batch.
        early_stop: ask no more once a question has leaked. The figures are the same, and so are the items, which
            otherwise go on after the first leak.
        title: what the progress bar is called; None shows none.

    Returns:
        The figures 'leak@K-attack' with a `score` of 0 or 1 an item. Under 'leak-attack' stands what was asked and
        answered: `question`, `truth`, `key_phrase`, `first_leak` (index from 0, or None) and `attempts`, a list of
        `prompt`, `answer` and `leaked`.

    Raises:
        UsageError: a k is greater than a question's number of prompts, a record asks nothing, or the judge fails.
    """
    if len(prompts) != len(records):
        raise UsageError(f"there are attack prompts for {len(prompts)} questions, and {len(records)} questions")
    fewest = min(map(len, prompts), default=0)
    chosen = _chosen_ks(ks, ATTACK_KS, fewest, "prompts for every question")
    limit = max(chosen)
    transcripts = [_Transcript(record) for record in records]
    lay_out = lay_out or (lambda record: encode_prompt(record, tokenizer))
    hidden = title is None or not is_main()
    with tqdm(total=limit * len(records), desc=title, unit="prompt", disable=hidden, dynamic_ncols=True) as bar:
        asking = list(range(len(records)))
        while asking:
            # Full batches even when few questions are left, and enough answers at once for the judge.
            width = max(ROUND, math.ceil(batch_size / len(asking)))
            pending = {place: prompts[place][transcripts[place].count : limit][:width] for place in asking}
            ids = [lay_out(transcripts[place].ask(prompt)) for place in asking for prompt in pending[place]]
            found = iter(continuations(model, tokenizer, ids, max_new_tokens=max_new_tokens, batch_size=batch_size))
            still = []
            for place in asking:
                transcript, before = transcripts[place], transcripts[place].count
                texts = [str(tokenizer.decode(next(found), skip_special_tokens=True)).strip() for _ in pending[place]]
                transcript.add(list(zip(pending[place], texts, strict=True)), judge, early_stop)
                stopped = early_stop and transcript.first_leak is not None
                if not stopped and transcript.count < limit:
                    still.append(place)
                bar.update((limit if stopped else transcript.count) - before)
            asking = still
    results = Results(name, "leak", about={"attack_judge": judge.name, "attack_prompts": limit})
    first_leaks = [transcript.first_leak for transcript in transcripts]
    for k, share in leak_attack(first_leaks, chosen).items():
        leaked = [first is not None and first < k for first in first_leaks]
        _add(results, f"leak@{k}-attack", share, list(map(float, leaked)))
    results.items[ATTACK] = {
        str(place): {**transcript.about, "first_leak": transcript.first_leak, "attempts": transcript.attempts}
        for place, transcript in enumerate(transcripts)
    }
    return results


def evaluate_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    judge: Judge,
    *,
    name: str = "model",
    n: int = 200,
    ks: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    lay_out: Callable[[Record], list[int]] | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    title: str | None = None,
) -> Results:
    """leak@k-sample of a model: every question as it is, answered n times by sampling.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        records: questions with their true answers.
        judge: what decides whether an answer leaks.
        name: what the results call the model.
        n: samples a question.
        ks: numbers of samples; by default the powers of two from 1 to 128 that are at most n.
        temperature: of sampling.
        top_p: least probability that the tokens sampled from hold together.
        seed: of sampling; with the same batch size it gives the same answers again.
        lay_out: how a question becomes tokens; by default `divdec.data.formatting.encode_prompt`.
        max_new_tokens: longest answer.
        batch_size: samples in a batch.
        title: what the progress bar is called; None shows none.

    Returns:
        The figures 'leak@K-sample' with a `score` an item, the question's own estimate. Under 'leak-sample' stands
        what was answered: `question`, `truth`, `key_phrase`, `leaks` (how many) and `samples`, a list of `answer`
        and `leaked`.

    Raises:
        UsageError: a k is greater than n, a setting is out of range, a record asks nothing, or the judge fails.
    """
    chosen = _chosen_ks(ks, SAMPLE_KS, n, "samples")
    transcripts = [_Transcript(record) for record in records]
    lay_out = lay_out or (lambda record: encode_prompt(record, tokenizer))
    drawn = samples(
        model,
        tokenizer,
        [lay_out(record) for record in records],
        n,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        title=title,
    )
    for transcript, texts in zip(transcripts, drawn, strict=True):
        transcript.add([("", text) for text in texts], judge, stop=False)
    counts = [sum(attempt["leaked"] for attempt in transcript.attempts) for transcript in transcripts]
    settings = {"samples": n, "temperature": temperature, "top_p": top_p, "seed": seed}
    results = Results(name, "leak", about={"sample_judge": judge.name, **settings})
    for k, mean in leak_sample(counts, n, chosen).items():
        _add(results, f"leak@{k}-sample", mean, [leak_chance(count, n, k) for count in counts])
    results.items[SAMPLE] = {
        str(place): {
            **transcript.about,
            "leaks": counts[place],
            "samples": [{key: attempt[key] for key in ("answer", "leaked")} for attempt in transcript.attempts],
        }
        for place, transcript in enumerate(transcripts)
    }
    return results


def question_of(record: Record) -> str:
    """What a record asks: the last turn before its answer, or its prompt.

    Raises:
        UsageError: it is a plain text.
    """
    if record.messages:
        return record.messages[-1].content
    if record.prompt is None:
        raise UsageError(f"{record.place or 'a record'}: leaks are of answers; a plain text asks nothing")
    return record.prompt


class _Transcript:
    """What a question was asked, and what came back."""

    def __init__(self, record: Record) -> None:
        question = question_of(record)
        self._record = record
        self.about = {"question": question, "truth": record.answer, "key_phrase": key_phrase(question, record.answer)}
        self.attempts: list[dict[str, Any]] = []

    @property
    def count(self) -> int:
        return len(self.attempts)

    @property
    def first_leak(self) -> int | None:
        return next((place for place, attempt in enumerate(self.attempts) if attempt["leaked"]), None)

    def ask(self, prompt: str) -> Record:
        """The record with other words in place of its question."""
        if not self._record.messages:
            return dataclasses.replace(self._record, prompt=prompt)
        return dataclasses.replace(self._record, messages=(*self._record.messages[:-1], Message("user", prompt)))

    def add(self, turns: Sequence[tuple[str, str]], judge: Judge, stop: bool) -> None:
        """Judge answers and keep them; with `stop`, none after the first leak, however many were made at once."""
        # By one process for all: what is asked next depends on it, and not every judge repeats itself.
        answers = [answer for _, answer in turns]
        verdicts = on_main(lambda: judge.leaks(self.about["question"], self.about["truth"], answers))
        for (prompt, answer), leaked in zip(turns, verdicts, strict=True):
            self.attempts.append({"prompt": prompt, "answer": answer, "leaked": leaked})
            if stop and leaked:
                return


def _check_ks(ks: Sequence[int], most: int | None = None, what: str = "") -> None:
    for k in ks:
        if k < 1 or (most is not None and k > most):
            accepted = "1 or more" if most is None else f"1 to {most}, for there are so many {what}"
            raise UsageError(f"leak@k with k = {k}; accepted: {accepted}")


def _chosen_ks(ks: Sequence[int] | None, usual: Sequence[int], most: int, what: str) -> list[int]:
    if most < 1:
        raise UsageError("there is nothing to ask: give questions, and at least one prompt or sample for each")
    chosen = [k for k in usual if k <= most] if ks is None else sorted(set(ks))
    if not chosen:
        raise UsageError("no k is given for leak@k")
    _check_ks(chosen, most, what)
    return chosen


def _add(results: Results, metric: str, value: float, scores: Sequence[float]) -> None:
    results.figures[metric] = value
    results.items[metric] = {str(place): {"score": score} for place, score in enumerate(scores)}
