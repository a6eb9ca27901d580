import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from divdec import UsageError, runs
from divdec.runs import (
    ResultCache,
    ResumableOutput,
    RunFolder,
    check_output,
    file_sha256,
    output_folder,
    path_digests,
    read_record,
    record,
    settings_hash,
    write_json,
    write_text,
)


def _is_run(folder):
    return (folder / "run.json").is_file()


def test_output_folder_is_created_atomically(tmp_path):
    with output_folder(tmp_path / "a" / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "x"
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path / "b") as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_failed_replacement_leaves_previous_result(tmp_path):
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


def test_output_files_follow_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "file", "x")
        with output_folder(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def test_a_mount_point_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="give one within it"), output_folder(tmp_path / "out"):
        raise AssertionError("the work has begun")


def test_a_result_that_cannot_be_moved_is_kept(tmp_path, monkeypatch):
    def busy(*paths):
        raise OSError(16, "Device or resource busy")

    said = pytest.raises(UsageError, match="busy; the result of this run is in")
    with said as error, output_folder(tmp_path / "out") as folder:
        (folder / "result").write_text("done")
        monkeypatch.setattr(os, "replace", busy)
    assert (Path(str(error.value).rpartition(" ")[2]) / "result").read_text() == "done"


def test_file_in_place_of_output_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        check_output(tmp_path / "file", overwrite=True, ours=lambda folder: True)


def test_output_folder_in_a_folder_without_write_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(UsageError, match=f"{tmp_path} may not be written to"):
        check_output(tmp_path / "new" / "out", overwrite=False, ours=lambda folder: True)


def test_run_record_contains_settings_metrics_and_versions():
    content = record("train", {"a": 1}, figure=2)
    assert content["settings"] == {"a": 1}
    assert content["figure"] == 2
    assert content["versions"]["torch"]
    assert settings_hash({"a": 1, "b": 2}) == settings_hash({"b": 2, "a": 1}) != settings_hash({"a": 2, "b": 2})


def test_commit_is_that_of_divdecs_own_source(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=Ana", "-c", "user.email=ana@example.org")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--message", "another repository")
    monkeypatch.chdir(tmp_path)
    assert record("train", {})["git_commit"] != git("rev-parse", "HEAD")
    source = tmp_path / "runs.py"
    source.write_text("")
    monkeypatch.setattr(runs, "__file__", str(source))
    assert record("train", {})["git_commit"] is None  # installed in a folder of another repository
    git("add", "runs.py")
    git("commit", "--message", "a checkout of divdec")
    assert record("train", {})["git_commit"] == git("rev-parse", "HEAD")


def test_interrupted_run_resumes_and_finished_run_requires_overwrite(tmp_path):
    output, work = tmp_path / "out", {"lr": 1, "data": "a"}
    with RunFolder.open(output, "train", work, work) as run:
        assert not run.resumed
        assert read_record(output)["status"] == "running"
        (output / "checkpoint").write_text("x")
    with RunFolder.open(output, "train", work, work, overwrite=True, stale=("check*",)) as run:
        assert run.resumed
    assert (output / "checkpoint").exists()
    with pytest.raises(UsageError, match=r"unfinished run .*\(lr differ\)"):
        RunFolder.open(output, "train", {"lr": 2}, {"lr": 2})
    assert run.finish(loss=0.5)["loss"] == read_record(output)["loss"] == 0.5
    assert read_record(output)["status"] == "finished"
    with pytest.raises(UsageError, match="--overwrite"):
        RunFolder.open(output, "train", work, work)
    with pytest.raises(UsageError, match="not an earlier result"):
        RunFolder.open(output, "eval", work, work, overwrite=True)
    with RunFolder.open(output, "train", work, work, extend=True) as run:
        assert run.resumed
    with pytest.raises(UsageError, match=r"holds a run .*\(data differ\)"):
        RunFolder.open(output, "train", work, {"lr": 1, "data": "b"}, extend=True)
    with RunFolder.open(output, "train", work, work, overwrite=True, stale=("*",)) as run:
        assert not run.resumed
    assert os.listdir(output) == ["run.json"]


