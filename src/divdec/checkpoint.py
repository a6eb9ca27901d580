"""Checkpoints: references, digests, loading and vocabularies. Weights must be safetensors; pickles are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError, first_line
from divdec.runs import cache_folder, file_sha256, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

COMMIT = re.compile("[0-9a-f]{40}")
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?$")
INDEX = "model.safetensors.index.json"
# Files that decide what a model reads and computes.
TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")
HASHED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", *TEMPLATES),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "vocab.json", "vocab.txt", "merges.txt"),
)
COMPOSITE = "divdec_composite"  # model type of baselines that combine several checkpoints
# Names of scales and packed weights, which transformers leaves out where it does not know the quantization.
QUANTIZED = re.compile(r"\.(weight_scale(_inv)?|input_scale|SCB|qzeros|qweight|absmax)$")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclasses.dataclass(frozen=True)
class CheckpointReference:
    """Reference to a checkpoint: a folder, or a repository of the hub at a revision."""

    folder: str | None = None
    """Folder; a relative path is resolved against the bundle."""
    hub_id: str | None = None
    """Repository of the hub."""
    revision: str | None = None
    """Branch, tag or commit of `hub_id`; a bundle holds the commit."""
    sha256: Mapping[str, str] | None = None
    """SHA-256 by file name of the folder's files that decide what the model computes."""

    @classmethod
    def parse(cls, text: str) -> CheckpointReference:
        """Parse a folder, a GGUF file, 'smollm2', or a hub id with an optional '@revision'.

        A GGUF file is converted once; the reference is the folder of the result.

        Raises:
            UsageError: the text is none of these, or the GGUF file cannot be converted.
        """
        from divdec.gguf import convert, gguf_file

        if (file := gguf_file(text)) is not None:
            return cls(folder=str(convert(file)))
        if Path(text).expanduser().is_dir():
            return cls(folder=str(Path(text).expanduser()))
        hub_id, _, revision = text.partition("@")
        if HUB_ID.match(hub_id) and not Path(text).exists():
            return cls(hub_id=hub_id, revision=revision or None)
        raise UsageError(
            f"checkpoint {text!r} is not a folder, nor a GGUF file, nor a hub id such as 'org/name' or "
            "'org/name@revision'"
        )

    @classmethod
    def from_dict(cls, fields: Any, part: str) -> CheckpointReference:
        """Read the reference of a part from a bundle's configuration."""
        if not isinstance(fields, Mapping) or not (fields.get("folder") or fields.get("hub_id")):
            raise UsageError(f"the bundle names no {part}: a steered model needs all three parts")
        reference = cls(**{field.name: fields.get(field.name) for field in dataclasses.fields(cls)})
        texts = (reference.folder, reference.hub_id, reference.revision)
        if not all(text is None or isinstance(text, str) for text in texts):
            raise UsageError(f"the bundle's reference of the {part} is malformed; write the bundle again")
        if reference.folder is None and not COMMIT.fullmatch(reference.revision or ""):
            raise UsageError(
                f"{part}: {reference.hub_id} at {reference.revision or 'no revision'}, which may change; accepted: a "
                "commit of 40 hexadecimal digits (write the bundle again; for a registry give --target)"
            )
        return reference

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, without fields that are None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def resolve(self, base: Path, *, weights: bool, local_files_only: bool = False) -> Path:
        """Return the local folder of the checkpoint, downloading a hub repository if necessary.

        Args:
            base: folder that a relative path is resolved against.
            weights: download the weights as well as configuration and tokenizer.
            local_files_only: use the local cache alone.
        """
        if self.folder is not None:
            folder = (base / self.folder).resolve()
            if not folder.is_dir():
                cached = folder.is_relative_to(cache_folder().resolve())
                hint = "; it was unpacked from a GGUF file, so name that file in a command again" if cached else ""
                raise UsageError(f"checkpoint folder {folder} does not exist{hint}")
            return folder
        assert self.hub_id is not None
        return download(self.hub_id, self.revision, weights=weights, local_files_only=local_files_only)

    def verify(self, folder: Path, part: str) -> None:
        """Compare the folder's files with the digests."""
        if self.folder is None:
            return  # a hub reference is pinned to a commit
        if not isinstance(self.sha256, Mapping) or not self.sha256:
            raise UsageError(
                f"{part}: the bundle holds no digests of {folder}; write the bundle again, "
                "or load it without verification (--no-verify)"
            )
        actual = digests(folder)
        for name in sorted({*self.sha256, *actual}):
            if actual.get(name) != self.sha256.get(name):
                what = "is missing" if name not in actual else "is new" if name not in self.sha256 else "has changed"
                raise UsageError(
                    f"{part}: {folder / name} {what} since the bundle was written; write the bundle again, "
                    "or load it without verification (--no-verify) if the change is meant"
                )


