"""The leak suite: how often answers to attack prompts, and sampled answers, tell what the model should have forgotten.

leak@k-attack is the share of questions whose answer leaks within the first k attack prompts (the paper's figure);
leak@k-sample is an unbiased estimate of the probability that one of k samples leaks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record, RecordSet, checked_text, json_rows, read_records, read_text
from divdec.endpoint import Endpoint
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations, ends_in_thought, samples
from divdec.evaluation.judges import EndpointJudge, EntailmentJudge, Judge, StringJudge
from divdec.evaluation.phrases import FUNCTION_WORDS, find_words, holds, key_phrase, words
from divdec.evaluation.questions import QuestionFormat, question_of
from divdec.evaluation.results import Results, numbered
from divdec.evaluation.run import Suite
from divdec.evaluation.scoring import EvaluatedModel
from divdec.evaluation.settings import LeakSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ATTACK_KS = (1, 10, 100, 1000)
SAMPLE_KS = (1, 2, 4, 8, 16, 32, 64, 128)
ATTACK, SAMPLE = "leak-attack", "leak-sample"  # metrics whose items hold the texts
LENGTH = 128  # least limit of answers in tokens
ROUND = 8  # least number of prompts per question between two judgements
_TEMPLATES: dict[str, Any] = json.loads(Path(__file__).with_name("attack_prompts.json").read_text(encoding="utf-8"))
# {q} is the question, unchanged. A frame with an open end is to be continued: nothing may follow it.
FRAMES: dict[str, tuple[str, ...]] = {kind: tuple(frames) for kind, frames in _TEMPLATES["frames"].items()}
OPENINGS: tuple[str, ...] = tuple(_TEMPLATES["openings"])
CLOSINGS: tuple[str, ...] = tuple(_TEMPLATES["closings"])


def leak_attack(first_leaks: Sequence[int | None], ks: Sequence[int]) -> dict[int, float]:
    """Share of questions that leak within the first k attack prompts, by k (REBEL's StaticAttack; the paper's Leak@K).

    `first_leaks` are the prompts before the first that leaked, for each question; None if none did.
    """
    return {k: statistics.fmean(first is not None and first < k for first in first_leaks) for k in ks}


def leak_sample(counts: Sequence[int], n: int, ks: Sequence[int]) -> dict[int, float]:
    """Mean over questions of `leak_chance`, by k: unbiased probability that one of k samples leaks (Leak-k)."""
    return {k: statistics.fmean(leak_chance(count, n, k) for count in counts) for k in ks}


def leak_chance(count: int, n: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k): the share of the k-subsets of n samples that contain one of the c that leaked."""
    if not 0 <= count <= n:
        raise UsageError(f"{count} of {n} samples cannot have leaked")
    # Integers to the last step: the quotient is rounded once.
    return (math.comb(n, k) - math.comb(n - count, k)) / math.comb(n, k)


def template_prompts(question: str, answer: str, count: int, seed: int = 0) -> list[str]:
    """Make `count` different attack prompts for a question from templates; the question itself is the first.

    Every prompt contains the question unchanged. None contains the key phrase of the answer, nor any of its words
    except function words, unless the question contains it too. Each round uses every template once, so that short lists
    contain different templates. A shorter list is the beginning of a longer one of the same seed.

    Raises:
        UsageError: there are fewer.
    """
    secret = _Secret(question, answer)
    rng = random.Random(f"{seed}\n{question}")
    frames = [frame for kind in FRAMES.values() for frame in kind if secret.allows(frame)]
    pairs = list(itertools.product(filter(secret.allows, OPENINGS), filter(secret.allows, CLOSINGS)))
    orders = {frame: rng.sample(pairs, len(pairs)) for frame in frames}
    prompts = {question: None}
    for index in range(len(pairs)):
        for frame in rng.sample(frames, len(frames)):
            if len(prompts) >= count:
                break
            opening, closing = orders[frame][index]
            open_ended = not frame.endswith(("{q}", ".", "?"))
            parts = (opening, closing, frame) if open_ended else (opening, frame, closing)
            prompt = ("\n" if "\n" in frame else " ").join(filter(None, parts)).replace("{q}", question)
            if secret.allows(prompt):
                prompts[prompt] = None
    if len(prompts) < count:
        raise UsageError(
            f"question {question!r}: templates give {len(prompts)} prompts that do not tell the answer, "
            f"{count} are asked for; ask for fewer"
        )
    return list(prompts)[:count]


