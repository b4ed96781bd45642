"""Running sums over the steps of one rank.

Metrics need sums over an interval rather than single steps. A step's recording is added when the
device has finished it, however late that is, so that the host never waits for it.
"""

from __future__ import annotations

from collections import deque

import torch

from megatron_ext.compile.program.verify import Program
from megatron_ext.observe.metrics import RankSums, telling_passes
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import Recording, clock_of
from megatron_ext.schedule.action import Action


class StepSums:
    """Running sums over the steps that the device has finished; adding them never waits."""

    def __init__(self, device: torch.device) -> None:
        self._has_allocator = device.type == "cuda"
        self._clock = clock_of(device)
        self._recording: Recording | None = None  # recording of the running step
        # Recordings of steps that have not been added to the sums yet.
        self._recorded: deque[Recording] = deque()
        self._expected: tuple[Action, ...] = ()
        self._telling: list[int] = []
        self._sums = RankSums()
        # Program of all steps that were added to the sums since the sums were last taken.
        self.program: Program | None = None

    def begin(self, recorder: Recorder) -> None:
        """Start to record the step that begins now."""
        self._recording = recorder.record(self._clock)

    def end(self, program: Program, rank: int) -> None:
        """Store the recording of a step of ``program``, and discard recordings of other programs.

        The step's passes are launched, but may not have finished.
        """
        if self._recording is None:
            return
        if program is not self.program:
            self.program = program
            self._expected = program.schedule.compute_rows[rank]
            self._telling = telling_passes(program, rank)
            self._recorded.clear()
            self._sums = RankSums()
        self._recorded.append(self._recording)
        self._recording = None

    def take(self) -> RankSums:
        """Return the sums over the steps since the last call, and the peak memory so far."""
        self.add_up()
        sums, self._sums = self._sums, RankSums()
        if self._has_allocator:
            allocated, reserved = (
                torch.cuda.max_memory_allocated(),
                torch.cuda.max_memory_reserved(),
            )
            sums += RankSums(allocated=allocated, reserved=reserved)
        return sums

    def add_up(self) -> None:
        """Add the finished steps to the sums, so that `take` has little to read.

        A step whose passes are not the program's is ignored, since Megatron's own order may differ.
        """
        while self._recorded and self._recorded[0].has_ended():
            recording = self._recorded.popleft()
            if recording.actions() != self._expected:
                continue
            times = recording.times(self._telling)
            self._sums += RankSums(1.0, recording.busy(), recording.span(), tuple(times))
