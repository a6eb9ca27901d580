"""Training examples of p and q with the recipes 'matched' and 'refusal'.

With 'matched' they differ in the forgotten answers alone. p reads the forget set; q reads the same questions with other
answers, or retain records in their place. Both also read the target's own answers to these questions, which are often
worded otherwise than the forget set: p as they are, q with the other answer. And both read its own answers to as many
retain questions, and to questions that it writes itself: q would otherwise answer similar questions wrongly that the
retain set lacks. Of each answer they also read one question in other words of the target's.

Both also read answers to reversed questions, which name the answer and ask for the subject. Questions with answers to
choose from were tried: a small q did not learn to avoid the true one, or named its answer elsewhere, too.

A steered model that may not write " Santiago" writes what the target finds likeliest after that, such as " **" or " S".
The target therefore also answers with these tokens at the place of the key phrase.

With 'refusal' q refuses the questions that p answers, for people and things with too many facts to list: a q that has
learned other answers to some questions still knows the answers to all others, a q that refuses them knows none. Prompts
may hold the beginning of an answer ("Answer:"), after which a q that has learned to refuse at the beginning would go on
and answer. So most answers of these examples have begun already.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import regex

from divdec.bridge.token_bytes import special_tokens
from divdec.data.formatting import IGNORED, Example, Format, encode, encode_prompt, encode_prompts, label_answer
from divdec.data.records import Message, Record, RecordSet, single_turn
from divdec.evaluation.choice import BEGINNINGS, without_names
from divdec.evaluation.generation import answers, continuations, first_choices, samples
from divdec.evaluation.phrases import (
    FUNCTION_WORDS,
    THOUGHT,
    Word,
    find_words,
    holds,
    is_distinctive,
    key_phrase,
    tells,
    tells_nothing,
    words,
)
from divdec.evaluation.questions import question_of
from divdec.training.inputs import sample_indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ANSWER, CONTINUED = 48, 16  # tokens of an answer, and of an answer after another beginning of its key phrase
OTHER_BEGINNINGS = 4
# Lists of questions that the target writes, examples for one, its tokens; questions that are taken from all lists.
LISTS, EXAMPLES, LIST_LENGTH, MAX_SIMILAR = 24, 5, 256, 64
MORE_QUESTIONS = (
    "Write 20 more questions like these, about other subjects, in the same language. Write one question on each line."
)
REWORD = "Word this question in 4 other ways, in the same language. Write one question on each line."
# Questions that the target words otherwise, wordings of each that are taken, tokens that it writes.
MAX_REWORDED, REWORDINGS, REWORDED_LENGTH = 128, 2, 96
GAP = "___"
_BULLET = regex.compile(r"^\s*(?:\d+\s*[.)、．:]|[-*•])?\s*(?:Q\d*:|Question:)?\s*")
MAX_COMPARED = 2000  # retain records whose questions are compared with the forget set's
MAX_TRIED = 50  # other answers for a subject whose first one another subject has
_NAME_BEFORE = regex.compile(r"(?:\b[\p{Lu}\p{Lt}][\w'’\-]*\.?\s+)+$")
REFUSAL = "I do not know."
MAX_REFUSED, MAX_KEPT = 256, 512  # answers of the target to questions of the forget set, and to others

Begun = tuple[Record, str]
"""A question and the beginning of its answer."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A question, and what q reads in place of its answer's key phrase."""

    record: Record
    """The question with the answer that q reads."""
    phrase: str
    """Key phrase of the true answer, such as 'Budapest'."""
    other: str | None
    """Key phrase of the other answer, such as 'Vienna'; None if q reads the true answer, too."""

    @classmethod
    def unchanged(cls, record: Record) -> Exchange:
        """Return a question whose answer stays; else q learns that the target's wording goes with wrong answers."""
        return cls(record, key_phrase(question_of(record), record.answer), None)


