"""The benchmark behind `divdec bench compute`: passes of models with random weights."""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from divdec.costs.model_size import ModelSize, measure_size
from divdec.errors import UsageError, first_line
from divdec.runs import ResumableOutput, RunFolder, settings_hash
from divdec_research.bench.results import PASSES, compute_deviation, write_compute
from divdec_research.bench.settings import BenchSettings, DecoderShape, find_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERB, RESULTS = "bench compute", "results.jsonl"
# Targets, auxiliaries and vocabularies that are measured by default.
ON_CPU = (
    ("chinchilla-140M", "chinchilla-306M", "chinchilla-489M"), ("chinchilla-44M", "chinchilla-106M"), (2**15, 2**17),
)  # fmt: skip
ON_CUDA = (
    ("chinchilla-9293M", "chinchilla-12295M", "chinchilla-16183M", "llama-19B", "llama-31B", "llama-48B", "llama-70B"),
    ("chinchilla-306M", "chinchilla-1018M", "chinchilla-2007M", "chinchilla-4084M"),
    (2**15, 2**16, 2**17, 2**18),
)
Times = dict[str, dict[str, list[float]]]
Models = Mapping[str, "PreTrainedModel"]


@dataclasses.dataclass(frozen=True)
class BenchDevice:
    """Device and type of the models."""

    device: torch.device
    dtype: torch.dtype
    name: str

    @classmethod
    def of(cls, settings: BenchSettings) -> BenchDevice:
        """Find the requested device.

        Raises:
            UsageError: there is no GPU.
        """
        kind = settings.device
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda" and not torch.cuda.is_available():
            raise UsageError("device is 'cuda' and this machine has no GPU that PyTorch can use; give --device cpu")
        dtype = settings.dtype if settings.dtype != "auto" else "bfloat16" if kind == "cuda" else "float32"
        cpu = f"cpu, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        name = torch.cuda.get_device_name() if kind == "cuda" else cpu
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return cls(device, getattr(torch, dtype), name)


@dataclasses.dataclass(frozen=True)
class Combination:
    """Shapes of target and auxiliaries, and the vocabulary size of all three models."""

    target: DecoderShape
    auxiliary: DecoderShape
    vocabulary: int
    N: ModelSize
    n: ModelSize

    def key(self, settings: BenchSettings, device: BenchDevice) -> str:
        """Digest of everything that decides a measurement."""
        shapes = [dataclasses.asdict(self.target), dataclasses.asdict(self.auxiliary), self.vocabulary]
        options = [settings.batch, settings.prompt, settings.tokens, settings.rounds, settings.seed]
        return settings_hash([shapes, options, device.name, str(device.dtype), torch.__version__])

    def create(self, settings: BenchSettings, device: BenchDevice) -> dict[str, PreTrainedModel]:
        """Create P, p and q with random weights; those of p and q differ.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        from transformers import AutoModelForCausalLM

        models = {}
        for index, (name, shape) in enumerate({"P": self.target, "p": self.auxiliary, "q": self.auxiliary}.items()):
            torch.manual_seed(settings.seed + index)
            config = shape.config(self.vocabulary, settings.prompt + settings.tokens)
            with device.device:
                models[name] = AutoModelForCausalLM.from_config(config, dtype=device.dtype).eval()
        return models

    def about(self, device: BenchDevice, settings: BenchSettings) -> dict[str, Any]:
        """Columns of a result row that describe the combination."""
        return {
            "target": self.target.name,
            "auxiliary": self.auxiliary.name,
            "vocabulary": self.vocabulary,
            "N": self.N.parameters,
            "n": self.n.parameters,
            "device": device.name,
            "dtype": str(device.dtype).removeprefix("torch."),
            "batch": settings.batch,
            "prompt": settings.prompt,
            "tokens": settings.tokens,
            "rounds": settings.rounds,
        }


def combinations(settings: BenchSettings, device: BenchDevice) -> list[Combination]:
    """List all combinations with 2n ≤ N, embeddings counted (paper, appendix Compute Requirements).

    Raises:
        UsageError: a shape is not known, or no combination is left.
    """
    usual = ON_CUDA if device.device.type == "cuda" else ON_CPU
    targets = [find_shape(name) for name in dict.fromkeys(settings.targets or usual[0])]
    auxiliaries = [find_shape(name) for name in dict.fromkeys(settings.auxiliaries or usual[1])]
    result = []
    for vocabulary in dict.fromkeys(settings.vocabularies or usual[2]):
        sizes = {
            shape: measure_size(shape.config(vocabulary, settings.prompt + settings.tokens), shape.name)
            for shape in {*targets, *auxiliaries}
        }
        result += [
            Combination(target, auxiliary, vocabulary, sizes[target], sizes[auxiliary])
            for target in targets
            for auxiliary in auxiliaries
            if 2 * sizes[auxiliary].parameters <= sizes[target].parameters
        ]
    if not result:
        raise UsageError("no pair of target and auxiliary has 2n ≤ N; give larger --targets or smaller --auxiliaries")
    return result


def bench_compute(settings: BenchSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure (t_P + t_p + t_q)/t_P against 1 + 2n/N, prefill and decoding apart, and write table, plot and run.json.

    Combinations that the output folder holds are not measured again.

    Returns:
        rows (of the requested combinations), left_out (combinations that do not fit), and summary.

    Raises:
        UsageError: a setting cannot be used.
    """
    device = BenchDevice.of(settings)
    wanted = {case.key(settings, device): case for case in combinations(settings, device)}
    output, left_out = Path(settings.output).expanduser(), []
    with RunFolder.open(output, VERB, settings, VERB, extend=True) as run:
        results = ResumableOutput(output / RESULTS)
        missing = [key for key in wanted if key not in results]
        report(f"{len(wanted)} combinations on {device.name}, {len(wanted) - len(missing)} of them measured before")
        for key in tqdm(missing, desc=VERB, unit="combination", dynamic_ncols=True):
            case = wanted[key]
            about = case.about(device, settings)
            try:
                times = time_passes(case.create(settings, device), case.vocabulary, settings)
                results.add({"key": key, **about, **compute_figures(times, about)})
            except torch.OutOfMemoryError as error:
                left_out.append({**about, "why": first_line(error)})
                report(f"left out: {case.target.name} with {case.auxiliary.name} does not fit ({first_line(error)})")
        rows = [results.items[key] for key in wanted if key in results]
        if rows:
            write_compute(output, rows, device.name)
        run.finish(device=device.name, measured=len(rows), left_out=left_out)
    return {"rows": rows, "left_out": left_out, "summary": compute_deviation(rows)}


