"""`divdec bench latency`: t_Q/t_P against vocabulary and N (paper, appendix Latency), and what the roofline predicts.

Whole answers of a fixed length, as `generate` makes them: the target alone; steered with the auxiliaries after it, by
blocks, and with the auxiliaries beside it. Weights are random: only time is measured. The device is measured anew
beside every combination, so that a prediction and what it is held against have the same machine.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from divdec.costs.latency import Device, Workload, measure_device, pass_seconds, predict_latency
from divdec.decoding.speculative import Speculation, SpeculationStatistics
from divdec.errors import UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.research.bench_models import Combination, Makers, Place, combinations, misfit, workload
from divdec.research.bench_results import results_in
from divdec.research.bench_settings import LatencySettings
from divdec.research.charts import write_latency

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERB = "bench latency"
WAYS = ("target", "plain", "speculative", "beside")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
MEASURED_ROUNDS = 3  # of the device, beside each combination


def bench_latency(settings: LatencySettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what is not measured yet, and write table, plot and run.json.

    Args:
        settings: combinations and how they are measured.
        report: told what is done, a line each.

    Returns:
        rows (those of the combinations asked for), left_out (what did not fit, and why), and complete.

    Raises:
        UsageError: something asked for cannot be used.
    """
    place = Place.of(settings)
    apart = auxiliaries_device(place)
    check_clock(settings, place)
    more = ("latency", settings.block, settings.agreement, settings.clock, str(apart))
    wanted = {one.key(settings, place, *more): one for one in combinations(settings, place)}
    makers, work, left_out = Makers(place, settings), workload(settings, place), []
    with results_in(settings.output, VERB) as results:
        missing = [key for key in wanted if key not in results.rows]
        report(f"{len(wanted)} combinations on {place.name}, {len(wanted) - len(missing)} of them measured before")
        results.write_record(settings, status="running", device=place.name)
        measured = 0
        for key in tqdm(missing, desc="latency", unit="combination", dynamic_ncols=True):
            if settings.limit is not None and measured >= settings.limit:
                break
            one = wanted[key]
            about = one.about(place, settings) | {
                "block": settings.block,
                "clock": settings.clock,
                "auxiliaries_on": str(apart),
            }
            why = misfit(one, work, place, makers)
            if why is None:
                try:
                    row = _measured(one, makers, settings, place, apart)
                except torch.OutOfMemoryError as error:
                    why = f"did not fit: {str(error).splitlines()[0]}"
                else:
                    results.add({"key": key, **about, **row})
                    measured += 1
                    continue
            left_out.append({**about, "why": why})
            report(f"left out: {one.target.name} with {one.auxiliary.name}, {one.vocabulary} tokens: {why}")
        rows = [results.rows[key] for key in wanted if key in results.rows]
        complete = len(rows) + len(left_out) == len(wanted)
        if rows:
            write_latency(results.folder, rows, place.name)
        status = "finished" if complete else "stopped"
        results.write_record(
            settings, status=status, device=place.name, measured=len(rows), left_out=left_out, complete=complete
        )
        return {"rows": rows, "left_out": left_out, "complete": complete}


def check_clock(settings: LatencySettings, place: Place) -> None:
    """Refuse processor time where it is not what an answer takes.

    Raises:
        UsageError: on a GPU, or with several threads, whose times would be added up.
    """
    if settings.clock == "processor" and (place.device.type != "cpu" or torch.get_num_threads() > 1):
        raise UsageError(
            f"clock 'processor' is for one thread of a CPU, not for {place.name}; set OMP_NUM_THREADS=1 and give "
            "--device cpu, or --clock wall"
        )


def auxiliaries_device(place: Place) -> torch.device:
    """Where the auxiliaries of the way 'beside' are: on another GPU where there is one, else where the target is."""
    if place.device.type == "cuda" and torch.cuda.device_count() > 1:
        return torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    return place.device


def predicted(one: Combination, device: Device, work: Workload, settings: LatencySettings) -> dict[str, float]:
    """Seconds per token of whole answers by the roofline: the prompt's pass, then token by token.

    The way 'beside' is predicted only where the device has a link to another: on one device the three models share its
    bandwidth, and what that gives is measured, not modelled.
    """
    later = settings.tokens - 1
    seconds = predict_latency(one.N, one.n, device, work)
    begin = dataclasses.replace(work, context=settings.prompt / 2)
    target, auxiliary = (pass_seconds(size, device, begin, settings.prompt) for size in (one.N, one.n))
    whole = {
        "target": target + later * seconds.target,
        "plain": target + 2 * auxiliary + later * seconds.plain,
    }
    if seconds.parallel is not None:
        whole["beside"] = max(target, auxiliary) + later * seconds.parallel
    return {way: total / settings.tokens for way, total in whole.items()}


