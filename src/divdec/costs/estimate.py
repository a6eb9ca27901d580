"""Estimate the cost of a deployment, and recommend steering, distillation or n-grams.

The time per token is a roofline prediction (Williams et al. 2009): a pass takes the longer of memory time and compute
time, plus a fixed cost per layer and per pass. `divdec bench latency` compares predictions with measurements
(docs/benchmarks.md).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from divdec.costs import formulas
from divdec.costs.formulas import Teacher
from divdec.costs.model_size import ModelSize, format_quantity, parse_quantity, read_size
from divdec.errors import UsageError
from divdec.options import OutputFile, option

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


Option = Literal["steer", "distil", "n-gram"]
WIDTHS = {"float8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
FORMATS = (".svg", ".png")
MOST = 1_000_000  # epochs, requests, drafted tokens, microseconds: a larger number is a typing error


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostSettings(OutputFile):
    """A deployment: models, data, volume and device."""

    target: float | str
    """P: a number of parameters such as 8B or 8e9, a folder with config.json (weights are not needed), or a hub id."""
    aux: float | str
    """Each of the two auxiliaries: a number, a folder, or a hub id."""
    forget_tokens: float | str
    """Size of the forget set in tokens, such as 1M."""
    retain_tokens: float | str = 0.0
    """Size of the retain set in tokens."""
    volume: float | str | None = None
    """Number of tokens that the model reads and generates before the forget set or the model changes, such as 1B."""
    epochs: float = 10.0
    """Epochs of the auxiliaries' training and of distillation."""
    distill_epochs: float | None = None
    """Epochs of distillation, if different."""
    recipe: Literal["forget-retain", "full-retain", "matched"] = "forget-retain"
    """Recipe of `divdec train`: 'forget-retain' reads each set once (the paper's formula), 'full-retain' the retain set
    twice, 'matched' both sets twice."""
    embeddings: Literal["counted", "uncounted"] = "counted"
    """Whether N and n include embeddings and output layer; numbers such as 8B are used as given."""
    verbatim: bool = False
    """Only verbatim text must be forgotten. n-grams are then sufficient."""
    dtype: Literal["float8", "bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights, keys and values."""
    context: float | str = 2048.0
    """Context length in tokens, for cache and attention."""
    requests: int = 1
    """Batch size of decoding."""
    device: str = "h100"
    """Device of the latency prediction: a100, h100, h200, b200, or 'measured' for this machine."""
    layer_microseconds: float | None = None
    """Fixed time per layer in microseconds, instead of the device's default. Eager PyTorch needs a much larger
    value."""
    acceptance: float | None = None
    """Measured acceptance rate of drafted tokens (`generate --statistics`); adds the cost of speculation."""
    draft_length: int = 4
    """Tokens per draft, with --acceptance."""

    def __post_init__(self) -> None:
        for name, least in (("forget_tokens", 1.0), ("retain_tokens", 0.0), ("context", 1.0), ("volume", 0.0)):
            if (value := getattr(self, name)) is not None:
                parse_quantity(value, option(name), least)
        for name, least, wanted in (
            ("epochs", math.ulp(0.0), "a number above 0"), ("distill_epochs", math.ulp(0.0), "a number above 0"),
            ("layer_microseconds", 0, "a number of at least 0"), ("requests", 1, "a whole number of at least 1"),
            ("draft_length", 1, "a whole number of at least 1"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not least <= value <= MOST:
                raise UsageError(f"{option(name)} is {value:g}; accepted: {wanted}, at most {MOST:,}")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise UsageError(f"--acceptance is {self.acceptance:g}; accepted: a probability from 0 to 1")
        if self.output is not None and Path(self.output).suffix.lower() not in FORMATS:
            raise UsageError(f"--output is {self.output!r}; accepted: a file whose name ends in {' or '.join(FORMATS)}")


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """FLOPs as a linear function of the volume."""

    once: float
    per_token: float

    def at(self, tokens: float) -> float:
        """FLOPs for a volume in tokens."""
        return self.once + self.per_token * tokens


@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """The result of `divdec cost`."""

    target: ModelSize
    auxiliary: ModelSize
    N: float
    n: float
    increase: float
    """2n/N."""
    training: float
    distillation: dict[Teacher, float]
    """FLOPs of distillation by the way of counting the teacher; below, tokens until it breaks even."""
    break_even: dict[Teacher, float]
    options: dict[str, LinearCost]
    """FLOPs by option; 'target' is the unsteered model, 'speculate' exists only with an acceptance rate."""
    memory: dict[str, float]
    device: Device
    latency: Latency
    volume: float | None
    choice: Option | None
    reason: str
    warnings: tuple[str, ...]
    tokens_per_block: float | None
    """Expected tokens per verified block, with an acceptance rate."""

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON values."""
        volume = self.volume
        return {
            "target": self.target.to_dict(),
            "auxiliary": self.auxiliary.to_dict(),
            "N": self.N,
            "n": self.n,
            "compute_increase": self.increase,
            "flops_per_token": {name: cost.per_token for name, cost in self.options.items()},
            "flops_once": {name: cost.once for name, cost in self.options.items()},
            "training_flops": self.training,
            "distillation_flops": dict(self.distillation),
            "break_even_tokens": dict(self.break_even),
            "volume": volume,
            "flops_at_volume": None if volume is None else {k: cost.at(volume) for k, cost in self.options.items()},
            "memory_bytes": dict(self.memory),
            "device": dataclasses.asdict(self.device),
            "seconds_per_token": dataclasses.asdict(self.latency),
            "tokens_per_block": self.tokens_per_block,
            "choice": self.choice,
            "reason": self.reason,
            "warnings": list(self.warnings),
        }


def estimate_costs(settings: CostSettings) -> CostEstimate:
    """Estimate compute, memory and time, and choose the cheapest option.

    Raises:
        UsageError: a model cannot be read, a value is not a number, or the device is unknown.
    """
    target, auxiliary = read_size(settings.target, "--target"), read_size(settings.aux, "--aux")
    embeddings = settings.embeddings == "counted"
    N, n = target.count(embeddings), auxiliary.count(embeddings)
    forget = parse_quantity(settings.forget_tokens, "--forget-tokens")
    retain = parse_quantity(settings.retain_tokens, "--retain-tokens")
    volume = None if settings.volume is None else parse_quantity(settings.volume, "--volume")
    context = parse_quantity(settings.context, "--context", least=1.0)
    epochs = settings.epochs if settings.distill_epochs is None else settings.distill_epochs
    training = formulas.auxiliary_training(n, settings.epochs, retain, forget, settings.recipe)
    teachers: tuple[Teacher, ...] = ("paper", "live", "cached")
    distillation: dict[Teacher, float] = {
        teacher: formulas.distillation(N, n, epochs, forget, teacher) for teacher in teachers
    }
    break_even: dict[Teacher, float] = {
        teacher: formulas.break_even(N, n, epochs, forget, teacher) for teacher in teachers
    }
    options = {
        "target": LinearCost(0.0, formulas.inference(N, 0.0, 1.0)),
        "steer": LinearCost(training, formulas.inference(N, n, 1.0)),
        "distil": LinearCost(training + distillation["paper"], formulas.inference(N, 0.0, 1.0)),
        "n-gram": LinearCost(0.0, formulas.inference(N, 0.0, 1.0)),
    }
    per_block = None
    if settings.acceptance is not None:
        per_block = formulas.tokens_per_block(settings.acceptance, settings.draft_length)
        speculative = formulas.speculative_inference(N, n, 1.0, settings.acceptance, settings.draft_length)
        options["speculate"] = LinearCost(training, speculative)
    width = WIDTHS[settings.dtype]
    device = find_device(settings.device, "bfloat16" if settings.dtype == "float8" else settings.dtype)
    if settings.layer_microseconds is not None:
        device = dataclasses.replace(device, layer_seconds=settings.layer_microseconds * 1e-6)
    memory = _memory(target, auxiliary, width, settings.requests, context)
    choice, reason = choose_option(volume, break_even, settings.verbatim)
    return CostEstimate(
        target, auxiliary, N, n, formulas.compute_increase(N, n), training, distillation, break_even, options, memory,
        device, predict_latency(target, auxiliary, device, Workload(width, settings.requests, context)), volume,
        choice, reason, tuple(_warnings(N, n, target, auxiliary, memory, device)), per_block,
    )  # fmt: skip


def choose_option(volume: float | None, break_even: dict[Teacher, float], verbatim: bool) -> tuple[Option | None, str]:
    """Choose n-grams for verbatim text, distillation from the break-even volume on, and steering below it.

    Returns:
        The choice, or None without a volume, and the reason in one sentence.
    """
    if verbatim:
        return "n-gram", "verbatim text needs no neural auxiliaries: counting n-grams costs next to nothing"
    limit = break_even["paper"]
    if volume is None:
        return None, f"up to {format_quantity(limit)} tokens steering costs less than distilling; give --volume"
    if volume >= limit:
        note = ""
        if volume < break_even["live"]:
            note = (
                " (with the target's own pass over the forget set, which the paper leaves out, it is "
                f"{format_quantity(break_even['live'])})"
            )
        return "distil", (
            f"{format_quantity(volume)} tokens are more than the break-even volume of {format_quantity(limit)}{note}; "
            "each further request to forget must be distilled again"
        )
    return "steer", (
        f"{format_quantity(volume)} tokens are fewer than the break-even volume of {format_quantity(limit)}"
    )


def _memory(target: ModelSize, auxiliary: ModelSize, width: int, requests: int, context: float) -> dict[str, float]:
    target_cache, auxiliary_cache = (size.cache_bytes(context, width) for size in (target, auxiliary))
    weights = width * (target.parameters + 2 * auxiliary.parameters)
    memory = {
        "target_weights": width * target.parameters,
        "auxiliary_weights": 2 * width * auxiliary.parameters,
        "target_cache_per_token": target.token_bytes(width),
        "auxiliary_cache_per_token": 2 * auxiliary.token_bytes(width),
        "target_cache_per_request": target_cache,
        "auxiliary_cache_per_request": 2 * auxiliary_cache,
        "all": weights + requests * (target_cache + 2 * auxiliary_cache),
    }
    return {name: float(number) for name, number in memory.items()}


def _warnings(
    N: float, n: float, target: ModelSize, auxiliary: ModelSize, memory: dict[str, float], device: Device
) -> list[str]:
    warnings = []
    if 2 * n > N:
        warnings.append(
            f"the two auxiliaries hold more parameters ({format_quantity(2 * n)}) than the target "
            f"({format_quantity(N)}): the paper's setting is 2n ≤ N; steering more than doubles the cost"
        )
    if device.memory is not None and memory["all"] > device.memory:
        warnings.append(
            f"{memory['all'] / 1e9:.3g} GB of weights and caches do not fit one {device.name} with "
            f"{device.memory / 1e9:.3g} GB: the times assume a device that can hold them"
        )
    if target.vocabulary != auxiliary.vocabulary and not (target.guessed or auxiliary.guessed):
        warnings.append(
            f"the models give {target.vocabulary} and {auxiliary.vocabulary} logits: if that is more than padding, "
            "their tokenizers differ and a bundle needs --bridge"
        )
    return warnings
