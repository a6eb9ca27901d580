"""How long a token takes: a roofline model of target, plain, speculative and apart steering on one kind of device.

A pass takes the longer of what its bytes need at the device's bandwidth and what its operations need at its rate
(Williams et al. 2009), and what it costs to begin it and each of its layers. It knows no model's weights; what it
predicts is held against measured runs by `divdec bench latency`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from divdec.costs.formulas import tokens_per_block
from divdec.costs.sizes import ModelSize
from divdec.errors import UsageError

RULE_NUMBERS = (
    10  # float32 read or written for an entry of the vocabulary: three casts, difference, check, product, sum
)


@dataclasses.dataclass(frozen=True)
class Device:
    """What a roofline needs to know of a device."""

    name: str
    bandwidth: float
    """Bytes read from its memory in a second."""
    flops: float
    """Operations a second in dense matrix products of `flops_width` bytes a number."""
    layer_seconds: float
    """What it costs to begin a layer: its kernels' launches, and on a CPU Python itself."""
    pass_seconds: float
    """What a pass costs beside its layers."""
    memory: float | None = None
    """Bytes; None where it was not asked."""
    link: float | None = None
    """Bytes a second to another such device, one way."""
    link_seconds: float = 10e-6
    """What a message between two devices costs beside its bytes."""
    flops_width: int = 2
    source: str = ""
    """Where the figures come from."""

    def rate(self, width: int) -> float:
        """Operations a second for numbers of so many bytes: half as many where they are twice as wide."""
        return self.flops * self.flops_width / width

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is being decoded."""

    width: int = 2
    """Bytes of a weight, and of a key or value."""
    rows: int = 1
    """Sequences decoded together."""
    context: float = 2048.0
    """Tokens that each has before it."""
    acceptance: float = 0.8
    """Probability that a drafted token is kept."""
    block: int = 4
    """γ: tokens drafted at a time."""

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise UsageError(f"acceptance is {self.acceptance:g}; accepted: a probability from 0 to 1")
        for name, value in (("block", self.block), ("rows", self.rows)):
            if value < 1:
                raise UsageError(f"{name} is {value}; accepted: a whole number of at least 1")


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds per token and sequence, and what they rest on."""

    target: float
    plain: float
    speculative: float
    apart: float | None
    """The auxiliaries on devices of their own, beside the target; None where the device's link is not known."""
    bound: str
    """What limits the target's pass: 'bandwidth', 'operations' or 'launches'."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return dataclasses.asdict(self)


def pass_parts(size: ModelSize, device: Device, work: Workload, tokens: int = 1) -> tuple[float, float, float]:
    """Seconds that a pass needs for its bytes, for its operations, and to begin.

    Args:
        size: of the model.
        device: where it runs.
        work: width, rows and context.
        tokens: read at once by each sequence.
    """
    read = size.read(tokens * work.rows) * work.width + work.rows * size.cache_bytes(work.context, work.width)
    operations = tokens * work.rows * (2 * size.active + size.attended(work.context))
    begin = device.pass_seconds + size.layers * device.layer_seconds
    return read / device.bandwidth, operations / device.rate(work.width), begin


def pass_seconds(size: ModelSize, device: Device, work: Workload, tokens: int = 1) -> float:
    """Seconds of one pass, see `pass_parts`: the longer of bytes and operations, and what it costs to begin."""
    read, operations, begin = pass_parts(size, device, work, tokens)
    return max(read, operations) + begin


def rule_seconds(vocabulary: int, device: Device, work: Workload, tokens: int = 1) -> float:
    """Seconds of divergence and rule over the logits of so many tokens."""
    return RULE_NUMBERS * 4 * vocabulary * tokens * work.rows / device.bandwidth


def latency(target: ModelSize, auxiliary: ModelSize, device: Device, work: Workload) -> Latency:
    """Predict seconds per token of target alone, plain, speculative and apart steering.

    Speculative: q drafts γ + 1 tokens one after the other, the target and p judge them in a pass each, and
    (1 − a^(γ+1))/(1 − a) are kept (`divdec.decoding`). Apart: the three models run at the same time, each on a device
    of its own, and one row of float32 logits crosses for each sequence (paper, appendix Latency).

    Args:
        target: P.
        auxiliary: each of p and q.
        device: what all of them run on.
        work: what is decoded.
    """
    alone = pass_seconds(target, device, work)
    one = pass_seconds(auxiliary, device, work)
    rule = rule_seconds(target.vocabulary, device, work)
    judged = work.block + 1
    block = (
        judged * one
        + pass_seconds(target, device, work, judged)
        + pass_seconds(auxiliary, device, work, judged)
        + rule_seconds(target.vocabulary, device, work, judged)
    )
    apart = None
    if device.link is not None:
        crossing = 4 * target.vocabulary * work.rows / device.link + device.link_seconds
        apart = max(alone, one) + crossing + rule
    read, operations, start = pass_parts(target, device, work)
    bound = "launches" if start > max(read, operations) else "bandwidth" if read >= operations else "operations"
    return Latency(
        target=alone,
        plain=alone + 2 * one + rule,
        speculative=block / tokens_per_block(work.acceptance, work.block),
        apart=apart,
        bound=bound,
    )
