"""Trainings that are stopped by a real signal at a step."""

import contextlib
import os
import signal

import pytest
from transformers import TrainerCallback

from divdec.training import fine_tuning


class StopAt(TrainerCallback):
    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@contextlib.contextmanager
def stopping_at(step, number=signal.SIGINT):
    """Every training within gets the signal at the beginning of this step."""
    trainer = fine_tuning.ObjectiveTrainer

    def stopped(*objective, **given):
        return trainer(*objective, **{**given, "callbacks": [*given["callbacks"], StopAt(step, number)]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine_tuning, "ObjectiveTrainer", stopped)
        yield
