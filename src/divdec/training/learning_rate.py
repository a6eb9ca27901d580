"""The paper's rule for the learning rate: the training loss about halves over the run (appendix, MUSE details).

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
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AIM = 0.5
NEAR_ENOUGH = 0.08
STEP = math.sqrt(10)
START = 1e-4
MOST_PROBES = 7
SMALLEST_PROBE = 32  # examples


@dataclasses.dataclass(frozen=True)
class Probe:
    """One learning rate that was tried, and the loss after over the loss before."""

    learning_rate: float
    loss_ratio: float


def find_learning_rate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    settings: TrainingSettings,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[float, list[Probe]]:
    """Find the learning rate at which the loss about halves; the model comes back as it was.

    Args:
        model: the model that will be trained.
        tokenizer: its tokenizer.
        examples: the data of the run.
        settings: the run's settings; their learning rate is not read.
        report: told one line a probe.

    Returns:
        The rate, and all that was tried, in order.
    """
    sample, probe_settings = _probe(examples, settings)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def try_rate(rate: float) -> float:
        with tempfile.TemporaryDirectory() as folder:
            result = fine_tune(
                model,
                tokenizer,
                sample,
                dataclasses.replace(probe_settings, learning_rate=rate),
                Path(folder),
                title=f"probing learning rate {rate:.1e}",
                resumable=False,
            )[1]
        model.load_state_dict(initial)
        report(f"learning rate {rate:.1e}: loss {result.loss_before:.3f} → {result.loss_after:.3f}")
        return result.loss_ratio if math.isfinite(result.loss_ratio) else math.inf

    probes = search(try_rate)
    best = min(probes, key=lambda probe: abs(probe.loss_ratio - AIM))
    report(f"chosen: {best.learning_rate:.1e} (loss falls to {best.loss_ratio:.0%}; the rule aims at {AIM:.0%})")
    return best.learning_rate, probes


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


def _probe(examples: Sequence[Example], settings: TrainingSettings) -> tuple[Sequence[Example], TrainingSettings]:
    settings = dataclasses.replace(settings, loggers=())  # a probe is no run of its own to an experiment tracker
    share = max(1 / 8, 1 / settings.batch_size, SMALLEST_PROBE / len(examples))
    if share >= 1:
        return examples, settings
    batch_size = max(1, round(settings.batch_size * share))
    size = min(len(examples), round(len(examples) * batch_size / settings.batch_size))
    chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(settings.seed))[:size]
    return [examples[place] for place in chosen.tolist()], dataclasses.replace(settings, batch_size=batch_size)