def test_output_folder_rejects_second_process(tmp_path):
    run = RunFolder.open(tmp_path / "out", "train", {"lr": 1}, {"lr": 1})
    (tmp_path / "out" / "work").write_text("hours")
    for decides in ({"lr": 1}, {"lr": 2}):
        with pytest.raises(UsageError, match=r"another `divdec train` is running in .*; wait for it"):
            RunFolder.open(tmp_path / "out", "train", decides, decides, overwrite=True, stale=("*",))
    assert (tmp_path / "out" / "work").read_text() == "hours"
    with run:
        run.finish()
    with RunFolder.open(tmp_path / "out", "train", {"lr": 2}, {"lr": 2}, overwrite=True, stale=("*",)) as other:
        assert not other.resumed
        assert sorted(os.listdir(tmp_path / "out")) == [".lock", "run.json"]
    assert os.listdir(tmp_path / "out") == ["run.json"]


def test_lock_of_a_killed_process_does_not_block(tmp_path):
    program = (
        "import pathlib, sys, time; from divdec.runs import RunFolder\n"
        "run = RunFolder.open(pathlib.Path(sys.argv[1]), 'train', {}, {}); print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(UsageError, match="another `divdec train` is running"):
            RunFolder.open(tmp_path / "out", "train", {}, {})
        process.kill()
    with RunFolder.open(tmp_path / "out", "train", {}, {}) as run:
        assert run.resumed


def test_digests_of_named_paths_change_with_their_content(tmp_path):
    (tmp_path / "folder" / ".cache").mkdir(parents=True)
    (tmp_path / "folder" / "weights").write_text("a")
    (tmp_path / "folder" / ".cache" / "x").write_text("not read")
    (tmp_path / "file").write_text("a")
    options = {name: str(tmp_path / name) for name in ("folder", "file", "absent")} | {"number": 3, "none": None}
    before = path_digests(options)
    assert before == {"folder": {"weights": before["file"]}, "file": before["file"]}
    (tmp_path / "folder" / "weights").write_text("b")
    assert path_digests(options)["folder"] != before["folder"]


def test_foreign_folder_gets_no_lock(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        RunFolder.open(tmp_path / "mine", "train", {}, {})
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]


def test_resumable_output_drops_truncated_line(tmp_path):
    path = tmp_path / "items.jsonl"
    output = ResumableOutput(path)
    output.add({"key": "a", "text": "one\u2028line"})
    with path.open("ab") as file:
        file.write('{"key": "b", "text": "ü'.encode()[:-1])
    resumed = ResumableOutput(path)
    assert resumed.items == {"a": {"key": "a", "text": "one\u2028line"}}
    assert "b" not in resumed
    resumed.add({"key": "b"})
    assert list(ResumableOutput(path).items) == ["a", "b"]
    with path.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(UsageError, match="line 3"):
        ResumableOutput(path)
    in_memory = ResumableOutput(None)
    in_memory.add({"key": 1})
    assert 1 in in_memory


def test_items_that_cannot_be_written_are_refused():
    with pytest.raises(UsageError, match=r"output /proc/answers\.partial cannot be written"):
        ResumableOutput(Path("/proc/answers.partial"), "settings")


@pytest.mark.parametrize("cut", [0, 1, 7, 60])
def test_items_of_other_settings_are_refused(tmp_path, cut):
    path = tmp_path / "answers.partial"
    items = [{"key": 0, "text": "line\u2028separator\x85"}, {"key": 1, "text": "é" * 9}]
    for item in items:
        ResumableOutput(path, "these").add(item)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    for item in items[1 if cut < 60 else 0 :]:
        ResumableOutput(path, "these").add(item)
    assert list(ResumableOutput(path, "these").items.values()) == items
    with pytest.raises(UsageError, match="other settings"):
        ResumableOutput(path, "others")
    path.write_bytes(path.read_bytes()[:20])  # not even the settings are complete
    assert ResumableOutput(path, "others").items == {}


def test_a_cached_result_is_computed_once(tmp_path):
    cache, calls = ResultCache(tmp_path / "figures"), []
    for seed in (0, 0, 1):
        assert cache.get("rank: k", [seed], lambda seed=seed: calls.append(seed) or {"figure": seed})["figure"] == seed
    assert calls == [0, 1]
    assert cache.load("rank: k", [2]) is None


def test_a_replaced_folder_is_restored_where_the_new_one_cannot_be_moved(tmp_path, monkeypatch):
    folder, replace, calls = tmp_path / "result", os.replace, []
    folder.mkdir()
    (folder / "old").touch()

    def fail_second(source, destination):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_second)
    with (
        pytest.raises(UsageError, match="No space left"),
        output_folder(folder, True, lambda folder: True) as temporary,
    ):
        (temporary / "new").touch()
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["new", "old"]
    assert (folder / "old").is_file()


