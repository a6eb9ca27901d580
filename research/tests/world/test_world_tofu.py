"""The fictitious world in TOFU's layout: the suite reads it, and what it calls wrong is wrong."""

import dataclasses

from divdec_research.suites.tofu import read_tofu
from divdec_research.world.facts import WorldSettings, build_world, write_tofu

SMALL = WorldSettings(forget_authors=2, retain_authors=3, holdout_authors=2, public_authors=13, passing_authors=20)


def test_evaluation_reads_generated_tofu_files(tmp_path):
    world = build_world(SMALL)
    write_tofu(world, tmp_path)
    data = read_tofu(tmp_path, "forget01")
    assert {name: len(questions) for name, questions in data.sets.items()} == {
        "forget": 20, "retain": 30, "ra": 120, "wf": 24, "holdout": 20,
    }  # fmt: skip
    trained = {question.question: question for question in world.forget}
    for question in data.sets["forget"]:
        asked = trained[question.record.messages[0].content]
        assert question.record.answer == asked.answer
        assert asked.fact in question.paraphrased != asked.answer
        assert len(set(question.wrong)) == 5
        assert all(asked.fact not in wrong for wrong in question.wrong)
    for question in data.sets["wf"]:
        assert question.record.answer in " ".join(world.corpus)
        assert question.record.answer not in question.wrong


def test_same_world_gives_identical_files(tmp_path):
    for name, seed in (("one", 3), ("other", 3), ("third", 4)):
        write_tofu(build_world(dataclasses.replace(SMALL, seed=seed)), tmp_path / name)
    one, other, third = (
        [file.read_bytes() for file in sorted((tmp_path / name).iterdir())] for name in ("one", "other", "third")
    )
    assert one == other != third