def download(hub_id: str, revision: str | None, *, weights: bool, local_files_only: bool = False) -> Path:
    """Download safetensors, n-grams, configuration and tokenizer of a repository, and return their folder in the cache.

    Raises:
        UsageError: the repository does not exist, or is not in the cache and the hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Older versions of huggingface_hub request the list of files even in offline mode.
    local_files_only = local_files_only or huggingface_hub.constants.HF_HUB_OFFLINE
    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors", "ngram/*"] if weights else [])
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=patterns, local_files_only=local_files_only
        )
    except Exception as error:  # the HTTP library of huggingface_hub, and so its errors, differ by version
        if local_files_only and isinstance(error, LocalEntryNotFoundError):
            raise UsageError(
                f"{hub_id!r} is not a local folder, and not in the local Hugging Face cache (offline mode: "
                "HF_HUB_OFFLINE or local_files_only is set); check the path"
            ) from None
        raise UsageError(
            f"{hub_id!r} is not a local folder, and could not be downloaded from the hub "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    return Path(folder)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 by file name of the files that decide what a model reads and computes."""
    names = sorted({path.relative_to(folder).as_posix() for pattern in HASHED for path in folder.glob(pattern)})
    return {name: file_sha256(folder / name) for name in names}


def tokenizer_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 by file name of what a bundle's own tokenizer reads and writes."""
    patterns = ("tokenizer.json", "tokenizer_config.json", TEMPLATES[0])
    return {path.name: file_sha256(path) for pattern in patterns for path in folder.glob(pattern)}


def input_digests(folder: Path) -> dict[str, str]:
    """Return the digests of all files that decide a checkpoint's answers, for the fingerprint of a run.

    These are `digests` and the settings of generation, which bundles do not verify.
    """
    settings = folder / "generation_config.json"
    return digests(folder) | ({settings.name: file_sha256(settings)} if settings.is_file() else {})


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT, not a whole model."""
    return (folder / "adapter_config.json").is_file()


def adapter_base(folder: Path) -> str:
    """Return the base that an adapter names: a folder or hub id.

    Raises:
        UsageError: it names none.
    """
    config = read_json(folder / "adapter_config.json", dict)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{folder / 'adapter_config.json'} names no base_model_name_or_path; write the base there")
    return f"{name}@{config['revision']}" if config.get("revision") and not Path(name).is_dir() else name


def portable_adapter_config(folder: Path, base: CheckpointReference) -> str:
    """Return an adapter's configuration for other machines, as text.

    PEFT loads the base from `base_model_name_or_path` at `revision`. A hub id means the same everywhere; a folder is
    left out, so that PEFT asks for the base instead of looking for a folder of this machine.
    """
    names = {"base_model_name_or_path": base.hub_id, "revision": base.revision}
    return json.dumps(read_json(folder / "adapter_config.json", dict) | names, indent=2, ensure_ascii=False) + "\n"


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint whose weights are missing, pickled, an adapter or unreadable; reads headers only."""
    if is_adapter(folder):
        raise UsageError(f"{folder} holds a LoRA adapter; merge it into its base model (merge_and_unload) first")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json; give a transformers checkpoint, a GGUF file or a hub id")
    config = read_json(folder / "config.json", dict)
    if config.get("model_type") == COMPOSITE:
        return  # it checks its checkpoints itself when it is loaded
    if name := config.get("transformers_weights"):
        raise UsageError(f"{folder}: config.json names the weights {name}; accepted: model.safetensors or {INDEX}")
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
        check_header(file)