class TestRecordedDigests:
    """The digest of a large file is computed once, until the file changes."""

    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(runs, "MIN_RECORDED", 4)
        file = tmp_path / "weights"
        file.write_bytes(b"first")
        old = time.time_ns() - 10**10
        os.utime(file, ns=(old, old))
        monkeypatch.setattr(runs, "MIN_AGE", -1)  # the time of the last change of status cannot be set
        return file

    @pytest.fixture
    def computed(self, monkeypatch):
        """Names of the files whose digest was computed."""
        names, file_digest = [], runs.hashlib.file_digest

        def counted(file, *arguments):
            names.append(Path(file.name).name)
            return file_digest(file, *arguments)

        monkeypatch.setattr(runs.hashlib, "file_digest", counted)
        return names

    def test_an_unchanged_file_is_read_once(self, file, computed):
        digests = [file_sha256(file), file_sha256(file)]
        assert digests == [hashlib.sha256(b"first").hexdigest()] * 2
        assert computed == ["weights"]

    def test_a_change_that_keeps_size_and_time_is_seen(self, file, computed):
        file_sha256(file)
        times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
        file.write_bytes(b"other")
        os.utime(file, ns=times)
        assert file_sha256(file) == hashlib.sha256(b"other").hexdigest()
        file.with_name("copy").write_bytes(b"third")
        os.utime(file.with_name("copy"), ns=times)
        os.replace(file.with_name("copy"), file)
        assert file_sha256(file) == hashlib.sha256(b"third").hexdigest()
        assert len(computed) == 3

    def test_a_file_that_has_just_changed_is_not_recorded(self, file, computed, monkeypatch):
        monkeypatch.setattr(runs, "MIN_AGE", 2_000_000_000)
        file_sha256(file)
        file_sha256(file)
        assert len(computed) == 2

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"file": 1, "sha256": 2}'])
    def test_a_damaged_record_is_ignored(self, file, computed, tmp_path, content):
        file_sha256(file)
        (record,) = (tmp_path / "cache" / "digests").iterdir()
        record.write_text(content)
        assert file_sha256(file) == hashlib.sha256(b"first").hexdigest()
        assert len(computed) == 2

    def test_a_cache_that_cannot_be_written_costs_only_time(self, file, tmp_path, monkeypatch):
        (tmp_path / "no folder").write_text("")
        monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "no folder"))
        assert file_sha256(file) == hashlib.sha256(b"first").hexdigest()


def test_a_folder_that_appears_during_the_work_is_not_replaced(tmp_path):
    folder = tmp_path / "result"
    with (
        pytest.raises(UsageError, match=r"not empty.*the result of this run is in"),
        output_folder(folder) as temporary,
    ):
        (temporary / "new").touch()
        folder.mkdir()
        (folder / "mine").touch()
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert [path.name for path in temporary.iterdir()] == ["new"]
