"""Devices of which the makers publish bandwidth and rates, and a measurement of the one at hand.

It knows nothing of models but for two tiny ones, whose passes say what it costs to begin a pass and a layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from divdec.costs.roofline import Device
from divdec.errors import UsageError

if TYPE_CHECKING:
    import torch

# What it costs to begin a layer and a pass is no maker's figure but an assumption: about a dozen kernels a layer of
# 2 μs each, as with CUDA graphs or in a serving engine. PyTorch run eagerly takes far longer.
LAYER_SECONDS, PASS_SECONDS = 25e-6, 100e-6

DEVICES = {
    device.name: device
    for device in (
        Device(
            "a100", 2.039e12, 312e12, LAYER_SECONDS, PASS_SECONDS, 80e9, 300e9,
            source="NVIDIA A100 datasheet, SXM 80 GB: 2,039 GB/s, 312 TFLOP/s bfloat16, NVLink 600 GB/s both ways",
        ),
        Device(
            "h100", 3.35e12, 989.5e12, LAYER_SECONDS, PASS_SECONDS, 80e9, 450e9,
            source="NVIDIA H100 datasheet, SXM: 3.35 TB/s, 1,979 TFLOP/s bfloat16 with sparsity (half of it dense), "
            "NVLink 900 GB/s both ways",
        ),
        Device(
            "h200", 4.8e12, 989.5e12, LAYER_SECONDS, PASS_SECONDS, 141e9, 450e9,
            source="NVIDIA H200 datasheet, SXM: 4.8 TB/s, 1,979 TFLOP/s bfloat16 with sparsity (half of it dense), "
            "NVLink 900 GB/s both ways",
        ),
        Device(
            "b200", 8e12, 2250e12, LAYER_SECONDS, PASS_SECONDS, 180e9, 900e9,
            source="NVIDIA HGX B200 datasheet: 8 TB/s, 4.5 PFLOP/s bfloat16 with sparsity (half of it dense), "
            "NVLink 1.8 TB/s both ways",
        ),
    )
}  # fmt: skip
MEASURED = "measured"
WIDTH = 64  # of the tiny models: their arithmetic takes no time worth naming


def find_device(name: str, dtype: str = "float32") -> Device:
    """A device by name, or the one at hand, measured.

    Args:
        name: one of `DEVICES`, or 'measured'.
        dtype: of the weights, where it is measured.

    Raises:
        UsageError: there is no such device.
    """
    if name == MEASURED:
        return measure_device(dtype=dtype)
    if name not in DEVICES:
        raise UsageError(f"device is {name!r}; accepted: {', '.join(DEVICES)}, {MEASURED} (this machine)")
    return DEVICES[name]


def measure_device(
    place: str | None = None, dtype: str = "float32", rounds: int = 7, clock: Callable[[], float] = time.perf_counter
) -> Device:
    """Measure bandwidth, rate and the costs of beginning on this machine; some seconds.

    Bandwidth is that of a matrix-vector product over 256 MiB, which is what decoding does; the rate that of a product
    of two square matrices; a layer's and a pass's beginnings follow from tiny Llama-style models of 2 and 10 layers.

    Args:
        place: 'cpu' or 'cuda'; what is at hand by default.
        dtype: of the numbers, 'float32', 'bfloat16' or 'float16'.
        rounds: each measurement is the median of so many, after two that only warm up.
        clock: what time is taken from, in seconds.
    """
    import torch

    where = torch.device(place or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind: torch.dtype = getattr(torch, dtype)
    width = kind.itemsize
    with torch.inference_mode():
        columns = 8192
        wide = torch.ones(2**28 // width // columns, columns, device=where, dtype=kind)
        vector = torch.ones(columns, device=where, dtype=kind)
        bandwidth = wide.numel() * width / _seconds(lambda: torch.mv(wide, vector), where, rounds, clock)
        side = 8192 if where.type == "cuda" else 1024
        square = torch.full((side, side), 1 / side, device=where, dtype=kind)
        flops = 2 * side**3 / _seconds(lambda: square @ square, where, rounds, clock)
        few, many = (_tiny_pass(layers, where, kind, rounds, clock) for layers in (2, 10))
    layer = max(0.0, (many - few) / 8)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    memory = float(torch.cuda.get_device_properties(where).total_memory) if where.type == "cuda" else None
    return Device(
        name, bandwidth, flops, layer, max(0.0, few - 2 * layer), memory, flops_width=width, source=f"measured, {dtype}"
    )


def _tiny_pass(layers: int, where: torch.device, kind: torch.dtype, rounds: int, clock: Callable[[], float]) -> float:
    """Seconds of one token's pass of a tiny model with a cache."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WIDTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=layers,
        num_attention_heads=1, num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.to(device=where, dtype=kind)  # pyright: ignore[reportCallIssue]
    token = torch.zeros(1, 1, dtype=torch.long, device=where)
    cache = DynamicCache(config=config)
    return _seconds(lambda: model(token, past_key_values=cache), where, rounds, clock, calls=10)


def _seconds(
    call: Callable[[], object], where: torch.device, rounds: int, clock: Callable[[], float], calls: int = 1
) -> float:
    """The median over rounds of one call's time; two rounds more only warm up."""
    import torch

    found = []
    for number in range(rounds + 2):
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        started = clock()
        for _ in range(calls):
            call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        if number >= 2:
            found.append((clock() - started) / calls)
    return statistics.median(found)
