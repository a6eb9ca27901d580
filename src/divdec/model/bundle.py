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
from divdec.model.card import NOT_MEASURED, bundle_card
from divdec.model.checkpoint import (
    INDEX,
    TEMPLATES,
    CheckpointReference,
    check_apart,
    check_different,
    check_weights,
    digests,
    load_config,
    load_tokenizer,
    save_model,
    weight_files,
)
from divdec.model.configuration import AUXILIARIES, NO_RULE, DivergenceConfig
from divdec.model.loading import check_tokenizer, read_config, weight_of
from divdec.model.vocabularies import (
    check_same_vocabulary,
    check_widths,
    common_vocabulary,
    vocabulary_sha256,
    vocabulary_width,
)
from divdec.runs import check_output, file_sha256, output_folder, read_json, write_text
from divdec.steering import Steering

if TYPE_CHECKING:
    from torch import Tensor

    from divdec.model.modeling import DivergenceForCausalLM


def write_bundle(
    output: str | os.PathLike[str],
    *,
    target: str,
    retain_auxiliary: str | None = None,
    forget_auxiliary: str | None = None,
    steering: Steering | str | None = None,
    ngram: str | os.PathLike[str] | None = None,
    ngram_weight: float = 1.0,
    registry: str | os.PathLike[str] | None = None,
    bridge: bool = False,
    heal: bool = False,
    pack: bool = False,
    overwrite: bool = False,
    forget_set: str | None = None,
    single_turn: bool = False,
) -> Path:
    """Write a bundle that refers to checkpoints and other experts; what they hold stays where it is.

    The divergences of several kinds of experts add; the linear rule so steers by each with α times its weight.

    Args:
        output: the bundle's folder.
        target: folder or hub id ('org/name', 'org/name@revision') of P.
        retain_auxiliary: likewise of q, which has not seen the forget set.
        forget_auxiliary: likewise of p, which has. Both may be left out where there are other experts.
        steering: the rule, such as 'linear:1.5'; None where nothing but a registry steers, which needs no rule.
        ngram: folder of an n-gram pair (`divdec ngram`).
        ngram_weight: what its divergence is multiplied by.
        registry: folder of a registry of takedown requests (`divdec forget`), which the loaded model follows. Its
            strength is its own.
        bridge: the auxiliaries have another tokenizer than the target.
        heal: with `bridge`, where a token of the target ends within one of the auxiliaries', take the divergence of
            those tokens that go on from there.
        pack: copy checkpoints and n-grams into the bundle; a registry, which changes, stays where it is.
        overwrite: replace an earlier result in `output`.
        forget_set: name and hash of the forget set, for the model card.
        single_turn: the models have learned single questions, no longer conversations.

    Returns:
        The bundle's folder.

    Raises:
        UsageError: a part is missing, corrupt, pickled or of another tokenizer, the rule does not fit the vocabulary,
            or the output folder is in use. Nothing has then been written.
    """
    output = Path(output).expanduser()
    has_experts = retain_auxiliary is not None or forget_auxiliary is not None or ngram is not None
    if steering is None and has_experts:
        raise UsageError("a pair or n-grams need a rule: give a steering, such as linear:1.5")
    if steering is not None and registry is not None and not has_experts:
        raise UsageError(NO_RULE)
    steering = Steering() if steering is None else Steering.parse(steering)
    check_output(output, overwrite, is_bundle)
    given = {"target": target, "retain_auxiliary": retain_auxiliary, "forget_auxiliary": forget_auxiliary}
    _check_kinds(given, ngram, registry, bridge, heal)
    references = {part: CheckpointReference.parse(text) for part, text in given.items() if text is not None}
    places = {part: reference.resolve(Path(), weights=pack) for part, reference in references.items()}
    folders = {
        name: Path(folder).expanduser().absolute()  # a link stays one: it may be switched
        for name, folder in (("ngram", ngram), ("registry", registry))
        if folder is not None
    }
    check_apart(output.resolve(), [*places.values(), *(folder.resolve() for folder in folders.values())])
    for part, reference in references.items():
        if reference.folder is not None or pack:
            check_weights(places[part])
    configs = {part: load_config(place) for part, place in places.items()}
    tokenizers = {part: load_tokenizer(place) for part, place in places.items()}
    vocab_size = _vocabulary(configs, tokenizers, places, bridge)
    counted, sizes = _counted(folders, tokenizers["target"], ngram_weight)
    vocab_size = min(vocab_size, *sizes) if sizes else vocab_size
    steering.check_vocabulary(vocab_size)
    for part, reference in references.items():
        if reference.folder is not None:
            stored = _stored_path(reference.folder, places[part], output.resolve())
            references[part] = CheckpointReference(folder=stored, sha256=digests(places[part]))
        else:
            # A branch may move on; the commit that was looked at is the snapshot's folder name.
            references[part] = dataclasses.replace(reference, revision=places[part].name)
    if retain_auxiliary is not None:
        check_different(references["retain_auxiliary"], references["forget_auxiliary"])

    with output_folder(output, overwrite, is_bundle) as folder:
        for part in places if pack else ():
            _copy_checkpoint(places[part], folder / part)
            references[part] = CheckpointReference(folder=part, sha256=digests(folder / part))
        for name, place in folders.items():
            counted[name]["folder"] = _stored_path(str(ngram if name == "ngram" else registry), place, output.resolve())
            if pack and name == "ngram":
                shutil.copytree(place, folder / name)
                counted[name]["folder"] = name
        named: dict[str, Any] = {part: reference.to_dict() for part, reference in references.items()} | counted
        if bridge:
            named["bridge"] = {"heal": heal}
        config = DivergenceConfig.from_parts(configs, steering, vocab_size, named)
        config.single_turn = single_turn
        config.save_pretrained(folder)
        tokenizers["target"].save_pretrained(folder)
        if (places["target"] / "generation_config.json").is_file():
            shutil.copyfile(places["target"] / "generation_config.json", folder / "generation_config.json")
        write_text(folder / "README.md", bundle_card(config, forget_set))
    return output


