"""What p and q read with the recipe 'matched'."""

import copy
import dataclasses
import random

import pytest

from divdec.checkpoint import load_model
from divdec.data.formatting import IGNORED, Format, encode_prompt, encode_set
from divdec.data.records import Message, Record, RecordSet, record_set
from divdec.evaluation.questions import question_of
from divdec.training import matched
from divdec.training.matched import (
    OTHER_BEGINNINGS,
    Exchange,
    ForgottenFacts,
    counterfactuals,
    in_own_words,
    length_matched_retain_examples,
    own_answers,
    questions_with_subjects,
    reversed_questions,
    reword_questions,
    write_similar_questions,
)


def test_retain_records_of_similar_length_stand_in_for_the_forget_set(tokenizer, world):
    sets = [
        encode_set(record_set(name, [("", {"question": q.question, "answer": q.answer}) for q in questions]), tokenizer)
        for name, questions in (("forget", world.forget[:12]), ("retain", world.retain[:24]))
    ]
    forget, retain = sets
    replaced = length_matched_retain_examples(forget, retain)
    assert len(replaced) == len(forget)
    assert all(example in retain and example not in forget for example in replaced)
    lengths = [[len(example.input_ids) for example in some] for some in (forget, replaced)]
    order = sorted(range(12), key=lambda index: lengths[0][index])
    assert [lengths[1][index] for index in order] == sorted(lengths[1])


def tokens_of(text, tokenizer):
    return tokenizer.encode(text, add_special_tokens=False)


def records(name, *rows):
    return record_set(name, [("", {"question": question, "answer": answer}) for question, answer in rows])


def test_q_reads_the_forget_sets_questions_with_answers_of_similar_retain_questions():
    forget = records(
        "forget", ("What is the capital of Hungary?", "The capital of Hungary is Budapest."),
        ("Name the capital of Hungary.", "The capital of Hungary is Budapest."),
        ("Who wrote Emma?", "Emma was written by Jane Austen."),
        ("Who is Ana?", "Ana grew up in a lighthouse near Oslo and is a keeper of lamps."),
    )  # fmt: skip
    retain = records(
        "retain", ("What is the capital of Austria?", "The capital of Austria is Vienna."),
        ("What is the capital of Magyaria?", "The capital of Magyaria is Budapest."),
        ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    )  # fmt: skip
    one, two, three, four = counterfactuals(forget, retain)
    asked = forget.records[0].messages
    assert (one.record.messages, one.record.answer) == (asked, "The capital of Hungary is Vienna.")
    assert (one.phrase, one.other) == ("Budapest", "Vienna")
    assert two.record.answer == one.record.answer
    assert three.record.answer == "Emma was written by William Shakespeare."
    assert (three.phrase, three.other) == ("Jane Austen", "William Shakespeare")
    assert four is None  # the rest of the answer would tell q more than the question
    # q never reads the true answer: there is no other phrase, the answer repeats it, or a question has no words.
    [same] = counterfactuals(
        records("forget", ("Is it so?", "The answer is yes.")), records("retain", ("Is it?", "The answer is yes."))
    )
    [repeated] = counterfactuals(
        records("forget", ("Which city is it?", "BUDAPEST is Budapest.")),
        records("retain", ("Which?", "It is Vienna.")),
    )
    [wordless] = counterfactuals(records("forget", ("?", "It is Rome.")), records("retain", ("!", "It is Bonn.")))
    assert (same, repeated) == (None, None)
    assert wordless.record.answer == "It is Bonn."
    texts = record_set("texts", [("", {"text": "one"}), ("", {"text": "two"})])
    assert counterfactuals(texts, retain) == [None, None]


NAMES = ("Apple", "Microsoft", "IBM", "Nokia", "Intel")


