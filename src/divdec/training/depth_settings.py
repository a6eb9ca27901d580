"""Options of `divdec depth`. It knows nothing of torch, so that `--help` is instant."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from divdec.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthSettings:
    """Whose gradient is measured, on what, and where the result goes."""

    bundle: str = dataclasses.field(kw_only=False)
    """The bundle: a folder or hub id. Steered it is the teacher, its target the student."""
    forget: str
    """Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset 'org/name:config:split'."""
    retain: str
    """Retain set, likewise."""
    output: str
    """Folder for depth.json, depth.svg and run.json."""
    temperature: float = 1.0
    """T of the loss T²·KL: both models' logits are divided by it."""
    direction: Literal["teacher-student", "student-teacher"] = "teacher-student"
    """Which KL: 'teacher-student' is KL(teacher ‖ student), as the paper's code has it, 'student-teacher' the other
    way round, as the paper prints it."""
    steering: str | None = None
    """Another rule than the bundle's: linear:ALPHA, or rank:K:soft."""
    samples: int = 100
    """Examples of each set, drawn at random; 0 takes all."""
    batch_size: int = 1
    """Examples whose mean loss is one gradient: 1 takes the norm of each example's own, 32 is what the paper's code
    took."""
    max_length: int = 1024
    """Longest sequence in tokens; longer answers are cut, longer texts are split."""
    system_prompt: str | None = None
    """System turn before every conversation."""
    device: str = "auto"
    """Where the models run: auto, cpu, cuda, cuda:1, mps; 'spread' places them over all GPUs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; 'auto' takes what the checkpoints hold."""
    no_verify: bool = False
    """Load although a weight file has changed since the bundle was written."""
    seed: int = 0
    """Seed of the drawn examples and of the bootstrap."""
    overwrite: bool = False
    """Replace an earlier result in the output folder."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UsageError(f"temperature is {self.temperature:g}; accepted: a number above 0")
        for name, least in (("samples", 0), ("batch_size", 1), ("max_length", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(
                    f"{name.replace('_', '-')} is {getattr(self, name)}; accepted: a whole number of at least {least}"
                )
