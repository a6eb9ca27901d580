"""What a class-conditional checkpoint of taming-transformers is made of, and what transformers and diffusers call it.

Everything is read from the names and shapes of its weights. It knows nothing of files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from divdec.errors import UsageError
from divdec.imaging.vq import vq_config, vq_model_class

if TYPE_CHECKING:
    from diffusers import VQModel
    from transformers import GPT2Config, GPT2LMHeadModel

TRANSFORMER = "transformer."
FIRST_STAGE = "first_stage_model."
HEAD = 64  # width of an attention head in the published transformer
GROUPS = 32  # of all normalisation in a VQGAN
# Losses, the class itself as a "model", masks that are always causal, projections of a time that there is not.
_UNUSED = re.compile(r"(.+\.)?loss\.|cond_stage_model\.|.+\.attn\.mask$|.+\.temb_proj\.")
_BLOCK_NAMES = {
    "ln_1": "ln1",
    "ln_2": "ln2",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "mlp.0",
    "mlp.c_proj": "mlp.2",
}
_ENDS = {
    "wte.weight": "tok_emb.weight",
    "wpe.weight": "pos_emb",
    "ln_f.weight": "ln_f.weight",
    "ln_f.bias": "ln_f.bias",
}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}

Shapes = Mapping[str, tuple[int, ...]]
"""Of the weights, by their names in the checkpoint."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a converted model, and what it is made from."""

    sources: tuple[str, ...]
    """Names in the checkpoint; several are laid one after another, along the first axis."""
    shape: tuple[int, ...]
    """That each of them must have."""
    turn: Callable[[Tensor], Tensor]
    """Makes the weight of them."""


def used(shapes: Shapes) -> Shapes:
    """Those weights that decide what is computed.

    Raises:
        UsageError: the checkpoint lacks a transformer or a VQGAN altogether.
    """
    for part, prefix in (("transformer", TRANSFORMER), ("VQGAN", FIRST_STAGE)):
        if not any(name.startswith(prefix) for name in shapes):
            raise UsageError(
                f"holds no {part}: no weight is named {prefix}…; accepted: a class-conditional checkpoint of "
                "taming-transformers, such as cin_transformer"
            )
    return {name: shape for name, shape in shapes.items() if not _UNUSED.match(name)}


def transformer_config(shapes: Shapes, heads: int | None = None) -> GPT2Config:
    """The GPT-2 that computes what the checkpoint's transformer does.

    It has one position more than the checkpoint. An image is a class and as many codes as there were positions, of
    which the last is never read; but what trains or scores a text gives the model all of it at once. What the model
    answers at that last position is never used.

    Args:
        shapes: of the checkpoint.
        heads: attention heads of a layer, which the weights do not show; by default one for 64 of the width.

    Raises:
        UsageError: weights are missing or no transformer's, or the heads do not divide the width.
    """
    from transformers import GPT2Config

    vocabulary, width = _shape(shapes, f"{TRANSFORMER}tok_emb.weight", 2)
    _, block, _ = _shape(shapes, f"{TRANSFORMER}pos_emb", 3)
    inner, _ = _shape(shapes, f"{TRANSFORMER}blocks.0.mlp.0.weight", 2)
    if heads is None and width % HEAD:
        raise UsageError(
            f"is {width} wide, which does not part into heads of {HEAD}: give the number of attention heads"
        )
    count = width // HEAD if heads is None else heads
    if count < 1 or width % count:
        raise UsageError(f"is {width} wide, which {count} attention heads do not divide; give a divisor of it")
    layers = _count(shapes, rf"{re.escape(TRANSFORMER)}blocks\.(\d+)\.")
    return _gpt2(GPT2Config, vocabulary, block + 1, width, layers, count, inner)