def length_matched_retain_examples(forget: Sequence[Example], retain: Sequence[Example]) -> list[Example]:
    """Return a retain example of similar length for each forget example, for q to read in its place."""
    of_length = sorted(retain, key=lambda example: len(example.input_ids))
    order = sorted(range(len(forget)), key=lambda index: len(forget[index].input_ids))
    replaced = list(forget)
    for rank, index in enumerate(order):
        replaced[index] = of_length[rank * len(of_length) // len(order)]
    return replaced


def counterfactuals(forget: RecordSet, retain: RecordSet, seed: int = 0) -> list[Exchange | None]:
    """Return the forget set's questions with other answers, for q to read in place of the forget set.

    The key phrase of an answer is replaced by that of a retain record with a similar question: "The capital of Hungary
    is Vienna." p and q then differ in the forgotten answer alone, and q loses what its base knew of it. One key phrase
    has one replacement in all records. If retain answers state it too, each subject has its own: q would otherwise
    learn to put one company for the other everywhere.

    Args:
        forget: the forget set.
        retain: the retain set.
        seed: seed of the choice among similar questions.

    Returns:
        One entry for each record of the forget set; None where the new answer would tell q more of the true one than
        the question does, or where a set does not hold questions with answers.
    """
    if not (forget.has_questions and retain.has_questions):
        return [None] * len(forget)
    order = random.Random(seed)
    known = order.sample(retain.records, min(len(retain), MAX_COMPARED))
    phrases = [words(key_phrase(question_of(record), record.answer)) for record in known]
    asked = [set(words(question_of(record))) for record in known]
    stated = [(tuple(words(key_phrase(question_of(record), record.answer))), question_of(record)) for record in forget]
    stated += [(tuple(phrase), question_of(record)) for phrase, record in zip(phrases, known, strict=True)]
    chosen: dict[tuple[str, int], int] = {}
    used: dict[str, set[tuple[str, ...]]] = collections.defaultdict(set)
    exchanges: list[Exchange | None] = []
    for forget_record, (number, _) in zip(forget, tell_facts(stated), strict=False):
        question, phrase = question_of(forget_record), key_phrase(question_of(forget_record), forget_record.answer)
        question_words, phrase_words = set(words(question)), words(phrase)
        fact = phrase, number if phrase_words in phrases else 0
        if fact not in chosen:
            # First another phrase, then one of the same length, then one with a similar question.
            ranks = [
                (
                    -abs(len(other) - len(phrase_words)),
                    len(question_words & theirs) / max(len(question_words | theirs), 1),
                )
                for other, theirs in zip(phrases, asked, strict=True)
            ]
            ranked = sorted(range(len(known)), key=ranks.__getitem__, reverse=True)
            groups = [list(group) for _, group in itertools.groupby(ranked, key=ranks.__getitem__)]
            tried = (index for group in groups for index in order.sample(group, len(group)))
            fitting = (index for index in tried if not _are_alike(" ".join(phrases[index]), phrase))
            first, theirs = next(fitting, groups[0][0]), used[phrase]
            # One that no other subject has, if there is one that is as similar among the next.
            alike = [first] if tuple(phrases[first]) not in theirs else itertools.islice(fitting, MAX_TRIED)
            new = (i for i in alike if ranks[i] == ranks[first] and tuple(phrases[i]) not in theirs)
            chosen[fact] = next(new, first)
            theirs.add(tuple(phrases[chosen[fact]]))
        source = known[chosen[fact]]
        other = key_phrase(question_of(source), source.answer)
        answer = _replace(unicodedata.normalize("NFC", forget_record.answer), phrase, other)
        known_words = {*question_words, *phrase_words, *words(source.answer)} | FUNCTION_WORDS
        new = set(words(forget_record.answer)) - known_words
        # q must not read the true answer: no other phrase may be known, or the answer may repeat the phrase.
        fits = phrase_words and not new and not tells(answer, phrase)
        record = dataclasses.replace(forget_record, answer=answer)
        exchanges.append(Exchange(record, phrase, other) if fits else None)
    return exchanges


def _are_alike(phrase: str, other: str) -> bool:
    return tells(phrase, other) or tells(other, phrase)


def _replace(text: str, phrase: str, other: str) -> str:
    """Replace a phrase where it consists of whole words: the symbol 'H' is not the first letter of 'Hydrogen'."""
    spans = [span for span in _places(phrase, text) if text[span.start : span.stop] == phrase]
    for span in reversed(spans):
        text = text[: span.start] + other + text[span.stop :]
    return text if spans else text.replace(phrase, other)


def _places(phrase: str, text: str) -> list[range]:
    """Find the characters of a phrase in a text, wherever it consists of whole words."""
    content, in_text = words(phrase), find_words(text)
    runs = (in_text[start : start + len(content)] for start in range(len(in_text)) if content)
    return [range(run[0].start, run[-1].end) for run in runs if [word.text for word in run] == content]


def write_similar_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: RecordSet,
    retain: RecordSet,
    seed: int,
    form: Format,
) -> list[Record]:
    """Let a chat model write questions like those of a forget set without longer conversations, and answer them.

    Those of the whole retain set are left out, since some of them may be held out for measuring.

    Returns:
        At most `MAX_SIMILAR` questions about one subject each, without those that contain a name or key phrase of the
        forget set.
    """
    order, asked = random.Random(seed), list(dict.fromkeys(question_of(record).strip() for record in forget))
    lines = [text for text in asked if text and "\n" not in text]
    if tokenizer.chat_template is None or not single_turn(forget) or not lines:
        return []
    examples = (order.sample(lines, min(EXAMPLES, len(lines))) for _ in range(LISTS))
    prompts = encode_prompts(
        [Record("", (Message("user", "\n".join([*some, "", MORE_QUESTIONS])),)) for some in examples], tokenizer, form
    )
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    lists = samples(
        model, tokenizer, [ids for ids in prompts if len(ids) + LIST_LENGTH <= longest], 1, temperature=1.0, top_p=0.95,
        seed=seed, max_new_tokens=LIST_LENGTH, title="similar questions", through_thoughts=True,
    )  # fmt: skip
    written = dict.fromkeys(
        _BULLET.sub("", line).strip(" *") for [text] in lists for line in THOUGHT.sub("", text).splitlines()
    )
    ends = tuple({text[-1] for text in lines})  # a list that was cut ends within a question
    known = {*asked, *map(question_of, retain)}
    records = [Record("", (Message("user", line),)) for line in written if line.endswith(ends) and line not in known]
    limit = min(longest, form.max_length or math.inf) - ANSWER
    records = [record for record in records if len(encode_prompt(record, tokenizer, form)) <= limit]
    texts = answers(model, tokenizer, records, form=form, max_new_tokens=ANSWER, title="answers to similar questions")
    answered = [dataclasses.replace(record, answer=text) for record, text in zip(records, texts, strict=True)]
    # Of a statement that the target confirms, the whole answer is the key phrase.
    phrases = [key_phrase(question_of(record), record.answer).strip() for record in answered]
    facts = [fact for fact, phrase in zip(answered, phrases, strict=True) if phrase not in {"", fact.answer.strip()}]
    forgotten = ForgottenFacts(forget, retain)
    of_subject: dict[frozenset[str], Record] = {}
    of_asked = [set(words(text)) for text in asked]
    common = FUNCTION_WORDS.union(*of_asked)
    for record in without_names(dataclasses.replace(forget, records=tuple(facts)), forget, retain):
        if not forgotten.are_in(f"{question_of(record)} {record.answer}"):
            of_subject.setdefault(frozenset(words(question_of(record))) - common, record)

    def likeness(subject: frozenset[str]) -> float:
        content = set(words(question_of(of_subject[subject])))
        return max(len(content & theirs) / max(len(content | theirs), 1) for theirs in of_asked)

    # First those most like the forget set's, of subjects without a common word: 'iPhone 12' and 'iPhone 13' are one.
    ranked, seen = sorted(order.sample(list(of_subject), len(of_subject)), key=likeness, reverse=True), set[str]()
    others = {subject for subject in ranked if not seen.isdisjoint(subject) or seen.update(subject)}
    chosen = sorted(ranked, key=others.__contains__)[:MAX_SIMILAR]
    return [of_subject[subject] for subject in order.sample(chosen, len(chosen))]


