"""δ-Unlearning: a small model is trained so that target + (trained − untrained) forgets (Huang et al. 2024).

What it yields is linear steering with α = 1, and so an ordinary bundle: q is the trained model, p the untrained one.
"""

from __future__ import annotations

from pathlib import Path

from divdec.model.bundle import write_bundle
from divdec.research.baselines.helpers import RETAIN, OffsetAscent, base_of, helper
from divdec.research.baselines.inference_settings import OffsetSettings
from divdec.research.baselines.job import Job
from divdec.research.baselines.method import Made
from divdec.training.auxiliaries import load_for_training
from divdec.training.inputs import Companion


def make_offset(job: Job, settings: OffsetSettings, output: Path) -> Made:
    """Train the offset on the ensemble's logits, and write the bundle.

    Raises:
        UsageError: the job has no base, or one of other tokens; or training has changed nothing.
    """
    base = base_of(job, "offset")
    objective = OffsetAscent(load_for_training(job.target), load_for_training(base), settings.retain_weight)
    trained, seconds = helper(
        job,
        "offset",
        base,
        job.forget_examples,
        settings.training(job.seed),
        key=settings.retain_weight,
        objective=objective,
        companions={RETAIN: Companion(job.retain_examples)},
    )
    write_bundle(
        output,
        target=str(job.target),
        retain_auxiliary=str(trained),
        forget_auxiliary=str(base),
        steering="linear:1",
        forget_set=job.forget.label,
    )
    return Made(seconds)