def check_header(file: Path) -> None:
    """Refuse weights that are missing or corrupt; reads the file's header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is missing or corrupt ({error}); copy or download it again") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights: one, or the shards that an index names.

    Raises:
        UsageError: there are both, and either could be the newer.
    """
    index, whole = folder / INDEX, folder / "model.safetensors"
    if not index.is_file():
        return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    shard_of = read_json(index, dict).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(name, str) for name in shard_of.values()):
        raise UsageError(f"{index} names no shards: weight_map is {shard_of!r:.60}; copy or download it again")
    names = sorted(set(shard_of.values()))
    if any(Path(name).name != name for name in names):
        raise UsageError(f"{index} names weights outside the folder itself; put all shards into {folder}")
    shards = [folder / name for name in names]
    others = [shard for shard in shards if shard != whole and shard.is_file()]
    if whole.is_file() and others:
        raise UsageError(
            f"{folder} holds two sets of weights, {whole.name} and the shards of {INDEX}: delete the older one, "
            "or save the model into an empty folder"
        )
    return [whole] if whole.is_file() else shards  # transformers does not delete an older index


def check_plain(folder: Path, part: str) -> None:
    """Refuse a bundle or a composite baseline where an ordinary checkpoint is required."""
    kind = read_json(folder / "config.json", dict).get("model_type") if (folder / "config.json").is_file() else None
    if kind in ("divergence", COMPOSITE):
        raise UsageError(
            f"{part} {folder} is made of several checkpoints ({kind}), which cannot be trained as one; give an "
            "ordinary checkpoint, such as a distilled student"
        )


def check_apart(output: Path, sources: Iterable[Path]) -> None:
    """Refuse an output folder that contains one of its sources, or lies in one."""
    for source in sources:
        if source.is_relative_to(output) or output.is_relative_to(source):
            raise UsageError(
                f"output folder {output} and {source}, which it is made from, lie one within the other; "
                "give another output folder"
            )


def check_different(retain: CheckpointReference, forget: CheckpointReference) -> None:
    """Refuse a pair of two equal models, whose divergence is zero."""
    if retain.hub_id is not None or forget.hub_id is not None:
        same = (retain.hub_id, retain.revision) == (forget.hub_id, forget.revision)
    else:
        weights = [
            {name: digest for name, digest in reference.sha256.items() if name.endswith(".safetensors")}
            for reference in (retain, forget)
            if isinstance(reference.sha256, Mapping)
        ]
        same = len(weights) == 2 and bool(weights[0]) and weights[0] == weights[1]
    if same:
        raise UsageError(
            "retain auxiliary and forget auxiliary are the same model: their divergence is zero, "
            "and nothing would be forgotten"
        )


def load_model(folder: Path, auto_class: Any = None, **options: Any) -> PreTrainedModel:
    """Load a model; no code of the folder is executed.

    Args:
        folder: a checkpoint of safetensors.
        auto_class: class of transformers that loads it; by default `AutoModelForCausalLM`.
        **options: arguments of `from_pretrained`.

    Raises:
        UsageError: the model cannot be loaded, or lacks weights, which transformers would initialise at random.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = (auto_class or AutoModelForCausalLM).from_pretrained(
            folder,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder} cannot be loaded ({first_line(error)})") from None
    model, loading = loaded
    for what, names in (("lacks the weights", loading["missing_keys"]), ("misfits", loading["mismatched_keys"])):
        if names:
            listed = ", ".join(sorted(map(str, names))[:3])
            raise UsageError(f"{folder}: the checkpoint {what} {listed}; save the whole model there again")
    if scales := [name for name in map(str, loading["unexpected_keys"]) if QUANTIZED.search(name)]:
        raise UsageError(
            f"{folder} is quantized in a form that transformers ignores ({scales[0]}); give the unquantized checkpoint"
        )
    return model


def has_bfloat16_instructions() -> bool:
    """Whether the CPU multiplies matrices of bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch do not tell
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def dtype_for_passes(dtype: str = "auto", device: str | None = None) -> Any:
    """Return the dtype to load a checkpoint in for forward passes.

    Args:
        dtype: 'auto' means the checkpoint's own, or float32 on a CPU that emulates bfloat16. There bfloat16 takes six
            times as long to read prompts (docs/benchmarks.md).
        device: where the model will run; by default on an accelerator if there is one.
    """
    import torch

    on_cpu = not torch.accelerator.is_available() if device is None else device == "cpu"
    return torch.float32 if dtype == "auto" and on_cpu and not has_bfloat16_instructions() else dtype


