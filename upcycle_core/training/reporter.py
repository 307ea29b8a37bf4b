"""Hands the Trainer's steps and logs to ``Progress``, and decides when there is a point."""

import time
from collections.abc import Callable

from transformers import TrainerCallback

from upcycle_core.progress import Progress

_NO_CURVES = ("epoch", "step")


class Reporter(TrainerCallback):
    """Reports steps, speed and curves.

    Args:
        progress: Where they go.
        tokens_per_step: Tokens of an optimizer step, over all workers; of unequal ones the mean.
        watched: Whether there is a point of the watch after a step.
        validated: Whether the validation loss is measured after a step.
    """

    def __init__(
        self,
        progress: Progress,
        tokens_per_step: float,
        *,
        watched: Callable[[int], bool],
        validated: Callable[[int], bool],
    ) -> None:
        self._progress = progress
        self._tokens_per_step = tokens_per_step
        self._watched, self._validated = watched, validated
        self._last_step = 0
        self._last_time = 0.0

    def on_train_begin(self, args, state, control, **_):
        # What is resumed brings the intervals of the call that wrote it.
        state.compute_steps(args, state.max_steps)
        self._last_step, self._last_time = state.global_step, time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        # A stretch of the curve never spans a checkpoint, so a resumed curve has the same points.
        watched = self._watched(state.global_step)
        control.should_log = control.should_log or control.should_save or watched
        control.should_evaluate = self._validated(state.global_step)
        if not control.should_log:
            self._progress.advance()

    def on_log(self, args, state, control, **event):
        values = {key: value for key, value in event["logs"].items() if key not in _NO_CURVES}
        if "loss" in values:
            now = time.perf_counter()
            tokens = (state.global_step - self._last_step) * self._tokens_per_step
            values["tokens_per_second"] = tokens / (now - self._last_time)
            self._last_step, self._last_time = state.global_step, now
            self._progress.advance(
                loss=values["loss"], tokens_per_second=values["tokens_per_second"]
            )
        elif "validation_loss" not in values:
            return  # the Trainer's summary of the whole training
        self._progress.metrics(values, state.global_step)
