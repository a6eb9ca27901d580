"""Output folders of long runs, with their `run.json`; files that are written whole or not at all.

A run that can be interrupted opens its folder with `RunFolder.open`, keeps finished work in a `ResumableOutput` or a
`ResultCache`, and ends with `RunFolder.finish`; the same call resumes it. `output_folder` is for results that are
written in one piece. Importable without torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from divdec.errors import UsageError

if TYPE_CHECKING:
    from filelock import FileLock

RECORD = "run.json"
LOCK = ".lock"
MIN_RECORDED = 1 << 26  # bytes; smaller files are read each time
MIN_AGE = 2_000_000_000  # ns since the last change; FAT stores times in steps of two seconds
LIBRARIES = ("divdec", "torch", "transformers", "tokenizers", "accelerate", "datasets", "peft")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Output folder of a run that can be interrupted and resumed; a context manager that holds the folder's lock.

    The operating system releases the lock of a process that was killed.
    """

    path: Path
    verb: str
    settings: Any
    fingerprint: str
    """Digest of what decides the result."""
    inputs: dict[str, str]
    """Digests of the fields of what decides the result, for error messages."""
    resumed: bool
    """Whether the folder holds an interrupted run of the same work."""
    lock: FileLock | None = dataclasses.field(default=None, repr=False)
    """The folder's lock; None in the other processes of a run."""

    @classmethod
    def open(
        cls,
        path: Path,
        verb: str,
        settings: Any,
        decides: Any,
        *,
        overwrite: bool = False,
        extend: bool = False,
        stale: Sequence[str] = (),
        on_main: Callable[[Callable[[], RunFolder]], RunFolder] = lambda work: work(),
        **content: Any,
    ) -> RunFolder:
        """Lock an output folder, and resume the run in it or begin a new one.

        A new run writes a `run.json` with the status "running".

        Args:
            path: output folder.
            verb: name of the command in `run.json`; only results of the same verb are overwritten.
            settings: a dataclass or a JSON value, for `run.json`.
            decides: JSON value of everything that decides the result. Where it is an object, an error names those
                of its fields that differ.
            overwrite: replace an earlier result, or an interrupted run with other settings. An interrupted run of
                the same work is resumed nevertheless.
            extend: also resume a finished run of the same work, to add to it.
            stale: files and folders in `path` to remove when a new run begins; glob patterns.
            on_main: does the work in the main process of several, and returns its result in all of them.
            **content: further fields of `run.json` while the run is unfinished.

        Raises:
            UsageError: another process is running in the folder, the folder holds another run and `overwrite` is
                False, or see `check_output`.
        """
        fingerprint = settings_hash(decides)
        inputs = {name: settings_hash(value) for name, value in decides.items()} if isinstance(decides, dict) else {}
        unlocked = cls(path, verb, settings, fingerprint, inputs, resumed=False)

        def work() -> RunFolder:
            unlocked._can_resume(overwrite, extend)  # a foreign folder gets no lock
            path.mkdir(parents=True, exist_ok=True)
            otherwise = f"another `divdec {verb}` is running in {path}; wait for it, or give another name"
            lock = lock_file(path / LOCK, otherwise)
            try:
                # Another run may have ended in between.
                run = dataclasses.replace(unlocked, resumed=unlocked._can_resume(overwrite, extend), lock=lock)
                for left in [left for pattern in stale for left in path.glob(f".{pattern}.????????")]:
                    shutil.rmtree(left)  # of a killed process, by `output_folder`
                if not run.resumed:
                    for old in {old for pattern in stale for old in path.glob(pattern)} - {path / LOCK}:
                        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)
                    started = record(verb, settings, fingerprint=fingerprint, inputs=inputs, **content)
                    write_json(path / RECORD, started | {"status": "running"})
            except BaseException:
                unlock_file(lock)
                raise
            return run

        return on_main(work)

    def _can_resume(self, overwrite: bool, extend: bool) -> bool:
        """Whether the folder holds a run of the same work; another one's is refused."""
        earlier = (read_record(self.path) if self.path.is_dir() else None) or {}
        unfinished = earlier.get("status") == "running"
        resumable = earlier.get("verb") == self.verb and (unfinished or extend)
        resumed = resumable and earlier.get("fingerprint") == self.fingerprint
        if resumable and not resumed and not overwrite:
            before: dict[str, str] = earlier.get("inputs") or {}
            changed = [name for name in self.inputs if name in before and before[name] != self.inputs[name]]
            named = f" ({', '.join(changed)} differ)" if changed else ""
            raise UsageError(
                f"output folder {self.path} holds {'an unfinished' if unfinished else 'a'} run with other settings or "
                f"data{named}; repeat those to resume it, or give --overwrite to begin anew"
            )
        if not resumed:
            check_output(self.path, overwrite, made_by(self.verb))
        return resumed

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            if isinstance(error[1], UsageError) and {file.name for file in self.path.iterdir()} <= {RECORD, LOCK}:
                (self.path / RECORD).unlink(missing_ok=True)  # nothing was done: another run may use the folder
            unlock_file(self.lock)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"lock": None}  # for the other processes of a run

    def finish(self, **content: Any) -> dict[str, Any]:
        """Write the final `run.json`, and return its content."""
        final = record(self.verb, self.settings, fingerprint=self.fingerprint, inputs=self.inputs, **content)
        write_json(self.path / RECORD, final)
        return final


