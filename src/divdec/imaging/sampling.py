"""Images of given classes from any image model, steered or plain: transformers' `generate` with what images need.

Logits go through, in this order: steering (within the model), tokens that are no code, guidance, temperature, top-k,
top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, LogitsProcessorList, set_seed

from divdec.decoding.processors import ClassifierFreeGuidance
from divdec.errors import UsageError
from divdec.imaging.layout import Codes, ImageLayout
from divdec.imaging.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.decoding.speculative import Speculation


def sample(
    model: PreTrainedModel,
    layout: ImageLayout,
    classes: Sequence[int],
    settings: SamplingSettings = SamplingSettings(),  # noqa: B008
    *,
    speculative: Speculation | bool | int | None = None,
    title: str | None = None,
) -> Codes:
    """Draw an image of each class.

    The same seed, classes and batch size give the same images.

    Args:
        model: any causal language model over the layout's tokens.
        layout: what its tokens mean.
        classes: of the images, by their places; one may stand there often.
        settings: how tokens are drawn.
        speculative: see `SteeredGeneration.generate`.
        title: what the progress bar is called; None shows none.

    Raises:
        UsageError: a class is out of range, the model has another vocabulary or too few positions, or cannot guide.
    """
    check_model(model, layout)
    if settings.guidance != 1 and speculative:
        raise UsageError("guidance draws from two classes at once and cannot be drafted: leave out one of the two")
    prompts = layout.prompts(list(classes))
    any_class = layout.prompts([None]) if settings.guidance != 1 else None
    options: dict[str, Any] = {"speculative": speculative} if speculative else {}
    set_seed(settings.seed)
    # What a checkpoint says of decoding texts would change what is drawn, or cut it short.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        return layout.rasters(torch.cat(_batches(model, layout, prompts, any_class, settings, options, title)))
    finally:
        model.generation_config = own


def _batches(
    model: PreTrainedModel,
    layout: ImageLayout,
    prompts: Int[Tensor, "images 1"],
    any_class: Int[Tensor, "1 1"] | None,
    settings: SamplingSettings,
    options: dict[str, Any],
    title: str | None,
) -> list[Tensor]:
    found = []
    with tqdm(total=len(prompts), desc=title, unit="image", disable=title is None) as bar:
        for batch in prompts.split(settings.batch_size):
            batch = batch.to(model.device)
            # It keeps a cache of its own: one for each batch.
            guides = [] if any_class is None else [_guidance(model, any_class, len(batch), settings.guidance)]
            generate: Any = model.generate
            tokens = generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                temperature=settings.temperature,
                top_k=min(settings.top_k, layout.codes),
                top_p=settings.top_p,
                min_p=None,
                max_new_tokens=layout.length,
                suppress_tokens=layout.no_codes or None,
                eos_token_id=None,
                pad_token_id=layout.padding,
                logits_processor=LogitsProcessorList(guides),
                **options,
            )
            assert isinstance(tokens, Tensor)
            found.append(tokens[:, 1:].cpu())
            bar.update(len(batch))
    return found


def check_model(model: PreTrainedModel, layout: ImageLayout) -> None:
    """Refuse a model that cannot draw images of a layout.

    Raises:
        UsageError: it has another vocabulary, or fewer positions than an image has codes.
    """
    config = model.config.get_text_config(decoder=True)
    if config.vocab_size != layout.vocab_size:
        raise UsageError(f"the model has {config.vocab_size} tokens, its images are made of {layout.vocab_size}")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < layout.length:
        raise UsageError(f"the model has {positions} positions, an image needs {layout.length}")


def _guidance(
    model: PreTrainedModel, any_class: Int[Tensor, "1 1"], images: int, scale: float
) -> ClassifierFreeGuidance:
    return ClassifierFreeGuidance(scale, model, unconditional_ids=any_class.expand(images, 1).to(model.device))  # pyright: ignore[reportArgumentType]
