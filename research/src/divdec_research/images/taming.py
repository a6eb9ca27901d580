"""Convert class-conditional checkpoints of taming-transformers to GPT-2 (transformers) and `VQModel` (diffusers).

Configurations are derived from the names and shapes of the weights.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from divdec.checkpoint import check_apart
from divdec.errors import UsageError, first_line
from divdec.runs import RECORD, check_output, made_by, output_folder, record, write_json
from divdec_research.images.codecs import VQCodec, vq_config, vq_model_class
from divdec_research.images.models import ImageLayout, gpt2_config, write_image_files

if TYPE_CHECKING:
    from diffusers import VQModel
    from transformers import GPT2Config, GPT2LMHeadModel

VERB = "image convert"
CLASSES = 1000
"""Number of ImageNet's classes."""
SHARD_BYTES = 1_000_000_000
"""Size of a file of weights."""
TRANSFORMER, FIRST_STAGE = "transformer.", "first_stage_model."
HEAD = 64  # width of an attention head in the published transformer
# Losses, the class conditioning stage, causal masks, and projections of a time embedding that is not used.
_UNUSED = re.compile(r"(.+\.)?loss\.|cond_stage_model\.|.+\.attn\.mask$|.+\.temb_proj\.")
_BLOCK_NAMES = {
    "ln_1": ("ln1",),
    "ln_2": ("ln2",),
    "attn.c_attn": ("attn.query", "attn.key", "attn.value"),
    "attn.c_proj": ("attn.proj",),
    "mlp.c_fc": ("mlp.0",),
    "mlp.c_proj": ("mlp.2",),
}
_OUTER_NAMES = {"wte.weight": "tok_emb.weight", "ln_f.weight": "ln_f.weight", "ln_f.bias": "ln_f.bias"}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
# Lightning stores the state of its callbacks under their classes; only this name is needed to read the file.
_CALLBACK = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
_SAVE_ALONE = 'torch.save(torch.load(FILE, weights_only=False)["state_dict"], NEW)'

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the weights by their names in the checkpoint."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a converted model, and its sources in the checkpoint."""

    sources: tuple[str, ...]
    """Names in the checkpoint; several are concatenated along the first axis."""
    convert: Callable[[Tensor], Tensor] = lambda weight: weight
    """Function of the concatenated sources."""

    def load(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Compute the weight from the checkpoint's tensors."""
        sources = [tensors[source] for source in self.sources]
        weight = self.convert(torch.cat(sources) if len(sources) > 1 else sources[0])
        return weight.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def convert_taming(
    checkpoint: Path,
    output: Path,
    *,
    classes: Sequence[str] | None = None,
    heads: int | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Convert a class-conditional checkpoint of taming-transformers, such as ImageNet's `cin_transformer`.

    The output is a causal language model (GPT-2) with its tokenizer, `image.json`, and the VQGAN in `codec/`.

    Args:
        checkpoint: a .ckpt of PyTorch Lightning, its `state_dict` alone, or the latter as .safetensors. Only tensors
            and plain values are unpickled.
        output: the folder to write; it appears only when it is complete.
        classes: names of the classes, in their order; by default '0' to '999'.
        heads: attention heads of a layer, which the weights do not show; by default the width divided by 64.
        overwrite: replace an earlier conversion.
        report: receives one line at a time.

    Returns:
        The output folder and the figures in `run.json`: parameters, number of codes and of classes, image size.

    Raises:
        UsageError: the checkpoint cannot be read safely, or its weights do not fit; or see `check_output`. Nothing
            is written.
    """
    check_output(output, overwrite, made_by(VERB))
    check_apart(output.resolve(), [checkpoint.resolve()])
    vq_model_class()
    tensors = read_checkpoint(checkpoint)
    try:
        used = select_used(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in used.items()}
        config = transformer_config(shapes, heads)
        transformer = transformer_model(config)
        codec = codec_model(codec_config(shapes))
        transformer_sources, codec_sources = transformer_weights(transformer), codec_weights(codec)
        _check_names(shapes, {**transformer_sources, **codec_sources})
        _check_values(used)
        _check_causal(tensors)
        layout = _layout(config, codec.config, classes)
        factor = 2 ** (len(codec.config["block_out_channels"]) - 1)
        size = (layout.height * factor, layout.width * factor)
        dtype = tensors[f"{TRANSFORMER}head.weight"].dtype
        for model, sources, precision in (
            (transformer, transformer_sources, dtype),
            (codec, codec_sources, torch.float32),
        ):
            state = {name: weight.load(used, precision) for name, weight in sources.items()}
            model.load_state_dict(state, strict=True, assign=True)
    except UsageError as error:
        raise UsageError(f"{checkpoint}: {error}") from None
    except (RuntimeError, IndexError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{checkpoint} has weights whose shapes do not fit each other ({reason})") from None
    figures = {
        # The additional position is not in the checkpoint.
        "transformer_parameters": sum(weight.numel() for weight in transformer.parameters()) - config.n_embd,
        "vq_parameters": sum(weight.numel() for weight in codec.parameters()),
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
    settings = {"checkpoint": str(checkpoint), "heads": config.n_head}
    with output_folder(output, overwrite, made_by(VERB)) as folder:
        transformer.save_pretrained(folder, max_shard_size=SHARD_BYTES)
        layout.tokenizer().save_pretrained(folder)
        write_image_files(folder, layout, VQCodec(codec, size))
        write_json(folder / RECORD, record(VERB, settings, **figures))
    return {"output": str(output), **figures}


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, memory-mapped if its format allows it.

    Raises:
        UsageError: it is missing or damaged, needs unpickling of objects, or holds no tensors.
    """
    if not path.is_file():
        raise UsageError(f"checkpoint {path} is no file; accepted: a .ckpt of taming-transformers, or .safetensors")
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else _read_pickle(path)
    except UsageError:
        raise
    except Exception as error:  # torch raises errors of many kinds for damaged files
        raise UsageError(f"{path} cannot be read ({first_line(error)}); copy or download it again") from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content:
        raise UsageError(f"{path} holds no state_dict; accepted: a checkpoint of PyTorch Lightning, or its state_dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UsageError(f"{path} holds {name!r}, which is no tensor; accepted: a state_dict of tensors alone")
    return dict(content)


class _Callback:
    """Placeholder for Lightning's callback."""


def _read_pickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([(_Callback, _CALLBACK)]):
            # Files from before torch 1.6 are no archives and cannot be memory-mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"holds {name[1]}" if name else "is damaged, or holds something"
        raise UsageError(
            f"{path} {reason} beside tensors and plain values, which could run code when read; if you trust the file, "
            f"save its weights alone: {_SAVE_ALONE}"
        ) from None


def select_used(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the weights that the models use.

    Raises:
        UsageError: the checkpoint has no transformer or no VQGAN.
    """
    for part, prefix in (("transformer", TRANSFORMER), ("VQGAN", FIRST_STAGE)):
        if not any(name.startswith(prefix) for name in tensors):
            raise UsageError(
                f"holds no {part}: no weight is named {prefix}…; accepted: a class-conditional checkpoint of "
                "taming-transformers, such as cin_transformer"
            )
    return {name: tensor for name, tensor in tensors.items() if not _UNUSED.match(name)}


def transformer_config(shapes: Shapes, heads: int | None = None) -> GPT2Config:
    """Derive the GPT-2 that computes the same as the checkpoint's transformer.

    It has one position more. An image is a class and as many codes as the checkpoint has positions; the last code is
    never an input of decoding, but training and scoring pass the whole sequence. The output there is not used.

    Raises:
        UsageError: weights are missing or have unexpected shapes, or the heads do not divide the width.
    """
    vocabulary, width = _shape(shapes, f"{TRANSFORMER}tok_emb.weight", 2)
    _, block, _ = _shape(shapes, f"{TRANSFORMER}pos_emb", 3)
    inner, _ = _shape(shapes, f"{TRANSFORMER}blocks.0.mlp.0.weight", 2)
    if heads is None and width % HEAD:
        raise UsageError(
            f"is {width} wide, which is no multiple of {HEAD}: give the number of attention heads (--heads)"
        )
    count = width // HEAD if heads is None else heads
    if count < 1 or width % count:
        raise UsageError(f"is {width} wide, which {count} attention heads do not divide; give another number")
    layers = len(_indices(shapes, rf"{re.escape(TRANSFORMER)}blocks\.(\d+)\."))
    return mingpt_config(vocabulary, block + 1, width, layers, count, inner)


def mingpt_config(vocab_size: int, positions: int, width: int, layers: int, heads: int, inner: int) -> GPT2Config:
    """Create the configuration of a GPT-2 with minGPT's architecture."""
    return gpt2_config(
        vocab_size,
        positions,
        width,
        layers,
        heads,
        n_inner=None if inner == 4 * width else inner,
        activation_function="gelu",  # exact, as in minGPT
        tie_word_embeddings=False,
    )


def codec_config(shapes: Shapes) -> dict[str, Any]:
    """Derive the arguments of the `VQModel` that computes the same as the checkpoint's VQGAN.

    Raises:
        UsageError: weights are missing, or diffusers has no equivalent.
    """
    _, channels, *_ = _shape(shapes, f"{FIRST_STAGE}encoder.conv_in.weight", 4)
    latent, *_ = _shape(shapes, f"{FIRST_STAGE}encoder.conv_out.weight", 4)
    codes, width = _shape(shapes, f"{FIRST_STAGE}quantize.embedding.weight", 2)
    down = re.escape(f"{FIRST_STAGE}encoder.down.")
    # Counts of distinct indices: if one is missing, `_check_names` names it.
    levels, blocks = len(_indices(shapes, rf"{down}(\d+)\.")), len(_indices(shapes, rf"{down}0\.block\.(\d+)\."))
    names = [f"{FIRST_STAGE}encoder.down.{level}.block.0.conv1.weight" for level in range(max(levels, 1))]
    widths = [_shape(shapes, name, 4)[0] for name in names]
    attention = sorted(_indices(shapes, rf"{down}(\d+)\.attn\."))
    return vq_config(channels, widths, blocks, attention, latent, (codes, width))


def transformer_model(config: GPT2Config) -> GPT2LMHeadModel:
    """Create a GPT-2 on the meta device."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def codec_model(config: Mapping[str, Any]) -> Any:
    """Create a VQGAN (`VQModel`) on the meta device."""
    network = vq_model_class()
    with torch.device("meta"):
        return network(**config)


def transformer_weights(model: GPT2LMHeadModel) -> dict[str, Weight]:
    """Sources of each weight of a converted transformer."""
    weights = {}
    for name, _ in model.named_parameters():
        inner = name.removeprefix("transformer.")
        if name == "lm_head.weight":
            weights[name] = Weight((f"{TRANSFORMER}head.weight",))
        elif inner == "wpe.weight":
            weights[name] = Weight((f"{TRANSFORMER}pos_emb",), _append_position)
        elif inner in _OUTER_NAMES:
            weights[name] = Weight((TRANSFORMER + _OUTER_NAMES[inner],))
        else:
            _, layer, rest = inner.split(".", 2)
            module, _, kind = rest.rpartition(".")
            sources = tuple(f"{TRANSFORMER}blocks.{layer}.{source}.{kind}" for source in _BLOCK_NAMES[module])
            # Linear maps of GPT-2 are [in, out].
            weights[name] = Weight(sources, lambda weight: weight.t() if weight.dim() > 1 else weight)
    return weights


def codec_weights(model: VQModel) -> dict[str, Weight]:
    """Sources of each weight of a converted VQGAN."""
    last_level = len(model.config["block_out_channels"]) - 1
    weights = {}
    for name, weight in model.named_parameters():
        source = FIRST_STAGE + _codec_name(name, last_level)
        # The checkpoint has convolutions of single pixels for these linear maps.
        is_linear = ".attentions." in name and weight.dim() == 2
        weights[name] = Weight((source,), lambda weight: weight.flatten(1)) if is_linear else Weight((source,))
    return weights


def _check_names(shapes: Shapes, weights: Mapping[str, Weight]) -> None:
    needed = [source for weight in weights.values() for source in weight.sources]
    _refuse_missing([name for name in needed if name not in shapes])
    if unknown := sorted(shapes.keys() - set(needed)):
        raise UsageError(
            f"holds {len(unknown)} weight(s) that this version does not know: {_first_names(unknown)}; accepted: "
            "a class-conditional checkpoint of taming-transformers, such as cin_transformer"
        )


def _codec_name(name: str, last_level: int) -> str:
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    name = name.replace("mid_block.attentions.0", "mid.attn_1")
    name = re.sub(r"down_blocks\.(\d+)", r"down.\1", name)
    # The checkpoint numbers the decoder's levels by resolution, diffusers in the order of computation.
    name = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{last_level - int(match[1])}", name)
    name = re.sub(r"\.(down|up)samplers\.0\.", r".\1sample.", name)
    name = name.replace(".resnets.", ".block.").replace(".attentions.", ".attn.")
    for ours, theirs in _ATTENTION.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name


def _append_position(weight: Tensor) -> Tensor:
    return torch.cat([weight.squeeze(0), weight.new_zeros(1, weight.shape[-1])])


def _shape(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    if name not in shapes:
        _refuse_missing([name])
    if len(shapes[name]) != axes or 0 in shapes[name]:
        shape = "×".join(map(str, shapes[name])) or "()"
        raise UsageError(f"holds {name} of shape {shape}; {axes} axes are expected, none of them empty")
    return shapes[name]


def _refuse_missing(names: list[str]) -> None:
    if names:
        raise UsageError(
            f"lacks weights that it needs ({len(names)}): {_first_names(names)}; give the whole checkpoint, as "
            "published"
        )


def _indices(shapes: Shapes, pattern: str) -> set[int]:
    return {int(match[1]) for name in shapes if (match := re.match(pattern, name))}


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise UsageError(f"holds {name} of type {tensor.dtype}, {tensor.layout}; accepted: dense floats")


def _check_causal(tensors: Mapping[str, Tensor]) -> None:
    # Transformers with an unmasked prefix have other masks, which GPT-2 cannot express.
    for name, mask in tensors.items():
        if not re.match(r"transformer\.blocks\.\d+\.attn\.mask$", name):
            continue
        if mask.dim() < 2 or not torch.equal(mask != 0, torch.ones_like(mask).tril() != 0):
            raise UsageError(f"holds {name}, which is not causal; accepted: transformers without n_unmasked")


def _layout(config: GPT2Config, codec: Any, names: Sequence[str] | None) -> ImageLayout:
    classes = tuple(map(str, range(CLASSES))) if names is None else tuple(names)
    vocabulary, codes, positions = config.vocab_size, codec["num_vq_embeddings"], config.n_positions - 1
    side = math.isqrt(positions)
    if side * side != positions:
        raise UsageError(f"has {positions} positions; accepted: a square raster of codes")
    if vocabulary != codes:
        raise UsageError(f"has a vocabulary of {vocabulary} tokens and a codebook of {codes}; accepted: the same")
    if not classes or len(set(classes)) < len(classes):
        raise UsageError(
            f"{len(classes)} names of classes are given, {len(set(classes))} of them different; accepted: at least "
            "one, all different"
        )
    # Classes are the first tokens, which are codes too; the last token is the padding.
    if len(classes) >= vocabulary:
        raise UsageError(f"has {vocabulary} tokens, too few for {len(classes)} classes")
    return ImageLayout(codes, side, side, classes, first_class=0, no_class=None, vocab_size=codes, padding=codes - 1)