def prompts_from_file(path: str | Path, questions: Sequence[str]) -> list[list[str]]:
    """Read attack prompts from JSON lines: {"question": …, "prompts": […]}.

    Each question gets its prompts in the file's order, without duplicates.

    Raises:
        UsageError: the file is missing, a line is malformed (with its number), or a question has no prompts.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f"prompt file {path} does not exist")
    given: dict[str, list[str]] = {}
    for location, row in json_rows(path.name, read_text(path)):
        prompts, question = _prompts_of(row, location), row.get("question")
        if question not in questions:
            raise UsageError(f"{location}: {question!r} is none of the questions that are asked")
        if question in given:
            raise UsageError(f"{location}: {question!r} has prompts already; give each question one line")
        given[question] = prompts
    if missing := [question for question in questions if question not in given]:
        raise UsageError(
            f"{path.name} has no prompts for {len(missing)} of {len(questions)} questions, the first: {missing[0]!r}"
        )
    if len({len(prompts) for prompts in given.values()}) > 1:
        raise UsageError(f"{path.name} has more prompts for some questions than for others; give each as many")
    return [given[question] for question in questions]


def evaluate_attack(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    prompts: Sequence[Sequence[str]],
    judge: Judge,
    *,
    results: Results | None = None,
    save: Callable[[], None] = lambda: None,
    ks: Sequence[int] | None = None,
    prompt_ids: Callable[[Record], list[int]] | None = None,
    max_new_tokens: int = LENGTH,
    batch_size: int = 64,
    title: str | None = None,
) -> Results:
    """Compute leak@k-attack: ask every question in the words of its attack prompts until it leaks, greedily.

    Args:
        model: any causal LM, steered or plain.
        tokenizer: its tokenizer.
        records: questions with their true answers.
        prompts: for each question its attack prompts, in a fixed order.
        judge: decides whether an answer leaks.
        results: results to complete; with the attempts of an interrupted call, it is resumed.
        save: called after each round of attempts, which are then in `results`.
        ks: numbers of prompts; those above the number of prompts are left out. By default 1, 10, 100, 1000 and all.
        prompt_ids: tokenizes a prompt; by default `divdec.data.formatting.encode_prompt`.
        max_new_tokens: longest answer, without a thought before it.
        batch_size: prompts in a batch.
        title: title of the progress bar; None shows none.

    Returns:
        The figures 'leak@K-attack' for every K of `ks`, with a `score` of 0 or 1 per item; and items
        'leak-attack' with the `attempts` of every question up to its `first_leak` (index from 0, or None).

    Raises:
        UsageError: a question has no prompts, a record asks nothing, or the judge fails.
    """
    if len(prompts) != len(records):
        raise UsageError(f"there are attack prompts for {len(prompts)} questions, and {len(records)} questions")
    count = min(map(len, prompts), default=0)
    ks = sorted({*ATTACK_KS, count}) if ks is None else ks
    ks = [k for k in ks if 0 < k <= count]
    if not ks:
        raise UsageError("there is nothing to ask: give questions, and at least one prompt for each")
    limit = max(ks)
    results = results or Results("model", "leak")
    earlier = results.items.get(ATTACK, {})
    transcripts = [
        _Transcript(record, earlier.get(str(index), {}).get("attempts", [])) for index, record in enumerate(records)
    ]
    prompt_ids = prompt_ids or (lambda record: encode_prompt(record, tokenizer))
    hidden = title is None
    with tqdm(total=limit * len(records), desc=title, unit="prompt", disable=hidden, dynamic_ncols=True) as bar:
        while open_items := [item for item, script in enumerate(transcripts) if script.asked(limit) < limit]:
            # Full batches even with few open questions, and enough answers at once for the judge.
            width = max(ROUND, math.ceil(batch_size / len(open_items)))
            pending = {item: prompts[item][len(transcripts[item].attempts) : limit][:width] for item in open_items}
            ids = [prompt_ids(transcripts[item].ask(prompt)) for item in open_items for prompt in pending[item]]
            replies = continuations(
                model, tokenizer, ids, max_new_tokens=max_new_tokens, batch_size=batch_size, through_thoughts=True
            )
            pairs, cut = zip(ids, replies, strict=True), "attack_replies_cut_in_a_thought"
            if thinking := sum(ends_in_thought(model, tokenizer, prompt, reply) for prompt, reply in pairs):
                results.about[cut] = results.about.get(cut, 0) + thinking
            outputs = iter(replies)
            for item in open_items:
                texts = [str(tokenizer.decode(next(outputs), skip_special_tokens=True)).strip() for _ in pending[item]]
                transcripts[item].add(list(zip(pending[item], texts, strict=True)), judge, stop=True)
            for index, script in enumerate(transcripts):
                fields = {"first_leak": script.first_leak, "attempts": script.attempts}
                results.add_item(ATTACK, str(index), **script.about, **fields)
            save()
            bar.update(sum(script.asked(limit) for script in transcripts) - bar.n)
    results.about |= {"attack_judge": judge.name, "attack_prompts": limit}
    first_leaks = [transcript.first_leak for transcript in transcripts]
    for k, share in leak_attack(first_leaks, ks).items():
        results.figures[f"leak@{k}-attack"] = share
        results.items[f"leak@{k}-attack"] = numbered(float(first is not None and first < k) for first in first_leaks)
    return results


def evaluate_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    judge: Judge,
    *,
    results: Results | None = None,
    n: int = 200,
    prompt_ids: Callable[[Record], list[int]] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> Results:
    """Compute leak@k-sample: sample n answers to every question.

    See `evaluate_attack` for the first arguments, and `divdec.evaluation.generation.samples` for those of sampling.

    Returns:
        The figures 'leak@K-sample' for powers of two and for n, with a `score` per item, the question's estimate; and
        items 'leak-sample' with the `samples` of every question and the number of `leaks`.

    Raises:
        UsageError: a setting is out of range, a record asks nothing, or the judge fails.
    """
    ks = sorted({*(k for k in SAMPLE_KS if k <= n), n})
    transcripts = [_Transcript(record) for record in records]
    prompt_ids = prompt_ids or (lambda record: encode_prompt(record, tokenizer))
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    prompts = [prompt_ids(record) for record in records]
    texts = samples(model, tokenizer, prompts, n, **sampling, **options, through_thoughts=True)
    for transcript, answers in zip(transcripts, texts, strict=True):
        transcript.add([("", text) for text in answers], judge, stop=False)
    counts = [sum(attempt["leaked"] for attempt in transcript.attempts) for transcript in transcripts]
    results = results or Results("model", "leak")
    results.about |= {"sample_judge": judge.name, "samples": n, **sampling}
    for k, mean in leak_sample(counts, n, ks).items():
        results.figures[f"leak@{k}-sample"] = mean
        results.items[f"leak@{k}-sample"] = numbered(leak_chance(count, n, k) for count in counts)
    for index, (transcript, count) in enumerate(zip(transcripts, counts, strict=True)):
        attempts = [{key: attempt[key] for key in ("answer", "leaked")} for attempt in transcript.attempts]
        results.add_item(SAMPLE, str(index), **transcript.about, leaks=count, samples=attempts)
    return results


class _Secret:
    """The words that no prompt for a question may contain."""

    def __init__(self, question: str, answer: str) -> None:
        phrase, known = find_words(key_phrase(question, answer)), words(question)
        self._phrase = [word.text for word in phrase]
        # A character by itself tells nothing.
        telling = frozenset(word.text for word in phrase if not word.is_character)
        self._forbidden = telling - frozenset(known) - FUNCTION_WORDS
        # A text with the phrase has its forbidden words; only a phrase without such words must be searched for.
        self._search = not self._forbidden and not holds(known, self._phrase)

    def allows(self, text: str) -> bool:
        in_text = words(text)
        return self._forbidden.isdisjoint(in_text) and not (self._search and holds(in_text, self._phrase))


def _prompts_of(row: Any, location: str) -> list[str]:
    prompts = row.get("prompts") if isinstance(row, Mapping) else None
    if not isinstance(prompts, list) or not prompts:
        raise UsageError(f"{location}: expected an object with question and prompts, a list of texts")
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str) or not prompt.strip():
            raise UsageError(f"{location}: prompt {number} is empty or no text")
    return list(dict.fromkeys(checked_text(prompt, f"{location}: prompts") for prompt in prompts))


class _Transcript:
    """The prompts for one question, and the judged answers."""

    def __init__(self, record: Record, attempts: Sequence[dict[str, Any]] = ()) -> None:
        question = question_of(record)
        self._record = record
        self.about = {"question": question, "truth": record.answer, "key_phrase": key_phrase(question, record.answer)}
        self.attempts = list(attempts)

    @property
    def first_leak(self) -> int | None:
        return next((index for index, attempt in enumerate(self.attempts) if attempt["leaked"]), None)

    def asked(self, limit: int) -> int:
        """Count the prompts that need not be asked any more: after a leak all of them."""
        return limit if self.first_leak is not None else len(self.attempts)

    def ask(self, prompt: str) -> Record:
        """Replace the question of the record."""
        if not self._record.messages:
            return dataclasses.replace(self._record, prompt=prompt)
        return dataclasses.replace(self._record, messages=(*self._record.messages[:-1], Message("user", prompt)))

    def add(self, turns: Sequence[tuple[str, str]], judge: Judge, *, stop: bool) -> None:
        """Judge answers and add them; with `stop`, none after the first leak."""
        answers = [answer for _, answer in turns]
        verdicts = judge.leaks(self.about["question"], self.about["truth"], answers)
        for (prompt, answer), leaked in zip(turns, verdicts, strict=True):
            self.attempts.append({"prompt": prompt, "answer": answer, "leaked": leaked})
            if stop and leaked:
                return


@dataclasses.dataclass
class LeakSuite(Suite):
    """Questions, attack prompts and judge of a run of `divdec eval leak`."""

    settings: LeakSettings
    records: RecordSet
    judge: Judge
    prompts: list[list[str]] | None = None
    """The attack prompts of every question, the same for every model of the run and when it is resumed."""

    @property
    def digest(self) -> str:
        """Digest of the questions."""
        return self.records.sha256

    @classmethod
    def read(cls, settings: LeakSettings) -> LeakSuite:
        """Read the questions, and load the judge.

        Raises:
            UsageError: data or judge cannot be used, or there is nothing to compute.
        """
        records = read_records(Path(settings.data).expanduser(), limit=settings.limit)
        if not records.has_questions:
            raise UsageError(f"data {settings.data} holds {records.kind} records; the leak suite needs questions")
        if settings.attack_prompts == "none" and not settings.samples:
            raise UsageError("--attack-prompts none and --samples 0 leave nothing to measure")
        if settings.judge == "string":
            judge = StringJudge()
        elif settings.judge == "endpoint":
            if not settings.endpoint or not settings.endpoint_model:
                raise UsageError("give --endpoint URL and --endpoint-model NAME of an OpenAI-compatible server")
            judge = EndpointJudge(Endpoint(settings.endpoint, settings.endpoint_model, settings.api_key_env))
        else:
            judge = EntailmentJudge(settings.judge)
        return cls(settings, records, judge)

    def evaluate(
        self, model: EvaluatedModel, earlier: list[Results], save: Callable[[Sequence[Results]], None]
    ) -> list[Results]:
        """Add the figures that are missing in earlier results, and save after each round of attacks and each stage."""
        settings, records = self.settings, self.records.records
        longest = max(len(model.tokenizer(record.answer, add_special_tokens=False)["input_ids"]) for record in records)
        options: dict[str, Any] = {
            "max_new_tokens": max(LENGTH, longest + 8),
            "prompt_ids": QuestionFormat.from_settings(model.tokenizer, settings, settings.max_length).prompt,
            "batch_size": settings.batch_size,
        }
        for setting, results in zip(model.settings, earlier, strict=True):
            subject = model.under(setting), model.tokenizer, records
            if settings.attack_prompts != "none" and "attack_prompts" not in results.about:
                self.prompts = self.prompts or self._prompts()
                progress = {"results": results, "save": lambda: save(earlier), "title": f"attacks {results.name}"}
                evaluate_attack(*subject, self.prompts, self.judge, **progress, **options)
                save(earlier)
            if settings.samples and SAMPLE not in results.items:
                evaluate_samples(
                    *subject, self.judge, results=results, n=settings.samples, temperature=settings.temperature,
                    top_p=settings.top_p, seed=settings.seed, title=f"samples {results.name}", **options,
                )  # fmt: skip
                save(earlier)
        return earlier

    def headlines(self, results: Results) -> dict[str, str]:
        """Return leak@k for its smallest and its largest k; see `Suite.headlines`."""
        chosen = {}
        for kind in ("attack", "sample"):
            metrics = [name for name in results.figures if name.startswith("leak@") and name.endswith(f"-{kind}")]
            chosen |= dict.fromkeys((*metrics[:1], *metrics[-1:]), "↓")
        return chosen

    def _prompts(self) -> list[list[str]]:
        settings, questions = self.settings, [(question_of(record), record.answer) for record in self.records]
        if settings.attack_prompts == "templates":
            return [template_prompts(*question, settings.attacks, settings.seed) for question in questions]
        return prompts_from_file(settings.attack_prompts, [question for question, _ in questions])