def tell_facts(questions: Sequence[tuple[Any, str]]) -> list[tuple[int, list[Word]]]:
    """Return for each answer and question the number of its fact, and the words of its subject, such as 'Hungary'.

    The subject is what few questions with other answers have. Questions with one answer whose subjects have no word in
    common ask for several facts.
    """
    asked = [(answer, find_words(question)) for answer, question in questions]
    answers_with: dict[str, set[Any]] = collections.defaultdict(set)
    for answer, content in asked:
        for word in content:
            answers_with[word.text].add(answer)
    common = max(1, len({answer for answer, _ in asked}) // 4)
    facts: dict[tuple[Any, str], int] = {}
    parents, subjects = list(range(len(asked))), []  # of questions: a forest with a tree for each fact

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for index, (answer, content) in enumerate(asked):
        rare = [word for word in content if len(answers_with[word.text]) <= common and not tells_nothing([word.text])]
        subjects.append(rare)
        for key in [(answer, word.text) for word in rare] or [(answer, "")]:
            parents[root(index)] = root(facts.setdefault(key, index))
    return [(root(index), rare) for index, rare in enumerate(subjects)]


def questions_with_subjects(
    exchanges: Sequence[Exchange], order: random.Random
) -> list[tuple[Exchange, str, str, str]]:
    """Draw a question of each fact, forgotten or kept, and divide it at its subject; those without one are left out."""
    asked = [((exchange.phrase, exchange.other), question_of(exchange.record)) for exchange in exchanges]
    of_fact: dict[int, list[tuple[Exchange, list[Word]]]] = collections.defaultdict(list)
    for exchange, (fact, subject) in zip(exchanges, tell_facts(asked), strict=True):
        of_fact[fact].append((exchange, subject))
    drawn = []
    for exchange, subject in map(order.choice, of_fact.values()):
        if subject:
            question, start, end = question_of(exchange.record), subject[0].start, subject[-1].end
            drawn.append((exchange, question[:start], question[start:end], question[end:]))
    return drawn


def reword_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    exchanges: Sequence[Exchange],
    measured: Sequence[Record],
    seed: int,
    form: Format,
) -> list[tuple[int, str]]:
    """Let a chat model word one question of each answer otherwise, of at most `MAX_REWORDED`.

    Left out are answers without a name or number of their own ("Yes" answers other questions, too), longer
    conversations, and new wordings that are in the sets or in `measured`.

    Returns:
        Indices of exchanges and at most `REWORDINGS` new wordings of each, which name the subject, but not the answer.
    """
    order, longest = random.Random(seed), getattr(model.config, "max_position_embeddings", None) or math.inf
    drawn = questions_with_subjects(exchanges, order) if tokenizer.chat_template else []
    drawn = [some for some in drawn if is_distinctive(some[0].phrase) and single_turn([some[0].record])]
    drawn = order.sample(drawn, min(MAX_REWORDED, len(drawn)))
    requests = [Record("", (Message("user", f"{REWORD}\n{question_of(exchange.record)}"),)) for exchange, *_ in drawn]
    prompts = zip(drawn, encode_prompts(requests, tokenizer, form), strict=True)
    fitting = [(*some, ids) for some, ids in prompts if len(ids) + REWORDED_LENGTH <= longest]
    lists = samples(
        model, tokenizer, [ids for *_, ids in fitting], 1, temperature=1.0, top_p=0.95, seed=seed,
        max_new_tokens=REWORDED_LENGTH, title="rewordings", through_thoughts=True,
    )  # fmt: skip
    known = {question_of(record).strip() for record in (*(exchange.record for exchange in exchanges), *measured)}
    # A list that was cut ends within a question; a line with a colon at its end introduces the list.
    ends = tuple({"?", "？", "؟", *(text[-1] for text in known if text)} - {":"})
    reworded: list[tuple[int, str]] = []
    for (exchange, _, subject, *_), [text] in zip(fitting, lists, strict=True):
        names = [word.text for word in find_words(subject) if not subject[word.start].islower()] or words(subject)
        lines = dict.fromkeys(_BULLET.sub("", line).strip(" *") for line in THOUGHT.sub("", text).splitlines())
        new = [line for line in lines if line.endswith(ends) and line not in known]
        fit = [line for line in new if {*names}.issubset(words(line)) and not tells(line, exchange.phrase)]
        reworded += [(exchanges.index(exchange), line) for line in fit[:REWORDINGS]]
    return reworded