def codec_config(shapes: Shapes) -> dict[str, Any]:
    """What diffusers' `VQModel` is made from, to compute what the checkpoint's VQGAN does.

    Raises:
        UsageError: weights are missing, or of a VQGAN that diffusers cannot express.
    """
    first, channels, *_ = _shape(shapes, f"{FIRST_STAGE}encoder.conv_in.weight", 4)
    latent, *_ = _shape(shapes, f"{FIRST_STAGE}encoder.conv_out.weight", 4)
    codes, width = _shape(shapes, f"{FIRST_STAGE}quantize.embedding.weight", 2)
    down, up = re.escape(f"{FIRST_STAGE}encoder.down."), re.escape(f"{FIRST_STAGE}decoder.up.")
    levels, blocks = _count(shapes, rf"{down}(\d+)\."), _count(shapes, rf"{down}0\.block\.(\d+)\.")
    names = [f"{FIRST_STAGE}encoder.down.{level}.block.0.conv1.weight" for level in range(max(levels, 1))]
    widths = [_shape(shapes, name, 4)[0] for name in names]
    if widths[0] != first:
        raise UsageError(
            f"has a VQGAN whose input has {first} channels and whose first level {widths[0]}; accepted: the same "
            "(ch_mult that begins with 1)"
        )
    if any(count % GROUPS for count in widths):
        raise UsageError(f"has a VQGAN whose levels have {widths} channels; accepted: multiples of {GROUPS}")
    attention, others = (_indices(shapes, rf"{part}(\d+)\.attn\.") for part in (down, up))
    if attention != others:
        raise UsageError(
            f"has a VQGAN with attention at levels {sorted(attention)} of the encoder and {sorted(others)} of the "
            "decoder; accepted: the same"
        )
    return vq_config(channels, widths, blocks, sorted(attention), latent, (codes, width))


