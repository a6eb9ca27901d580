"""What a deployment costs in each of its ways, and which way to choose. It knows numbers alone and prints nothing."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from divdec.costs import formulas
from divdec.costs.devices import find_device
from divdec.costs.formulas import Teacher
from divdec.costs.quantities import parse_quantity, short
from divdec.costs.roofline import Device, Latency, Workload, latency
from divdec.costs.settings import CostSettings
from divdec.costs.sizes import ModelSize, read_size

Way = Literal["steer", "speculate", "distil", "n-gram"]
WORTH = 0.95  # of plain steering's time per token, below which speculation is worth its operations


@dataclasses.dataclass(frozen=True)
class Line:
    """Total FLOPs of a way as a function of the volume: what is paid once, and what for each token."""

    once: float
    per_token: float

    def at(self, tokens: float) -> float:
        """FLOPs for a volume."""
        return self.once + self.per_token * tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that `divdec cost` says."""

    target: ModelSize
    auxiliary: ModelSize
    N: float
    n: float
    increase: float
    """2n/N."""
    training: float
    """FLOPs of both auxiliaries' training."""
    distillation: dict[Teacher, float]
    """FLOPs, by what is counted of the teacher."""
    break_even: dict[Teacher, float]
    """Tokens, likewise."""
    lines: dict[str, Line]
    """By way, and 'target' for the unsteered model."""
    memory: dict[str, float]
    """Bytes."""
    device: Device
    latency: Latency
    volume: float | None
    choice: Way | None
    reason: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "target": self.target.to_dict(),
            "auxiliary": self.auxiliary.to_dict(),
            "N": self.N,
            "n": self.n,
            "compute_increase": self.increase,
            "flops_per_token": {way: line.per_token for way, line in self.lines.items()},
            "flops_once": {way: line.once for way, line in self.lines.items()},
            "training_flops": self.training,
            "distillation_flops": dict(self.distillation),
            "break_even_tokens": dict(self.break_even),
            "volume": self.volume,
            "flops_at_volume": None
            if self.volume is None
            else {way: line.at(self.volume) for way, line in self.lines.items()},
            "memory_bytes": dict(self.memory),
            "device": self.device.to_dict(),
            "seconds_per_token": self.latency.to_dict(),
            "choice": self.choice,
            "reason": self.reason,
            "warnings": list(self.warnings),
        }


def plan(settings: CostSettings) -> Plan:
    """Compute everything and choose.

    Raises:
        UsageError: a model cannot be read, a number is none, or the device is not known.
    """
    target, auxiliary = read_size(settings.target, "target"), read_size(settings.aux, "aux")
    counted = settings.embeddings == "counted"
    N, n = target.counted(counted), auxiliary.counted(counted)
    forget = parse_quantity(settings.forget_tokens, "forget-tokens")
    retain = parse_quantity(settings.retain_tokens, "retain-tokens")
    volume = None if settings.volume is None else parse_quantity(settings.volume, "volume")
    epochs = settings.epochs if settings.distill_epochs is None else settings.distill_epochs
    training = formulas.auxiliary_training(n, settings.epochs, retain, forget, settings.recipe)
    teachers: tuple[Teacher, ...] = ("paper", "live", "cached")
    distillation: dict[Teacher, float] = {
        teacher: formulas.distillation(N, n, epochs, forget, teacher) for teacher in teachers
    }
    break_even: dict[Teacher, float] = {
        teacher: formulas.break_even(N, n, epochs, forget, teacher) for teacher in teachers
    }
    lines = {
        "target": Line(0.0, formulas.inference(N, 0.0, 1.0)),
        "steer": Line(training, formulas.inference(N, n, 1.0)),
        "speculate": Line(training, formulas.speculative_inference(N, n, 1.0, settings.acceptance, settings.block)),
        "distil": Line(training + distillation["paper"], formulas.inference(N, 0.0, 1.0)),
        "n-gram": Line(0.0, formulas.inference(N, 0.0, 1.0)),
    }
    device = _device(settings)
    context = parse_quantity(settings.context, "context", least=1.0)
    work = Workload(settings.width, settings.requests, context, settings.acceptance, settings.block)
    seconds = latency(target, auxiliary, device, work)
    memory = _memory(target, auxiliary, settings, context)
    dearer = lines["speculate"].per_token / lines["steer"].per_token
    choice, reason = choose(volume, break_even, seconds, dearer, settings.verbatim)
    return Plan(
        target, auxiliary, N, n, formulas.compute_increase(N, n), training, distillation, break_even, lines, memory,
        device, seconds, volume, choice, reason, tuple(_warnings(N, n, target, auxiliary, memory, device)),
    )  # fmt: skip


