"""What the steps of one rank come to, summed up while it goes on."""

from __future__ import annotations

from collections import deque

import torch

from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import Recording, clock_of
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.show.metrics import RankSums, telling_passes


class StepSums:
    """Records steps, and adds up those that the device has ended. Waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._has_allocator = device.type == "cuda"
        self._clock = clock_of(device)
        self._recording: Recording | None = None  # of the step that runs
        self._recorded: deque[Recording] = deque()  # that have not been added yet
        self._expected: tuple[Action, ...] = ()
        self._telling: list[int] = []
        self._sums = RankSums()
        self.program: Program | None = None  # of the steps since they were taken

    def begin(self, recorder: Recorder) -> None:
        """Record the step that begins."""
        self._recording = recorder.record(self._clock)

    def end(self, program: Program, rank: int) -> None:
        """A step of ``program`` has been given to the device; forget those of another one."""
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
        """The sums since they were last taken, and the most memory so far."""
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
        """Read those that have ended, so that little is left to read when they are taken. A step
        of other passes than the program's does not count: stock's order may be another."""
        while self._recorded and self._recorded[0].has_ended():
            recording = self._recorded.popleft()
            if recording.actions() != self._expected:
                continue
            times = recording.times(self._telling)
            self._sums += RankSums(1.0, recording.busy(), recording.span(), tuple(times))
