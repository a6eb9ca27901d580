"""Bundles: a folder of a few kilobytes that names target, auxiliaries and rule, and is a model for transformers.

It fails closed: whatever is missing, changed or does not fit is an error, never an unsteered model.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.model.card import bundle_card
from divdec.model.checkpoint import (
    HUB_ID,
    CheckpointReference,
    check_apart,
    check_different,
    check_weights,
    common_vocabulary,
    digests,
    download,
    load_config,
    load_model,
    load_tokenizer,
    vocabulary_width,
)
from divdec.model.configuration import PARTS, DivergenceConfig
from divdec.runs import check_output, output_folder, read_json, write_text
from divdec.steering import Steering

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from divdec.model.modeling import DivergenceForCausalLM

PER_PART = ("dtype", "torch_dtype", "device_map", "attn_implementation", "quantization_config")
PART_NAMES = (*PARTS, "experts")
# Options of from_pretrained that name one checkpoint's files, or would give something else than a model.
REFUSED = ("subfolder", "output_loading_info", "state_dict", "gguf_file", "variant")
# What the Auto classes and their users add; the parts are never loaded with code of their own.
WITHOUT_EFFECT = (
    "trust_remote_code",
    "_from_auto",
    "_commit_hash",
    "adapter_kwargs",
    "cache_dir",
    "force_download",
    "proxies",
    "token",
    "code_revision",
    "use_safetensors",
    "low_cpu_mem_usage",
)


def write_bundle(
    output: str | os.PathLike[str],
    *,
    target: str,
    retain_auxiliary: str,
    forget_auxiliary: str,
    steering: Steering | str,
    pack: bool = False,
    overwrite: bool = False,
    forget_set: str | None = None,
) -> Path:
    """Write a bundle that refers to three checkpoints; their weights stay where they are.

    Args:
        output: the bundle's folder.
        target: folder or hub id ('org/name', 'org/name@revision') of P.
        retain_auxiliary: likewise of q, which has not seen the forget set.
        forget_auxiliary: likewise of p, which has.
        steering: the rule, such as 'linear:1.5'.
        pack: copy the checkpoints into the bundle.
        overwrite: replace an earlier result in `output`.
        forget_set: name and hash of the forget set, for the model card.

    Returns:
        The bundle's folder.

    Raises:
        UsageError: a checkpoint is missing, corrupt or pickled, the vocabularies differ, the rule does not fit
            them, or the output folder is in use. Nothing has then been written.
    """
    output = Path(output).expanduser()
    steering = Steering.parse(steering)
    check_output(output, overwrite, is_bundle)
    given = dict(zip(PARTS, (target, retain_auxiliary, forget_auxiliary), strict=True))
    references = {part: CheckpointReference.parse(text) for part, text in given.items()}
    places = {part: reference.resolve(Path(), weights=pack) for part, reference in references.items()}
    check_apart(output.resolve(), places.values())
    for part, reference in references.items():
        if reference.folder is not None or pack:
            check_weights(places[part])
    configs = {part: load_config(place) for part, place in places.items()}
    tokenizers = {part: load_tokenizer(place) for part, place in places.items()}
    widths = {part: vocabulary_width(config) for part, config in configs.items()}
    vocab_size = common_vocabulary(widths, tokenizers, places)
    steering.check_vocabulary(vocab_size)
    for part, reference in references.items():
        if reference.folder is not None:
            stored = _stored_path(reference.folder, places[part], output.resolve())
            references[part] = CheckpointReference(folder=stored, sha256=digests(places[part]))
        else:
            # A branch may move on; the commit that was looked at is the snapshot's folder name.
            references[part] = dataclasses.replace(reference, revision=places[part].name)
    check_different(references["retain_auxiliary"], references["forget_auxiliary"])

    with output_folder(output, overwrite, is_bundle) as folder:
        for part in PARTS if pack else ():
            _copy_checkpoint(places[part], folder / part)
            references[part] = CheckpointReference(folder=part, sha256=digests(folder / part))
        config = DivergenceConfig.from_parts(
            configs,
            steering,
            vocab_size,
            {part: reference.to_dict() for part, reference in references.items()},
        )
        config.save_pretrained(folder)
        tokenizers["target"].save_pretrained(folder)
        if (places["target"] / "generation_config.json").is_file():
            shutil.copyfile(places["target"] / "generation_config.json", folder / "generation_config.json")
        write_text(folder / "README.md", bundle_card(config, forget_set))
    return output


def rewrite_steering(bundle: str | os.PathLike[str], steering: Steering) -> None:
    """Change the rule that a bundle's folder holds, and its model card; all else stays.

    Raises:
        UsageError: it is no bundle on disk, or the rule does not fit its vocabulary.
    """
    folder = Path(bundle).expanduser()
    if not folder.is_dir():
        raise UsageError(f"bundle {str(bundle)!r} is not a folder here; its steering cannot be changed")
    config = read_config(folder)
    steering.check_vocabulary(config.vocab_size)
    config.steering = steering.to_dict()
    write_text(folder / "config.json", config.to_json_string())
    card = folder / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8")
        write_text(card, re.sub(r"(?m)^\| steering \|.*\|$", f"| steering | {steering} |", text))


def load_parts(
    name_or_path: str | os.PathLike[str], *, verify: bool = True, **kwargs: Any
) -> tuple[DivergenceConfig, PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Load what a bundle names: its configuration, target, retain auxiliary and forget auxiliary.

    Args:
        name_or_path: a bundle's folder or hub id.
        verify: compare local files with the bundle's digests.
        **kwargs: see `DivergenceForCausalLM.from_pretrained`.

    Raises:
        UsageError: a part is missing, has changed, is corrupt or does not fit the others.
    """
    from divdec.experts.neural import logit_width

    local_files_only = bool(kwargs.pop("local_files_only", False))
    folder = find_bundle(name_or_path, kwargs.pop("revision", None), local_files_only=local_files_only)
    config = kwargs.pop("config", None)
    if not isinstance(config, DivergenceConfig):
        config = read_config(folder)
    for name in REFUSED:
        if kwargs.pop(name, None):
            raise UsageError(f"{name} has no meaning for a bundle, which names three checkpoints; leave it out")
    for name in WITHOUT_EFFECT:
        kwargs.pop(name, None)

    if not config.steering:
        raise UsageError(f"{folder}: the bundle names no steering; write it again with `divdec bundle`")
    if type(config.vocab_size) is not int or config.vocab_size < 1:
        raise UsageError(f"{folder}: vocab_size is {config.vocab_size!r}; write the bundle again with `divdec bundle`")
    Steering.from_dict(config.steering).check_vocabulary(config.vocab_size)
    references = {part: CheckpointReference.from_dict(getattr(config, part), part) for part in PARTS}
    check_different(references["retain_auxiliary"], references["forget_auxiliary"])
    places = {}
    for part, reference in references.items():
        places[part] = reference.resolve(folder, weights=True, local_files_only=local_files_only)
        check_weights(places[part])
        if verify:
            reference.verify(places[part], part)
    if places["retain_auxiliary"] == places["forget_auxiliary"]:
        raise UsageError(f"{folder}: both auxiliaries are {places['retain_auxiliary']}; nothing would be forgotten")
    target, retain, forget = (_load_part(part, places[part], kwargs) for part in PARTS)
    narrowest = min(logit_width(model) for model in (target, retain, forget))
    if narrowest != config.vocab_size:
        raise UsageError(
            f"{folder}: the bundle's common vocabulary has {config.vocab_size} tokens, that of its three parts "
            f"{narrowest}; write the bundle again"
        )
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        target.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return config, target, retain, forget


