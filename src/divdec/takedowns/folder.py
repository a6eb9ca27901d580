"""What lies where in a registry's folder, and what the folder says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram_counts import DESCRIPTION as COUNTS
from divdec.runs import file_sha256, read_json

DESCRIPTION, FORMAT = "registry.json", "divdec registry 2"
RETAIN, FILES, TOKENIZER, IDS, LOCK = "retain", "entries", "tokenizer", "ids", "lock"


def check_retain(folder: Path, digest: str) -> None:
    """Refuse a retain side that is not the one that the registry was made with.

    Raises:
        FailedClosed: it is missing, or another one.
    """
    counts = folder / RETAIN / COUNTS
    if not counts.is_file() or file_sha256(counts) != digest:
        raise FailedClosed(f"{folder / RETAIN} is missing or holds other counts than the registry's; restore it")


def read_description(folder: Path) -> dict[str, Any]:
    """What a registry's folder says of itself.

    Raises:
        UsageError: it is no registry.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise UsageError(f"{folder} is no registry: it has no {DESCRIPTION}; `divdec takedown init` makes one")
    about = read_json(path)
    kinds = {
        "format": str,
        "id": str,
        "seal": str,
        "retain": str,
        "tokenizer_files": dict,
        "vocab_size": int,
        "order": int,
        "tokenizer": str,
        "key_check": str,
        "target": dict,
    }
    if isinstance(about, dict) and about.get("format") == "divdec registry 1":
        raise UsageError(
            f"{folder} was made by a divdec whose registries had no strength; make it again (divdec takedown init "
            "ANOTHER_FOLDER --target … --retain …) and add its requests to that"
        )
    if not isinstance(about, dict) or any(type(about.get(name)) is not kind for name, kind in kinds.items()):
        raise UsageError(f"{path} does not describe a registry; restore it from a backup")
    if about["format"] != FORMAT:
        raise UsageError(f"{path} is of the format {about['format']!r}; this divdec reads {FORMAT!r}")
    return about
