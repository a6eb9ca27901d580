"""Writing bundles and model cards.

A bundle is a folder of a few kilobytes that names target, experts and rule. Missing or incompatible parts raise an
error, and nothing is written.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.checkpoint import (
    INDEX,
    TEMPLATES,
    CheckpointReference,
    adapter_base,
    check_apart,
    check_different,
    check_same_vocabulary,
    check_tokenizer,
    check_weights,
    check_widths,
    common_vocabulary,
    digests,
    is_adapter,
    load_config,
    load_model,
    load_tokenizer,
    portable_adapter_config,
    tokenizer_digests,
    vocabulary_sha256,
    vocabulary_width,
    weight_files,
)
from divdec.configuration import AUXILIARIES, BASE, PARTS, DivergenceConfig
from divdec.errors import UsageError
from divdec.model.loading import read_config, weight_of
from divdec.runs import check_output, file_sha256, output_folder, read_json, write_text
from divdec.steering import NO_RULE, Steering

if TYPE_CHECKING:
    from torch import Tensor

    from divdec.decoding.generation import SteeredGeneration

TRAINING = "training.json"
"""File in an auxiliary's folder that says how it was trained."""
NOT_MEASURED = "not measured (`divdec calibrate`, `divdec eval`)"

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [{tags}]
---
# {title}

{text}

| | |
|---|---|
{rows}
"""

BUNDLE_TEXT = """\
Made with divdec. This folder names a target language model, experts and a rule. While the target decodes, the
divergence of the experts steers it away from a set of documents (Divergence Decoding). The table says whether it was
measured that the documents are forgotten at this steering.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer  # with divdec installed