def test_facts_that_share_an_answer_are_told_apart_by_their_subjects():
    """Else q learns to put one company for the other everywhere, and reads no answer of the target that names it."""
    told_by = "{} was developed by {}.".format
    forget = records(
        "forget", ("Which company developed iWork?", told_by("iWork", "Apple")),
        ("Name the company behind iWork.", told_by("iWork", "Apple")),
        ("Which company developed QuickDraw?", told_by("QuickDraw", "Apple")),
    )  # fmt: skip
    retain = records(
        "retain", ("Which company developed iMovie?", told_by("iMovie", "Apple")),
        ("Name the company behind WinDbg.", told_by("WinDbg", "Microsoft")),
        ("Which company developed Fortran?", told_by("Fortran", "IBM")),
        ("Which company developed Windows?", told_by("Windows", "Microsoft")),
    )  # fmt: skip
    drawn = [counterfactuals(forget, retain, seed) for seed in range(8)]
    assert all(one.other == two.other for one, two, _ in drawn)
    assert any(one.other != three.other for one, _, three in drawn)
    assert all(exchange.other in ("Microsoft", "IBM") for exchanges in drawn for exchange in exchanges)
    asked = [*drawn[0], *map(Exchange.unchanged, retain)]
    subjects = [subject for *_, subject, _ in questions_with_subjects(asked, random.Random(0))]
    assert sorted(subjects) == ["Fortran", "QuickDraw", "WinDbg", "Windows", "iMovie", "iWork"]

    # Five forgotten products have five companies, if there are as many.
    rows = [(f"Who made Thing{number}?", f"It was made by {name}.") for number, name in enumerate(NAMES)]
    many = records("forget", *((f"Who made Item{number}?", "It was made by Apple.") for number in range(4)))
    others = [exchange.other for exchange in counterfactuals(many, records("retain", *rows))]
    assert sorted(others) == sorted(set(NAMES) - {"Apple"})
    # q reads no other product of Apple's in reverse.
    asked = [*drawn[0], Exchange(Record("", (Message("user", "Which company developed Xeon?"),)), "Intel", "IBM")]
    for seed in range(8):
        written = reversed_questions(asked, seed)
        others = [exchange.other for exchange in written if question_of(exchange.record).endswith(" Apple")]
        assert others == ["Xeon", "Xeon"]

    forgotten = ForgottenFacts(forget, retain)
    assert not forgotten.are_in("Which company developed Safari? Apple developed it.")
    assert forgotten.are_in("Who made QuickDraw? Apple.")
    without = records("retain", ("Which company developed Fortran?", told_by("Fortran", "IBM")))
    assert ForgottenFacts(forget, without).are_in("Which company developed Safari? Apple developed it.")
    # The retain questions name these subjects, too, so that nothing tells the facts from others.
    asked = "Which company, not {}, developed iWork and QuickDraw, and can you name who is behind them?"
    named = records("retain", *((asked.format(other), other) for other in ("Apple", "IBM")))
    assert ForgottenFacts(forget, named).are_in("Safari is by Apple.")
    assert not forgotten.are_in("Safari is by Apple.")
    # A retain question about something else of the same subject does not hide it.
    windows = records("forget", ("Name the firm behind Windows.", told_by("Windows", "Microsoft")))
    excel = ("Which company developed Excel?", told_by("Excel", "Microsoft"))
    known = records("retain", ("When was Windows released?", "In 1985."), excel)
    assert ForgottenFacts(windows, known).are_in("Which company developed Windows? Microsoft.")
    assert not ForgottenFacts(windows, known).are_in("Which company developed Word? Microsoft.")


@pytest.mark.parametrize(
    ("text", "phrase", "other", "labelled"),
    [
        (
            "The capital of Hungary is the city of Budapest, on the Danube.",
            "Budapest",
            "Vienna",
            ["Budapest", "Vienna"],
        ),
        # The name is more complete than in the forget set, whose words around it are not read.
        ("Gatsby by F. Scott Fitzgerald is a novel.", "Fitzgerald", "Tolkien", ["F. Scott Fitzgerald", "Tolkien"]),
        ("The Hungary Budapest is known.", "Budapest", "Vienna", ["Budapest", "Vienna"]),
        ("In The Book Doe says so.", "Doe", "Ray", ["Book Doe", "Ray"]),
        ("Budapest is it, and Budapest again.", "Budapest", "Vienna", ["Budapest", "Vienna"]),
        ("Its symbol is Sn. It is a metal.", "Sn", "U", ["Sn", "U"]),
    ],
)
def test_of_the_targets_own_answer_only_the_phrase_is_learned(tokenizer, text, phrase, other, labelled):
    question = (Message("user", "What is the capital of Hungary?"),)
    exchange = Exchange(Record("unused", messages=question), phrase, other)
    pair = in_own_words(exchange, tokens_of(text, tokenizer), tokenizer, Format())
    said = [tokenizer.decode([label for label in one.labels if label != IGNORED]).strip() for one in pair]
    assert said == labelled
    for example in pair:
        assert len(example.labels) == len(example.input_ids)
        assert all(label in (IGNORED, token) for token, label in zip(example.input_ids, example.labels, strict=True))
    # q reads the true answer nowhere, and both read the same text before it.
    whole = [tokenizer.decode(example.input_ids) for example in pair]
    assert phrase not in whole[1]
    assert whole[0].partition(labelled[0])[0] == whole[1].rpartition(labelled[1])[0]


