"""Roofline prediction of the time per token (Williams et al. 2009), and the devices it is predicted for.

A pass takes the longer of memory time and compute time, plus a fixed cost per layer and per pass. `divdec bench
latency` compares predictions with measurements (docs/costs.md).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from divdec.costs.model_size import ModelSize
from divdec.errors import UsageError

if TYPE_CHECKING:
    import torch

# Assumed, not measured: about a dozen kernels of 2 μs per layer, as with CUDA graphs. Eager PyTorch is slower.
LAYER_SECONDS, PASS_SECONDS = 25e-6, 100e-6
LINK_SECONDS = 10e-6  # latency of a message between two devices
RULE_NUMBERS = 10  # float32 numbers read or written per vocabulary entry: casts, difference, check, product, sum
MEASURED = "measured"
TINY_WIDTH = 64  # hidden size of the models that measure the fixed costs


@dataclasses.dataclass(frozen=True)
class Device:
    """A device's speed."""

    name: str
    bandwidth: float
    """Bytes per second from its memory."""
    flops: float
    """FLOPs per second in dense matrix products of `flops_width` bytes per number."""
    layer_seconds: float = LAYER_SECONDS
    pass_seconds: float = PASS_SECONDS
    memory: float | None = None
    """Bytes, or None if unknown."""
    link: float | None = None
    """Bytes per second to another such device in one direction, or None if unknown."""
    flops_width: int = 2
    source: str = ""

    def rate(self, width: int) -> float:
        """FLOPs per second for numbers of `width` bytes."""
        return self.flops * self.flops_width / width