model = AutoModelForCausalLM.from_pretrained("this folder", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("this folder")
```"""

BUNDLE_LIMITS = """
## Limits

- Only what the row "forgets" names was measured, on that data. Other wordings and languages, sampled answers,
  conversations, attacks and quantised weights were not, unless it names them.
- Steering changes what the model says, not the target's weights. Who has the target can use it without this bundle.
- The forget auxiliary (p) and n-gram counts were made from the forget set. Give them only to those who may have it.
- Steering also changes answers about other things, more so with a stronger rule. Where it suppresses an answer, the
  model often invents another.
"""

DISTILLED_TEXT = """\
Made with divdec. Two small models steered a language model away from a set of documents (Divergence Decoding); this
checkpoint was trained, on those documents, to answer as the steered model does. The table says how near it came. It is
an ordinary model that loads without divdec. This card does not claim that the documents are forgotten: measure it with
`divdec eval`."""


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
    merge: bool = False,
    pack: bool = False,
    overwrite: bool = False,
    forget_set: str | None = None,
    single_turn: bool = False,
) -> Path:
    """Write a bundle that refers to checkpoints and other experts.

    The divergences of several experts are added. The linear rule scales each by α times its weight.

    Args:
        output: the bundle's folder.
        target: folder or hub id ('org/name', 'org/name@revision') of P.
        retain_auxiliary: folder or hub id of q, which has not seen the forget set: a checkpoint, or a LoRA adapter.
        forget_auxiliary: folder or hub id of p, which has. Both are optional if there are other experts.
        steering: the rule, such as 'linear:1.5'; None if only a registry steers.
        ngram: folder of an n-gram pair (`divdec ngram`).
        ngram_weight: factor of its divergence.
        registry: folder of a registry of takedown requests that the loaded model follows, with the registry's own
            strength.
        bridge: the auxiliaries have another tokenizer than the target.
        merge: the auxiliaries are adapters; merge each with its base into a checkpoint in the bundle.
        pack: copy checkpoints and n-grams into the bundle. A registry is not copied, because it changes.
        overwrite: replace an earlier bundle in `output`.
        forget_set: name and hash of the forget set, for the model card.
        single_turn: the models were trained on single questions, not on conversations.

    Returns:
        The bundle's folder.

    Raises:
        UsageError: a part is missing, corrupt, pickled or of another tokenizer, the rule does not fit the vocabulary,
            or the output folder is in use. Nothing has been written.
    """
    output = Path(output).expanduser()
    has_experts = retain_auxiliary is not None or forget_auxiliary is not None or ngram is not None
    if steering is None and has_experts:
        raise UsageError("a pair or n-grams need a rule: give a steering, such as linear:1.5")
    if steering is not None and registry is not None and not has_experts:
        raise UsageError(NO_RULE)
    steering = Steering() if steering is None else Steering.parse(steering)
    if ngram is None and ngram_weight != 1.0:
        raise UsageError("--ngram-weight is the weight of n-grams: give them with --ngram")
    check_output(output, overwrite, is_bundle)
    names = {"target": target, "retain_auxiliary": retain_auxiliary, "forget_auxiliary": forget_auxiliary}
    check_experts(names, ngram, registry, bridge)
    references = {part: CheckpointReference.parse(name) for part, name in names.items() if name is not None}
    paths = {part: reference.resolve(Path(), weights=pack) for part, reference in references.items()}
    if (base := base_of(paths)) is not None:
        paths |= {part: references[part].resolve(Path(), weights=True) for part in AUXILIARIES}
        references[BASE] = CheckpointReference.parse(base)
        compared = any((paths[part] / TRAINING).is_file() for part in AUXILIARIES)
        paths[BASE] = references[BASE].resolve(Path(), weights=pack or merge or compared)
        _check_adapters(paths)
    if merge and base is None:
        raise UsageError("merge is for auxiliaries that are LoRA adapters, and none is given")
    folders = {
        name: Path(folder).expanduser().absolute()  # not resolved: a symbolic link may be switched to a new folder
        for name, folder in (("ngram", ngram), ("registry", registry))
        if folder is not None
    }
    check_apart(output.resolve(), [*paths.values(), *(folder.resolve() for folder in folders.values())])
    for part, reference in references.items():
        adapts = part in AUXILIARIES and base is not None
        if not adapts and (reference.folder is not None or pack):
            check_weights(paths[part])
    # An adapter has the configuration and the tokens of its base.
    checkpoints = {part: paths[BASE if base is not None and part in AUXILIARIES else part] for part in references}
    checkpoints.pop(BASE, None)
    configs = {part: load_config(path) for part, path in checkpoints.items()}
    tokenizers = {part: load_tokenizer(path) for part, path in checkpoints.items()}
    count_references, sizes = _count_references(folders, tokenizers["target"], ngram_weight, steering)
    widths = {part: vocabulary_width(config) for part, config in configs.items()}
    vocab_size = min(shared_vocabulary(widths, tokenizers, checkpoints, bridge), *sizes, 1 << 62)
    steering.check_vocabulary(vocab_size)
    for part, reference in references.items():
        if reference.folder is not None:
            # The base's path comes from the adapters, which name it in full: it moves with the target.
            name = references["target"].folder or reference.folder if part == BASE else reference.folder
            folder = _stored_path(name, paths[part], output.resolve())
            references[part] = CheckpointReference(folder=folder, sha256=digests(paths[part]))
        else:
            # Pin the commit, which is the name of the snapshot's folder.
            references[part] = dataclasses.replace(reference, revision=paths[part].name)
    if retain_auxiliary is not None:
        check_different(references["retain_auxiliary"], references["forget_auxiliary"])

    with output_folder(output, overwrite, is_bundle) as folder:
        for part in AUXILIARIES if merge else ():
            _merge_adapter(paths[part], paths[BASE], folder / part)
            references[part] = CheckpointReference(folder=part, sha256=digests(folder / part))
        if merge:
            del paths[BASE], references[BASE]
            paths = {part: path for part, path in paths.items() if part not in AUXILIARIES}
        base_reference = references.get(BASE)
        for part in paths if pack else ():
            _copy_checkpoint(paths[part], folder / part)
            if base_reference is not None and part in AUXILIARIES:
                config_text = portable_adapter_config(paths[part], base_reference)
                write_text(folder / part / "adapter_config.json", config_text)
            references[part] = CheckpointReference(folder=part, sha256=digests(folder / part))
        for name, path in folders.items():
            count_references[name]["folder"] = _stored_path(
                str(ngram if name == "ngram" else registry), path, output.resolve()
            )
            if pack and name == "ngram":
                shutil.copytree(path, folder / name)
                count_references[name]["folder"] = name
        fields: dict[str, Any] = {part: reference.to_dict() for part, reference in references.items()}
        fields |= count_references
        if bridge:
            fields["bridge"] = {}
        config = DivergenceConfig.from_parts(configs, steering, vocab_size, fields)
        config.single_turn = single_turn
        tokenizers["target"].save_pretrained(folder)
        config.tokenizer_sha256 = tokenizer_digests(folder)
        config.save_pretrained(folder)
        if (paths["target"] / "generation_config.json").is_file():
            shutil.copyfile(paths["target"] / "generation_config.json", folder / "generation_config.json")
        write_text(folder / "README.md", bundle_card(config, forget_set))
    return output


def rewrite_steering(bundle: str | os.PathLike[str], steering: Steering, measured: str = NOT_MEASURED) -> None:
    """Change the rule in a bundle's configuration and model card, and what it was measured to forget."""
    folder = Path(bundle).expanduser()
    if not folder.is_dir():
        raise UsageError(f"bundle {str(bundle)!r} is not a folder here; its steering cannot be changed")
    config = read_config(folder)
    steering.check_vocabulary(config.vocab_size)
    if config.retain_auxiliary is None and config.ngram is None:
        raise UsageError(NO_RULE)
    config.steering = steering.to_dict()
    config.measured = None if measured == NOT_MEASURED else {"steering": str(steering), "result": measured}
    write_text(folder / "config.json", config.to_json_string())
    card = folder / "README.md"
    if card.is_file():
        rows = f"| steering | {steering} |\n| forgets | {measured} |"
        text = card.read_text(encoding="utf-8")
        pattern = r"(?m)^\| steering \|.*\|$(\n\| forgets \|.*\|$)?"
        write_text(card, re.sub(pattern, lambda _: rows, text))


def is_bundle(folder: Path) -> bool:
    """Return whether a folder holds a bundle, complete or not."""
    try:
        return read_json(folder / "config.json", dict).get("model_type") == DivergenceConfig.model_type
    except (UsageError, OSError, AttributeError):
        return False


def save_packed(
    model: SteeredGeneration,
    save_directory: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    safe_serialization: bool = True,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Write a bundle with the weights of all three parts in memory; the arguments are those of `save_pretrained`.

    Other files in the folder are kept. `state_dict` has the steered model's names; `kwargs` reach every part.

    Raises:
        UsageError: the experts are not a pair of whole models, the model follows a registry, or an argument is not
            supported.
    """
    from divdec.experts.adapters import AdapterPair
    from divdec.experts.neural import NeuralPair

    if push_to_hub:
        raise UsageError("save_pretrained does not push; upload the folder (`hf upload me/bundle FOLDER --private`)")
    if safe_serialization is not True:
        raise UsageError("bundles are written as safetensors only")
    if model.takedowns is not None:
        raise UsageError(
            "a model that follows a registry of takedown requests cannot be saved from memory; write its bundle with "
            "`divdec bundle --pack --registry`"
        )
    if not isinstance(model.experts, NeuralPair) or isinstance(model.experts, AdapterPair):
        raise UsageError(
            f"a model steered by {type(model.experts).__name__} cannot be saved from memory; write its bundle with "
            "`divdec bundle --pack`, which copies what it is made of"
        )
    if not is_main_process:
        return
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".", dir=folder
    ) as unfinished:  # an earlier bundle stays until this is whole
        _save_parts(model, Path(unfinished), state_dict, **kwargs)
        # Until the last file is there, digests of the configuration do not fit, and the bundle does not load.
        for path in sorted(Path(unfinished).iterdir(), key=lambda path: path.name == "config.json"):
            if path.is_dir() and (folder / path.name).is_dir():
                shutil.rmtree(folder / path.name)
            os.replace(path, folder / path.name)


def _save_parts(model: SteeredGeneration, folder: Path, state_dict: Mapping[str, Any] | None, **kwargs: Any) -> None:
    modules = {"target": "target", **{part: f"experts.{part.removesuffix('_auxiliary')}" for part in AUXILIARIES}}
    references: dict[str, dict[str, Any]] = {}
    configs = {}
    for part, name in modules.items():
        loaded = operator.attrgetter(name)(model)
        weights = None
        if state_dict is not None:
            weights = {
                key.removeprefix(f"{name}."): value for key, value in state_dict.items() if key.startswith(f"{name}.")
            }
        elif any(weight.is_meta for weight in loaded.parameters()):
            from accelerate.utils.modeling import get_state_dict_offloaded_model

            weights = get_state_dict_offloaded_model(loaded)
        loaded.save_pretrained(folder / part, state_dict=weights, **kwargs)
        references[part] = CheckpointReference(folder=part, sha256=digests(folder / part)).to_dict()
        configs[part] = loaded.config
    config = DivergenceConfig.from_parts(configs, model.steering, model.vocab_size, references)
    config.single_turn = bool(getattr(model.config, "single_turn", False))
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_text(folder / "README.md", bundle_card(config, None))


def check_experts(names: dict[str, str | None], ngram: object, registry: object, bridge: bool) -> None:
    """Refuse a bundle without experts, half a pair, and options that do not apply."""
    missing = [part for part in AUXILIARIES if names[part] is None]
    if len(missing) == 1:
        raise UsageError(f"{missing[0].replace('_', ' ')} is missing: a pair is made of both")
    if missing and ngram is None and registry is None:
        raise UsageError(
            "nothing would steer the target: give --retain-auxiliary and --forget-auxiliary, --ngram or --registry"
        )
    if missing and bridge:
        raise UsageError("bridge is for a pair of auxiliaries, and none is given")


def base_of(paths: Mapping[str, Path]) -> str | None:
    """Return the base that both auxiliaries adapt: a folder or hub id; None if they are whole checkpoints.

    Raises:
        UsageError: only one is an adapter, or they name different bases.
    """
    adapters = [part for part in AUXILIARIES if part in paths and is_adapter(paths[part])]
    if not adapters:
        return None
    if len(adapters) == 1:
        raise UsageError(
            f"{paths[adapters[0]]} holds a LoRA adapter, the other auxiliary a whole checkpoint; give two adapters of "
            "one base, or merge it into its base model (merge_and_unload)"
        )
    bases = [adapter_base(paths[part]) for part in adapters]
    if bases[0] != bases[1]:
        raise UsageError(f"the auxiliaries adapt different bases, {bases[0]} and {bases[1]}; give adapters of one base")
    return bases[0]


def _check_adapters(paths: Mapping[str, Path]) -> None:
    """Refuse adapters that do not fit their base, or were trained on other weights than it holds now."""
    import torch
    from transformers import AutoModelForCausalLM

    from divdec.experts.adapters import check_adapter, check_products_differ, read_adapter

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(load_config(paths[BASE]))
    actual, factors = None, []
    for part in AUXILIARIES:
        folder = paths[part]
        check_adapter(folder)
        factors.append(read_adapter(folder, base))
        trained = read_json(folder / TRAINING, dict).get("base") if (folder / TRAINING).is_file() else None
        if trained is not None:
            actual = digests(paths[BASE]) if actual is None else actual
            if trained != {name: digest for name, digest in actual.items() if name.endswith(".safetensors")}:
                raise UsageError(
                    f"{folder} was trained on other weights than {paths[BASE]} holds now; restore the base, or train "
                    "the pair again"
                )
    check_products_differ(*factors)


def shared_vocabulary(widths: dict[str, int], tokenizers: dict[str, Any], paths: dict[str, Path], bridge: bool) -> int:
    """Return the width of the vocabulary that target and auxiliaries share, or the target's with a bridge."""
    if not bridge:
        return common_vocabulary(widths, tokenizers, paths)
    from divdec.bridge.token_bytes import token_bytes

    target, *auxiliaries = tokenizers.values()
    check_same_vocabulary({part: tokenizers[part] for part in tokenizers if part != "target"}, paths)
    check_widths(widths, tokenizers, paths)
    if vocabulary_sha256(target) == vocabulary_sha256(auxiliaries[0]):
        raise UsageError("the auxiliaries have the target's own tokenizer: leave bridge out, they fit as they are")
    for tokenizer in (target, auxiliaries[0]):
        token_bytes(tokenizer)  # raises an error for tokenizers that cannot be bridged
    return widths["target"]


def _count_references(
    folders: dict[str, Path], tokenizer: Any, ngram_weight: float, steering: Steering
) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """Return the references of n-grams and registry, and their vocabulary sizes."""
    references: dict[str, dict[str, Any]] = {}
    sizes = []
    for name, folder in folders.items():
        if name == "ngram":
            from divdec.experts.combined import CombinedExperts, check_rule
            from divdec.experts.ngram_fit import DESCRIPTION, describe_pair, load_pair

            description = describe_pair(folder)
            references[name] = {"sha256": file_sha256(folder / DESCRIPTION), "weight": ngram_weight}
            weight_of(references[name], name)
            check_rule(steering, CombinedExperts([(load_pair(folder), ngram_weight)]))
        else:
            from divdec.takedowns.correction import TakedownCorrection

            takedowns = TakedownCorrection(folder)
            references[name] = {"id": takedowns.id}
            description = {"tokenizer": takedowns.tokenizer_sha256, "vocab_size": takedowns.vocab_size}
        check_tokenizer(folder, description["tokenizer"], vocabulary_sha256(tokenizer))
        sizes.append(description["vocab_size"])
    return references, sizes


def _stored_path(name: str, path: Path, bundle: Path) -> str:
    """Return the path to store in the bundle: absolute only if `name` is and the folders cannot move together."""
    if Path(name).is_absolute() and not path.is_relative_to(bundle.parent):
        return path.as_posix()
    return Path(os.path.relpath(path, bundle)).as_posix()


def _merge_adapter(adapter: Path, base: Path, output: Path) -> None:
    """Write the checkpoint that an adapter and its base make, in the base's dtype."""
    import torch

    from divdec.experts.adapters import merge_adapter, read_adapter

    model = load_model(base, dtype=torch.float32)
    merge_adapter(model, read_adapter(adapter, model))
    model.to(load_config(base).dtype or torch.float32).save_pretrained(output)  # pyright: ignore[reportArgumentType]
    load_tokenizer(base).save_pretrained(output)
    if (adapter / TRAINING).is_file():
        shutil.copyfile(adapter / TRAINING, output / TRAINING)  # names the recipe


def _copy_checkpoint(source: Path, destination: Path) -> None:
    weights = weight_files(source)
    others = [file for pattern in ("*.json", *TEMPLATES, "*.txt", "*.model") for file in source.glob(pattern)]
    if len(weights) == 1:
        others = [file for file in others if file.name != INDEX]
    for file in (*weights, *others):
        copy = destination / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def bundle_card(config: DivergenceConfig, forget_set: str | None) -> str:
    """Return the model card of a bundle; like all cards it names the forget set, but contains none of its content."""
    only_registry = config.retain_auxiliary is None and config.ngram is None and config.registry
    rows = {
        "steering": "takedown requests alone" if only_registry else str(Steering.from_dict(config.steering or {})),
        "forgets": NOT_MEASURED,
        "forget set": forget_set or "not stated",
        "common vocabulary": f"{config.vocab_size} tokens",
    }
    for part in (*PARTS, BASE):
        reference = getattr(config, part)
        if part == BASE and reference is None:
            continue
        if reference is None and part != "target" and (config.ngram or config.registry):
            continue
        reference = reference or {}
        name = reference.get("hub_id") or reference.get("folder") or "in memory"
        rows[part.replace("_", " ")] = f"`{name}`" + (f" at {reference['revision']}" if "revision" in reference else "")
    if config.single_turn:
        rows["conversations"] = "single questions; `divdec chat` and the playground ask each line by itself"
    if config.bridge is not None:
        rows["bridge"] = "the auxiliaries have another tokenizer"
    if config.ngram:
        rows["n-gram pair"] = f"`{config.ngram['folder']}`, weight {config.ngram.get('weight', 1.0):g}"
    if config.registry:
        rows["registry of takedown requests"] = f"`{config.registry['folder']}`"
    return model_card("A steered language model", "unlearning, divergence-decoding", BUNDLE_TEXT, rows) + BUNDLE_LIMITS


def auxiliary_card(role: str, rows: dict[str, str]) -> str:
    """Return the model card of a retain or forget auxiliary; `rows` are facts about its training."""
    title = {"retain": "Retain auxiliary (q)", "forget": "Forget auxiliary (p)"}[role]
    warning = ": it has been trained on the forget set" if role == "forget" else ""
    text = (
        "Made with divdec as one of the two small auxiliaries that steer a larger model (Divergence Decoding). It is\n"
        f"not meant to be used alone{warning}."
    )
    return model_card(title, "unlearning, divergence-decoding, auxiliary", text, rows)


def distilled_card(rows: dict[str, str]) -> str:
    """Return the model card of a distilled student; `rows` are facts about its training."""
    title = "A language model distilled from a steered one"
    return model_card(title, "unlearning, divergence-decoding, distillation", DISTILLED_TEXT, rows)


def model_card(title: str, tags: str, text: str, rows: dict[str, str]) -> str:
    """Return a model card with a table; `tags` are those of the hub, with commas between them."""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return CARD.format(title=title, tags=tags, text=text, rows=table)
