"""Loading what a bundle names: the target, the experts of whatever kinds, and the registry that it follows.

It fails closed: whatever is missing, changed or does not fit is an error, never an unsteered model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.model.checkpoint import (
    HUB_ID,
    CheckpointReference,
    check_different,
    check_weights,
    download,
    load_config,
    load_model,
    load_tokenizer,
)
from divdec.model.configuration import AUXILIARIES, PARTS, DivergenceConfig
from divdec.model.vocabularies import check_same_vocabulary, vocabulary_sha256
from divdec.runs import file_sha256
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.experts.protocol import Experts
    from divdec.takedowns.live import Takedowns

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


def load_parts(
    name_or_path: str | os.PathLike[str], *, verify: bool = True, **kwargs: Any
) -> tuple[DivergenceConfig, PreTrainedModel, Experts | None, Takedowns | None]:
    """Load what a bundle names: its configuration, target, experts and takedowns.

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
            raise UsageError(f"{name} has no meaning for a bundle, which names several checkpoints; leave it out")
    for name in WITHOUT_EFFECT:
        kwargs.pop(name, None)

    if not config.steering:
        raise UsageError(f"{folder}: the bundle names no steering; write it again with `divdec bundle`")
    if type(config.vocab_size) is not int or config.vocab_size < 1:
        raise UsageError(f"{folder}: vocab_size is {config.vocab_size!r}; write the bundle again with `divdec bundle`")
    Steering.from_dict(config.steering).check_vocabulary(config.vocab_size)
    places = places_of(folder, config, verify, local_files_only)
    models = {part: load_part(part, place, kwargs) for part, place in places.items()}
    target = models["target"]
    experts = load_experts(folder, config, places, models, verify)
    takedowns = load_takedowns(folder, config)
    sizes = [part.vocab_size for part in (experts, takedowns) if part is not None]
    narrowest = min(logit_width(target), *sizes)
    if narrowest != config.vocab_size:
        raise UsageError(
            f"{folder}: the bundle's common vocabulary has {config.vocab_size} tokens, that of its parts "
            f"{narrowest}; write the bundle again"
        )
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        target.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return config, target, experts, takedowns


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


def places_of(
    folder: Path,
    config: DivergenceConfig,
    verify: bool,
    local_files_only: bool,
) -> dict[str, Path]:
    """Folders of the checkpoints that a bundle names."""
    counted = config.ngram is not None or config.registry is not None
    named = [part for part in AUXILIARIES if getattr(config, part) is not None]
    parts = PARTS if named or not counted else ("target",)  # a single auxiliary is missed by name
    references = {part: CheckpointReference.from_dict(getattr(config, part), part) for part in parts}
    if named:
        check_different(references["retain_auxiliary"], references["forget_auxiliary"])
    places = {}
    for part, reference in references.items():
        places[part] = reference.resolve(folder, weights=True, local_files_only=local_files_only)
        check_weights(places[part])
        if verify:
            reference.verify(places[part], part)
    if set(AUXILIARIES) <= places.keys() and places["retain_auxiliary"] == places["forget_auxiliary"]:
        raise UsageError(f"{folder}: both auxiliaries are {places['retain_auxiliary']}; nothing would be forgotten")
    return places


def load_experts(
    folder: Path,
    config: DivergenceConfig,
    places: dict[str, Path],
    models: dict[str, PreTrainedModel],
    verify: bool,
) -> Experts | None:
    """The experts that a bundle names, joined where there are several; None where it names a registry alone."""
    from divdec.experts.combined import CombinedExperts
    from divdec.experts.neural import NeuralPair

    found: list[tuple[Experts, float]] = []
    for name in ("bridge", "ngram"):
        if getattr(config, name) is not None and not isinstance(getattr(config, name), dict):
            raise UsageError(f"{folder}: {name} is {getattr(config, name)!r}; write the bundle again")
    if "retain_auxiliary" in models:
        pair = models["retain_auxiliary"], models["forget_auxiliary"]
        if config.bridge is None:
            found.append((NeuralPair(*pair), 1.0))
        else:
            found.append((bridged(config, places, models), 1.0))
    if config.ngram is not None:
        sha256 = vocabulary_sha256(load_tokenizer(places["target"]))
        found.append((load_ngrams(folder, config.ngram, sha256, verify), weight_of(config.ngram, "ngram")))
    if not found:
        return None
    if len(found) == 1 and found[0][1] == 1:
        return found[0][0]
    return CombinedExperts(found)