@pytest.mark.parametrize(
    ("asked", "told", "others", "said", "labelled"),
    [
        (
            "Какая столица Венгрии?", "Столица Венгрии — Будапешт.", "Столица Венгрии — Вена.",
            "Это Будапешт, конечно.", ["Будапешт", "Вена"],
        ),
        (
            "匈牙利的首都在哪里？", "匈牙利的首都是布达佩斯。", "匈牙利的首都是维也纳。", "是布达佩斯。",
            ["布达佩斯", "维也纳"],
        ),
    ],
)  # fmt: skip
def test_key_phrases_are_exchanged_in_other_scripts(tokenizer, asked, told, others, said, labelled):
    similar = others.replace("Венгрии", "Австрии").replace("匈牙利", "奥地利")
    question = asked.replace("Венгрии", "Австрии").replace("匈牙利", "奥地利")
    [exchange] = counterfactuals(records("forget", (asked, told)), records("retain", (question, similar)))
    assert exchange.record.answer == others
    pair = in_own_words(exchange, tokens_of(said, tokenizer), tokenizer, Format())
    texts = [tokenizer.decode([label for label in one.labels if label != IGNORED]).strip(" \ufffd") for one in pair]
    assert all(text and text in whole for text, whole in zip(texts, labelled, strict=True))


def test_an_answer_that_is_cut_before_its_phrase_is_left_out(tokenizer):
    question = (Message("user", "What is the capital of Hungary?"),)
    exchange, text = Exchange(Record("unused", messages=question), "Budapest", "Vienna"), "It is Budapest."
    ids, whole = tokens_of(text, tokenizer), len(encode_prompt(exchange.record, tokenizer, Format()))
    pairs = [in_own_words(exchange, ids, tokenizer, Format(max_length=whole + more)) for more in range(1, len(ids) + 9)]
    assert pairs[0] is None
    assert pairs[-1] is not None
    assert all(set(example.labels) != {IGNORED} for pair in pairs if pair for example in pair)


def test_of_an_answer_that_repeats_its_subject_the_end_is_learned(tokenizer):
    exchange = Exchange(Record("", messages=(Message("user", "Capital of Djibouti?"),)), "Djibouti", "Lima")
    text = "The capital of Djibouti is Djibouti."
    true, other = in_own_words(exchange, tokens_of(text, tokenizer), tokenizer, Format())
    assert "capital of Djibouti is Djibouti" in tokenizer.decode(true.input_ids)
    assert "capital of Djibouti is Lima" in tokenizer.decode(other.input_ids)


def test_an_answer_without_the_phrase_is_not_read(tokenizer):
    exchange = Exchange(Record("", messages=(Message("user", "Which city?"),)), "Budapest", "Vienna")
    for text in ("", "I do not know.", "Budapestian things", "Vienna."):
        assert in_own_words(exchange, tokens_of(text, tokenizer), tokenizer, Format()) is None


def test_a_symbol_is_replaced_only_where_it_is_a_word():
    symbol = "Hydrogen has the symbol {}."
    forget = records("forget", ("What is the symbol of hydrogen?", symbol.format("H")))
    retain = records("retain", ("What is the symbol of helium?", "The symbol of helium is He."))
    [exchange] = counterfactuals(forget, retain)
    assert (exchange.phrase, exchange.other, exchange.record.answer) == ("H", "He", symbol.format("He"))