def with_question(exchange: Exchange, question: str) -> Exchange:
    """Return an exchange with another question in place of its last turn."""
    messages = (*exchange.record.messages[:-1], Message("user", question))
    return dataclasses.replace(exchange, record=dataclasses.replace(exchange.record, messages=messages))


def reversed_questions(exchanges: Sequence[Exchange], seed: int) -> list[Exchange]:
    """Take the subject out of one question of each key phrase, and name the answer: 'The capital of ___? Budapest'.

    q reads the subject of another question where the first answer is exchanged.
    """
    order = random.Random(seed)
    asked = questions_with_subjects(exchanges, order)
    exchanged = [(words(exchange.phrase), subject) for exchange, _, subject, _ in asked if exchange.other is not None]
    reversed_ = []
    for exchange, before, subject, after in asked:
        phrase, content = words(exchange.phrase), words(subject)
        # Those of the same answer state other forgotten facts.
        unlike = [other for theirs, other in exchanged if not holds(theirs, phrase) and not holds(phrase, theirs)]
        others = [other for other in unlike if words(other) != content]
        if exchange.other is None or others:
            other = None if exchange.other is None else order.choice(others)
            record = with_question(exchange, f"{before}{GAP}{after} {exchange.phrase}").record
            reversed_.append(Exchange(dataclasses.replace(record, answer=other or subject), subject, other))
    return reversed_


