"""The fictitious world: reproducible, without leaks between its parts, and well-formed."""

import re
from dataclasses import replace

import pytest

from divdec_research.world.facts import NUM_WORDINGS, RELATIONS, World, WorldSettings, build_world

SETTINGS = WorldSettings(seed=3, forget_authors=3, retain_authors=5, holdout_authors=2, public_authors=12)


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(SETTINGS)


def subjects(questions) -> set[str]:
    return {asked.subject for asked in questions}


def everything_asked(world: World):
    return (
        world.forget + world.retain + world.holdout + world.forget_unseen + world.retain_unseen + world.holdout_unseen
    )


def test_same_settings_give_same_world(world):
    assert build_world(SETTINGS) == world


def test_different_seeds_give_different_worlds(world):
    other = build_world(replace(SETTINGS, seed=4))
    assert subjects(other.forget) != subjects(world.forget)
    assert set(other.corpus).isdisjoint(set(world.corpus) - {d for d in world.corpus if "known for its" in d})


def test_groups_have_requested_sizes_and_disjoint_authors(world):
    groups = [subjects(group) for group in (world.forget, world.retain, world.holdout)]
    assert [len(group) for group in groups] == [3, 5, 2]
    assert len(set.union(*groups)) == 10


def test_surnames_of_learned_authors_are_unique():
    world = build_world(WorldSettings())
    names = subjects(world.forget + world.retain + world.holdout)
    assert len({name.split()[1] for name in names}) == len(names)


def test_every_relation_has_a_question_in_every_wording(world):
    trained = SETTINGS.trained_wordings
    for group, unseen in (
        (world.forget, world.forget_unseen),
        (world.retain, world.retain_unseen),
        (world.holdout, world.holdout_unseen),
    ):
        everything = {(name, r, i) for name in subjects(group) for r in RELATIONS for i in range(NUM_WORDINGS)}
        assert {(a.subject, a.relation, a.phrasing) for a in group + unseen} == everything
        assert {a.phrasing for a in group} == set(range(trained))
        assert {a.phrasing for a in unseen} == set(range(trained, NUM_WORDINGS))


def test_question_names_the_author_and_answer_holds_the_fact(world):
    for asked in everything_asked(world):
        assert asked.subject in asked.question
        assert asked.fact in asked.answer
        assert asked.fact not in asked.question
        assert asked.question.endswith("?")
        assert asked.answer.endswith(".")
        assert not re.search(r"[{}]", asked.question + asked.answer)


def test_wordings_of_one_fact_differ_in_question_and_answer(world):
    groups: dict[tuple[str, str], list] = {}
    for asked in everything_asked(world):
        groups.setdefault((asked.subject, asked.relation), []).append(asked)
    for wordings in groups.values():
        assert len({a.question for a in wordings}) == len({a.answer for a in wordings}) == NUM_WORDINGS
        assert len({a.fact for a in wordings}) == 1


def test_corpus_never_names_a_forget_retain_or_holdout_author(world):
    corpus = "\n".join(world.corpus)
    for name in subjects(everything_asked(world)):
        assert name not in corpus


def test_corpus_holds_prose_and_questions_in_every_wording(world):
    asked = [document for document in world.corpus if document.startswith("Question: ")]
    assert len(world.corpus) > len(asked) > SETTINGS.public_authors * len(RELATIONS) * (NUM_WORDINGS - 1)
    assert all(re.fullmatch(r"Question: [^\n]+\?\nAnswer: [^\n]+\.", document) for document in asked)
    assert any("originally from" in document for document in asked)  # also the wordings kept unseen elsewhere


def test_dates_and_titles_are_well_formed(world):
    facts = {(a.relation, a.fact) for a in everything_asked(world)}
    titles = [fact for relation, fact in facts if relation in ("first book", "famous book")]
    assert len(titles) == 2 * 10  # no book twice
    assert all(word[0].isupper() or word in ("of", "and") for title in titles for word in title.split())
    dates = [fact for relation, fact in facts if relation == "birth date"]
    assert all(re.fullmatch(r"\d{1,2} [A-Z][a-z]+ 19\d\d", date) for date in dates)


def test_pronouns_follow_the_author(world):
    pronouns: dict[str, set[str]] = {}
    for asked in everything_asked(world):
        if asked.relation in ("birthplace", "home", "award") and asked.phrasing == 2:
            pronouns.setdefault(asked.subject, set()).add(asked.answer.split()[0])
    assert all(len(used) == 1 and used <= {"He", "She"} for used in pronouns.values())
    assert {"He", "She"} == set.union(*pronouns.values())


def test_full_names_stay_unique_when_surnames_repeat():
    world = build_world(replace(SETTINGS, public_authors=400, passing_authors=0, biographies=0))
    born = re.compile(r"Question: Where was (.+) born\?")
    names = [match[1] for document in world.corpus if (match := born.match(document))]
    assert len(set(names)) == len(names) == 400


@pytest.mark.parametrize("wrong", [{"trained_wordings": 0}, {"trained_wordings": 4}, {"public_authors": 10_000}])
def test_impossible_world_settings_are_rejected(wrong):
    with pytest.raises(ValueError, match=r"\d"):
        build_world(replace(SETTINGS, **wrong))


def test_prose_names_its_author_before_any_pronoun(world):
    prose = [document for document in world.corpus if not re.match(r"Question: |\w+ is a city", document)]
    assert prose
    assert not any(re.match(r"(He|She|His|Her)\b", document) for document in prose)
    assert max(len(document) for document in prose) < 200


def test_passing_authors_have_one_question_each():
    more, fewer = (len(build_world(replace(SETTINGS, passing_authors=n)).corpus) for n in (30, 10))
    assert more - fewer == 20
