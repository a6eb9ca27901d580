"""The paper's rule for the learning rate: the training loss about halves over the run (appendix, MUSE details).

Halving is where the search begins, not where it ends: a base that knows nothing of the records' form halves its loss by
learning the form alone. From there the rate rises until a probe has learned what it was shown.

A probe trains on a share of the data with the batch cut by the same share, so that it takes as many steps and
passes as the run it stands for, at a fraction of its cost.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from divdec.data.formatting import Example
from divdec.errors import Diverged
from divdec.evaluation.scoring import score
from divdec.training.fine_tuning import fine_tune
from divdec.training.separation import LEARNED, share_learned
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AIM = 0.5
NEAR_ENOUGH = 0.08
STEP = math.sqrt(10)
START = 1e-4
MOST_PROBES = 7  # for the rate that halves the loss
MOST_RISES = 3  # from there
SMALLEST_PROBE = 32  # examples


@dataclasses.dataclass(frozen=True)
class Probe:
    """One learning rate that was tried."""

    learning_rate: float
    loss_ratio: float
    """The loss after over the loss before."""
    learned: float | None = None
    """Share of the required examples' tokens that the model did not predict before and does after."""


def find_learning_rate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    settings: TrainingSettings,
    *,
    required: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[float, list[Probe]]:
    """Find the least learning rate from the one that halves the loss on that learns what is required.

    Args:
        model: the model that will be trained; afterwards it is as it was.
        tokenizer: its tokenizer.
        examples: the data of the run.
        settings: the run's settings; their learning rate is not read.
        required: how many of the examples, the first ones, must be learned. With 0 the loss decides alone.
        report: told one line a probe.

    Returns:
        The rate, and all that was tried, in order.
    """
    places, probe_settings = _probe(len(examples), settings)
    sample = [examples[place] for place in places]
    watched = [examples[place] for place in places if place < required]
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = score(model.eval(), watched, batch_size=settings.batch_size)
    tried: list[Probe] = []

    def try_rate(rate: float) -> float:
        try:
            with tempfile.TemporaryDirectory() as folder:
                trained, result = fine_tune(
                    model,
                    tokenizer,
                    sample,
                    dataclasses.replace(probe_settings, learning_rate=rate),
                    Path(folder),
                    title=f"probing learning rate {rate:.1e}",
                    resumable=False,
                )
        except Diverged as error:
            model.load_state_dict(initial)
            report(f"learning rate {rate:.1e}: {error}")
            tried.append(Probe(rate, math.inf))
            return math.inf
        ratio = result.loss_ratio if math.isfinite(result.loss_ratio) else math.inf
        learned = None
        if watched and ratio < math.inf:
            learned = share_learned(before, score(trained, watched, batch_size=settings.batch_size))
        model.load_state_dict(initial)
        told = "" if learned is None else f", {learned:.0%} of the forget set's unknown tokens learned"
        report(f"learning rate {rate:.1e}: loss {result.loss_before:.3f} → {result.loss_after:.3f}{told}")
        tried.append(Probe(rate, ratio, learned))
        return ratio

    search(try_rate)
    best = min(tried, key=lambda probe: abs(probe.loss_ratio - AIM))
    for _ in range(MOST_RISES):
        if best.learned is None or best.learned >= LEARNED:
            break
        try_rate(best.learning_rate * STEP)
        if (tried[-1].learned or 0.0) <= best.learned:
            break
        best = tried[-1]
    report(f"chosen: {best.learning_rate:.1e} (loss falls to {best.loss_ratio:.0%}; the rule begins at {AIM:.0%})")
    return best.learning_rate, tried


def search(loss_ratio: Callable[[float], float]) -> list[Probe]:
    """Try rates until one comes near the aim: up or down by √10 to a bracket, then between its ends.

    The ratio falls with the rate until training diverges, where it rises again: a rise ends the search upward.
    """
    probes = [Probe(START, loss_ratio(START))]
    while len(probes) < MOST_PROBES and abs(probes[-1].loss_ratio - AIM) > NEAR_ENOUGH:
        too_low = [probe for probe in probes if probe.loss_ratio > AIM]
        too_high = [probe for probe in probes if probe.loss_ratio <= AIM]
        if too_low and too_high:
            low = max(too_low, key=lambda probe: probe.learning_rate)
            high = min(too_high, key=lambda probe: probe.learning_rate)
            if low.learning_rate >= high.learning_rate:
                break
            rate = _between(low, high)
        elif too_high:
            rate = min(probe.learning_rate for probe in probes) / STEP
        else:
            if len(probes) > 1 and probes[-1].loss_ratio >= probes[-2].loss_ratio:
                break
            rate = max(probe.learning_rate for probe in probes) * STEP
        probes.append(Probe(rate, loss_ratio(rate)))
    return probes


def _between(low: Probe, high: Probe) -> float:
    """Where a straight line in (log rate, ratio) meets the aim."""
    ratio = min(low.loss_ratio, 2.0)  # a diverged end says nothing about slope
    share = (ratio - AIM) / max(ratio - high.loss_ratio, 1e-9)
    share = min(max(share, 0.2), 0.8)
    return math.exp(math.log(low.learning_rate) + share * (math.log(high.learning_rate) - math.log(low.learning_rate)))


def _probe(count: int, settings: TrainingSettings) -> tuple[list[int], TrainingSettings]:
    """Indices of the examples that a probe learns, of `count`, and its settings."""
    settings = dataclasses.replace(settings, loggers=())  # a probe is no run of its own to an experiment tracker
    share = max(1 / 8, 1 / settings.batch_size, SMALLEST_PROBE / count)
    if share >= 1:
        return list(range(count)), settings
    batch_size = max(1, round(settings.batch_size * share))
    size = min(count, round(count * batch_size / settings.batch_size))
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed))[:size]
    return chosen.tolist(), dataclasses.replace(settings, batch_size=batch_size)
