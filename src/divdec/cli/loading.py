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

    from divdec.experts.placed import Placement
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
    devices, placement = placed(settings)
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
        experts_placement=placement,
    )
    warn_if_unsteered(model.steering)
    return model, load_tokenizer(folder)


def hold_experts(settings: LoadSettings) -> None:
    """In a process that torchrun has started to hold experts: do that, and leave when it is done. Elsewhere nothing.

    Raises:
        UsageError: see `load`.
        SystemExit: the process that answers has ended.
    """
    if "experts=processes" in settings.place and int(os.environ.get("RANK", "0")):
        load(settings)


def report_transfer(model: DivergenceForCausalLM) -> None:
    """Say on standard error what experts in other processes left out, where they were asked to."""
    from divdec.experts.placed_remote import RemoteExperts

    experts = model.experts
    if isinstance(experts, RemoteExperts) and experts.entries is not None and experts.statistics.passes:
        print(f"experts: {experts.statistics.said(experts.entries, experts.vocab_size)}", file=sys.stderr)


def placed(settings: LoadSettings) -> tuple[str | dict[str, str], Placement]:
    """Where the parts run, and how the experts do.

    Raises:
        UsageError: a part or a place is not known, or other processes were started and nothing is said about them.
    """
    from divdec.experts.placed import Placement

    device = device_map(settings.device)
    places: dict[str, str] = {}
    for given in settings.place:
        part, _, place = given.partition("=")
        if part not in (*EXPERTS, "experts") or not place or part in places:
            raise UsageError(
                f"--place {given}; accepted: experts=DEVICE, experts=thread, experts=processes, or "
                "retain_auxiliary=DEVICE and forget_auxiliary=DEVICE"
            )
        places[part] = place
    if places and places.keys() not in ({"experts"}, set(EXPERTS)):
        raise UsageError(f"--place {' '.join(settings.place)}; give experts=…, or both auxiliaries one by one")
    where = places.get("experts")
    kind = "processes" if where == "processes" else "beside" if places else "inside"
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if kind != "processes" and started > 1:
        raise UsageError(
            f"{started} processes were started, and all would do the same; give --place experts=processes, or start one"
        )
    if kind != "processes" and settings.experts_entries is not None:
        raise UsageError("--experts-entries is for experts in processes of their own: --place experts=processes")
    placement = Placement(kind, settings.experts_timeout, settings.experts_entries, settings.experts_tolerance)
    if kind != "beside" or where == "thread":
        return device, placement
    return {"target": device} | {part: device_map(place) for part, place in places.items()}, placement


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
