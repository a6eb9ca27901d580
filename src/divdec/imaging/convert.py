"""Published image models, made into what transformers and diffusers load: folders of safetensors."""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from divdec.errors import UsageError, first_line
from divdec.imaging import taming
from divdec.imaging.codec import FOLDER
from divdec.imaging.layout import ImageLayout
from divdec.imaging.vq import VQCodec, vq_model_class
from divdec.model.checkpoint import check_apart
from divdec.runs import RECORD, check_output, output_folder, read_record, record, write_json

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

VERB = "image convert"
CLASSES = 1000
"""Of ImageNet."""
SHARD_BYTES = 1_000_000_000
"""Of a file of weights; writing takes about twice as much memory."""
# Lightning keeps the state of its callbacks under their classes. This name is all that must be known of it.
_CALLBACK = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
_SAVE_ALONE = 'torch.save(torch.load(FILE, weights_only=False)["state_dict"], NEW)'


def convert_taming(
    checkpoint: Path,
    output: Path,
    *,
    classes: Sequence[str] | None = None,
    heads: int | None = None,
    raster: tuple[int, int] | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Convert a class-conditional checkpoint of taming-transformers, such as ImageNet's `cin_transformer`.

    The output is an ordinary causal language model (GPT-2) with its tokenizer, `image.json`, and the VQGAN in
    `codec/`. It has one position more than the checkpoint, see `divdec.imaging.taming.transformer_config`. Weights
    are read where they lie in the file and written some at a time, so that far less memory is needed than they take.

    Args:
        checkpoint: a .ckpt of PyTorch Lightning, its `state_dict` alone, or that as .safetensors. Nothing that it may
            hold beside tensors and plain values is ever made or run.
        output: the folder to write; it appears whole or not at all.
        classes: names of the classes, in their order; by default '0' to '999'.
        heads: attention heads of a layer, which the weights do not show; by default one for 64 of the width, as
            published.
        raster: height and width of an image in codes; by default a square.
        overwrite: whether an earlier conversion there may be replaced.
        report: is told what has been found and what is written, a line each.

    Returns:
        The output folder, and what `run.json` holds of the models: their parameters, the number of codes and of
        classes, and the images' size.

    Raises:
        UsageError: the checkpoint cannot be read safely, lacks weights or has others; or see `check_output`. Nothing
            is written.
    """
    check_output(output, overwrite, is_conversion)
    check_apart(output.resolve(), [checkpoint.resolve()])
    vq_model_class()
    tensors = read_checkpoint(checkpoint)
    try:
        shapes = taming.used({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        config = taming.transformer_config(shapes, heads)
        transformer = taming.transformer_model(config)
        codec = taming.codec_model(codec_config := taming.codec_config(shapes))
        transformer_weights, codec_weights = taming.transformer_weights(transformer), taming.codec_weights(codec)
        taming.check(shapes, {**transformer_weights, **codec_weights})
        _check_values({name: tensors[name] for name in shapes})
        _check_causal(tensors)
        layout = _layout(
            config.vocab_size, codec_config["num_vq_embeddings"], _raster(config.n_positions - 1, raster), classes
        )
        factor = 2 ** (len(codec_config["block_out_channels"]) - 1)
        size = (layout.height * factor, layout.width * factor)
    except UsageError as error:
        raise UsageError(f"{checkpoint}: {error}") from None
    figures = {
        # The additional position is none of the checkpoint's parameters.
        "transformer_parameters": _parameters(transformer) - config.n_embd,
        "vq_parameters": _parameters(codec),
        "codes": layout.codes,
        "classes": len(layout.classes),
        "size": list(size),
    }
    report(
        f"transformer: {config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, "
        f"{figures['transformer_parameters']:,} parameters"
    )
    report(
        f"VQGAN: {layout.codes:,} codes, rasters of {layout.height}×{layout.width}, images of {size[0]}×{size[1]} "
        f"pixels, {figures['vq_parameters']:,} parameters"
    )
    report(f"writing {output}")
    settings = {"checkpoint": str(checkpoint), "heads": config.n_head, "raster": [layout.height, layout.width]}
    with output_folder(output, overwrite, is_conversion) as folder:
        _write_transformer(folder, transformer, transformer_weights, tensors)
        layout.tokenizer().save_pretrained(folder)
        layout.save(folder)
        made = {name: _made(weight, tensors, torch.float32) for name, weight in codec_weights.items()}
        codec.load_state_dict(made, strict=True, assign=True)
        (folder / FOLDER).mkdir()
        VQCodec(codec, size).save(folder / FOLDER)
        write_json(folder / RECORD, record(VERB, settings, **figures))
    return {"output": str(output), **figures}


def is_conversion(folder: Path) -> bool:
    """Whether a folder is what `convert_taming` has written."""
    return (read_record(folder) or {}).get("verb") == VERB


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, left in the file until they are used where its format lets them.

    Args:
        path: see `convert_taming`.

    Raises:
        UsageError: it is missing or damaged, holds objects that only unpickling could make, or no tensors.
    """
    if not path.is_file():
        raise UsageError(f"checkpoint {path} is no file; accepted: a .ckpt of taming-transformers, or .safetensors")
    content: Any = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickled(path)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content:
        raise UsageError(f"{path} holds no state_dict; accepted: a checkpoint of PyTorch Lightning, or its state_dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UsageError(f"{path} holds {name!r}, which is no tensor; accepted: a state_dict of tensors alone")
    return dict(content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({first_line(error)}); copy or download it again") from None


class _Unneeded:
    """Stands where a checkpoint names Lightning's callback."""


def _read_pickled(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([(_Unneeded, _CALLBACK)]):
            # Files of before torch 1.6 are no archives, and cannot be left where they lie.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"holds {named[1]}" if named else "is damaged, or holds something"
        raise UsageError(
            f"{path} {what} beside tensors and plain values, which could run code when read; where you trust it, "
            f"save its weights alone: {_SAVE_ALONE}"
        ) from None
    except Exception as error:  # damaged files are met with errors of any kind
        raise UsageError(f"{path} cannot be read ({first_line(error)}); copy or download it again") from None


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise UsageError(f"holds {name} of type {tensor.dtype}, {tensor.layout}; accepted: dense floats")


def _check_causal(tensors: Mapping[str, Tensor]) -> None:
    # Only transformers with a prefix that sees itself whole have others, and GPT-2 cannot compute them.
    for name, mask in tensors.items():
        if not re.match(r"transformer\.blocks\.\d+\.attn\.mask$", name):
            continue
        if mask.dim() < 2 or not torch.equal(mask != 0, torch.ones_like(mask).tril() != 0):
            raise UsageError(f"holds {name}, which is not causal; accepted: transformers without n_unmasked")


def _raster(block: int, given: tuple[int, int] | None) -> tuple[int, int]:
    if given is None:
        side = math.isqrt(block)
        if side * side != block:
            raise UsageError(f"has {block} positions, which are no square; give the raster's height and width")
        return side, side
    if min(given) < 1 or given[0] * given[1] != block:
        raise UsageError(f"has {block} positions; a raster of {given[0]}×{given[1]} codes has not as many")
    return given


def _layout(vocabulary: int, codes: int, raster: tuple[int, int], names: Sequence[str] | None) -> ImageLayout:
    classes = tuple(map(str, range(CLASSES))) if names is None else tuple(names)
    if vocabulary != codes:
        raise UsageError(f"has a vocabulary of {vocabulary} tokens and a codebook of {codes}; accepted: the same")
    if not classes or len(set(classes)) < len(classes):
        raise UsageError(
            f"{len(classes)} names of classes are given, {len(set(classes))} of them different; accepted: at least "
            "one, all different"
        )
    # Classes are the first tokens, which are codes too; the last is kept for padding.
    if len(classes) >= vocabulary:
        raise UsageError(f"has {vocabulary} tokens, too few for {len(classes)} classes; give the names of its own")
    return ImageLayout(
        codes=codes,
        height=raster[0],
        width=raster[1],
        classes=classes,
        first_class=0,
        no_class=None,
        vocab_size=vocabulary,
        padding=vocabulary - 1,
    )


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _made(weight: taming.Weight, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    parts = [tensors[source] for source in weight.sources]
    whole = weight.turn(torch.cat(parts) if len(parts) > 1 else parts[0])
    return whole.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def _write_transformer(
    folder: Path, model: GPT2LMHeadModel, weights: Mapping[str, taming.Weight], tensors: Mapping[str, Tensor]
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    dtype = tensors[weights["lm_head.weight"].sources[0]].dtype
    wanted = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    plan = split_torch_state_dict_into_shards(wanted, max_shard_size=SHARD_BYTES)
    for file, names in plan.filename_to_tensors.items():
        made = {name: _made(weights[name], tensors, dtype) for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
