import json
import os
import stat

import pytest

from divdec import UsageError
from divdec.runs import check_output, output_folder, record, settings_hash, write_json, write_text


def _is_run(folder):
    return (folder / "run.json").is_file()


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with output_folder(tmp_path / "a" / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "x"
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path / "b") as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_failed_replacement_leaves_the_earlier_result(tmp_path):
    with output_folder(tmp_path / "out") as folder:
        write_json(folder / "run.json", 1)
    with pytest.raises(RuntimeError), output_folder(tmp_path / "out", overwrite=True, ours=_is_run) as folder:
        write_json(folder / "run.json", 2)
        raise RuntimeError
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == 1
    with output_folder(tmp_path / "out", overwrite=True, ours=_is_run) as folder:
        write_json(folder / "run.json", 3)
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == 3
    assert os.listdir(tmp_path) == ["out"]


def test_files_keep_the_users_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "file", "x")
        with output_folder(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        check_output(tmp_path / "file", overwrite=True, ours=lambda folder: True)


def test_a_record_says_what_decided_the_figures():
    content = record("train", {"a": 1}, figure=2)
    assert content["settings"] == {"a": 1}
    assert content["figure"] == 2
    assert content["versions"]["torch"]
    assert settings_hash({"a": 1, "b": 2}) == settings_hash({"b": 2, "a": 1}) != settings_hash({"a": 2, "b": 2})
