"""What every long verb leaves behind: an output folder that is whole or absent, and its `run.json`.

It knows nothing of models or data; it must stay importable without torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from divdec.errors import UsageError

RECORD = "run.json"
LIBRARIES = ("divdec", "torch", "transformers", "tokenizers", "accelerate", "datasets", "peft")


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name in the same folder, then rename it into place."""
    _replace(path, text.encode(), durable=False)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that after a crash, also one of the machine, it is there whole or not at all."""
    _replace(path, content, durable=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _replace(path: Path, content: bytes, durable: bool) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UsageError: it is not readable JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not readable JSON ({error}); remove it or choose another folder") from None


def settings_hash(settings: Any) -> str:
    """Twelve hexadecimal digits that name a setting: a dataclass or any JSON value."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = dataclasses.asdict(settings)
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that decide a run's figures; None where one is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: Path | None = None) -> str | None:
    """The commit checked out in `folder` (the working directory by default), or None outside a repository."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def record(verb: str, settings: Any, **content: Any) -> dict[str, Any]:
    """The content of a `run.json`: verb, settings, versions, commit, time, and whatever the run found."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = dataclasses.asdict(settings)
    return {
        "verb": verb,
        "status": "finished",
        "settings": json.loads(json.dumps(settings, default=str)),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git_commit": git_commit(),
        **content,
    }


def read_record(folder: Path) -> dict[str, Any] | None:
    """The `run.json` of a folder, or None where there is none."""
    path = folder / RECORD
    return read_json(path) if path.is_file() else None


def goes_on(folder: Path, verb: str, fingerprint: str, overwrite: bool) -> bool:
    """Whether a folder holds a run of this very work that was stopped; if not, a new one may begin there.

    Args:
        folder: where the result shall lie.
        verb: whose earlier result may be replaced.
        fingerprint: digest of all that decides the result.
        overwrite: whether an earlier result, or what is left of another run, may be replaced.

    Raises:
        UsageError: it holds an unfinished run of something else, or see `check_output`.
    """
    earlier = read_record(folder) if folder.is_dir() else None
    if earlier is not None and earlier.get("status") == "running":
        if earlier.get("fingerprint") == fingerprint:
            return True
        if not overwrite:
            raise UsageError(
                f"output folder {folder} holds an unfinished run with other settings or data; repeat those to resume "
                "it, or give --overwrite to begin anew"
            )
    check_output(folder, overwrite, lambda folder: (read_record(folder) or {}).get("verb") == verb)
    return False


def check_output(folder: Path, overwrite: bool, ours: Callable[[Path], bool]) -> None:
    """Refuse an output folder that would lose somebody's files.

    Args:
        folder: where the result shall lie.
        overwrite: whether an earlier result there may be replaced.
        ours: whether a folder is such an earlier result.

    Raises:
        UsageError: it or a folder above it is a file, it is not empty without `overwrite`, or it is not ours.
    """
    for place in (folder, *folder.absolute().parents):
        if place.exists() and not place.is_dir():
            raise UsageError(f"output {folder} cannot be made: {place} is a file; give the name of a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"output folder {folder} is not empty; give --overwrite to replace it, or another name")
    if not ours(folder):
        raise UsageError(
            f"output folder {folder} holds files that are not an earlier result of divdec; "
            "it is not replaced: empty it yourself or give another name"
        )


def check_output_file(file: Path, overwrite: bool, ours: Callable[[Path], bool] = lambda file: True) -> None:
    """Refuse an output file that would replace another, or that cannot be written, before any work is done for it.

    Args:
        file: where the result shall lie.
        overwrite: whether a file there may be replaced.
        ours: whether a file may then be replaced; by default any.

    Raises:
        UsageError: it is a folder, its folder cannot be made or written to, it exists without `overwrite`, or it is
            not ours.
    """
    if file.is_dir():
        raise UsageError(f"output {file} is a folder; give the name of a file")
    place = next(place for place in file.absolute().parents if place.exists())
    if not place.is_dir():
        raise UsageError(f"output {file} cannot be written: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"output {file} cannot be written: {place} may not be written to")
    if not os.path.lexists(file):
        return
    if not overwrite:
        raise UsageError(f"output {file} exists; give --overwrite to replace it, or another name")
    if not ours(file):
        raise UsageError(f"output {file} is not an earlier result of divdec; it is not replaced: give another name")


@contextlib.contextmanager
def output_folder(
    folder: Path, overwrite: bool = False, ours: Callable[[Path], bool] = lambda folder: False
) -> Iterator[Path]:
    """A folder that appears under its name only when the work inside the `with` block has succeeded.

    Args:
        folder: the final name.
        overwrite: whether an earlier result under that name may be replaced.
        ours: whether a folder is such an earlier result; by default none is.

    Yields:
        A temporary folder beside it, to write into; it is renamed at the end, or removed after an error.

    Raises:
        UsageError: see `check_output`.
    """
    folder = folder.resolve()  # a link stays, and what it points to is replaced
    check_output(folder, overwrite, ours)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
            os.replace(folder, replaced / "old")
            os.replace(temporary, folder)
            shutil.rmtree(replaced)
        else:
            os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def cache_folder() -> Path:
    """Where results that can be made again are kept: $DIVDEC_CACHE, else divdec in the user's cache folder."""
    if given := os.environ.get("DIVDEC_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "divdec"


def _umask() -> int:
    # The only way to read it is to set it; mkstemp and mkdtemp ignore it and make everything private.
    mask = os.umask(0)
    os.umask(mask)
    return mask
