"""The benchmarks behind `divdec bench`: compute and latency of steering, measured on models with random weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from divdec.costs.formulas import compute_increase
from divdec.costs.latency import Device, measure_device, pass_seconds, predict_latency
from divdec.decoding.speculative import Speculation, SpeculationStatistics
from divdec.errors import UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.bench.models import BenchDevice, Combination, RandomModels, combinations, misfit, workload
from divdec.research.bench.settings import BenchSettings, ComputeSettings, LatencySettings
from divdec.research.charts import compute_deviation, write_compute, write_latency
from divdec.runs import LOCK, ResumableOutput, RunFolder, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RESULTS = "results.jsonl"
PARTS = ("prefill", "decode")
WITHOUT = "_without_embeddings"
WAYS = ("target", "plain", "speculative", "beside")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
DEVICE_ROUNDS = 3  # measurements of the device, with each combination
Times = dict[str, dict[str, list[float]]]
Models = Mapping[str, "PreTrainedModel"]


def bench_compute(settings: ComputeSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure (t_P + t_p + t_q)/t_P against 1 + 2n/N, prefill and decoding apart, and write table, plot and run.json.

    Combinations that the output folder holds are not measured again.

    Args:
        settings: combinations and measurement.
        report: receives one line per step.

    Returns:
        rows (of the requested combinations), left_out (combinations that do not fit), complete, and summary.

    Raises:
        UsageError: a setting cannot be used.
    """

    def measure(one: Combination, models: Models, about: Mapping[str, Any]) -> dict[str, Any]:
        return compute_figures(time_passes(models, one.vocabulary, settings), about)

    result = _run("bench compute", settings, {}, measure, write_compute, report)
    return {**result, "summary": compute_deviation(result["rows"])}


def bench_latency(settings: LatencySettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure t_Q/t_P of whole answers against vocabulary and N, and write table, plot and run.json.

    The target generates alone; steered with the auxiliaries one after the other, speculatively, and in parallel. The
    device is measured with every combination, so that the roofline's prediction refers to the same machine state.

    Args:
        settings: combinations and measurement.
        report: receives one line per step.

    Returns:
        rows (of the requested combinations), left_out (combinations that do not fit), and complete.

    Raises:
        UsageError: a setting cannot be used.
    """
    device = BenchDevice.of(settings)
    apart = auxiliaries_device(device)
    check_clock(settings, device)
    about = {"block": settings.block, "clock": settings.clock, "auxiliaries_on": str(apart)}

    def measure(one: Combination, models: Models, _: Mapping[str, Any]) -> dict[str, Any]:
        return _measure_latency(one, models, settings, device, apart)

    return _run("bench latency", settings, about, measure, write_latency, report, settings.agreement)


def _run(
    verb: str,
    settings: BenchSettings,
    extra: Mapping[str, Any],
    measure: Callable[[Combination, Models, Mapping[str, Any]], dict[str, Any]],
    write: Callable[[Path, Sequence[Any], str], None],
    report: Callable[[str], None],
    *decides: Any,
) -> dict[str, Any]:
    device = BenchDevice.of(settings)
    wanted = {one.key(settings, device, verb, extra, *decides): one for one in combinations(settings, device)}
    output = Path(settings.output).expanduser()
    _check_folder(output, verb)
    run = RunFolder.open(output, verb, settings, verb, extend=True)
    models, work, left_out = RandomModels(device, settings), workload(settings, device), []
    with run.locked():
        results = ResumableOutput(output / RESULTS)
        missing = [key for key in wanted if key not in results]
        report(f"{len(wanted)} combinations on {device.name}, {len(wanted) - len(missing)} of them measured before")
        measured = 0
        for key in tqdm(missing, desc=verb, unit="combination", dynamic_ncols=True):
            if settings.limit is not None and measured >= settings.limit:
                break
            one = wanted[key]
            about = {**one.about(device, settings), **extra}
            reason = misfit(one, work, device, models)
            if reason is None:
                try:
                    results.add({"key": key, **about, **measure(one, models.create(one), about)})
                except torch.OutOfMemoryError as error:
                    reason = f"did not fit: {str(error).splitlines()[0]}"
                else:
                    measured += 1
                    continue
            left_out.append({**about, "why": reason})
            report(f"left out: {one.target.name} with {one.auxiliary.name}, {one.vocabulary} tokens: {reason}")
        rows = [results.items[key] for key in wanted if key in results]
        complete = len(rows) + len(left_out) == len(wanted)
        if rows:
            write(output, rows, device.name)
        status = "finished" if complete else "stopped"
        run.finish(status=status, device=device.name, measured=len(rows), left_out=left_out, complete=complete)
    return {"rows": rows, "left_out": left_out, "complete": complete}


def _check_folder(folder: Path, verb: str) -> None:
    """Refuse a folder with other contents than this benchmark's."""
    if folder.is_dir() and any(entry.name != LOCK for entry in folder.iterdir()):
        earlier = (read_record(folder) or {}).get("verb")
        if earlier != verb:
            raise UsageError(
                f"output folder {folder} holds {f'a result of `divdec {earlier}`' if earlier else 'other files'}; give "
                f"the name of a new folder, or of one that `divdec {verb}` has written"
            )


# Compute.


@torch.inference_mode()
def time_passes(models: Models, vocabulary: int, settings: ComputeSettings) -> Times:
    """Measure the device seconds (see `_clock`) of the prompt's pass and of one decoded token's, of each model.

    The models take turns token by token, so that a temporarily slow machine is slow for all, and the first model
    changes from round to round. The first round warms up. Only the last position's logits of a prompt are computed.

    Args:
        models: P, p and q, on one device.
        vocabulary: random tokens are drawn from it.
        settings: batch, prompt, tokens, rounds and seed.

    Returns:
        Seconds of each round by part ('prefill', 'decode') and model; decoding is the mean over its tokens.
    """
    from transformers import DynamicCache

    device = next(iter(models.values())).device
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.batch, settings.prompt + settings.tokens)
    ids = torch.randint(vocabulary, shape, generator=generator).to(device)
    times: Times = {part: {name: [] for name in models} for part in PARTS}
    for number in range(settings.rounds + 1):
        names = list(models)
        names = names[number % len(names) :] + names[: number % len(names)]
        caches = {name: DynamicCache(config=models[name].config) for name in names}

        def read(name: str, tokens: torch.Tensor, caches: Mapping[str, Any] = caches) -> float:
            started = _clock(device)
            models[name](tokens, past_key_values=caches[name], use_cache=True, logits_to_keep=1)
            return _clock(device) - started

        prefill = {name: read(name, ids[:, : settings.prompt]) for name in names}
        decode = dict.fromkeys(names, 0.0)
        for token in range(settings.prompt, shape[1]):
            for name in names:
                decode[name] += read(name, ids[:, token : token + 1]) / settings.tokens
        if number:
            for part, seconds in zip(PARTS, (prefill, decode), strict=True):
                for name in names:
                    times[part][name].append(seconds[name])
    return times


