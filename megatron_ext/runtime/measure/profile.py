"""Measurement of passes, messages and memory in the first steps of a training.

The steps are real ones and are not synchronized: passes are recorded as for a trace (`recording`),
and the recordings are read after the last step. In the first step caches fill and kernels load; it
is not timed, so bytes are counted there.
"""

from __future__ import annotations

import socket

import torch.distributed as dist

from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.program.verify import Program
from megatron_ext.cost_model.measured.places import RankPlaces, seconds_by_place
from megatron_ext.cost_model.measured_costs import (
    RankFigures,
    forwards_of_first_stage,
    medians,
)
from megatron_ext.runtime.held_bytes import HeldBytes, reserved_beyond_allocated
from megatron_ext.runtime.measure.message_time import message_seconds
from megatron_ext.runtime.messages.batched import PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import Clock, Recording

WARM_UP = 1  # first steps of a run that are not timed
MEASURED = 3  # number of steps that are timed
STEPS = WARM_UP + MEASURED


class Profile:
    """Measurement of passes, messages and memory in the first `STEPS` steps on this rank."""

    def __init__(self, clock: Clock, counting: HeldBytes) -> None:
        self.steps = 0  # number of measured steps that have ended
        self._clock = clock
        self._counting = counting
        self._program: Program | None = None
        self._recording: Recording | None = None  # recording of the running step
        self._recordings: list[Recording] = []

    def begin(self, recorder: Recorder) -> None:
        """Start to count memory (first steps) or to record times (later steps), before a step."""
        if self.steps < WARM_UP:
            recorder.counting = self._counting
        else:
            self._recording = recorder.record(self._clock)

    def end(self, recorder: Recorder, program: Program) -> bool:
        """Store the recording of a step of ``program``; return whether no further step is needed.

        A step of another program discards the recordings of earlier ones. (The number of
        microbatches may grow.)
        """
        recorder.counting = None
        if program is not self._program:
            self._program = program
            self._recordings.clear()
        if self._recording is not None:
            self._recordings.append(self._recording)
            self._recording = None
        self.steps += 1
        return len(self._recordings) >= MEASURED

    @property
    def program(self) -> Program:
        """Program whose steps have been measured."""
        assert self._program is not None
        return self._program

    def figures(
        self,
        connection: Channels | PipelineGroup,
        pipeline: dist.ProcessGroup,
        boundary: Boundary,
        *,
        by_place: bool,
    ) -> RankFigures:
        """Return this rank's measured times and bytes, after the last measured step.

        Collective over ``pipeline``.

        Args:
            pipeline: the group that ``connection`` connects.
            boundary: the tensor that passes between stages, with its shape.
            by_place: whether the cost of a microbatch depends on its place in the step. Memory is
                then that of the largest microbatch.
        """
        assert boundary.shape is not None
        used_channels = channels(self.program.schedule)
        p2p_seconds = message_seconds(
            connection, used_channels, boundary.shape, boundary.dtype, self._clock
        )
        steps = [recording.read()[0] for recording in self._recordings]
        problem, places = self.program.problem, None
        if by_place and problem.slices.count == 1:
            seconds = seconds_by_place(steps, problem.microbatches)
            places = RankPlaces(dist.get_global_rank(pipeline, 0), seconds)
        return RankFigures(
            medians(event for events in steps for event in events),
            self._counting.per_microbatch(largest=places is not None),
            list(p2p_seconds.values()),
            [dist.get_global_rank(pipeline, rank) for rank in p2p_seconds],
            socket.gethostname(),
            reserved_beyond_allocated(connection.device),
            forwards_of_first_stage(steps[-1]),
            places,
        )