def bridged(config: DivergenceConfig, places: dict[str, Path], models: dict[str, PreTrainedModel]) -> Experts:
    """A neural pair that speaks another tokenizer than the target.

    Raises:
        UsageError: the two auxiliaries do not share a vocabulary, or its bytes cannot be told.
    """
    from divdec.bridge.bridge import BridgedPair
    from divdec.experts.neural import logit_width

    tokenizers = {part: load_tokenizer(place) for part, place in places.items()}
    check_same_vocabulary({part: tokenizers[part] for part in AUXILIARIES}, places)
    return BridgedPair(
        models["retain_auxiliary"],
        models["forget_auxiliary"],
        target_tokenizer=tokenizers["target"],
        auxiliary_tokenizer=tokenizers["retain_auxiliary"],
        target_width=logit_width(models["target"]),
        heal=bool((config.bridge or {}).get("heal", False)),
    )


def load_ngrams(folder: Path, reference: dict[str, Any], tokenizer: str, verify: bool) -> Experts:
    """The n-gram pair that a bundle names.

    Raises:
        UsageError: it is missing, has changed since the bundle was written, or belongs to another tokenizer.
    """
    from divdec.experts.ngram_folder import DESCRIPTION, describe_pair, load_pair

    place = (folder / str(reference.get("folder"))).resolve()
    about = describe_pair(place)
    check_tokenizer(place, about["tokenizer"], tokenizer)
    if verify and file_sha256(place / DESCRIPTION) != reference.get("sha256"):
        raise UsageError(
            f"{place / DESCRIPTION} has changed since the bundle was written; write the bundle again, "
            "or load it without verification (--no-verify) if the change is meant"
        )
    return load_pair(place, verify=verify)


def load_takedowns(folder: Path, config: DivergenceConfig, instead: Path | None = None) -> Takedowns | None:
    """The registry that a bundle names; it changes, so that there is no digest to compare with.

    Args:
        folder: the bundle's.
        config: its configuration.
        instead: where a registry lies that is followed though the bundle names none, or names this one elsewhere.

    Raises:
        UsageError: it is missing, belongs to another tokenizer, lacks its key, or is another than the bundle's.
        FailedClosed: it is damaged.
    """
    from divdec.takedowns.folder import read_description
    from divdec.takedowns.live import Takedowns

    reference = config.registry
    if reference is not None and not isinstance(reference, dict):
        raise UsageError(f"{folder}: registry is {reference!r}; write the bundle again")
    if reference is None and instead is None:
        return None
    place = instead or folder / str((reference or {}).get("folder"))
    about = read_description(place)
    if reference is not None and about["id"] != reference.get("id"):
        raise UsageError(f"{place} is another registry than the bundle was written for; write the bundle again")
    target = CheckpointReference.from_dict(config.target, "target").resolve(folder, weights=False)
    check_tokenizer(place, about["tokenizer"], vocabulary_sha256(load_tokenizer(target)))
    return Takedowns(place)


def check_tokenizer(place: Path, found: str, wanted: str) -> None:
    """Refuse counts of another tokenizer's tokens.

    Raises:
        UsageError: the digests differ.
    """
    if found != wanted:
        raise UsageError(
            f"{place} counts the tokens of another tokenizer (vocabulary {found[:12]}) than the target's "
            f"({wanted[:12]}); fit it again with the target's tokenizer"
        )


def weight_of(reference: dict[str, Any], name: str) -> float:
    """What the divergence of one kind of experts is multiplied by.

    Raises:
        UsageError: it is not a number, or would make the experts count for nothing.
    """
    weight = reference.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-3 <= weight <= 1e3:
        raise UsageError(f"the weight of {name} is {weight!r}; accepted: a number from 0.001 to 1000")
    return float(weight)


def load_part(part: str, folder: Path, kwargs: dict[str, Any]) -> PreTrainedModel:
    """One model of a bundle.

    Args:
        part: its name, for messages and for options that differ by part.
        folder: where it lies.
        kwargs: what `AutoModelForCausalLM.from_pretrained` takes, those of `PER_PART` perhaps by part.

    Raises:
        UsageError: it cannot be loaded.
    """
    options = {name: _for_part(part, value) if name in PER_PART else value for name, value in kwargs.items()}
    try:
        return load_model(folder, **options)
    except UsageError as error:
        raise UsageError(f"{part}: {error}") from None


def _for_part(part: str, value: Any) -> Any:
    """The value for one part of an option given as one value, or as a mapping from part names."""
    if not isinstance(value, dict) or not value or not set(value) <= set(PART_NAMES):
        return value
    return value.get(part, value.get("experts") if part != "target" else None)