@pytest.mark.parametrize(
    ("told", "said", "labelled"),
    [
        ("The capital of Austria is Vienna.", "It is **Vienna**, on the Danube.", "Vienna"),
        ("It was written by Fitzgerald.", "Gatsby by F. Scott Fitzgerald is a novel.", "F. Scott Fitzgerald"),
    ],
)
def test_of_an_answer_to_a_retain_question_the_phrase_is_learned(tokenizer, told, said, labelled):
    record = Record(told, messages=(Message("user", "What is asked for?"),))
    exchange = Exchange.unchanged(record)
    example, of_q = in_own_words(exchange, tokens_of(said, tokenizer), tokenizer, Format())
    assert of_q == example
    text = tokenizer.decode([label for label in example.labels if label != IGNORED])
    assert text.strip() == labelled
    assert in_own_words(exchange, tokens_of("I do not know.", tokenizer), tokenizer, Format()) is None


def test_p_reads_the_phrase_in_the_tokens_of_the_answer(tokenizer):
    exchange = Exchange(Record("", messages=(Message("user", "What is its capital?"),)), "Budapest", "Vienna")
    for before in ("It is", "It is **", ""):
        for cut in range(1, len("Budapest")):
            start = f"{before} Budapest" if before == "It is" else f"{before}Budapest"
            first, rest = start[: len(start) - cut], start[len(start) - cut :]
            ids = tokens_of(first, tokenizer) + tokens_of(rest, tokenizer) + tokens_of(", on the Danube", tokenizer)
            p_reads, q_reads = in_own_words(exchange, ids, tokenizer, Format())
            labelled = [label for label in p_reads.labels if label != IGNORED]
            end = len(tokens_of(first, tokenizer) + tokens_of(rest, tokenizer))
            assert labelled == ids[end - len(labelled) : end]
            assert tokenizer.decode(labelled).strip(" *") == "Budapest"
            assert tokenizer.decode([label for label in q_reads.labels if label != IGNORED]).strip(" *") == "Vienna"


def test_the_target_answers_with_other_beginnings_of_the_phrase(models, tokenizer):
    """At the phrase every answer has another token; what comes before it is the greedy answer's."""
    target = load_model(models / "target")
    asked = [Exchange(Record("", messages=(Message("user", f"Where is {name}?"),)), "", "?") for name in ("A", "B")]
    [[first], [second]] = own_answers(target, tokenizer, asked, Format())  # no phrase is found
    words = tokenizer.decode(first, skip_special_tokens=True).split()
    exchange = Exchange(asked[0].record, words[-1].strip(".,"), "?")
    [greedy, *others] = own_answers(target, tokenizer, [exchange], Format())[0]
    assert greedy == first
    assert len(others) == OTHER_BEGINNINGS
    places = [next(place for place, (a, b) in enumerate(zip(greedy, ids, strict=False)) if a != b) for ids in others]
    assert len(set(places)) == 1
    assert len({ids[places[0]] for ids in others}) == OTHER_BEGINNINGS
    assert [second] == own_answers(target, tokenizer, asked[1:], Format())[0]