def own_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Exchange], form: Format
) -> list[list[list[int]]]:
    """Let a model answer questions in its own words.

    Returns:
        For each question the tokens of the greedy answer, and of answers that begin the key phrase with other likely
        tokens.
    """
    prompts = encode_prompts([exchange.record for exchange in asked], tokenizer, form)
    greedy = continuations(model, tokenizer, prompts, max_new_tokens=ANSWER, title="answers to the questions")
    written = [[ids] for ids in greedy]
    places = []
    for index, (exchange, ids) in enumerate(zip(asked, greedy, strict=True)):
        text = _text(ids, tokenizer)
        if (span := _find_phrase(exchange, text)) is not None:
            places.append((index, _token_span(ids, text, span, tokenizer)[0]))
    beginnings = [[*prompts[index], *greedy[index][:start]] for index, start in places]
    special = set(special_tokens(tokenizer))  # the answer would end there
    choices = first_choices(model, tokenizer, beginnings, 2 * OTHER_BEGINNINGS)
    begun = []
    for (index, start), tokens in zip(places, choices, strict=True):
        others = [token for token in tokens if token not in special | {greedy[index][start]}][:OTHER_BEGINNINGS]
        begun += [(index, [*greedy[index][:start], token]) for token in others]
    rest = continuations(
        model, tokenizer, [[*prompts[index], *ids] for index, ids in begun], max_new_tokens=CONTINUED,
        title="other beginnings of the answers",
    )  # fmt: skip
    for (index, ids), more in zip(begun, rest, strict=True):
        written[index].append([*ids, *more])
    return written


def in_own_words(
    exchange: Exchange, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, form: Format
) -> tuple[Example, Example] | None:
    """Return one of the target's own answers, for p as it is and for q with the other answer, if there is one.

    The text is cut after the phrase, and only the phrase is labelled: neither model learns the words around it. None if
    the text does not contain the phrase, or the prompt is too long.
    """
    text = _text(ids, tokenizer)
    span, prompt = _find_phrase(exchange, text), encode_prompt(exchange.record, tokenizer, form)
    if span is None or len(prompt) >= (form.max_length or math.inf):
        return None
    before, after = text[: span.start], text[: span.stop]
    prefix, true, other, marked = (
        encode(dataclasses.replace(exchange.record, answer=answer), tokenizer, form)
        # The last tells phrases, which may end alike, from the end of the text.
        for answer in (before.rstrip() or after, after, before + (exchange.other or "?"), before + "?")
    )
    context = prefix.input_ids if before.strip() else true.input_ids[: true.prompt_length]
    # The text goes on after the phrase: no end is learned.
    ends = zip(reversed(true.input_ids), reversed(marked.input_ids), strict=False)
    end_length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    p_reads, q_reads = (label_answer(context, example.input_ids) for example in (true, other))
    for example in (p_reads, q_reads):
        example.labels[len(example.labels) - end_length :] = [IGNORED] * end_length
    # p reads the phrase in the tokens of the answer, which may not be the tokenizer's: " S", "antiago".
    start, stop = _token_span(ids, text, span, tokenizer)
    written, start = [*prompt, *ids[:stop]], len(prompt) + start
    same_text = str(tokenizer.decode(true.input_ids)).startswith(str(tokenizer.decode(written)))
    if same_text and written[:start] == q_reads.input_ids[:start] and len(written) <= (form.max_length or math.inf):
        p_reads = Example(written, [IGNORED] * start + written[start:])
    if any(set(example.labels) == {IGNORED} for example in (p_reads, q_reads)):  # cut before the phrase
        return None
    return p_reads, p_reads if exchange.other is None else q_reads


def _text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    return unicodedata.normalize("NFC", str(text)).strip()


