"""References to checkpoints, on disk or on the hub: finding them, checking them.

It knows nothing of steering. Safetensors only: a checkpoint of pickled weights is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError, first_line
from divdec.runs import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?$")
INDEX = "model.safetensors.index.json"
# Everything that decides what the model reads and computes.
TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")
HASHED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", *TEMPLATES),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "vocab.json", "vocab.txt", "merges.txt"),
)
COMPOSITE = "divdec_composite"  # model type of baselines that wrap other checkpoints
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclasses.dataclass(frozen=True)
class CheckpointReference:
    """Where a checkpoint lies: a folder, or a repository of the hub at a revision."""

    folder: str | None = None
    """A folder; a relative one is resolved against the bundle."""
    hub_id: str | None = None
    """A repository of the hub."""
    revision: str | None = None
    """Branch, tag or commit of `hub_id`; a bundle holds the commit."""
    sha256: Mapping[str, str] | None = None
    """Digests of the folder's files that decide what the model computes."""

    @classmethod
    def parse(cls, text: str) -> CheckpointReference:
        """Read what a user gives: a folder, or a hub id with an optional '@revision'.

        Raises:
            UsageError: it is neither an existing folder nor a possible hub id.
        """
        if Path(text).expanduser().is_dir():
            return cls(folder=str(Path(text).expanduser()))
        hub_id, _, revision = text.partition("@")
        if HUB_ID.match(hub_id) and not Path(text).exists():
            return cls(hub_id=hub_id, revision=revision or None)
        raise UsageError(f"checkpoint {text!r} is not a folder, nor a hub id such as 'org/name' or 'org/name@revision'")

    @classmethod
    def from_dict(cls, fields: Any, part: str) -> CheckpointReference:
        """Read the reference of a part from a bundle's configuration.

        Raises:
            UsageError: there is none, or it is malformed.
        """
        if not isinstance(fields, Mapping) or not (fields.get("folder") or fields.get("hub_id")):
            raise UsageError(f"the bundle names no {part}: a steered model needs all three parts")
        reference = cls(**{field.name: fields.get(field.name) for field in dataclasses.fields(cls)})
        texts = (reference.folder, reference.hub_id, reference.revision)
        if not all(text is None or isinstance(text, str) for text in texts):
            raise UsageError(f"the bundle's reference of the {part} is malformed; write the bundle again")
        return reference

    def to_dict(self) -> dict[str, Any]:
        """The reference as JSON values, without what is not set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def resolve(self, base: Path, *, weights: bool, local_files_only: bool = False) -> Path:
        """The local folder that holds the checkpoint; a hub repository is fetched, or found in the cache.

        Args:
            base: what a relative folder is resolved against.
            weights: whether the weights are needed too, or only configuration and tokenizer.
            local_files_only: never ask the hub.

        Raises:
            UsageError: it does not exist.
        """
        if self.folder is not None:
            folder = (base / self.folder).resolve()
            if not folder.is_dir():
                raise UsageError(f"checkpoint folder {folder} does not exist")
            return folder
        assert self.hub_id is not None
        return download(self.hub_id, self.revision, weights=weights, local_files_only=local_files_only)

    def verify(self, folder: Path, part: str) -> None:
        """Compare the folder's files with the digests.

        Raises:
            UsageError: a file has changed, is missing, or has been added.
        """
        if self.folder is None:
            return  # pinned to a commit of the hub instead
        if not isinstance(self.sha256, Mapping) or not self.sha256:
            raise UsageError(
                f"{part}: the bundle holds no digests of {folder}; write the bundle again, "
                "or load it without verification (--no-verify)"
            )
        found = digests(folder)
        for name in sorted({*self.sha256, *found}):
            if found.get(name) != self.sha256.get(name):
                what = "is missing" if name not in found else "is new" if name not in self.sha256 else "has changed"
                raise UsageError(
                    f"{part}: {folder / name} {what} since the bundle was written; write the bundle again, "
                    "or load it without verification (--no-verify) if the change is meant"
                )


def download(hub_id: str, revision: str | None, *, weights: bool, local_files_only: bool = False) -> Path:
    """Fetch a repository's safetensors, configuration and tokenizer from the hub, or find them in its cache.

    Raises:
        UsageError: the hub has no such repository, or cannot be reached and the cache has it not.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # Older versions of huggingface_hub ask for the list of files even when they are told to stay offline.
    local_files_only = local_files_only or huggingface_hub.constants.HF_HUB_OFFLINE
    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors"] if weights else [])
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=patterns, local_files_only=local_files_only
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        if local_files_only and isinstance(error, LocalEntryNotFoundError):
            raise UsageError(
                f"{hub_id!r} is not a local folder, and the hub's cache has it not; the hub itself was not asked "
                "(HF_HUB_OFFLINE is set, or local files alone were wanted); check the path"
            ) from None
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{hub_id!r} is not a local folder, and could not be had from the hub ({type(error).__name__}: {reason})"
        ) from None
    return Path(folder)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 by file name of everything in a checkpoint that decides what the model reads and computes."""
    names = sorted({path.relative_to(folder).as_posix() for pattern in HASHED for path in folder.glob(pattern)})
    return {name: file_sha256(folder / name) for name in names}


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint folder whose weights are absent, pickled, an adapter or unreadable.

    Only the headers of the safetensors files are read.

    Raises:
        UsageError: says which of these it is.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder} holds a LoRA adapter; merge it into its base model (merge_and_unload) first")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: it is not a transformers checkpoint")
    if _read_json(folder / "config.json").get("model_type") == COMPOSITE:
        return  # a baseline made of other checkpoints, which it checks itself when it is loaded
    files = weight_files(folder)
    if not files:
        if any(next(folder.glob(pattern), None) for pattern in PICKLED):
            raise UsageError(
                f"{folder} holds pickled weights, which can run code when loaded; "
                "convert them with save_pretrained(…, safe_serialization=True)"
            )
        raise UsageError(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        if not file.is_file():
            raise UsageError(f"{folder}: {file.name} is named in {INDEX} but missing")
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} is corrupt ({error}); copy or download it again") from None


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights: one, or the shards that an index names.

    Raises:
        UsageError: there are both, so that nobody knows which of them was saved last.
    """
    index, whole = folder / INDEX, folder / "model.safetensors"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    if any(Path(name).name != name for name in names):
        raise UsageError(f"{index} names weights outside the folder itself; put all shards into {folder}")
    shards = [folder / name for name in names]
    others = [shard for shard in shards if shard != whole and shard.is_file()]
    if whole.is_file() and others:
        raise UsageError(
            f"{folder} holds two sets of weights, {whole.name} and the shards of {INDEX}: delete the older one, "
            "or save the model into an empty folder"
        )
    return [whole] if whole.is_file() else shards  # saved as one file, transformers leaves an older index behind