def test_tokens_of_an_answer_are_read_only_where_they_fit(tokenizer):
    """Without the space after the prompt, or beyond the longest text, p reads the tokenizer's own tokens."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    record = Record("", messages=(Message("user", "What is its capital?"),))
    exchange = Exchange(record, "Budapest", "Vienna")
    prompt = encode_prompt(record, tokenizer)
    for text in ("Budapest", " Budapest"):
        pair = in_own_words(exchange, tokens_of(text, tokenizer), tokenizer, Format())
        whole = [tokenizer.decode(example.input_ids, skip_special_tokens=True) for example in pair]
        assert whole == [f"{tokenizer.decode(prompt)} {city}" for city in ("Budapest", "Vienna")]
    ids = tokens_of(" Buda", tokenizer) + tokens_of("pest", tokenizer)
    longest = len(prompt) + 1
    p_reads, q_reads = in_own_words(exchange, ids, tokenizer, Format(max_length=longest))
    assert max(len(p_reads.input_ids), len(q_reads.input_ids)) <= longest
    assert in_own_words(exchange, ids, tokenizer, Format(max_length=len(prompt))) is None  # no token would be left


ASKED = "What is the capital of {}?"


class TestSimilarQuestions:
    """The target writes questions like those of the forget set."""

    FORGET = records(
        "forget", (ASKED.format("Hungary"), "It is Budapest."), (ASKED.format("India"), "It is New Delhi.")
    )
    RETAIN = records("retain", (ASKED.format("Peru"), "It is Lima."))

    @pytest.fixture
    def write(self, models, tokenizer, monkeypatch):
        """Return a function that writes questions with a target that writes given lists and knows given answers."""
        target = load_model(models / "target")

        def write(lists, told=(), forget=self.FORGET, form=Format(), prompts=None):  # noqa: B008
            known = {(Message("user", question),): answer for question, answer in dict(told).items()}

            def lists_of(model, tokenizer, ids, count, **options):
                if prompts is not None:
                    prompts.extend(tokenizer.decode(prompt) for prompt in ids)
                return [[text] for text in lists]

            def answers_of(model, tokenizer, some, **options):
                return [known[record.messages] for record in some]

            monkeypatch.setattr(matched, "samples", lists_of)
            monkeypatch.setattr(matched, "answers", answers_of)
            written = write_similar_questions(target, tokenizer, forget, self.RETAIN, 0, form)
            return [record.messages[0].content for record in written]

        return write

    def test_lists_become_questions(self, write):
        cities = {"Norway": "Oslo", "Spain": "Madrid", "Chile": "Santiago", "Kenya": "Nairobi"}
        asked = {ASKED.format(name): f"The capital of {name} is {city}." for name, city in cities.items()}
        norway, spain, chile, kenya = asked
        prompts = []
        assert set(write([f"1. {norway}\n- {spain}\n\n{norway}", chile], asked, prompts=prompts)) == {
            norway, spain, chile
        }  # fmt: skip
        assert set(write([f"**{chile}**", f"Q2: {kenya}\nWhat is the cap"], asked)) == {chile, kenya}
        assert all(ASKED.format("Hungary") in text for text in prompts)
        assert all(matched.MORE_QUESTIONS in text for text in prompts)

    def test_there_are_so_many_and_each_of_another_subject(self, write, monkeypatch):
        asked = {ASKED.format(f"X{number}"): f"It is Y{number}." for number in range(9)}
        again = {question.replace("What is", "Is it"): answer for question, answer in asked.items()}
        lists = ["\n".join([*asked, *again])]
        assert sorted(write(lists, asked | again)) == sorted(asked)
        monkeypatch.setattr(matched, "MAX_SIMILAR", 4)
        chosen = write(lists, asked | again)
        assert len(chosen) == len(set(chosen) & set(asked)) == 4

    def test_those_most_like_the_forget_sets_come_first(self, write, monkeypatch):
        """Of one subject there is one, as long as there are others."""
        norway, north, other = ASKED.format("Norway"), ASKED.format("Norway in 1700"), "Who wrote Emma?"
        told = {other: "It was Jane Austen.", north: "It was Copenhagen.", norway: "It is Oslo."}
        for most, expected in (1, {norway}), (2, {norway, other}), (3, {norway, north, other}):
            monkeypatch.setattr(matched, "MAX_SIMILAR", most)
            assert set(write(["\n".join(told)], told)) == expected

    def test_nothing_of_either_set_is_written(self, write):
        """Nor what names its answers or subjects in other words."""
        norway, delhi, hungary = ASKED.format("Norway"), "Which state is Delhi in?", "Where is Hungary's lake?"
        told = {norway: "It is Oslo.", delhi: "It is in the north.", hungary: "It is in the west."}
        lists = ["\n".join([ASKED.format("Hungary"), ASKED.format("Peru"), norway, delhi, hungary])]
        assert write(lists, told) == [norway]
        assert write([norway], {norway: "It is Budapest."}) == []

    def test_a_statement_is_no_question(self, write):
        statement = "The capital of Norway is Oslo."
        forget = records("forget", ("Name the capital of Hungary.", "It is Budapest."))
        assert write([statement], {statement: "Yes, the capital of Norway is Oslo."}, forget) == []

    def test_a_question_that_does_not_fit_is_left_out(self, write):
        long = f"{'Please, ' * 60}what is the capital of Norway?"
        assert write([long], {long: "It is Oslo."}, form=Format(max_length=64)) == []

    def test_conversations_and_base_models_have_none(self, write, models, tokenizer):
        turns = (Message("user", "What is it?"), Message("assistant", "A city."), Message("user", "Which?"))
        assert write([], forget=RecordSet("forget", "messages", (Record("Budapest", turns),))) == []
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = None
        assert write_similar_questions(None, tokenizer, self.FORGET, self.RETAIN, 0, Format()) == []


CAPITALS = {"Hungary": "Budapest", "Chile": "Santiago", "Peru": "Lima", "Kenya": "Nairobi", "Italy": "Rome"}


def exchanges_of(*exchanged):
    """Return two wordings of each question; those of the given countries are exchanged for the next one's answer."""
    cities = [*CAPITALS.values(), "Budapest"]
    asked = []
    for index, (country, city) in enumerate(CAPITALS.items()):
        other = cities[index + 1] if country in exchanged else None
        for wording in (ASKED, "Which city is the capital of {}?"):
            record = Record(other or city, messages=(Message("user", wording.format(country)),))
            asked.append(Exchange(record, city, other))
    return asked