def rewrite_steering(bundle: str | os.PathLike[str], steering: Steering, measured: str = NOT_MEASURED) -> None:
    """Change the rule that a bundle's folder holds, and its model card; all else stays.

    Args:
        bundle: the bundle's folder.
        steering: the new rule.
        measured: what is known of how well it forgets, for the model card.

    Raises:
        UsageError: it is no bundle on disk, or the rule does not fit its vocabulary.
    """
    folder = Path(bundle).expanduser()
    if not folder.is_dir():
        raise UsageError(f"bundle {str(bundle)!r} is not a folder here; its steering cannot be changed")
    config = read_config(folder)
    steering.check_vocabulary(config.vocab_size)
    if config.retain_auxiliary is None and config.ngram is None:
        raise UsageError(NO_RULE)
    config.steering = steering.to_dict()
    write_text(folder / "config.json", config.to_json_string())
    card = folder / "README.md"
    if card.is_file():
        rows = f"| steering | {steering} |\n| forgets | {measured} |"
        text = card.read_text(encoding="utf-8")
        pattern = r"(?m)^\| steering \|.*\|$(\n\| forgets \|.*\|$)?"
        write_text(card, re.sub(pattern, lambda _: rows, text))


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle, readable or not, so that it may be replaced by one."""
    try:
        return read_json(folder / "config.json").get("model_type") == DivergenceConfig.model_type
    except (UsageError, OSError, AttributeError):
        return False


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
    if model.takedowns is not None:
        raise UsageError(
            "a model that follows a registry of takedown requests cannot be saved from memory; write its bundle with "
            "`divdec bundle --pack --registry`"
        )
    if not is_main_process:
        return
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    names = {"target": "target"} | _names_of_auxiliaries(model.experts)
    references: dict[str, dict[str, Any]] = {}
    configs = {}
    for part, name in names.items():
        loaded: Any = model.get_submodule(name)
        weights = None
        if state_dict is not None:
            weights = {
                key.removeprefix(f"{name}."): value for key, value in state_dict.items() if key.startswith(f"{name}.")
            }
        save_model(loaded, folder / part, state_dict=weights, **kwargs)
        references[part] = CheckpointReference(folder=part, sha256=digests(folder / part)).to_dict()
        configs[part] = loaded.config
    config = DivergenceConfig.from_parts(configs, model.steering, model.vocab_size, references)
    config.single_turn = bool(getattr(model.config, "single_turn", False))
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_text(folder / "README.md", bundle_card(config, None))


def _names_of_auxiliaries(experts: Any) -> dict[str, str]:
    """The auxiliaries of a plain neural pair, by part name.

    Raises:
        UsageError: the experts are of another kind, whose files only `write_bundle` knows.
    """
    from divdec.experts.neural import NeuralPair

    if not isinstance(experts, NeuralPair):
        raise UsageError(
            f"a model steered by {type(experts).__name__} cannot be saved from memory; write its bundle with "
            "`divdec bundle --pack`, which copies what it is made of"
        )
    return {part: f"experts.{part.removesuffix('_auxiliary')}" for part in AUXILIARIES}


def _check_kinds(given: dict[str, str | None], ngram: object, registry: object, bridge: bool, heal: bool) -> None:
    """Refuse a choice of experts that leaves nothing to steer with, or half a pair.

    Raises:
        UsageError: says what is missing.
    """
    missing = [part for part in AUXILIARIES if given[part] is None]
    if len(missing) == 1:
        raise UsageError(f"{missing[0].replace('_', ' ')} is missing: a pair is made of both")
    if missing and ngram is None and registry is None:
        raise UsageError(
            "nothing would steer the target: give a retain and a forget auxiliary, an n-gram pair or a registry"
        )
    if missing and bridge:
        raise UsageError("bridge is for a pair of auxiliaries, and none is given")
    if heal and not bridge:
        raise UsageError("heal belongs to bridge: auxiliaries with the target's tokenizer have nothing to heal")


def _vocabulary(configs: dict[str, Any], tokenizers: dict[str, Any], places: dict[str, Path], bridge: bool) -> int:
    """Width of the vocabulary that the models steer together."""
    widths = {part: vocabulary_width(config) for part, config in configs.items()}
    if not bridge:
        return common_vocabulary(widths, tokenizers, places)
    check_same_vocabulary({part: tokenizers[part] for part in AUXILIARIES}, places)
    check_widths(widths, tokenizers, places)
    if vocabulary_sha256(tokenizers["target"]) == vocabulary_sha256(tokenizers["retain_auxiliary"]):
        raise UsageError("the auxiliaries have the target's own tokenizer: leave bridge out, they fit as they are")
    from divdec.bridge.token_bytes import token_bytes

    for part in ("target", "retain_auxiliary"):
        token_bytes(tokenizers[part])  # a tokenizer that cannot be bridged is refused before anything is written
    return widths["target"]


def _counted(
    folders: dict[str, Path], tokenizer: Any, ngram_weight: float
) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """References of n-grams and registry, and the vocabularies that they count."""
    references: dict[str, dict[str, Any]] = {}
    sizes = []
    for name, place in folders.items():
        if name == "ngram":
            from divdec.experts.ngram_folder import DESCRIPTION, describe_pair, load_pair

            about = describe_pair(place)
            load_pair(place)
            references[name] = {"sha256": file_sha256(place / DESCRIPTION), "weight": ngram_weight}
            weight_of(references[name], name)
        else:
            from divdec.experts.correction import open_registry

            takedowns = open_registry(place)
            references[name] = {"id": takedowns.id}
            about = {"tokenizer": takedowns.tokenizer_sha256, "vocab_size": takedowns.vocab_size}
        check_tokenizer(place, about["tokenizer"], vocabulary_sha256(tokenizer))
        sizes.append(about["vocab_size"])
    return references, sizes


def _stored_path(given: str, place: Path, bundle: Path) -> str:
    """How a bundle names a checkpoint's folder: as the user gave it, but relative if the two can move together."""
    if Path(given).is_absolute() and not place.is_relative_to(bundle.parent):
        return place.as_posix()
    return Path(os.path.relpath(place, bundle)).as_posix()


def _copy_checkpoint(source: Path, destination: Path) -> None:
    weights = weight_files(source)
    others = [file for pattern in ("*.json", *TEMPLATES, "*.txt", "*.model") for file in source.glob(pattern)]
    if len(weights) == 1:
        others = [file for file in others if file.name != INDEX]
    for file in (*weights, *others):
        copied = destination / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)
