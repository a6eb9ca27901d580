"""Loading a bundle, for transformers and for vLLM.

It fails closed: a part that is missing, changed or does not fit is an error, never an unsteered model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.checkpoint import (
    HUB_ID,
    CheckpointReference,
    check_different,
    check_same_vocabulary,
    check_tokenizer,
    check_weights,
    download,
    input_digests,
    load_config,
    load_model,
    load_tokenizer,
    tokenizer_digests,
    vocabulary_sha256,
)
from divdec.configuration import AUXILIARIES, BASE, PARTS, DivergenceConfig
from divdec.errors import UsageError, first_line
from divdec.runs import folder_digests, read_json, settings_hash
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from divdec.experts.neural import NeuralPair
    from divdec.experts.protocol import Experts
    from divdec.takedowns.correction import TakedownCorrection

LoadedModels = dict[tuple[Path, str], "PreTrainedModel"]
"""Models by folder and the options that they were loaded with."""
REFERENCES = (*PARTS, BASE, "ngram", "bridge", "registry")
"""Fields of a bundle's configuration that name what steers."""
PER_PART = ("dtype", "torch_dtype", "device_map", "attn_implementation", "quantization_config")
PART_NAMES = (*PARTS, BASE, "experts")
# Arguments of from_pretrained that refer to the files of a single checkpoint.
REFUSED = ("subfolder", "output_loading_info", "state_dict", "gguf_file", "variant")
# Arguments that the Auto classes and their users add. The parts are never loaded with remote code.
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


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A bundle whose configuration and checkpoints have been checked; no weights are loaded yet."""

    folder: Path
    config: DivergenceConfig
    steering: Steering
    paths: dict[str, Path]
    """Folder of each checkpoint by part, the target's first."""
    verify: bool = True
    """Compare n-grams with their digest, as was done for the checkpoints."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Parts that are adapters of `paths["base"]`."""
        return AUXILIARIES if BASE in self.paths else ()

    @classmethod
    def open(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        verify: bool = True,
        local_files_only: bool = False,
        config: DivergenceConfig | None = None,
        target: bool = True,
    ) -> Bundle:
        """Find a bundle and its checkpoints, and check them.

        Args:
            name_or_path: a folder or hub id.
            revision: branch, tag or commit of a hub id.
            verify: compare local files with the bundle's digests.
            local_files_only: use the local cache of the hub alone.
            config: configuration to use instead of the folder's, with the same parts.
            target: False leaves out the target, which then need not exist.

        Raises:
            UsageError: a part is missing, has changed or is corrupt, or the configuration is invalid.
        """
        folder = find_bundle(name_or_path, revision, local_files_only=local_files_only)
        stored = read_config(folder)
        config = stored if config is None else config
        if isinstance(config.steering, str):  # the Auto classes write the argument `steering` into the configuration
            config.steering = Steering.from_dict(stored.steering or {}).revised(config.steering).to_dict()
        for name in REFERENCES:  # as they do with any of its fields: `ngram=None` would leave an expert out
            given = getattr(config, name)
            if name == "registry" and isinstance(given, (str, os.PathLike)):
                raise UsageError("registry: pass it to divdec.DivergenceForCausalLM.from_pretrained")
            if given is not None and given != getattr(stored, name):
                raise UsageError(
                    f"{name}={given!r} differs from the bundle {folder}; accepted: what its config.json names; write "
                    "another bundle for other parts (`divdec bundle`)"
                )
            setattr(config, name, getattr(stored, name))
        if not config.steering:
            raise UsageError(f"{folder}: the bundle names no steering; write it again with `divdec bundle`")
        size = config.vocab_size
        if type(size) is not int or size < 1:
            raise UsageError(f"{folder}: vocab_size is {size!r}; write the bundle again with `divdec bundle`")
        _check_fields(folder, config)
        steering = Steering.from_dict(config.steering)
        steering.check_vocabulary(size)
        paths = part_paths(folder, config, verify, local_files_only, target=target)
        if verify and stored.tokenizer_sha256 not in (None, tokenizer_digests(folder)):
            raise UsageError(
                f"{folder}: the bundle's tokenizer or chat template has changed; write it again, or use --no-verify"
            )
        return cls(folder, config, steering, paths, verify)

    def load_ngrams(self) -> tuple[Experts, float] | None:
        """Load the n-gram pair and its weight; None if the bundle has none.

        Raises:
            UsageError: it is missing, has changed, or belongs to another tokenizer.
        """
        from divdec.experts.ngram_fit import describe_pair, load_pair

        if (reference := self.config.ngram) is None:
            return None
        folder = (self.folder / str(reference.get("folder"))).resolve()
        check_tokenizer(folder, describe_pair(folder)["tokenizer"], self.target_vocabulary())
        pair = load_pair(folder, verify=self.verify, sha256=str(reference.get("sha256")))
        return pair, weight_of(reference, "ngram")

    def load_takedowns(self, registry: str | os.PathLike[str] | None = None) -> TakedownCorrection | None:
        """Open the registry of takedown requests; None if there is none.

        Args:
            registry: folder of a registry to follow where the bundle names none, or of the bundle's where its own
                folder does not exist.

        Raises:
            UsageError: it is missing, belongs to another tokenizer or vocabulary, lacks its key, or is another than the
                bundle's.
            FailedClosed: it is damaged.
        """
        from divdec.takedowns.correction import TakedownCorrection

        reference, takedowns = self.config.registry, None
        named = None if reference is None else self.folder / str(reference.get("folder"))
        if named is not None and registry is not None and not named.is_dir():
            named = None  # otherwise it is followed: a copy may lack later requests
        for folder in [path for path in (registry, named) if path is not None]:
            takedowns = TakedownCorrection(folder)
            if reference is not None and takedowns.id != reference.get("id"):
                raise UsageError(f"{folder} is another registry than the bundle's; accepted: that one")
        if takedowns is None:
            return None
        check_tokenizer(takedowns.folder, takedowns.tokenizer_sha256, self.target_vocabulary())
        if takedowns.vocab_size < self.config.vocab_size:
            raise UsageError(
                f"{takedowns.folder} counts {takedowns.vocab_size} tokens, the model has {self.config.vocab_size}; "
                "create a registry for this model's target (`divdec takedown init`)"
            )
        return takedowns

    def target_vocabulary(self) -> str:
        """Return the digest of the target's vocabulary."""
        return vocabulary_sha256(load_tokenizer(self.paths.get("target", self.folder)))

    def check_vocab_size(self, sizes: Iterable[int]) -> None:
        """Check that the parts' smallest vocabulary is the one that the bundle was written for."""
        if (smallest := min(sizes)) != self.config.vocab_size:
            raise UsageError(
                f"{self.folder}: the bundle's common vocabulary has {self.config.vocab_size} tokens, that of its "
                f"parts {smallest}; write the bundle again"
            )


