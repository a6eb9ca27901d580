"""What a person sees and does while a model trains: a progress bar with a rate, and Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Interrupted(Exception):
    """A run was stopped by Ctrl-C or a termination signal, after it had saved what it had."""


class RateBar(TrainerCallback):
    """A tqdm bar of steps; tqdm adds the rate and the time left. It is closed however the training ends."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.bar: tqdm[Any] | None = None

    def __enter__(self) -> RateBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar, at the step that a resumed run begins with."""
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=self.title,
                unit="step",
                dynamic_ncols=True,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar on."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)


class StopSignal(TrainerCallback):
    """Turns the first SIGINT or SIGTERM into a checkpoint and an orderly end; a second one ends at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Signals reach the main thread only; elsewhere the program around us handles them.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask Trainer to save and stop after the step in which the signal came."""
        if self.came and state.global_step < state.max_steps:
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True