@torch.inference_mode()
def time_passes(models: Models, vocabulary: int, settings: BenchSettings) -> Times:
    """Measure the seconds of the prompt's pass and of one decoded token's, of each model.

    On a GPU, seconds are those of the device. On a CPU they are processor time of all threads, which ignores the
    machine's other work. The models take turns token by token, so that a temporarily slow machine is slow for all, and
    the first model changes from round to round. The first round warms up. Only the last position's logits of a prompt
    are computed.

    Args:
        models: P, p and q, on one device.
        vocabulary: random tokens are drawn from it.
        settings: batch, prompt, tokens, rounds and seed.

    Returns:
        Seconds of each round by pass ('prefill', 'decode') and model; decoding is the mean over its tokens.
    """
    from transformers import DynamicCache

    device = next(iter(models.values())).device
    generator = torch.Generator().manual_seed(settings.seed)
    size = (settings.batch, settings.prompt + settings.tokens)
    ids = torch.randint(vocabulary, size, generator=generator).to(device)
    times: Times = {name: {model: [] for model in models} for name in PASSES}
    for number in range(settings.rounds + 1):
        names = list(models)
        names = names[number % len(names) :] + names[: number % len(names)]
        caches = {name: DynamicCache(config=models[name].config) for name in names}

        def read(name: str, tokens: torch.Tensor, caches: Mapping[str, Any] = caches) -> float:
            started = _now(device)
            models[name](tokens, past_key_values=caches[name], use_cache=True, logits_to_keep=1)
            return _now(device) - started

        prefill = {name: read(name, ids[:, : settings.prompt]) for name in names}
        decode = dict.fromkeys(names, 0.0)
        for token in range(settings.prompt, ids.shape[1]):
            for name in names:
                decode[name] += read(name, ids[:, token : token + 1]) / settings.tokens
        if number:
            for model_times, seconds in zip(times.values(), (prefill, decode), strict=True):
                for name in names:
                    model_times[name].append(seconds[name])
    return times


def compute_figures(times: Times, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the figures of a row.

    Returns:
        seconds (medians by pass and model), ratio (by pass, the median over rounds), theory (1 + 2n/N), and deviation
        (by pass, ratio over theory, minus one).
    """
    ratio = {
        name: statistics.median(
            (P + p + q) / P for P, p, q in zip(seconds["P"], seconds["p"], seconds["q"], strict=True)
        )
        for name, seconds in times.items()
    }
    theory = 1 + 2 * sizes["n"] / sizes["N"]
    return {
        "seconds": {
            name: {model: statistics.median(seconds) for model, seconds in by.items()} for name, by in times.items()
        },
        "ratio": ratio,
        "theory": theory,
        "deviation": {name: value / theory - 1 for name, value in ratio.items()},
    }


def _now(device: torch.device) -> float:
    """Read the clock: processor time on a CPU, on a GPU wall-clock time when its queue is empty."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
