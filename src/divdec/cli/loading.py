"""Loading a bundle for a verb, with the options that several verbs share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM


@dataclasses.dataclass(frozen=True)
class LoadSettings:
    """Options of every verb that answers with a bundle."""

    bundle: str
    """The bundle: a folder or hub id."""
    steering: str | None = None
    """Another rule than the bundle's: linear:ALPHA, rank:K or rank:K:soft."""
    allow_negative: bool = False
    """Accept a negative alpha, which steers towards the forget set."""
    no_verify: bool = False
    """Load although a weight file has changed since the bundle was written."""
    device: str = "auto"
    """Where the models run: auto, cpu, cuda, cuda:1, mps; 'spread' places them over all GPUs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; 'auto' takes what the checkpoints hold."""


def load(settings: LoadSettings) -> tuple[DivergenceForCausalLM, PreTrainedTokenizerBase]:
    """Load model and tokenizer.

    Raises:
        UsageError: the bundle does not load, or is no bundle; nothing answers unsteered.
    """
    from divdec.model.bundle import find_bundle, read_config
    from divdec.model.checkpoint import load_tokenizer
    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.steering import Steering

    quiet()
    steering = None
    if settings.steering is not None:
        steering = Steering.parse(settings.steering, allow_negative=settings.allow_negative)
    folder = find_bundle(settings.bundle)
    if steering is not None and steering.rule == "rank":
        # The eligible vocabulary belongs to the bundle, not to the strength.
        stored = Steering.from_dict(read_config(folder).steering or {})
        steering = dataclasses.replace(steering, vocabulary=stored.vocabulary)
    model = DivergenceForCausalLM.from_pretrained(
        folder,
        verify=not settings.no_verify,
        steering=steering,
        dtype=settings.dtype,
        device_map=_device_map(settings.device),
    )
    return model, load_tokenizer(folder)


def quiet() -> None:
    """Keep transformers' bars and notes out of a verb's output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _device_map(device: str) -> str:
    import torch

    if device == "spread":
        return "auto"
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
