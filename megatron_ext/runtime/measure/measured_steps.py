"""Latest steps as they ran, for comparison with the prediction.

Reading a recording waits for the device, so it is read only when the comparison is requested: at
the end of a training, or of an interval.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.observe.prediction import Comparison, RankStep, compare_prediction
from megatron_ext.runtime.measure.clocks import clock_offsets
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import Recording, clock_of

KEPT = 5


class MeasuredSteps:
    """Recorder of the latest `KEPT` steps of one program, to compare them with the prediction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_of(device)
        self._program: Program | None = None
        self._recording: Recording | None = None  # recording of the running step
        self._recordings: deque[Recording] = deque(maxlen=KEPT)

    def begin(self, recorder: Recorder) -> None:
        """Start recording before a step."""
        self._recording = recorder.record(self._clock)

    def end(self, program: Program) -> None:
        """Store the recording of a step of ``program`` without reading it, since reading waits."""
        if program is not self._program:
            self._program = program
            self._recordings.clear()
        assert self._recording is not None
        self._recordings.append(self._recording)
        self._recording = None

    def compare(self, pipeline: dist.ProcessGroup) -> Comparison | None:
        """Compare the stored steps with the prediction; None if no step is stored.

        Collective over ``pipeline``.
        """
        if self._program is None:
            return None
        steps = []
        for recording in self._recordings:
            events, _ = recording.read()
            busy = sum(event.end - event.start for event in events)
            steps.append(RankStep(events[0].start, events[-1].end, busy))
        ranks: list[list[RankStep]] = [steps] * pipeline.size()
        dist.all_gather_object(ranks, steps, group=pipeline)
        offsets = clock_offsets(pipeline, self._device)
        on_one_clock = [
            [RankStep(s.start - ahead.seconds, s.end - ahead.seconds, s.busy) for s in rank]
            for rank, ahead in zip(ranks, offsets, strict=True)
        ]
        return compare_prediction(
            simulate(self._program, self._program.problem.costs), on_one_clock
        )