def load_config(folder: Path) -> PreTrainedConfig:
    """Load the configuration of a checkpoint; no code of the folder is executed."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UsageError(f"{folder}: the configuration cannot be used ({first_line(error)})") from None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint; no code of the folder is executed."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UsageError(f"{folder} has no tokenizer; save the one the model was trained with into that folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, mistral_format=False, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise UsageError(f"{folder}: the tokenizer cannot be read ({first_line(error)})") from None
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json", dict)
        width = {**config, **(config.get("text_config") or {})}.get("vocab_size")
        if isinstance(width, int):
            tokenizer.tokens_without_logits = tokens_without_logits(tokenizer, width)
    return tokenizer


def tokens_without_logits(tokenizer: Any, width: int) -> dict[int, str]:
    """Return the special tokens, by id, for which a model with `width` logits has neither a logit nor an embedding.

    Gemma 3's text checkpoints have one, `<image_soft_token>`. Prompts that hold one are refused.
    """
    added = tokenizer.added_tokens_decoder.items()
    return {index: str(token) for index, token in added if index >= width and token.special}


def vocabulary_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the digest of a tokenizer's tokens and their ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=False).encode()).hexdigest()


def check_tokenizer(folder: Path, actual: str, expected: str) -> None:
    """Refuse n-grams or a registry of another tokenizer than the target's."""
    if actual != expected:
        raise UsageError(
            f"{folder} counts the tokens of another tokenizer (vocabulary {actual[:12]}) than the target's "
            f"({expected[:12]}); fit it again with the target's tokenizer"
        )


def vocabulary_width(config: PreTrainedConfig) -> int:
    """Return the number of logits of a model: its vocabulary, possibly padded."""
    return config.get_text_config(decoder=True).vocab_size


def common_vocabulary(
    widths: Mapping[str, int], tokenizers: Mapping[str, PreTrainedTokenizerBase], paths: Mapping[str, Path]
) -> int:
    """Return the width of the vocabulary that all parts share: the smallest.

    Args:
        widths: logits per position, by part.
        tokenizers: tokenizers by part; the first is the reference.
        paths: folders by part, for error messages.

    Raises:
        UsageError: a tokenizer has another vocabulary, or a model is narrower than its tokenizer.
    """
    check_same_vocabulary(tokenizers, paths)
    check_widths(widths, tokenizers, paths)
    return min(widths.values())


def check_widths(
    widths: Mapping[str, int], tokenizers: Mapping[str, PreTrainedTokenizerBase], paths: Mapping[str, Path]
) -> None:
    """Refuse a model that has no logit for some token that its tokenizer writes.

    Special tokens that neither ordinary text holds nor the tokenizer adds to it may lack one.
    """
    for part, width in widths.items():
        tokenizer = tokenizers[part]
        if max(tokenizer.get_vocab().values()) < width:
            continue
        missing = tokens_without_logits(tokenizer, width)
        used = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        needed = {index for index in tokenizer.get_vocab().values() if index >= width and index not in missing}
        if needed := needed | {index for index in used if isinstance(index, int) and index >= width}:
            token = tokenizer.convert_ids_to_tokens(max(needed))
            raise UsageError(
                f"{part} ({paths[part]}) has {width} logits, but its tokenizer writes token {token!r} with id "
                f"{max(needed)}: give the tokenizer that it was trained with, or resize its embeddings"
            )


def check_same_vocabulary(tokenizers: Mapping[str, PreTrainedTokenizerBase], paths: Mapping[str, Path]) -> None:
    """Refuse tokenizers with different tokens or token ids."""
    (first, vocabulary), *others = ((part, tokenizer.get_vocab()) for part, tokenizer in tokenizers.items())
    for part, other in others:
        if other != vocabulary:
            differing = next(token for token in {**vocabulary, **other} if vocabulary.get(token) != other.get(token))
            # A bridge leads from the target to auxiliaries that have one tokenizer.
            bridges = first in ("target", "provider") and all(other == another for _, another in others)
            raise UsageError(
                f"{part} ({paths[part]}) has another vocabulary than the {first} ({paths[first]}): "
                f"{len(other)} tokens against {len(vocabulary)}, and token {differing!r} is "
                f"{other.get(differing)} against {vocabulary.get(differing)}; "
                + (
                    "auxiliaries must share it (those of another tokenizer than the target's steer it with --bridge)"
                    if bridges
                    else f"both auxiliaries must have one vocabulary: train {part} again with the {first}'s tokenizer"
                )
            )
