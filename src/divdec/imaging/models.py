"""Image models from nothing: GPT-2 over a layout's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

    from divdec.imaging.layout import ImageLayout


def new_image_model(layout: ImageLayout, width: int, layers: int, heads: int, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, in float32, with room for a class and all codes of an image.

    Args:
        layout: what its tokens mean.
        width: of its hidden states.
        layers: how many.
        heads: of each layer.
        seed: of the weights.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(seed)
    config = GPT2Config(
        vocab_size=layout.vocab_size,
        n_positions=layout.length + 1,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)