def load_parts(
    name_or_path: str | os.PathLike[str],
    *,
    verify: bool = True,
    loaded: LoadedModels | None = None,
    registry: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> tuple[DivergenceConfig, PreTrainedModel, Experts | None, TakedownCorrection | None]:
    """Load a bundle's configuration, target, experts and takedowns; see `DivergenceForCausalLM.from_pretrained`.

    Raises:
        UsageError: a part is missing, has changed, is corrupt or does not fit the others.
    """
    from transformers import GenerationConfig

    from divdec.passes import logit_width

    local_files_only, revision = bool(kwargs.pop("local_files_only", False)), kwargs.pop("revision", None)
    config = kwargs.pop("config", None)
    for name in REFUSED:
        if kwargs.pop(name, None):
            raise UsageError(f"{name} has no meaning for a bundle, which names several checkpoints; leave it out")
    for name in WITHOUT_EFFECT:
        kwargs.pop(name, None)
    bundle = Bundle.open(
        name_or_path,
        revision=revision,
        verify=verify,
        local_files_only=local_files_only,
        config=config if isinstance(config, DivergenceConfig) else None,
    )
    models = {}
    for part, path in bundle.paths.items():
        if part in bundle.adapters:
            continue
        options = {name: _for_part(part, value) if name in PER_PART else value for name, value in kwargs.items()}
        try:
            models[part] = _load_once(path, options, loaded)
        except UsageError as error:
            raise UsageError(f"{part}: {error}") from None
    target = models["target"]
    experts, takedowns = load_experts(bundle, models), bundle.load_takedowns(registry)
    bundle.check_vocab_size(
        [logit_width(target), *(part.vocab_size for part in (experts, takedowns) if part is not None)]
    )
    if (bundle.folder / "generation_config.json").is_file():
        try:
            target.generation_config = settings = GenerationConfig.from_pretrained(bundle.folder, local_files_only=True)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                ids = getattr(settings, name)
                if not all(isinstance(token, int | None) for token in (ids if isinstance(ids, list) else [ids])):
                    raise ValueError(f"{name} is {ids!r}; accepted: token ids")
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(
                f"{bundle.folder / 'generation_config.json'}: {first_line(error)}; write it again"
            ) from None
    return bundle.config, target, experts, takedowns


def find_bundle(name_or_path: str | os.PathLike[str], revision: str | None = None, **download_options: Any) -> Path:
    """Return the folder of a bundle."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} is not a bundle: it has no config.json; `divdec bundle` writes one")
        return folder
    if not HUB_ID.match(name := str(name_or_path)) or name == "demo/bundle":
        command = "divdec demo --output demo" if name == "demo/bundle" else "divdec bundle"
        raise UsageError(f"bundle {name!r} is not a folder or hub id; `{command}` writes one")
    return download(str(name_or_path), revision, weights=True, **download_options)


def bundle_identity(config: PreTrainedConfig) -> str:
    """Return a digest of the parts that a bundle refers to, which does not depend on where they lie."""
    references = {role: dict(getattr(config, role) or {}) for role in REFERENCES}
    for reference in references.values():
        reference.pop("folder", None)
    return settings_hash(references)


def read_config(folder: Path) -> DivergenceConfig:
    """Read the configuration of a bundle's folder."""
    config = load_config(folder)
    if not isinstance(config, DivergenceConfig):
        raise UsageError(
            f"{folder} is a plain {config.model_type} checkpoint, not a bundle: nothing would steer it; "
            "make one with `divdec bundle`"
        )
    _check_fields(folder, config)
    return config


def _check_fields(folder: Path, config: DivergenceConfig) -> None:
    for name in ("base", "bridge", "ngram", "registry", "measured"):
        if not isinstance(getattr(config, name), dict | None):
            raise UsageError(f"{folder}: {name} is {getattr(config, name)!r}; write the bundle again")
    if not isinstance(config.max_position_embeddings, int | None):
        raise UsageError(f"{folder}: max_position_embeddings is {config.max_position_embeddings!r}; accepted: a number")
    if config.measured is not None and set(config.measured) != {"steering", "result"}:
        raise UsageError(f"{folder}: measured is {config.measured!r}; write the bundle again")
    if any((config.bridge or {}).values()):
        raise UsageError(f"{folder}: bridge is {config.bridge!r}; accepted: {{}}; write the bundle again")


def part_paths(
    folder: Path, config: DivergenceConfig, verify: bool, local_files_only: bool, *, target: bool = True
) -> dict[str, Path]:
    """Return the folder of each checkpoint that a bundle names, after checking its weights; see `Bundle.open`.

    Raises:
        UsageError: a checkpoint is missing, unreadable or has changed, or both auxiliaries are the same.
    """
    from divdec.experts.adapters import check_adapter

    has_counts = config.ngram is not None or config.registry is not None
    has_pair = any(getattr(config, part) is not None for part in AUXILIARIES)
    parts = PARTS if has_pair or not has_counts else ("target",)  # with one auxiliary, the error names the other
    adapters = AUXILIARIES if config.base is not None else ()
    parts = (*parts, BASE) if adapters else parts
    parts = [part for part in parts if target or part != "target"]
    references = {part: CheckpointReference.from_dict(getattr(config, part), part) for part in parts}
    if has_pair:
        check_different(references["retain_auxiliary"], references["forget_auxiliary"])
    paths = {}
    for part, reference in references.items():
        paths[part] = reference.resolve(folder, weights=True, local_files_only=local_files_only)
        (check_adapter if part in adapters else check_weights)(paths[part])
        if verify:
            reference.verify(paths[part], part)
    if has_pair and paths["retain_auxiliary"] == paths["forget_auxiliary"]:
        raise UsageError(f"{folder}: both auxiliaries are {paths['retain_auxiliary']}; nothing would be forgotten")
    return paths


def _load_once(path: Path, options: dict[str, Any], loaded: LoadedModels | None) -> PreTrainedModel:
    """Load a checkpoint, or return a model that shares the weights of one loaded before with the same options."""
    from divdec.passes import share_weights

    if loaded is None:
        return load_model(path, **options)
    key = path, repr(sorted(options.items(), key=lambda option: option[0]))
    if key not in loaded:
        loaded[key] = load_model(path, **options)
    return share_weights(loaded[key])


def answer_digests(folder: Path, *, verified: bool) -> dict[str, Any]:
    """Return digests of everything that decides the answers of a checkpoint or bundle, for the fingerprint of a run.

    Args:
        folder: the checkpoint or bundle.
        verified: the parts are compared with the bundle's digests when it is loaded, and need not be read here. A
            registry is followed, not verified: its present state is always part.

    Raises:
        UsageError: a part is missing.
        FailedClosed: the registry is damaged.
    """
    from divdec.takedowns.correction import TakedownCorrection

    content: dict[str, Any] = {"files": input_digests(folder)}
    if read_json(folder / "config.json", dict).get("model_type") != DivergenceConfig.model_type:
        return content
    config = read_config(folder)
    if not verified:
        paths = part_paths(folder, config, verify=False, local_files_only=False)
        if config.ngram is not None:
            paths["ngram"] = (folder / str(config.ngram.get("folder"))).resolve()
        content |= {part: folder_digests(path) for part, path in paths.items()}
    if config.registry is not None:
        content["registry"] = TakedownCorrection(folder / str(config.registry.get("folder"))).state_digest()
    return content


def load_experts(bundle: Bundle, models: dict[str, PreTrainedModel]) -> Experts | None:
    """Return the experts that a bundle names, combined if there are several; None if it names a registry alone."""
    from divdec.experts.adapters import AdapterPair
    from divdec.experts.combined import CombinedExperts
    from divdec.experts.neural import NeuralPair

    experts: list[tuple[Experts, float]] = []
    pair = None
    if BASE in models:
        pair = AdapterPair.load(models[BASE], *(bundle.paths[part] for part in AUXILIARIES))
    elif "retain_auxiliary" in models:
        pair = NeuralPair(models["retain_auxiliary"], models["forget_auxiliary"])
    if pair is not None:
        bridged = bundle.config.bridge is not None
        experts.append((_bridged_pair(bundle, models.get("target"), pair) if bridged else pair, 1.0))
    if (ngrams := bundle.load_ngrams()) is not None:
        experts.append(ngrams)
    if not experts:
        return None
    return experts[0][0] if len(experts) == 1 and experts[0][1] == 1 else CombinedExperts(experts)


def _bridged_pair(bundle: Bundle, target: PreTrainedModel | None, pair: NeuralPair) -> Experts:
    from divdec.bridge.pair import BridgedPair
    from divdec.passes import logit_width

    tokenizers = {part: load_tokenizer(path) for part, path in bundle.paths.items() if part not in bundle.adapters}
    target_tokenizer = tokenizers.pop("target", None) or load_tokenizer(bundle.folder)
    check_same_vocabulary(tokenizers, bundle.paths)
    width = bundle.config.vocab_size or len(target_tokenizer)
    return BridgedPair(
        pair.retain,
        pair.forget,
        target_tokenizer=target_tokenizer,
        auxiliary_tokenizer=next(iter(tokenizers.values())),
        target_width=width if target is None else logit_width(target),
    )


def weight_of(reference: dict[str, Any], name: str) -> float:
    """Return the factor of an expert's divergence."""
    weight = reference.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-3 <= weight <= 1e3:
        raise UsageError(f"the weight of {name} is {weight!r}; accepted: a number from 0.001 to 1000")
    return float(weight)


def _for_part(part: str, value: Any) -> Any:
    """Return a part's value of an option that may be a mapping by part."""
    if not isinstance(value, dict) or not value or not set(value) <= set(PART_NAMES):
        return value
    return value.get(part, value.get("experts") if part != "target" else None)