def save_model(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Save a model into a folder in which nothing of earlier weights stays; its other files are left alone.

    Args:
        model: offloaded (accelerate) or not.
        folder: made if it is not there.
        **options: what `save_pretrained` takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if options.get("state_dict") is None and any(weight.is_meta for weight in model.parameters()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        options["state_dict"] = get_state_dict_offloaded_model(model)
    # Not into the folder itself: the weights in memory may be those of its files.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        model.save_pretrained(temporary, **options)
        for pattern in ("*.safetensors", "*.safetensors.index.json"):
            for file in folder.glob(pattern):
                file.unlink()
        for file in Path(temporary).iterdir():
            os.replace(file, folder / file.name)


def check_plain(folder: Path, part: str) -> None:
    """Refuse a model made of several checkpoints where an ordinary one is trained.

    Raises:
        UsageError: it is a bundle, or a baseline that wraps a target.
    """
    kind = _read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if kind in ("divergence", COMPOSITE):
        raise UsageError(
            f"{part} {folder} is made of several checkpoints ({kind}), which cannot be trained as one; give an "
            "ordinary checkpoint, such as a distilled student"
        )


def check_apart(output: Path, places: Iterable[Path]) -> None:
    """Refuse an output folder that would replace what it is made from, or mix with it.

    Raises:
        UsageError: one lies within the other.
    """
    for place in places:
        if place.is_relative_to(output) or output.is_relative_to(place):
            raise UsageError(
                f"output folder {output} and {place}, which it is made from, lie one within the other; "
                "give another output folder"
            )


def check_different(retain: CheckpointReference, forget: CheckpointReference) -> None:
    """Refuse a pair of one and the same model: its divergence is zero, and it would forget nothing.

    Raises:
        UsageError: both references name the same weights.
    """
    if retain.hub_id is not None or forget.hub_id is not None:
        same = (retain.hub_id, retain.revision) == (forget.hub_id, forget.revision)
    else:
        same = bool(one := _weights(retain)) and one == _weights(forget)
    if same:
        raise UsageError(
            "retain auxiliary and forget auxiliary are the same model: their divergence is zero, "
            "and nothing would be forgotten"
        )


def _weights(reference: CheckpointReference) -> dict[str, str]:
    digests = reference.sha256 if isinstance(reference.sha256, Mapping) else {}
    return {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}


def load_model(folder: Path, **options: Any) -> PreTrainedModel:
    """A causal language model with every one of its weights.

    Args:
        folder: a checkpoint of safetensors.
        **options: what `AutoModelForCausalLM.from_pretrained` takes.

    Raises:
        UsageError: it cannot be loaded, or the file lacks weights, which would otherwise be random.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"{folder} cannot be loaded ({first_line(error)})") from None
    model, loading = loaded
    for what, names in (("lacks the weights", loading["missing_keys"]), ("misfits", loading["mismatched_keys"])):
        if names:
            listed = ", ".join(sorted(map(str, names))[:3])
            raise UsageError(f"{folder}: the checkpoint {what} {listed}; save the whole model there again")
    return model


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint folder; its own code is never run.

    Raises:
        UsageError: it cannot be read, or transformers has no such architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(f"{folder}: the configuration cannot be used ({first_line(error)})") from None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UsageError(f"{folder} has no tokenizer; save the one the model was trained with into that folder")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UsageError(f"{folder}: the tokenizer cannot be read ({first_line(error)})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not readable JSON ({error})") from None