def lock_file(path: Path, otherwise: str) -> FileLock:
    """Lock a file until `unlock_file`, or until the process ends; a file that a killed process left does not block.

    `otherwise` is the message of the error.

    Raises:
        UsageError: another process holds the lock, or the file cannot be locked.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(otherwise) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be locked: {error.strerror}") from None
    return lock


def unlock_file(lock: FileLock) -> None:
    """Remove a locked file, and release its lock."""
    with contextlib.suppress(OSError):  # Windows removes no open file
        Path(lock.lock_file).unlink()
    lock.release()


class ResumableOutput:
    """JSONL file to which items are appended; reads the items of an interrupted run, without an incomplete last line.

    Every item has a "key". Threads may add items at the same time.
    """

    def __init__(self, path: Path | None, fingerprint: str | None = None) -> None:
        """Open a file, and read the items in it; None keeps items in memory only.

        Args:
            path: the file.
            fingerprint: digest of what decides the items, for files outside of a `RunFolder`; the first line holds it.

        Raises:
            UsageError: a line is not an item, the items have another fingerprint, or the file cannot be written.
        """
        self.path = path
        self.items: dict[Any, dict[str, Any]] = {}
        """Items by their key."""
        self._lock = threading.Lock()
        self._read()
        if path is None or fingerprint is None:
            return
        if not self.items:
            try:
                self.add({"key": "settings", "fingerprint": fingerprint})
            except (PermissionError, FileNotFoundError) as error:
                raise UsageError(f"output {path} cannot be written: {error.strerror}") from None
        if self.items.pop("settings", {}).get("fingerprint") != fingerprint:
            raise UsageError(
                f"{path} holds items of a run with other settings, models or takedown requests; repeat those to resume "
                "it, or remove the file"
            )

    def _read(self) -> None:
        path = self.path
        if path is None or not path.is_file():
            return
        # Split bytes at \n alone: an item may hold U+2028, and the last line half a character.
        *lines, rest = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                item = json.loads(line)
                self.items[item["key"]] = item
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"{path}, line {number} cannot be read; remove the line or the file, or choose another output"
                ) from None
        if rest:
            write_text(path, b"\n".join([*lines, b""]).decode())

    def __contains__(self, key: Any) -> bool:
        return key in self.items

    def add(self, item: dict[str, Any]) -> None:
        """Append an item, and flush it to disk."""
        with self._lock:
            self.items[item["key"]] = item
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(item, ensure_ascii=False) + "\n")
                    file.flush()
                    os.fsync(file.fileno())


@contextlib.contextmanager
def resumable_items(file: Path | None, fingerprint: str) -> Iterator[ResumableOutput]:
    """Open the finished items of a stopped run beside the output; they are removed when the block succeeds.

    Raises:
        UsageError: another process writes the output, or the items have another fingerprint.
    """
    if file is None:
        yield ResumableOutput(None)
        return
    busy = f"another process is writing {file}; wait for it, or give another --output"
    lock = lock_file(file.with_name(f".{file.name}{LOCK}"), busy)
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield ResumableOutput(partial, fingerprint)
        partial.unlink()
    finally:
        unlock_file(lock)


@dataclasses.dataclass(frozen=True)
class ResultCache:
    """Folder of results as JSON files, found again by their name and by what decides them."""

    folder: Path

    def get(self, name: str, decides: Any, compute: Callable[[], T]) -> T:
        """Return the stored result, or compute and store it; `decides` and the result are JSON values."""
        if not self.has(name, decides):
            started = time.perf_counter()
            content = {"result": compute(), "seconds": round(time.perf_counter() - started, 1)}
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self._path(name, decides), content)
        return self.load(name, decides)

    def has(self, name: str, decides: Any) -> bool:
        """Whether a result is stored."""
        return self._path(name, decides).is_file()

    def load(self, name: str, decides: Any) -> Any:
        """Read a stored result; None if there is none."""
        return read_json(self._path(name, decides))["result"] if self.has(name, decides) else None

    def _path(self, name: str, decides: Any) -> Path:
        slug = re.sub(r"[^\w.]+", "-", name).strip("-")
        return self.folder / f"{slug}-{settings_hash([name, decides])}.json"


def write_json(path: Path, content: Any) -> None:
    """Write JSON; a reader sees the old file or the new one, never a half-written one."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name in the same folder, then rename it."""
    temporary = _temporary(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def read_json(path: Path, kind: type = object) -> Any:
    """Return the content of a JSON file.

    Raises:
        UsageError: it is not readable JSON, or not of the kind that is wanted.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, kind):
            raise ValueError(f"it holds a {type(content).__name__}, not a {kind.__name__}")
        return content
    except ValueError as error:
        raise UsageError(f"{path} is not readable JSON ({error}); remove it or choose another folder") from None


def settings_hash(settings: Any) -> str:
    """Return the digest of a dataclass or a JSON value: twelve hexadecimal digits."""
    text = json.dumps(_as_dict(settings), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal digits.

    The digest of a large file is recorded in the cache folder, and is not computed again while the file's device,
    inode, size and times are the same.
    """
    with path.open("rb") as file:
        state = _file_state(file)
        if state["size"] < MIN_RECORDED:
            return hashlib.file_digest(file, "sha256").hexdigest()
        name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
        recorded = cache_folder() / "digests" / f"{name}.json"
        try:
            content = json.loads(recorded.read_text(encoding="utf-8"))
            if content["file"] == state:
                return str(content["sha256"])
        except (OSError, ValueError, LookupError, TypeError):
            pass  # there is no record, or it is damaged
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        unchanged = _file_state(file) == state
    # A change just after the last one may leave the times as they are: a clock has a resolution.
    if unchanged and time.time_ns() - max(state["modified"], state["changed"]) > MIN_AGE:
        with contextlib.suppress(OSError):
            recorded.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(recorded, {"path": str(path.resolve()), "file": state, "sha256": digest})
    return digest


def _file_state(file: IO[bytes]) -> dict[str, int]:
    status = os.fstat(file.fileno())
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "modified": status.st_mtime_ns,
        "changed": status.st_ctime_ns,
    }


