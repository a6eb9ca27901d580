"""Loading a bundle for a verb."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from divdec.cli.settings import LoadSettings
from divdec.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.steering import Steering

EXPERTS = ("retain_auxiliary", "forget_auxiliary")


def load(settings: LoadSettings) -> tuple[DivergenceForCausalLM, PreTrainedTokenizerBase]:
    """Load model and tokenizer.

    Raises:
        UsageError: the bundle does not load, or is no bundle; nothing answers unsteered.
    """
    from divdec.model.checkpoint import load_tokenizer
    from divdec.model.loading import find_bundle, read_config
    from divdec.model.modeling import DivergenceForCausalLM
    from divdec.steering import Steering

    quiet()
    devices, overlap = devices_of(settings)
    steering = None
    if settings.steering is not None:
        steering = Steering.parse(settings.steering, allow_negative=settings.allow_negative)
    folder = find_bundle(settings.bundle)
    if steering is not None:
        # The eligible vocabulary belongs to the bundle, not to the strength.
        stored = Steering.from_dict(read_config(folder).steering or {})
        steering = dataclasses.replace(steering, vocabulary=stored.vocabulary)
    model = DivergenceForCausalLM.from_pretrained(
        folder,
        verify=not settings.no_verify,
        steering=steering,
        dtype=settings.dtype,
        device_map=devices,
        overlap=overlap,
    )
    warn_if_unsteered(model.steering)
    return model, load_tokenizer(folder)


def devices_of(settings: LoadSettings) -> tuple[str | dict[str, str], bool]:
    """The device map of a bundle's models, and whether the experts run while the target runs.

    Raises:
        UsageError: a model or device is unknown, or torchrun has started several processes.
    """
    device = device_map(settings.device)
    devices: dict[str, str] = {}
    for option in settings.place:
        name, _, value = option.partition("=")
        if name not in (*EXPERTS, "experts") or not value or name in devices:
            raise UsageError(
                f"--place {option}; accepted: experts=DEVICE, experts=thread, or retain_auxiliary=DEVICE and "
                "forget_auxiliary=DEVICE"
            )
        devices[name] = value
    if devices and devices.keys() not in ({"experts"}, set(EXPERTS)):
        raise UsageError(f"--place {' '.join(settings.place)}; give experts=…, or both auxiliaries one by one")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise UsageError(f"{processes} processes were started, and all would do the same; start one")
    if not devices or devices.get("experts") == "thread":
        return device, bool(devices)
    return {"target": device} | {name: device_map(value) for name, value in devices.items()}, True


def check_fits(prompts: Sequence[Sequence[int]], model: DivergenceForCausalLM, what: str) -> None:
    """Refuse prompts that leave no room for an answer: beyond its positions a model answers with noise.

    Raises:
        UsageError: one is as long as the shortest context of the three models.
    """
    positions = model.config.max_position_embeddings
    longest = max(map(len, prompts), default=0)
    if positions is not None and longest >= positions:
        raise UsageError(f"{longest} tokens are too many for {positions} positions of the models: shorten {what}")


def warn_if_unsteered(steering: Steering) -> None:
    """Say on standard error that linear:0 leaves the target as it is."""
    if steering.rule == "linear" and steering.alpha == 0:
        print("warning: linear:0 steers nothing: the answers are the target's own", file=sys.stderr)


def quiet() -> None:
    """Keep transformers' bars and notes out of a verb's output."""
    from transformers.utils import logging

    from divdec.research.baselines import auto  # noqa: F401  baselines that wrap a target load like checkpoints

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def device_map(device: str) -> str:
    """What transformers is told about a device that a user names.

    Raises:
        UsageError: there is no such device here.
    """
    import torch

    if device == "spread":
        return "auto"
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"device {device!r} cannot be used ({reason}); `divdec doctor` lists those there are"
        ) from None
    if device == "meta":
        raise UsageError("device 'meta' holds no weights; `divdec doctor` lists those there are")
    return device