def find_bundle(name_or_path: str | os.PathLike[str], revision: str | None = None, **download_options: Any) -> Path:
    """The folder of a bundle given by its folder or hub id.

    Raises:
        UsageError: there is no such folder, and no such repository on the hub or in its cache.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.match(str(name_or_path)):
        raise UsageError(f"bundle {str(name_or_path)!r} is not a folder, nor a hub id such as 'org/name'")
    return download(str(name_or_path), revision, weights=True, **download_options)


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle, readable or not, so that it may be replaced by one."""
    try:
        return read_json(folder / "config.json").get("model_type") == DivergenceConfig.model_type
    except (UsageError, OSError, AttributeError):
        return False


def read_config(folder: Path) -> DivergenceConfig:
    """The configuration of a bundle's folder.

    Raises:
        UsageError: it is not there, not readable, or that of another kind of model.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a bundle: it has no config.json; `divdec bundle` writes one")
    config = load_config(folder)
    if not isinstance(config, DivergenceConfig):
        raise UsageError(
            f"{folder} is a plain {config.model_type} checkpoint, not a bundle: nothing would steer it; "
            "make one with `divdec bundle`"
        )
    return config


def save_packed(
    model: DivergenceForCausalLM,
    save_directory: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    safe_serialization: bool = True,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Write a bundle with the weights of all three parts as they are in memory.

    Args:
        model: a steered model with a neural pair.
        save_directory: the bundle's folder; other files in it are left alone.
        is_main_process: one process of several writes, the others do nothing.
        state_dict: the weights to write instead of those in memory, under the steered model's names.
        safe_serialization: anything but True is refused.
        push_to_hub: refused; `model.push_to_hub` does it.
        **kwargs: what `save_pretrained` of the parts takes (`max_shard_size`).
    """
    if push_to_hub:
        raise UsageError("save_pretrained does not push; call model.push_to_hub(…)")
    if safe_serialization is not True:
        raise UsageError("bundles are written as safetensors only")
    if not is_main_process:
        return
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    experts: Any = model.experts
    names = dict(zip(PARTS, ("target", "experts.retain", "experts.forget"), strict=True))
    parts = dict(zip(PARTS, (model.target, experts.retain, experts.forget), strict=True))
    references: dict[str, dict[str, Any]] = {}
    for part, loaded in parts.items():
        weights = None
        if state_dict is not None:
            prefix = f"{names[part]}."
            weights = {
                name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)
            }
        loaded.save_pretrained(folder / part, state_dict=weights, **kwargs)
        references[part] = CheckpointReference(folder=part, sha256=digests(folder / part)).to_dict()
    configs = {part: loaded.config for part, loaded in parts.items()}
    config = DivergenceConfig.from_parts(configs, model.steering, model.vocab_size, references)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_text(folder / "README.md", bundle_card(config, None))


def _load_part(part: str, folder: Path, kwargs: dict[str, Any]) -> PreTrainedModel:
    options = {name: _for_part(part, value) if name in PER_PART else value for name, value in kwargs.items()}
    try:
        return load_model(folder, **options)
    except UsageError as error:
        raise UsageError(f"{part}: {error}") from None


def _stored_path(given: str, place: Path, bundle: Path) -> str:
    """How a bundle names a checkpoint's folder: as the user gave it, but relative if the two can move together."""
    if Path(given).is_absolute() and not place.is_relative_to(bundle.parent):
        return place.as_posix()
    return Path(os.path.relpath(place, bundle)).as_posix()


def _for_part(part: str, value: Any) -> Any:
    """The value for one part of an option given as one value, or as a mapping from part names."""
    if not isinstance(value, dict) or not value or not set(value) <= set(PART_NAMES):
        return value
    return value.get(part, value.get("experts") if part != "target" else None)


def _copy_checkpoint(source: Path, destination: Path) -> None:
    destination.mkdir()
    for pattern in ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"):
        for file in source.glob(pattern):
            shutil.copyfile(file, destination / file.name)
