"""Sample images of classes from a steered or plain image model, and write them as files.

Logits pass, in this order: steering (within the model), suppression of tokens that are no codes, guidance, temperature,
top-k, top-p.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, LogitsProcessorList, set_seed

from divdec.checkpoint import check_apart
from divdec.decoding.processors import ClassifierFreeGuidance
from divdec.errors import UsageError
from divdec.runs import RECORD, check_output, made_by, output_folder, record, write_bytes, write_json
from divdec.steering import Steering
from divdec_research.images.codecs import Codec, Codes, Images
from divdec_research.images.files import grid, png
from divdec_research.images.models import ImageLayout, load_image_model, local_folders
from divdec_research.images.settings import ImageSampleSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.decoding.speculative import Speculation

VERB = "image sample"
CODES, GRID = "codes.safetensors", "grid.png"
MIN_GRID_SIDE = 64
"""Smaller images are enlarged in a grid."""
MAX_GRID_ROWS, MAX_GRID_COLUMNS = 64, 16
MAX_NAME = 80
SAFE, UNSAFE = re.compile(r"[^\W_][\w ,()-]{0,79}(?<! )"), re.compile(r"[^\w ,()-]")


def sample(
    model: PreTrainedModel,
    layout: ImageLayout,
    classes: Sequence[int],
    settings: SamplingSettings = SamplingSettings(),  # noqa: B008
    *,
    speculative: Speculation | bool | int | None = None,
    title: str | None = None,
) -> Codes:
    """Sample one image for each class; equal seed, classes and batch size give equal images.

    Args:
        model: a causal language model over the layout's tokens; see `check_image_model`.
        layout: its layout.
        classes: index of the class of each image.
        settings: sampling settings.
        speculative: see `SteeredGeneration.generate`.
        title: title of the progress bar; None shows none.

    Raises:
        UsageError: a class is out of range, or the model has no guidance.
    """
    if settings.guidance != 1 and speculative:
        raise UsageError("guidance draws from two classes at once and cannot be drafted: leave out one of the two")
    prompts = layout.prompts(list(classes))
    any_class: Any = layout.prompts([None]) if settings.guidance != 1 else None
    options: dict[str, Any] = {"speculative": speculative} if speculative else {}
    set_seed(settings.seed)
    # The generation config of a checkpoint, made for texts, could change or truncate images.
    original_config, model.generation_config = model.generation_config, GenerationConfig()
    batches = []
    try:
        with tqdm(total=len(prompts), desc=title, unit="image", disable=title is None) as bar:
            for batch in prompts.split(settings.batch_size):
                batch = batch.to(model.device)
                processors = LogitsProcessorList()
                if any_class is not None:  # guidance has a cache, so each batch needs a new one
                    ids = any_class.expand(len(batch), 1).to(model.device)
                    processors.append(ClassifierFreeGuidance(settings.guidance, model, unconditional_ids=ids))
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
                    logits_processor=processors,
                    **options,
                )
                batches.append(tokens[:, 1:].cpu())
                bar.update(len(batch))
    finally:
        model.generation_config = original_config
    return layout.rasters(torch.cat(batches))


def sample_to_folder(
    settings: ImageSampleSettings, device: str = "cpu", report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Sample images and write `CLASS/000000.png`, `grid.png` (one row a class), `codes.safetensors` and `run.json`.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: an input cannot be used; nothing has been written.
        FailedClosed: the model could not be steered.
    """
    output = Path(settings.output).expanduser()
    check_output(output, settings.overwrite, made_by(VERB))
    rule = settings.steering
    steering = None if rule is None else Steering.parse(rule)
    check_apart(output.resolve(), [folder.resolve() for folder in local_folders(settings.model)])
    loaded = load_image_model(
        settings.model, steering=steering, verify=not settings.no_verify, dtype=settings.dtype, device=device
    )
    if loaded.steering is None:
        report(f"note: {settings.model} is no bundle: nothing steers it")
    layout = loaded.layout
    # A repeated class is sampled once: its images would have the same names.
    classes = list(dict.fromkeys(layout.find(name) for name in settings.classes)) or list(range(len(layout.classes)))
    labels = [index for index in classes for _ in range(settings.count)]
    codes = sample(loaded.model, layout, labels, settings, speculative=settings.draft_length, title="images")
    content = record(
        VERB,
        settings,
        steering=None if loaded.steering is None else str(loaded.steering),
        classes=[layout.classes[index] for index in classes],
        images=len(codes),
    )
    with output_folder(output, settings.overwrite, made_by(VERB)) as folder:
        save_file({"codes": codes.contiguous(), "classes": torch.tensor(labels)}, folder / CODES)
        shown: list[Images] = []
        for index, class_codes in zip(classes, codes.split(settings.count), strict=True):
            images = decode(class_codes, loaded.codec)
            class_folder = folder / folder_name(layout, index)
            class_folder.mkdir()
            for number, image in enumerate(images):
                write_bytes(class_folder / f"{number:06}.png", png(image))
            if len(shown) < MAX_GRID_ROWS:
                shown.append(images[:MAX_GRID_COLUMNS])
        write_bytes(folder / GRID, png(enlarged_grid(shown)))
        write_json(folder / RECORD, content)
    return content


def folder_name(layout: ImageLayout, index: int) -> str:
    """Name of a class's folder: the class's name, or its index and a name without characters unsafe in paths."""
    name = layout.classes[index]
    if SAFE.fullmatch(name) and name not in (GRID, CODES, RECORD):
        return name
    return f"{index:04} {UNSAFE.sub('_', name)}"[:MAX_NAME].rstrip(" .")


@torch.no_grad()
def decode(codes: Codes, codec: Codec, batch_size: int = 25) -> Images:
    """Decode all codes, batch by batch."""
    return torch.cat([codec.decode(batch) for batch in codes.split(batch_size)]).cpu()


def enlarged_grid(rows: Sequence[Images]) -> Float[Tensor, "channels grid_height grid_width"]:
    """Arrange rows of images as one, with tiny images enlarged."""
    return grid(rows, scale=max(1, MIN_GRID_SIDE // rows[0].shape[-1]))
