"""A turn: some iterations of a training under one schedule, timed from begin to begin.

What counts is an iteration, not its passes alone: the optimizer, the reductions and what else there
is between two steps belong to what a user waits for. Iterations with an evaluation or a save after
them do not count, and others take their place. Marks are those of a trace (`recording`): a GPU is
not synchronised before the turn has ended.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_ext.runtime.measure.measured_steps import MeasuredSteps
from megatron_ext.runtime.measure.peak import PeakBytes, peak_on
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import clock_of
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.race.rounds import TIMED, WARM_UP


class Turn:
    """On one rank. ``steps``: the passes of its timed iterations."""

    def __init__(self, device: torch.device) -> None:
        self.steps = MeasuredSteps(device)
        self.peak = 0  # bytes, in the warm-up
        self._device = device
        self._clock = clock_of(device)
        self._begun = 0
        self._marks: list[Any] = []
        self._counting: PeakBytes | None = None
        self._interrupted: set[int] = set()  # marks after which another thing than a step came

    def begin_iteration(self) -> None:
        """The iteration before this one has ended."""
        if self._begun >= WARM_UP:
            self._marks.append(self._clock.mark())
        self._begun += 1

    @property
    def missing(self) -> int:
        """How many more iterations the turn needs, if nothing interrupts them."""
        return max(TIMED - (len(self._marks) - 1 - len(self._interrupted)), 0)

    def interrupt(self) -> None:
        """What now comes before the next iteration is no part of this one."""
        if self._marks:
            self._interrupted.add(len(self._marks) - 1)

    def begin_step(self, recorder: Recorder, models: Sequence[torch.nn.Module]) -> None:
        """The passes begin."""
        if self._marks:
            self.steps.begin(recorder)
        else:
            self._counting = recorder.counting = peak_on(self._device, models)

    def end_step(self, recorder: Recorder, program: Program) -> None:
        """The passes, which were ``program``'s, have ended."""
        if self._counting is not None:
            self.peak = max(self.peak, self._counting.peak)
            self._counting = recorder.counting = None
        else:
            self.steps.end(program)

    def seconds(self) -> float:
        """Of an iteration: the median. Waits for the device."""
        times = self._clock.read(self._marks)
        return statistics.median(
            end - begin
            for number, (begin, end) in enumerate(pairwise(times))
            if number not in self._interrupted
        )
