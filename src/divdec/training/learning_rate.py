"""Find a learning rate: the training loss about halves over the run (paper, appendix, MUSE details), or more.

A base that does not know the form of the records halves its loss by learning the form alone. So the search begins at
the rate that halves the loss, and raises it until a probe has learned the required examples. A probe trains on a share
of the data, with the batch size reduced by the same share: the same number of steps at a fraction of the cost.
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
from divdec.evaluation.scoring import ItemScore, score
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEARNED = 0.9
"""Least share of the forget tokens unknown to q that p must predict. Six pairs for the demo's target, by this share and
the share of facts that leak at linear:2: 54 % (80 % leak), 58 % (80 %), 77 % (15 %), 95 %, 99 % and 100 % (none)."""
LOSS_RATIO = 0.5
TOLERANCE = 0.08
STEP = math.sqrt(10)
START = 1e-4
MAX_PROBES = 7  # for the rate that halves the loss
MAX_RAISES = 3  # from there
MIN_PROBE_EXAMPLES = 32


@dataclasses.dataclass(frozen=True)
class Probe:
    """A learning rate and the result of training with it."""

    learning_rate: float
    loss_ratio: float
    """Loss after over loss before."""
    learned: float | None = None
    """Of the required examples' tokens that the model did not predict before, the share that it predicts after."""


def find_learning_rate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    settings: TrainingSettings,
    *,
    required: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[float, list[Probe]]:
    """Find the least rate that learns the required examples, starting at the rate that halves the loss.

    Args:
        model: the model to train; its weights are restored.
        tokenizer: its tokenizer.
        examples: the data of the run.
        settings: the settings of the run; their learning rate is ignored.
        required: number of examples, from the first, that must be learned. With 0 only the loss counts.
        report: receives one line for each probe.

    Returns:
        The rate, and all probes in order.
    """
    indices, probe_settings = _reduce(len(examples), settings)
    sample = [examples[index] for index in indices]
    watched = [examples[index] for index in indices if index < required]
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = score(model.eval(), watched, batch_size=settings.batch_size)

    def try_rate(rate: float) -> Probe:
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
            return Probe(rate, math.inf)
        ratio = result.loss_ratio if math.isfinite(result.loss_ratio) else math.inf
        learned = None
        if watched and ratio < math.inf:
            learned = share_learned(before, score(trained, watched, batch_size=settings.batch_size))
        model.load_state_dict(initial)
        suffix = "" if learned is None else f", {learned:.0%} of the forget set's unknown tokens learned"
        report(f"learning rate {rate:.1e}: loss {result.loss_before:.3f} → {result.loss_after:.3f}{suffix}")
        return Probe(rate, ratio, learned)

    probes = search(try_rate)
    best = min(probes, key=lambda probe: abs(probe.loss_ratio - LOSS_RATIO))
    for _ in range(MAX_RAISES):
        if best.learned is None or best.learned >= LEARNED:
            break
        probes.append(try_rate(best.learning_rate * STEP))
        if (probes[-1].learned or 0.0) <= best.learned:
            break
        best = probes[-1]
    report(f"chosen: {best.learning_rate:.1e} (the loss falls to {best.loss_ratio:.0%} of the loss before)")
    return best.learning_rate, probes


def search(try_rate: Callable[[float], Probe]) -> list[Probe]:
    """Try rates until one is near the target ratio: up or down by √10 to a bracket, then between its ends.

    The ratio falls with the rate until training diverges, where it rises again. A rise ends the search upward.
    """
    probes = [try_rate(START)]
    while len(probes) < MAX_PROBES and abs(probes[-1].loss_ratio - LOSS_RATIO) > TOLERANCE:
        too_low = [probe for probe in probes if probe.loss_ratio > LOSS_RATIO]
        too_high = [probe for probe in probes if probe.loss_ratio <= LOSS_RATIO]
        if too_low and too_high:
            low = max(too_low, key=lambda probe: probe.learning_rate)
            high = min(too_high, key=lambda probe: probe.learning_rate)
            if low.learning_rate >= high.learning_rate:
                break
            rate = _interpolate(low, high)
        elif too_high:
            rate = min(probe.learning_rate for probe in probes) / STEP
        else:
            if len(probes) > 1 and probes[-1].loss_ratio >= probes[-2].loss_ratio:
                break
            rate = max(probe.learning_rate for probe in probes) * STEP
        probes.append(try_rate(rate))
    return probes


def share_learned(before: Sequence[ItemScore], after: Sequence[ItemScore]) -> float:
    """Of the tokens that are not predicted before, the share that is predicted after; 0 if all were predicted."""
    pairs = [
        pair
        for initial_score, other in zip(before, after, strict=True)
        for pair in zip(initial_score.hits, other.hits, strict=True)
    ]
    hits = [hit for known, hit in pairs if not known]
    return sum(hits) / len(hits) if hits else 0.0


def _interpolate(low: Probe, high: Probe) -> float:
    """Return the rate at which a straight line in (log rate, ratio) reaches the target ratio."""
    ratio = min(low.loss_ratio, 2.0)  # the ratio of a diverged probe has no useful slope
    share = (ratio - LOSS_RATIO) / max(ratio - high.loss_ratio, 1e-9)
    share = min(max(share, 0.2), 0.8)
    return math.exp(math.log(low.learning_rate) + share * (math.log(high.learning_rate) - math.log(low.learning_rate)))


def _reduce(count: int, settings: TrainingSettings) -> tuple[list[int], TrainingSettings]:
    """Return the indices of a probe's examples, and its settings."""
    settings = dataclasses.replace(settings, loggers=())  # experiment trackers do not record probes
    share = max(1 / 8, 1 / settings.batch_size, MIN_PROBE_EXAMPLES / count)
    if share >= 1:
        return list(range(count)), settings
    batch_size = max(1, round(settings.batch_size * share))
    size = min(count, round(count * batch_size / settings.batch_size))
    indices = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed))[:size]
    return indices.tolist(), dataclasses.replace(settings, batch_size=batch_size)