def folder_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 by name of all files in a folder and its subfolders; hidden ones do not count."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = {file.relative_to(folder): file for file in files}
    return {
        name.as_posix(): file_sha256(file)
        for name, file in names.items()
        if not any(part.startswith(".") for part in name.parts)
    }


def path_digests(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of the files and folders that options name, by option."""
    named = {name: Path(value).expanduser() for name, value in options.items() if isinstance(value, str) and value}
    return {
        name: folder_digests(path) if path.is_dir() else file_sha256(path)
        for name, path in named.items()
        if path.exists()
    }


def versions() -> dict[str, str | None]:
    """Return versions of Python and of the libraries that decide a run's figures; None where one is absent."""
    import importlib.metadata  # a tenth of the time of `divdec --help`, which needs no versions

    installed = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return {"python": platform.python_version()} | {name: installed.get(name) for name in LIBRARIES}


def record(verb: str, settings: Any, **content: Any) -> dict[str, Any]:
    """Return the content of a `run.json`: verb, settings, versions, divdec's commit, time, and fields of the run."""
    commit, file = None, Path(__file__)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # Another repository, in which divdec is only installed, does not track the file: git fails.
        git = ["git", "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.split()[0]
    return {
        "verb": verb,
        "status": "finished",
        "settings": _as_json(settings),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git_commit": commit,
        **content,
    }


def _as_dict(settings: Any) -> Any:
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return dataclasses.asdict(settings)
    return settings


def _as_json(settings: Any) -> Any:
    return json.loads(json.dumps(_as_dict(settings), default=str))


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the `run.json` of a folder, or None if it has none."""
    path = folder / RECORD
    return read_json(path, dict) if path.is_file() else None


def made_by(verb: str) -> Callable[[Path], bool]:
    """Return the test whether a folder holds a finished or unfinished run of a command."""
    return lambda folder: (read_record(folder) or {}).get("verb") == verb


def check_output(folder: Path, overwrite: bool, ours: Callable[[Path], bool]) -> None:
    """Refuse an output folder that would lose somebody's files; `ours` tells whether a folder is an earlier result.

    Raises:
        UsageError: it or a folder above it is a file or may not be written to, it is not empty without `overwrite`, or
            it is not ours.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UsageError(f"output {folder} cannot be made: {nearest} is a file; give the name of a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"output {folder} cannot be made: {nearest} may not be written to; give another name")
    if not folder.is_dir() or not any(entry.name != LOCK for entry in folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"output folder {folder} is not empty; give --overwrite to replace it, or another name")
    if not ours(folder):
        raise UsageError(
            f"output folder {folder} holds files that are not an earlier result of divdec; "
            "it is not replaced: empty it yourself or give another name"
        )


def check_output_file(file: Path, overwrite: bool) -> None:
    """Refuse an output file that cannot be written, or that exists where `overwrite` does not allow to replace it.

    Raises:
        UsageError: it is a folder, its folder cannot be made or written to, or it exists without `overwrite`.
    """
    if file.is_dir():
        raise UsageError(f"output {file} is a folder; give the name of a file")
    folder = next(path for path in file.absolute().parents if path.exists())
    if not folder.is_dir():
        raise UsageError(f"output {file} cannot be written: {folder} is a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"output {file} cannot be written: {folder} may not be written to")
    if os.path.lexists(file) and not overwrite:
        raise UsageError(f"output {file} exists; give --overwrite to replace it, or another name")


@contextlib.contextmanager
def output_folder(
    folder: Path, overwrite: bool = False, ours: Callable[[Path], bool] = lambda folder: False
) -> Iterator[Path]:
    """Make a folder that appears under its name only when the `with` block has succeeded.

    Args:
        folder: the final name.
        overwrite: whether an earlier result under that name may be replaced.
        ours: whether a folder is such an earlier result; by default none is.

    Yields:
        A temporary folder beside it, to write into; it is renamed at the end, or removed after an error.

    Raises:
        UsageError: see `check_output`.
    """
    folder = folder.resolve()  # a link is kept, and the folder that it points to is replaced
    check_output(folder, overwrite, ours)
    if folder.exists() and (os.path.ismount(folder) or not os.access(folder.parent, os.W_OK | os.X_OK)):
        raise UsageError(
            f"output {folder} is written as a new folder, which cannot replace this one; give one within it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = _temporary(folder), _temporary(folder)
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        check_output(folder, overwrite, ours)  # somebody else may have written it meanwhile
    except UsageError as error:
        raise UsageError(f"{error}; the result of this run is in {temporary}") from None
    try:
        if folder.exists():
            os.replace(folder, replaced)
        os.replace(temporary, folder)
    except BaseException as error:
        if replaced.exists():
            os.replace(replaced, folder)
        if isinstance(error, OSError):
            raise UsageError(f"output {folder}: {error.strerror}; the result of this run is in {temporary}") from None
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def check_one_process() -> None:
    """Refuse a command under torchrun whose work the processes cannot share.

    Raises:
        UsageError: there are several processes.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise UsageError(f"{processes} processes were started, and all would do the same; start one")


def cache_folder() -> Path:
    """Return the folder of results that can be computed again: $DIVDEC_CACHE, or divdec in the user's cache folder."""
    if folder := os.environ.get("DIVDEC_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "divdec"