def _measured(
    one: Combination, makers: Makers, settings: LatencySettings, place: Place, apart: torch.device
) -> dict[str, Any]:
    models = makers.models(one)
    device = measure_device(
        place.device.type, str(place.dtype).removeprefix("torch."), MEASURED_ROUNDS, CLOCKS[settings.clock]
    )
    with agreeing(models, settings.agreement):
        times, statistics_ = time_answers(models, one.vocabulary, settings, apart)
    acceptance = statistics_.acceptance_rate
    expected = predicted(one, device, workload(settings, place), settings)
    seconds = {way: statistics.median(own) / settings.tokens for way, own in times.items()}
    ratio = {
        way: statistics.median(own / alone for own, alone in zip(times[way], times["target"], strict=True))
        for way in times
        if way != "target"
    }
    return {
        "acceptance": acceptance,
        "seconds_per_token": seconds,
        "ratio": ratio,
        "roofline_device": dataclasses.asdict(device),
        "predicted_seconds_per_token": expected,
        "predicted_over_measured": {way: expected[way] / seconds[way] for way in expected if way in seconds},
    }


@torch.inference_mode()
def time_answers(
    models: Mapping[str, PreTrainedModel], vocabulary: int, settings: LatencySettings, apart: torch.device
) -> tuple[dict[str, list[float]], SpeculationStatistics]:
    """Seconds of whole greedy answers, each way in turn; the first round only warms up and counts accepted drafts.

    Args:
        models: P, p and q, on one device.
        vocabulary: tokens are drawn from it.
        settings: batch, prompt, tokens, rounds, block and seed.
        apart: where p and q go for the way 'beside'.

    Returns:
        By way ('target', 'plain', 'speculative', 'beside') the seconds of each round, and what the drafts were worth.
    """
    device = models["P"].device
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(vocabulary, (settings.batch, settings.prompt), generator=generator).to(device)
    given: dict[str, Any] = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False,
        "max_new_tokens": settings.tokens, "pad_token_id": 0,
    }  # fmt: skip
    steered = DivergenceForCausalLM.from_parts(models["P"], models["q"], models["p"], "linear:1")
    beside = steered
    if apart != device:
        q, p = (copy.deepcopy(models[name]).to(apart) for name in "qp")  # pyright: ignore[reportArgumentType]
        beside = DivergenceForCausalLM.from_parts(models["P"], q, p, "linear:1")
    counted = SpeculationStatistics()
    found: dict[str, list[float]] = {}

    def generate(way: str, first: bool) -> Any:
        if way == "target":
            return models["P"].generate(**given)  # pyright: ignore[reportCallIssue]
        steered.overlap = beside.overlap = way == "beside"
        if way != "speculative":
            return (beside if way == "beside" else steered).generate(**given)
        speculation = Speculation(settings.block, "retain", counted if first else None)
        return steered.generate(**given, speculative=speculation)

    clock = CLOCKS[settings.clock]
    for number in range(settings.rounds + 1):
        for way in WAYS if settings.clock == "wall" else WAYS[:-1]:
            _wait(device)
            started = clock()
            answer = generate(way, first=number == 0)
            _wait(device)
            seconds = clock() - started
            assert answer.shape[1] == settings.prompt + settings.tokens
            if number:
                found.setdefault(way, []).append(seconds)
    return found, counted


@contextlib.contextmanager
def agreeing(models: Mapping[str, PreTrainedModel], agreement: float) -> Iterator[None]:
    """Within, q has the last word: the logits of P and p are scaled by their last norm."""
    norms: list[torch.Tensor] = [models[name].model.norm.weight for name in ("P", "p")]
    before = [weight.detach().clone() for weight in norms]
    try:
        with torch.no_grad():
            for weight in norms:
                weight.mul_(agreement)
        yield
    finally:
        with torch.no_grad():
            for weight, was in zip(norms, before, strict=True):
                weight.copy_(was)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        for place in range(torch.cuda.device_count()):
            torch.cuda.synchronize(place)