def choose(
    volume: float | None, break_even: dict[Teacher, float], seconds: Latency, dearer: float, verbatim: bool
) -> tuple[Way | None, str]:
    """Which way to go, and why in one sentence.

    n-grams where word-for-word texts are all that must go; a distilled student where more will be asked than the
    break-even volume; steering otherwise, by blocks where that is predicted to take less time.

    Args:
        volume: tokens of inference, or None where it is not known.
        break_even: see `Plan.break_even`.
        seconds: predicted times per token.
        dearer: how many times the FLOPs of plain steering a token takes by blocks.
        verbatim: whether n-grams do.
    """
    if verbatim:
        return "n-gram", "texts word for word need no neural auxiliaries: counting n-grams costs next to nothing"
    edge = break_even["paper"]
    if volume is None:
        return None, f"up to {short(edge)} tokens steering costs less than distilling; give --volume to be told more"
    if volume >= edge:
        unsure = (
            " (the target's own pass over the forget set counted, which the paper leaves out, it would be "
            f"{short(break_even['live'])})"
        )
        return "distil", (
            f"{short(volume)} tokens are more than the break-even volume of {short(edge)}"
            f"{unsure if volume < break_even['live'] else ''}; a further request to forget has to be distilled anew"
        )
    below = f"{short(volume)} tokens are fewer than the break-even volume of {short(edge)}"
    if seconds.speculative < WORTH * seconds.plain:
        return "speculate", (
            f"{below}, and by blocks a token is predicted to take {1e3 * seconds.speculative:.3g} ms in place of "
            f"{1e3 * seconds.plain:.3g} ms (for {dearer:.2g} times the FLOPs: steer plainly where those count)"
        )
    return "steer", f"{below}, and speculation is not predicted to be faster"


def _device(settings: CostSettings) -> Device:
    dtype = settings.dtype if settings.dtype != "float8" else "bfloat16"
    device = find_device(settings.device, dtype)
    if settings.layer_microseconds is None:
        return device
    return dataclasses.replace(device, layer_seconds=settings.layer_microseconds * 1e-6)


def _memory(target: ModelSize, auxiliary: ModelSize, settings: CostSettings, context: float) -> dict[str, float]:
    width = settings.width
    caches = target.cache_bytes(context, width), auxiliary.cache_bytes(context, width)
    found = {
        "target_weights": target.weight_bytes(width),
        "auxiliary_weights": 2 * auxiliary.weight_bytes(width),
        "target_cache_per_token": target.token_bytes(width),
        "auxiliary_cache_per_token": 2 * auxiliary.token_bytes(width),
        "target_cache_per_request": caches[0],
        "auxiliary_cache_per_request": 2 * caches[1],
        "all": target.weight_bytes(width)
        + 2 * auxiliary.weight_bytes(width)
        + settings.requests * (caches[0] + 2 * caches[1]),
    }
    return {name: float(number) for name, number in found.items()}


def _warnings(
    N: float, n: float, target: ModelSize, auxiliary: ModelSize, memory: dict[str, float], device: Device
) -> list[str]:
    found = []
    if 2 * n > N:
        found.append(
            f"the two auxiliaries hold more parameters ({short(2 * n)}) than the target ({short(N)}): "
            "the paper's setting is 2n ≤ N; steering more than doubles the cost"
        )
    if device.memory is not None and memory["all"] > device.memory:
        found.append(
            f"{memory['all'] / 1e9:.3g} GB of weights and caches do not fit one {device.name} with "
            f"{device.memory / 1e9:.3g} GB: times are those of a device that could hold them"
        )
    if target.vocabulary != auxiliary.vocabulary and not (target.guessed or auxiliary.guessed):
        found.append(
            f"the models give {target.vocabulary} and {auxiliary.vocabulary} logits: where that is more than padding, "
            "their tokenizers differ and a bundle needs a bridge between them"
        )
    return found