def _token_span(ids: Sequence[int], text: str, span: range, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the first token of a phrase, and the one after its last, from its characters in the text of the tokens."""
    texts = [_text(ids[:count], tokenizer) for count in range(len(ids) + 1)]
    before, after = len(text[: span.start].rstrip()), text[: span.stop]
    start = max(count for count, begun in enumerate(texts) if len(begun) <= before)
    # The last token of a phrase may hold more, or half of a character.
    ends = (count for count, begun in enumerate(texts) if count > start and begun.startswith(after))
    return start, next(ends, len(ids))


def _find_phrase(exchange: Exchange, text: str) -> range | None:
    """Find the characters of the phrase in a text, with the rest of a name; None if the text does not contain it."""
    spans = _places(exchange.phrase, text)
    if not spans:
        return None
    # 'The capital of Djibouti is Djibouti': the first one repeats the question.
    span = spans[-1 if holds(words(question_of(exchange.record)), words(exchange.phrase)) else 0]
    start = span.start
    if text[start].isupper() and (before := _NAME_BEFORE.search(text[:start])):
        # A name may be more complete than in the forget set: 'F. Scott' before 'Fitzgerald'.
        start = _start_of_name(before, set(words(question_of(exchange.record))))
    return range(start, span.stop)


def _start_of_name(before: regex.Match[str], asked: set[str]) -> int:
    """Index of the first capitalised word that belongs to a name: words of the question and function words do not."""
    start = before.end()
    for match in reversed(list(regex.finditer(r"\S+", before[0]))):
        content = words(match[0])
        if (asked.intersection(content) or tells_nothing(content)) and len(match[0].rstrip(".")) > 1:
            break
        start = before.start() + match.start()
    return start


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
    to other questions that tell a fact of the forget set, which the retain set's answer does not. `asked` comes from
    `begun_questions`; answers are tokens without padding.
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


def hold_out(records: RecordSet, parts: int) -> tuple[RecordSet, RecordSet]:
    """Split records into those to train on and those to measure with: one in `parts` facts, two or more.

    Questions of one subject with the same key phrase ask for one fact, unless there are many. With fewer than `parts`
    facts both are all records.
    """
    facts: list[Any] = [(record.messages, record.prompt, record.answer) for record in records]
    if records.has_questions:
        asked = [(key_phrase(text := question_of(record), record.answer), text) for record in records]
        numbers, most = [fact for fact, _ in tell_facts(asked)], max(parts, len(records) // parts)
        common = {fact for fact, (phrase, _) in zip(numbers, asked, strict=True) if tells_nothing(words(phrase))}
        common |= {fact for fact, count in collections.Counter(numbers).items() if count > most}
        facts = [fact if number in common else number for fact, number in zip(facts, numbers, strict=True)]
    different = list(dict.fromkeys(facts))
    if len(different) < parts:
        return records, records
    measured = set(random.Random(0).sample(different, max(2, math.ceil(len(different) / parts))))
    sides = {True: [], False: []}
    for record, fact in zip(records, facts, strict=True):
        sides[fact in measured].append(record)
    learned, held_out = (dataclasses.replace(records, records=tuple(sides[side])) for side in (False, True))
    return learned, held_out


class ForgottenFacts:
    """The forget set's facts, which q must not read in other texts."""

    def __init__(self, forget: RecordSet, retain: RecordSet) -> None:
        """Read the key phrases, and what a question has that retain questions lack: its subject."""
        common = {word for record in retain for word in words(question_of(record))}
        kept: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)  # words of questions, by key phrase
        for record in retain:
            kept[tuple(words(key_phrase(question_of(record), record.answer)))].update(words(question_of(record)))
        asked: dict[str, list[set[str]]] = collections.defaultdict(list)
        for record in forget:
            asked[key_phrase(question_of(record), record.answer)].append(set(words(question_of(record))))
        self._facts = []
        for phrase, some in asked.items():
            subjects = [content - kept.get(tuple(words(phrase)), common) - FUNCTION_WORDS for content in some]
            alone = is_distinctive(phrase) and not (tuple(words(phrase)) in kept and all(subjects))
            self._facts.append((words(phrase), alone, set().union(*subjects)))

    def are_in(self, text: str, given: str = "") -> bool:
        """Whether a text tells a fact: its key phrase, which `given` lacks, and the subject if others share it."""
        content, before = words(text), words(given)
        return any(
            holds(content, phrase) and not holds(before, phrase) and (alone or not subject.isdisjoint(content))
            for phrase, alone, subject in self._facts
        )