def compute_figures(times: Times, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the figures of a row.

    Args:
        times: result of `time_passes`.
        sizes: N and n, with and without embeddings.

    Returns:
        seconds (medians by part and model), ratio (by part, the median over rounds), theory and
        theory_without_embeddings (1 + 2n/N), and deviation (by part, ratio over theory, minus one).
    """
    ratio = {
        part: statistics.median(
            (P + p + q) / P for P, p, q in zip(seconds["P"], seconds["p"], seconds["q"], strict=True)
        )
        for part, seconds in times.items()
    }
    theory, without = (
        1 + compute_increase(float(sizes[f"N{what}"]), float(sizes[f"n{what}"])) for what in ("", WITHOUT)
    )
    return {
        "seconds": {part: {name: statistics.median(own) for name, own in by.items()} for part, by in times.items()},
        "ratio": ratio,
        "theory": theory,
        "theory_without_embeddings": without,
        "deviation": {part: value / theory - 1 for part, value in ratio.items()},
    }


def _clock(device: torch.device) -> float:
    """Time on the device: of a GPU after its queue is empty, of a CPU the processor time of all threads.

    The paper counts GPU hours. The equivalent on a CPU is processor time, which ignores the machine's other work.
    """
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


# Latency.


def check_clock(settings: LatencySettings, device: BenchDevice) -> None:
    """Refuse processor time where it differs from the latency: on a GPU, or with several threads.

    Raises:
        UsageError: the clock does not fit the device.
    """
    if settings.clock == "processor" and (device.device.type != "cpu" or torch.get_num_threads() > 1):
        raise UsageError(
            f"clock 'processor' is for one thread of a CPU, not for {device.name}; set OMP_NUM_THREADS=1 and give "
            "--device cpu, or --clock wall"
        )


def auxiliaries_device(device: BenchDevice) -> torch.device:
    """Device of parallel auxiliaries: another GPU where there is one, otherwise the target's."""
    if device.device.type == "cuda" and torch.cuda.device_count() > 1:
        return torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    return device.device


def predict_seconds(
    one: Combination, device: Device, settings: LatencySettings, bench: BenchDevice
) -> dict[str, float]:
    """Predict the seconds per token of whole answers with the roofline: the prompt's pass, then token by token.

    Parallel auxiliaries are predicted only where the device has a link to another one: on one device the three models
    share its bandwidth. Speculation is not predicted.
    """
    work, later = workload(settings, bench), settings.tokens - 1
    seconds = predict_latency(one.N, one.n, device, work)
    begin = dataclasses.replace(work, context=settings.prompt / 2)
    target, auxiliary = (pass_seconds(size, device, begin, settings.prompt) for size in (one.N, one.n))
    whole = {"target": target + later * seconds.target, "plain": target + 2 * auxiliary + later * seconds.plain}
    if seconds.parallel is not None:
        whole["beside"] = max(target, auxiliary) + later * seconds.parallel
    return {way: total / settings.tokens for way, total in whole.items()}


def _measure_latency(
    one: Combination, models: Models, settings: LatencySettings, bench: BenchDevice, apart: torch.device
) -> dict[str, Any]:
    dtype = str(bench.dtype).removeprefix("torch.")
    device = measure_device(bench.device.type, dtype, DEVICE_ROUNDS, CLOCKS[settings.clock])
    with scaled_last_norms(models, settings.agreement):
        times, drafts = time_answers(models, one.vocabulary, settings, apart)
    predicted = predict_seconds(one, device, settings, bench)
    seconds = {way: statistics.median(own) / settings.tokens for way, own in times.items()}
    ratio = {
        way: statistics.median(own / alone for own, alone in zip(times[way], times["target"], strict=True))
        for way in times
        if way != "target"
    }
    return {
        "acceptance": drafts.acceptance_rate,
        "seconds_per_token": seconds,
        "ratio": ratio,
        "roofline_device": dataclasses.asdict(device),
        "predicted_seconds_per_token": predicted,
        "predicted_over_measured": {way: predicted[way] / seconds[way] for way in predicted if way in seconds},
    }


@torch.inference_mode()
def time_answers(
    models: Models, vocabulary: int, settings: LatencySettings, apart: torch.device
) -> tuple[dict[str, list[float]], SpeculationStatistics]:
    """Measure whole greedy answers, each way in turn; the first round warms up and counts accepted drafts.

    Args:
        models: P, p and q, on one device.
        vocabulary: random tokens are drawn from it.
        settings: batch, prompt, tokens, rounds, block and seed.
        apart: device of p and q for the way 'beside'.

    Returns:
        Seconds of each round by way ('target', 'plain', 'speculative', 'beside'), and statistics of the drafts.
    """
    device = models["P"].device
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(vocabulary, (settings.batch, settings.prompt), generator=generator).to(device)
    arguments: dict[str, Any] = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False,
        "max_new_tokens": settings.tokens, "pad_token_id": 0,
    }  # fmt: skip
    steered = DivergenceForCausalLM.from_parts(models["P"], models["q"], models["p"], "linear:1")
    beside = steered
    if apart != device:
        q, p = (copy.deepcopy(models[name]).to(apart) for name in "qp")  # pyright: ignore[reportArgumentType]
        beside = DivergenceForCausalLM.from_parts(models["P"], q, p, "linear:1")
    drafts = SpeculationStatistics()
    times: dict[str, list[float]] = {}

    def generate(way: str, first: bool) -> Any:
        if way == "target":
            return models["P"].generate(**arguments)  # pyright: ignore[reportCallIssue]
        steered.overlap = beside.overlap = way == "beside"
        if way != "speculative":
            return (beside if way == "beside" else steered).generate(**arguments)
        speculation = Speculation(settings.block, "retain", drafts if first else None)
        return steered.generate(**arguments, speculative=speculation)

    clock = CLOCKS[settings.clock]
    for number in range(settings.rounds + 1):
        for way in WAYS if settings.clock == "wall" else WAYS[:-1]:
            _synchronize(device)
            started = clock()
            answer = generate(way, first=number == 0)
            _synchronize(device)
            seconds = clock() - started
            assert answer.shape[1] == settings.prompt + settings.tokens
            if number:
                times.setdefault(way, []).append(seconds)
    return times, drafts


@contextlib.contextmanager
def scaled_last_norms(models: Models, agreement: float) -> Iterator[None]:
    """Scale the logits of P and p by their last norm, so that q decides the steered distribution; undone on exit."""
    norms: list[torch.Tensor] = [models[name].model.norm.weight for name in ("P", "p")]
    before = [weight.detach().clone() for weight in norms]
    try:
        with torch.no_grad():
            for weight in norms:
                weight.mul_(agreement)
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(norms, before, strict=True):
                weight.copy_(original)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
