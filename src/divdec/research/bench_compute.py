"""`divdec bench compute`: (t_P + t_p + t_q)/t_P against 1 + 2n/N (paper, appendix Compute Requirements).

Random weights, prefill and decoding apart. It knows nothing of what the models would say, and steers nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from divdec.costs.formulas import compute_increase
from divdec.research.bench_models import Makers, Place, combinations, misfit, workload
from divdec.research.bench_results import results_in
from divdec.research.bench_settings import ComputeSettings
from divdec.research.charts import compute_deviation, write_compute

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERB = "bench compute"
PARTS = ("prefill", "decode")
WITHOUT = "_without_embeddings"
Times = dict[str, dict[str, list[float]]]


def bench_compute(settings: ComputeSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what is not measured yet, and write table, plot and run.json.

    Args:
        settings: combinations and how they are measured.
        report: told what is done, a line each.

    Returns:
        rows (those of the combinations asked for), summary, left_out (what did not fit, and why), and complete.

    Raises:
        UsageError: something asked for cannot be used.
    """
    place = Place.of(settings)
    wanted = {one.key(settings, place): one for one in combinations(settings, place)}
    makers, work, left_out = Makers(place, settings), workload(settings, place), []
    with results_in(settings.output, VERB) as results:
        missing = [key for key in wanted if key not in results.rows]
        report(f"{len(wanted)} combinations on {place.name}, {len(wanted) - len(missing)} of them measured before")
        results.write_record(settings, status="running", device=place.name)
        measured = 0
        for key in tqdm(missing, desc="compute", unit="combination", dynamic_ncols=True):
            if settings.limit is not None and measured >= settings.limit:
                break
            one = wanted[key]
            row = {"key": key, **one.about(place, settings)}
            why = misfit(one, work, place, makers)
            if why is None:
                try:
                    times = time_passes(makers.models(one), one.vocabulary, settings)
                except torch.OutOfMemoryError as error:
                    why = f"did not fit: {str(error).splitlines()[0]}"
                else:
                    results.add(row | figures(times, row))
                    measured += 1
                    continue
            left_out.append({**one.about(place, settings), "why": why})
            report(f"left out: {one.target.name} with {one.auxiliary.name}, {one.vocabulary} tokens: {why}")
        rows = [results.rows[key] for key in wanted if key in results.rows]
        complete = len(rows) + len(left_out) == len(wanted)
        content = {"summary": compute_deviation(rows), "left_out": left_out, "complete": complete}
        if rows:
            write_compute(results.folder, rows, place.name)
        status = "finished" if complete else "stopped"
        results.write_record(settings, status=status, device=place.name, measured=len(rows), **content)
        return {"rows": rows, **content}


@torch.inference_mode()
def time_passes(models: Mapping[str, PreTrainedModel], vocabulary: int, settings: ComputeSettings) -> Times:
    """Device seconds (see `_clock`) of the prompt's pass and of one decoded token's, of each model in turn.

    The models take turns token by token, so that a machine that is slow for a while is slow for all, and another one
    begins in each round. The first round only warms up. Only the last position's logits are computed of a prompt.

    Args:
        models: P, p and q, on one device.
        vocabulary: tokens are drawn from it.
        settings: batch, prompt, tokens, rounds and seed.

    Returns:
        By part ('prefill', 'decode') and model the seconds of each round; decoding is the mean over its tokens.
    """
    from transformers import DynamicCache

    device = next(iter(models.values())).device
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.batch, settings.prompt + settings.tokens)
    ids = torch.randint(vocabulary, shape, generator=generator).to(device)
    found: Times = {part: {name: [] for name in models} for part in PARTS}
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
                    found[part][name].append(seconds[name])
    return found


def figures(times: Times, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of its times.

    Args:
        times: as `time_passes` gives them.
        sizes: N and n, with and without embeddings.

    Returns:
        seconds (medians by part and model), ratio (by part, the median of the rounds' own), theory and
        theory_without_embeddings (1 + 2n/N), and deviation (by part, ratio over theory, less one).
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
    """Seconds of the device: of a GPU that has finished what it was given, or the processor time of all our threads.

    The paper counts GPU hours. On a CPU their like is processor time, in which the machine's other work does not count.
    """
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