DEVICES = {
    device.name: device
    for device in (
        Device(
            "a100", 2.039e12, 312e12, memory=80e9, link=300e9,
            source="NVIDIA A100 datasheet, SXM 80 GB: 2,039 GB/s, 312 TFLOP/s bfloat16, NVLink 600 GB/s both ways",
        ),
        Device(
            "h100", 3.35e12, 989.5e12, memory=80e9, link=450e9,
            source="NVIDIA H100 datasheet, SXM: 3.35 TB/s, 1,979 TFLOP/s bfloat16 with sparsity (half of it dense), "
            "NVLink 900 GB/s both ways",
        ),
        Device(
            "h200", 4.8e12, 989.5e12, memory=141e9, link=450e9,
            source="NVIDIA H200 datasheet, SXM: 4.8 TB/s, 1,979 TFLOP/s bfloat16 with sparsity (half of it dense), "
            "NVLink 900 GB/s both ways",
        ),
        Device(
            "b200", 8e12, 2250e12, memory=180e9, link=900e9,
            source="NVIDIA HGX B200 datasheet: 8 TB/s, 4.5 PFLOP/s bfloat16 with sparsity (half of it dense), "
            "NVLink 1.8 TB/s both ways",
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Workload:
    """The decoding workload that is predicted."""

    width: int = 2
    """Bytes of a weight, a key or a value."""
    batch_size: int = 1
    context: float = 2048.0
    """Tokens before the predicted one in each sequence."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}; accepted: a whole number of at least 1")


@dataclasses.dataclass(frozen=True)
class Latency:
    """Predicted seconds per token and sequence."""

    target: float
    plain: float
    """Target and auxiliaries one after the other on one device."""
    parallel: float | None
    """Each auxiliary on a separate device; None if the device's link is unknown."""
    bound: str
    """The limit of the target's pass: 'bandwidth', 'operations' or 'launches'."""


def find_device(name: str, dtype: str = "float32") -> Device:
    """Return a device by name; 'measured' measures this machine with weights of `dtype`.

    Raises:
        UsageError: the device is unknown.
    """
    if name == MEASURED:
        return measure_device(dtype=dtype)
    if name not in DEVICES:
        raise UsageError(f"--device is {name!r}; accepted: {', '.join(DEVICES)}, {MEASURED} (this machine)")
    return DEVICES[name]


def pass_parts(size: ModelSize, device: Device, work: Workload, tokens: int = 1) -> tuple[float, float, float]:
    """Seconds of a pass over `tokens` tokens per sequence for memory, for operations, and in fixed costs."""
    read = size.read(tokens * work.batch_size) * work.width
    read += work.batch_size * size.cache_bytes(work.context, work.width)
    operations = tokens * work.batch_size * (2 * size.active + size.attention_flops(work.context))
    fixed = device.pass_seconds + size.layers * device.layer_seconds
    return read / device.bandwidth, operations / device.rate(work.width), fixed


def pass_seconds(size: ModelSize, device: Device, work: Workload, tokens: int = 1) -> float:
    """Seconds of one pass: the longer of memory and operations, plus the fixed costs. See `pass_parts`."""
    memory, operations, fixed = pass_parts(size, device, work, tokens)
    return max(memory, operations) + fixed


def predict_latency(target: ModelSize, auxiliary: ModelSize, device: Device, work: Workload) -> Latency:
    """Predict the seconds per token of the target alone and of plain steering.

    All models run on one such device. For `Latency.parallel` each has one, and a row of float32 logits per sequence
    crosses the link (paper, appendix Latency).
    """
    alone, auxiliary_pass = pass_seconds(target, device, work), pass_seconds(auxiliary, device, work)
    rule = RULE_NUMBERS * 4 * target.vocabulary * work.batch_size / device.bandwidth
    parallel = None
    if device.link is not None:
        transfer = 4 * target.vocabulary * work.batch_size / device.link + LINK_SECONDS
        parallel = max(alone, auxiliary_pass) + transfer + rule
    memory, operations, fixed = pass_parts(target, device, work)
    bound = "launches" if fixed > max(memory, operations) else "bandwidth" if memory >= operations else "operations"
    return Latency(alone, alone + 2 * auxiliary_pass + rule, parallel, bound)


def measure_device(
    device: str | None = None, dtype: str = "float32", rounds: int = 7, clock: Callable[[], float] = time.perf_counter
) -> Device:
    """Measure bandwidth, compute rate and fixed costs on this machine; takes some seconds.

    Bandwidth is that of a matrix-vector product over 256 MiB, the rate that of a product of two square matrices. The
    fixed costs follow from Llama models of 2 and 10 tiny layers.

    Args:
        device: 'cpu' or 'cuda'; CUDA if available by default.
        dtype: 'float32', 'bfloat16' or 'float16'.
        rounds: each measurement is the median of this many rounds, after two warm-up rounds.
        clock: returns the time in seconds.
    """
    import torch

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind: torch.dtype = getattr(torch, dtype)
    width = kind.itemsize
    with torch.inference_mode():
        columns = 8192
        wide = torch.ones(2**28 // width // columns, columns, device=where, dtype=kind)
        vector = torch.ones(columns, device=where, dtype=kind)
        bandwidth = wide.numel() * width / _median_seconds(lambda: torch.mv(wide, vector), where, rounds, clock)
        side = 8192 if where.type == "cuda" else 1024
        square = torch.full((side, side), 1 / side, device=where, dtype=kind)
        flops = 2 * side**3 / _median_seconds(lambda: square @ square, where, rounds, clock)
        few, many = (_tiny_pass_seconds(layers, where, kind, rounds, clock) for layers in (2, 10))
    layer = max(0.0, (many - few) / 8)
    cuda = where.type == "cuda"
    name = torch.cuda.get_device_name(where) if cuda else f"cpu, {torch.get_num_threads()} threads"
    memory = float(torch.cuda.get_device_properties(where).total_memory) if cuda else None
    return Device(
        name, bandwidth, flops, layer, max(0.0, few - 2 * layer), memory, flops_width=width, source=f"measured, {dtype}"
    )


def _tiny_pass_seconds(
    layers: int, device: torch.device, dtype: torch.dtype, rounds: int, clock: Callable[[], float]
) -> float:
    """Seconds of one token's pass through a tiny model with a cache."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_WIDTH, hidden_size=TINY_WIDTH, intermediate_size=TINY_WIDTH, num_hidden_layers=layers,
        num_attention_heads=1, num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.to(device=device, dtype=dtype)  # pyright: ignore[reportCallIssue]
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    cache = DynamicCache(config=config)
    return _median_seconds(lambda: model(token, past_key_values=cache), device, rounds, clock, calls=10)


def _median_seconds(
    call: Callable[[], Any], device: torch.device, rounds: int, clock: Callable[[], float], calls: int = 1
) -> float:
    """Median seconds of one call, after two warm-up rounds."""
    import torch

    seconds = []
    for number in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = clock()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            seconds.append((clock() - started) / calls)
    return statistics.median(seconds)
