"""Pushing a bundle to the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.checkpoint import (
    COMPOSITE,
    HUB_ID,
    CheckpointReference,
    check_weights,
    digests,
    hub_errors,
    portable_adapter_config,
)
from divdec.configuration import AUXILIARIES, BASE, PARTS, REMOTE_FILE
from divdec.errors import UsageError, first_line
from divdec.model.bundle import bundle_card, is_bundle
from divdec.model.loading import read_config
from divdec.runs import read_json
from divdec.steering import Steering

if TYPE_CHECKING:
    from divdec.decoding.generation import SteeredGeneration

REGISTRY = (
    "a registry of takedown requests is not pushed, because it changes and its key is secret; push a bundle without "
    "it, and name the registry where the bundle is served (`divdec serve --registry`)"
)


def push_model(model: SteeredGeneration, repo_id: str, **options: Any) -> str:
    """Push the bundle that a model was loaded from to the hub, as it is on disk and was measured.

    Weights that were changed in memory are not pushed: write them with `save_pretrained` and load that folder.

    Args:
        model: a steered model.
        repo_id: repository of the hub, such as 'me/bundle'.
        **options: see `push_bundle`. A new repository is private unless `private=False`.

    Returns:
        URL of the commit.

    Raises:
        UsageError: the model was not loaded from a bundle's folder, has another rule than the bundle, or follows a
            registry; the bundle has changed; or the hub refuses it.
    """
    if not model.name_or_path or not is_bundle(Path(model.name_or_path)):
        raise UsageError(
            "the model was not loaded from a bundle's folder; write one with `divdec.write_bundle`, or with the "
            "save_pretrained of model and tokenizer, load it and push that model"
        )
    if model.takedowns is not None:
        raise UsageError(REGISTRY)
    if (stored := Steering.from_dict(read_config(Path(model.name_or_path)).steering or {})) != model.steering:
        raise UsageError(
            f"the model's rule is {model.steering}, but its bundle's {stored}, and that would be pushed; assign the "
            f"bundle's rule, or write a bundle with {model.steering} (`divdec bundle --steering`)"
        )
    return push_bundle(model.name_or_path, repo_id, **options)


def push_bundle(
    bundle: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload bundle",
) -> str:
    """Push a bundle's folder to the hub, in one commit.

    Checkpoints that the bundle names by folder, and n-grams, become part of the repository, so that it loads
    anywhere. Checkpoints of the hub stay references at their commits. Only files that divdec reads are pushed.

    Args:
        bundle: the bundle's folder.
        repo_id: repository of the hub, such as 'me/bundle'; it is created if it does not exist.
        private: whether a new repository is private. The forget auxiliary has learned the forget set: consider who may
            have it before you publish it.
        token: token of the hub; by default that of `hf auth login` or the environment variable HF_TOKEN.
        revision: branch, which must exist; 'main' by default.
        create_pr: open a pull request instead of committing to the branch.
        commit_message: message of the commit.

    Returns:
        URL of the commit.

    Raises:
        UsageError: the bundle is incomplete, has changed or follows a registry, or the hub refuses it. In the first
            three cases nothing has been sent.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if not HUB_ID.match(repo_id):
        raise UsageError(f"repo_id is {repo_id!r}; accepted: a repository of the hub, such as 'me/bundle'")
    operations = [CommitOperationAdd(name, content) for name, content in hub_files(bundle, repo_id).items()]
    api = HfApi(token=token, library_name="divdec")
    try:
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.create_commit(
            created.repo_id, operations, commit_message=commit_message, revision=revision, create_pr=create_pr
        )
    except (*hub_errors(), ValueError) as error:
        raise UsageError(
            f"{str(bundle)!r} could not be pushed to {repo_id!r} on the hub ({type(error).__name__}: "
            f"{first_line(error)}); check the name, the token (`hf auth login`) and HF_HUB_OFFLINE"
        ) from None
    return commit.commit_url


def hub_files(bundle: str | os.PathLike[str], repo_id: str) -> dict[str, Path | bytes]:
    """Return the files of a bundle's repository, by name: paths, or contents of those that differ from the folder's.

    Raises:
        UsageError: the bundle follows a registry, or a part is missing, has changed or consists of several checkpoints.
    """
    folder = Path(bundle).expanduser()
    config = read_config(folder)
    if config.registry is not None:
        raise UsageError(f"{folder}: {REGISTRY}")
    files: dict[str, Path | bytes] = {name: folder / name for name in digests(folder)}
    for name in ("generation_config.json", REMOTE_FILE):
        if (folder / name).is_file():
            files[name] = folder / name
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else bundle_card(config, None)
    base = config.base
    for part in (*PARTS, BASE):
        if getattr(config, part) is None:
            continue
        reference = CheckpointReference.from_dict(getattr(config, part), part)
        if reference.folder is None:
            continue
        path = reference.resolve(folder, weights=True)
        adapts = base is not None and part in AUXILIARIES
        if not adapts:
            check_weights(path)
        reference.verify(path, part)
        if not adapts and read_json(path / "config.json").get("model_type") == COMPOSITE:
            raise UsageError(f"{part} {path} consists of several checkpoints, which a repository cannot hold")
        files |= {f"{part}/{name}": path / name for name in reference.sha256 or {}}
        sha256 = dict(reference.sha256 or {})
        if adapts and not path.resolve().is_relative_to(folder.resolve()):  # a packed one names its base already
            content = portable_adapter_config(path, CheckpointReference.from_dict(base, BASE)).encode()
            files[f"{part}/adapter_config.json"] = content
            sha256["adapter_config.json"] = hashlib.sha256(content).hexdigest()
        setattr(config, part, CheckpointReference(folder=part, sha256=sha256).to_dict())
        text = _replace_row(text, part.replace("_", " "), f"folder `{part}` of this repository")
    if config.ngram is not None:
        files |= _ngram_files(folder, config.ngram)
        text = _replace_row(text, "n-gram pair", f"folder `ngram`, weight {config.ngram.get('weight', 1.0):g}")
        config.ngram = config.ngram | {"folder": "ngram"}
    return files | {
        "config.json": config.to_json_string().encode(),
        "README.md": text.replace('"this folder"', f'"{repo_id}"').encode(),
    }


def _ngram_files(folder: Path, reference: dict[str, str]) -> dict[str, Path | bytes]:
    from divdec.experts.ngram_fit import load_pair

    path = (folder / reference["folder"]).resolve()
    load_pair(path, sha256=str(reference.get("sha256")))
    return {f"ngram/{file.relative_to(path).as_posix()}": file for file in sorted(path.rglob("*")) if file.is_file()}


def _replace_row(card: str, name: str, value: str) -> str:
    """Replace a row of the card's table: paths of this machine are nobody else's business."""
    return re.sub(rf"(?m)^\| {name} \|.*\|$", lambda _: f"| {name} | {value} |", card)