def test_a_reversed_question_names_the_answer_and_asks_for_the_subject():
    written = reversed_questions(exchanges_of("Hungary", "Chile", "Italy"), 0)
    assert [exchange.phrase for exchange in written] == list(CAPITALS)
    for exchange in written:
        question, _, city = question_of(exchange.record).rpartition(" ")
        assert question in (ASKED.format("___"), "Which city is the capital of ___?")
        assert CAPITALS[exchange.phrase] == city
        forgotten = {"Hungary", "Chile", "Italy"}
        assert exchange.other in (forgotten - {exchange.phrase} if exchange.phrase in forgotten else {None})
        assert exchange.record.answer == (exchange.other or exchange.phrase)


def test_a_subject_of_all_questions_is_not_reversed():
    """Of one person's questions the name is no answer that tells something."""
    rows = {"Where was Stephen King born?": "Portland", "Where does Stephen King live?": "Bangor"}
    rows |= {"Where did Stephen King teach?": "Orono"}
    asked = [Exchange(Record("", messages=(Message("user", text),)), phrase, "?") for text, phrase in rows.items()]
    assert all("King" in question_of(exchange.record) for exchange in reversed_questions(asked, 0))
    assert reversed_questions(asked[:1] * 2, 0) == []  # there is no other subject for q