def transformer_model(config: GPT2Config) -> GPT2LMHeadModel:
    """A GPT-2 without memory for its weights."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def codec_model(config: Mapping[str, Any]) -> VQModel:
    """A VQGAN without memory for its weights.

    Raises:
        UsageError: diffusers is not installed.
    """
    network = vq_model_class()
    with torch.device("meta"):
        return network(**config)


def published_models() -> tuple[GPT2LMHeadModel, VQModel]:
    """Transformer and VQGAN of ImageNet's published checkpoint as they are converted, without memory for weights.

    The transformer so has the one position more that `transformer_config` speaks of, 1,536 parameters.
    """
    from transformers import GPT2Config

    codes = 16_384
    transformer = transformer_model(_gpt2(GPT2Config, codes, 256 + 1, 1536, 48, 24, 4 * 1536))
    return transformer, codec_model(vq_config(3, (128, 128, 256, 256, 512), 2, [4], 256, (codes, 256)))


def transformer_weights(model: GPT2LMHeadModel) -> dict[str, Weight]:
    """What each weight of a converted transformer is made from, by its name there."""
    found = {}
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        inside = name.removeprefix("transformer.")
        if name == "lm_head.weight":
            found[name] = Weight((f"{TRANSFORMER}head.weight",), shape, _same)
        elif inside == "wpe.weight":
            # The row of the additional position: nothing that counts reads what follows from it.
            found[name] = Weight((f"{TRANSFORMER}pos_emb",), (1, shape[0] - 1, shape[1]), _with_a_row)
        elif inside in _ENDS:
            found[name] = Weight((TRANSFORMER + _ENDS[inside],), shape, _same)
        else:
            found[name] = _block_weight(inside, shape)
    return found


def codec_weights(model: VQModel) -> dict[str, Weight]:
    """What each weight of a converted VQGAN is made from, by its name there."""
    config: Any = model.config
    last = len(config.block_out_channels) - 1
    found = {}
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        # Attention was made of convolutions of single pixels.
        projection = ".attentions." in name and len(shape) == 2
        source = FIRST_STAGE + _codec_name(name, last)
        found[name] = Weight((source,), (*shape, 1, 1) if projection else shape, _flat if projection else _same)
    return found


def check(shapes: Shapes, weights: Mapping[str, Weight]) -> None:
    """Compare what a checkpoint holds with what converted models need.

    Args:
        shapes: as `used` gives them.
        weights: of all converted models.

    Raises:
        UsageError: weights are missing, unknown or of another shape.
    """
    needed = {source: weight.shape for weight in weights.values() for source in weight.sources}
    _refuse_missing([name for name in needed if name not in shapes])
    if unknown := [name for name in shapes if name not in needed]:
        raise UsageError(
            f"holds {len(unknown)} weight(s) that this version does not know: {_some(unknown)}; accepted: "
            "a class-conditional checkpoint of taming-transformers, such as cin_transformer"
        )
    for name, shape in needed.items():
        if shapes[name] != shape:
            raise UsageError(
                f"holds {name} of shape {_times(shapes[name])}; from its other weights, {_times(shape)} is expected"
            )


def _gpt2(
    config: type[GPT2Config], vocabulary: int, positions: int, width: int, layers: int, heads: int, inner: int
) -> GPT2Config:
    return config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_inner=None if inner == 4 * width else inner,
        activation_function="gelu",  # the exact one, which minGPT has
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["GPT2LMHeadModel"],
    )


def _block_weight(inside: str, shape: tuple[int, ...]) -> Weight:
    _, layer, rest = inside.split(".", 2)
    module, _, kind = rest.rpartition(".")
    block = f"{TRANSFORMER}blocks.{layer}"
    # GPT-2 keeps its linear maps as [in, out].
    linear = kind == "weight" and not module.startswith("ln")
    shape, turn = (tuple(reversed(shape)), _transposed) if linear else (shape, _same)
    if module == "attn.c_attn":
        sources = tuple(f"{block}.attn.{part}.{kind}" for part in ("query", "key", "value"))
        return Weight(sources, (shape[0] // 3, *shape[1:]), turn)
    return Weight((f"{block}.{_BLOCK_NAMES[module]}.{kind}",), shape, turn)


def _codec_name(name: str, last: int) -> str:
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
    name = name.replace("mid_block.attentions.0", "mid.attn_1")
    name = re.sub(r"down_blocks\.(\d+)", r"down.\1", name)
    # There, levels are numbered by resolution in the decoder too; here, in the order of work.
    name = re.sub(r"up_blocks\.(\d+)", lambda found: f"up.{last - int(found[1])}", name)
    name = re.sub(r"\.(down|up)samplers\.0\.", r".\1sample.", name)
    name = name.replace(".resnets.", ".block.").replace(".attentions.", ".attn.")
    for here, there in _ATTENTION.items():
        name = name.replace(f".{here}.", f".{there}.")
    return name


def _shape(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    if name not in shapes:
        _refuse_missing([name])
    if len(shapes[name]) != axes or 0 in shapes[name]:
        raise UsageError(f"holds {name} of shape {_times(shapes[name])}; {axes} axes are expected, none of them empty")
    return shapes[name]


def _refuse_missing(names: list[str]) -> None:
    if names:
        raise UsageError(
            f"lacks weights that it needs ({len(names)}): {_some(names)}; give the whole checkpoint, as published"
        )


def _indices(shapes: Shapes, pattern: str) -> set[int]:
    return {int(found[1]) for name in shapes if (found := re.match(pattern, name))}


def _count(shapes: Shapes, pattern: str) -> int:
    # Of different numbers, not the highest: where one is left out, `check` names what it lacks.
    return len(_indices(shapes, pattern))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "()"


def _same(weight: Tensor) -> Tensor:
    return weight


def _transposed(weight: Tensor) -> Tensor:
    return weight.t()


def _flat(weight: Tensor) -> Tensor:
    return weight.flatten(1)


def _with_a_row(weight: Tensor) -> Tensor:
    return torch.cat([weight[0], weight.new_zeros(1, weight.shape[-1])])
