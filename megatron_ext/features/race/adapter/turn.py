"""Turn: some iterations of a training under one schedule, timed from begin to begin.

Whole iterations are timed, not only their passes: the optimizer, the reductions and all else
between two steps belong to what a user waits for. Iterations followed by an evaluation or a save do
not count, and further iterations replace them. Times are recorded as for a trace (`recording`): a
GPU is not synchronized before the turn has ended.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_ext.compile.program.verify import Program
from megatron_ext.race.rounds import TIMED, WARM_UP
from megatron_ext.runtime.measure.measured_steps import MeasuredSteps
from megatron_ext.runtime.measure.peak import PeakBytes, peak_on
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import clock_of


class Turn:
    """Turn of one schedule in a race: some iterations, timed on one rank.

    ``steps`` has the passes of its timed iterations.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps = MeasuredSteps(device)
        self.peak = 0  # largest allocated bytes in the warm-up iterations
        self._device = device
        self._clock = clock_of(device)
        self._begun = 0
        self._events: list[Any] = []
        self._counting: PeakBytes | None = None
        # Positions of timing events after which an evaluation ran or a checkpoint was saved.
        self._interrupted: set[int] = set()

    def begin_iteration(self) -> None:
        """Mark the begin of an iteration, which is the end of the previous one."""
        if self._begun >= WARM_UP:
            self._events.append(self._clock.record_event())
        self._begun += 1

    @property
    def missing(self) -> int:
        """Number of further iterations that the turn needs, if nothing interrupts them."""
        return max(TIMED - (len(self._events) - 1 - len(self._interrupted)), 0)

    def interrupt(self) -> None:
        """Exclude the current iteration of the turn, because an evaluation or a save follows it."""
        if self._events:
            self._interrupted.add(len(self._events) - 1)

    def begin_step(self, recorder: Recorder, models: Sequence[torch.nn.Module]) -> None:
        """Start to record the passes of a step, or in the warm-up to count their memory."""
        if self._events:
            self.steps.begin(recorder)
        else:
            self._counting = recorder.counting = peak_on(self._device, models)

    def end_step(self, recorder: Recorder, program: Program) -> None:
        """Store the record of a step's passes, which were those of ``program``."""
        if self._counting is not None:
            self.peak = max(self.peak, self._counting.peak)
            self._counting = recorder.counting = None
        else:
            self.steps.end(program)

    def seconds(self) -> float:
        """Return the median seconds of the turn's iterations. Waits for the device."""
        times = self._clock.read(self._events)
        return statistics.median(
            end - begin
            for number, (begin, end) in enumerate(pairwise(times))
            if number not in self._interrupted
        )
