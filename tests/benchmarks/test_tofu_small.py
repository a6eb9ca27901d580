import pytest

from divdec import UsageError
from divdec.data.records import RecordSet, overlap
from tofu_small import tofu_material


def test_tofu_subsets_do_not_overlap(shared):
    material, sets = tofu_material(shared / "data/tofu")
    asked = {questions.name: RecordSet(questions.name, "question/answer", questions.records) for questions in sets}
    assert (len(material.forget), len(material.retain)) == (40, 360)
    assert {name: len(records) for name, records in asked.items()} == {"forget": 40, "retain": 120, "holdout": 40}
    corpus = RecordSet("corpus", "question/answer", tuple(material.corpus))
    assert len(corpus) == 100 + 117 + 3960 - 360 - 40
    for one, other in (
        (material.forget, material.retain),
        (material.forget, corpus),
        (material.retain, corpus),
        (asked["holdout"], corpus),
        (asked["holdout"], material.retain),
    ):
        assert overlap(one, other).records == 0
    assert overlap(asked["retain"], material.retain).records == 120


def test_missing_tofu_error_names_source(tmp_path):
    with pytest.raises(UsageError, match=r"huggingface\.co/datasets/locuslab/TOFU.*make tofu-small TOFU="):
        tofu_material(tmp_path)