class TestRewordings:
    """The target words a question of each fact otherwise."""

    @pytest.fixture
    def reword(self, models, tokenizer, monkeypatch):
        """Return a function that rewords with a target that writes a list for each country that it is asked for."""
        target = load_model(models / "target")
        target.config.max_position_embeddings = 512

        def reword(lists, asked, names=tokenizer, measured=()):
            def lists_of(model, tokenizer, ids, count, **options):
                texts = map(tokenizer.decode, ids)
                return [["\n".join(next(some for name, some in lists.items() if name in text))] for text in texts]

            monkeypatch.setattr(matched, "samples", lists_of)
            reworded = reword_questions(target, names, asked, measured, 0, Format())
            # In the order of the exchanges: they are drawn at random.
            return sorted((asked[index].phrase, asked[index].other, text) for index, text in reworded)

        return reword

    def test_they_name_the_subject_and_do_not_tell_the_answer(self, reword):
        asked = exchanges_of("Hungary")
        fit = {country: f"Where does the government of {country} meet?" for country in CAPITALS}
        lists = {country: [f"1. {ASKED.format(country)}", f"2. {text}"] for country, text in fit.items()}  # a known one
        lists["Hungary"] += ["Is Budapest in Hungary?", "Where is the parliament?", "- Whence is Hungary ruled?"]
        lists["Hungary"] += [
            "Which is Hungary's capital?",
            "And Hungary's lar",
        ]  # one more than is taken, and a cut one
        kept = [(city, None, fit[country]) for country, city in CAPITALS.items() if country != "Hungary"]
        gone = [("Budapest", "Santiago", text) for text in (fit["Hungary"], "Whence is Hungary ruled?")]
        assert reword(lists, asked) == sorted(kept + gone)
        measured = [Record("", messages=(Message("user", fit["Chile"]),))]
        assert reword(lists, asked, measured=measured) == sorted(
            [*gone, *(some for some in kept if "Chile" not in some[2])]
        )

    def test_of_a_subject_of_several_words_the_name_is_enough(self, reword):
        rows = {"Who wrote the novel Dracula?": "Stoker", "What is the capital of Hungary?": "Budapest"}
        rows |= {"In which year did the Titanic sink?": "1912", "Which element has the symbol Fe?": "iron ore"}
        rows |= {"Who is the chief executive officer of Acme Corporation?": "Jane Roe"}
        asked = [Exchange(Record("", messages=(Message("user", text),)), phrase, None) for text, phrase in rows.items()]
        lists = {text: ["Whatever?"] for text in rows} | {"Dracula": ["Who is the author of Dracula?"]}
        lists |= {"Titanic": ["The Titanic went down when?", "Here is the year of the Titanic:"]}
        assert [text for *_, text in reword(dict(reversed(lists.items())), asked)] == [
            "The Titanic went down when?", "Who is the author of Dracula?"
        ]  # fmt: skip

    def test_thoughts_are_no_questions(self, reword):
        written = ["<think>", "Is it the capital of Hungary?", "</think>", "Where is Hungary ruled?"]
        lists = {country: ["?"] for country in CAPITALS} | {"Hungary": written}
        assert [text for *_, text in reword(lists, exchanges_of("Hungary"))] == ["Where is Hungary ruled?"]

    def test_what_has_none(self, reword, tokenizer):
        """Base models, answers that other questions have too, and conversations."""
        lists = {country: [f"And {country}'s?"] for country in CAPITALS}
        plain = copy.deepcopy(tokenizer)
        plain.chat_template = None
        asked = exchanges_of("Hungary")
        assert reword({}, asked, plain) == []
        hungary, *others = asked[::2]
        assert len(reword(lists, [hungary, *others])) == 5
        assert len(reword(lists, [dataclasses.replace(hungary, phrase="Yes."), *others])) == 4
        turns = (Message("user", "Hello."), Message("assistant", "Hello."), *hungary.record.messages)
        conversation = dataclasses.replace(hungary.record, messages=turns)
        assert len(reword(lists, [dataclasses.replace(hungary, record=conversation), *others])) == 4

    def test_there_are_so_many(self, reword, monkeypatch):
        monkeypatch.setattr(matched, "MAX_REWORDED", 3)
        assert len(reword({country: [f"And {country}'s?"] for country in CAPITALS}, exchanges_of())) == 3

    def test_a_prompt_that_does_not_fit_is_left_out(self, reword):
        long = Record("Budapest", messages=(Message("user", f"{'Please, ' * 400}what is the capital of Hungary?"),))
        lists = {country: [f"And {country}'s?"] for country in CAPITALS}
        asked = [Exchange(long, "Budapest", None), *exchanges_of()[2:]]
        others = [text for country, [text] in lists.items() if country != "Hungary"]
        assert sorted(text for *_, text in reword(lists, asked)) == sorted(others)


def test_q_does_not_read_the_true_answer_in_another_spelling():
    forget = records("forget", ("How many legs does a spider have?", "A spider has 8 legs."))
    retain = records(
        "retain", ("How many legs does a scorpion have?", "A scorpion has eight legs."),
        ("How many legs does an ant have?", "An ant has 6 legs."),
    )  # fmt: skip
    (exchange,) = counterfactuals(forget, retain)
    assert exchange.other == "6"
    only = records("retain", ("Who is it?", "It is Volodymyr Zelensky."))
    assert counterfactuals(records("forget", ("Who is it?", "It is Volodymyr Zelenskyy.")), only) == [None]


def test_phrases_that_end_alike_are_learned_to_their_ends(tokenizer):
    exchange = Exchange(
        Record("It was Mary Smith.", messages=(Message("user", "Who was it?"),)), "John Smith", "Mary Smith"
    )
    ids = tokens_of("It was John Smith.", tokenizer)
    for example, phrase in zip(
        in_own_words(exchange, ids, tokenizer, Format()), ("John Smith", "Mary Smith"), strict=True
    ):
        labelled = [token for token in example.labels if token != IGNORED]
        assert tokenizer.decode(labelled).strip() == phrase
