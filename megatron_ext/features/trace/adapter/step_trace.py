"""Trace of training steps as they ran (``--pipeline-trace``).

One pipeline is traced, the one of global rank world_size - 1: that rank has Megatron's TensorBoard
and W&B writers, which get the bubble and the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.adapter.observers.observer import ObservedStep, StepObserver, StocksStep
from megatron_ext.adapter.observers.writers import log_step
from megatron_ext.adapter.training_globals import current_iteration, log_interval
from megatron_ext.base.logger import logger
from megatron_ext.compile.program.simulate import simulate_steps
from megatron_ext.compile.program.verify import Program
from megatron_ext.observe.trace import (
    LARGEST_WRITTEN,
    NAME,
    TRACED_OF_RUN,
    TracedStep,
    TraceFile,
    traced_steps,
)
from megatron_ext.observe.trace_report import trace_report
from megatron_ext.observe.trace_text import summary
from megatron_ext.observe.what_if import weight_shares
from megatron_ext.runtime.held_bytes import reserved_beyond_allocated
from megatron_ext.runtime.measure.clocks import clock_offsets
from megatron_ext.runtime.recording import Recording, clock_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.timeline import Event, GradientReduction, Timeline

_Recorded = tuple[list[Event], list[GradientReduction]]
# Recorded steps of a rank, and the bytes that its allocator reserved beyond its allocations.
_OfRank = tuple[list[_Recorded], float | None]
# Most steps of Megatron's own schedule that stay in memory for the report at the end.
_MOST_STEPS = 64
# Time limit in seconds for the prediction of other schedules, during which the other ranks wait
# before their next step.
_SECONDS = 5.0


class StepTrace(StepObserver[ObservedStep]):
    """Observer that records training steps as they ran, and writes them to ``folder``.

    Args:
        iterations: the recorded iterations; None records `TRACED_OF_RUN`.
        overlap: consecutive steps overlap, so ranks must not meet between them: all steps are
            written after the last.
        of_stock: the steps are Megatron's own; after the last, the time of our schedules is
            predicted.
    """

    def __init__(
        self,
        folder: Path,
        iterations: range | None,
        *,
        overlap: bool = False,
        of_stock: bool = False,
    ) -> None:
        self._path = folder / NAME
        self._iterations = iterations
        self._overlap = overlap
        self._of_stock = of_stock
        self._calls = 0
        self._iteration = 0
        self._latest = 0  # latest recorded iteration, as Megatron may rerun one
        self._file: TraceFile | None = None
        self._recording: Recording | None = None  # recording of the running step, if it is traced
        # Recordings of steps that are not written to the trace yet, by iteration.
        self._recorded: dict[int, Recording] = {}
        # Traced steps of Megatron's own schedule, on the rank that writes.
        self._traced: list[TracedStep] = []
        # Whether the log has an error about an iteration that could not be written.
        self._is_told = False

    def begin(self, step: ObservedStep) -> None:
        """Record the step if its iteration is traced."""
        self._calls += 1
        self._iteration = current_iteration() or self._calls
        if self._iterations is None:
            before = self._iteration - 1
            self._iterations = range(before + TRACED_OF_RUN.start, before + TRACED_OF_RUN.stop)
        is_wanted = self._iteration in self._iterations and self._iteration > self._latest
        if is_wanted and dist.get_world_size() - 1 in dist.get_process_group_ranks(step.pipeline):
            clock = clock_of(torch.device(torch.cuda.current_device()))
            self._recording = step.recorder.record(clock, with_reductions=True)

    def end(self, step: ObservedStep) -> None:
        """Write the step's trace if it was recorded.

        In that case the call is collective over the pipeline.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        assert self._iterations is not None
        is_last = self._iteration == self._iterations[-1]
        self._latest = self._iteration
        self._recorded[self._iteration] = recording
        if self._overlap and not is_last:
            return
        pipeline, program = step.pipeline, step.program
        recorded, self._recorded = self._recorded, {}
        device = torch.device(torch.cuda.current_device())
        recordings = [recording.read() for recording in recorded.values()]
        gathered: list[_OfRank] = [([], None)] * pipeline.size()
        of_rank = recordings, reserved_beyond_allocated(device)
        dist.all_gather_object(gathered, of_rank, group=pipeline)
        offsets = clock_offsets(pipeline, device)
        if not _is_writer():
            return
        measured = [
            _on_one_clock(program, ranks, [offset.seconds for offset in offsets])
            for ranks in zip(*(recordings for recordings, _ in gathered), strict=True)
        ]
        if self._of_stock and (strange := _other_order(program, measured[0])) is not None:
            logger.warning(f"iteration {self._iteration} is not traced: {strange}")
            return
        for traced in traced_steps(
            list(recorded),
            measured,
            simulate_steps(program, program.problem.costs, len(recorded)),
            max(offset.error for offset in offsets),
        ):
            reserved = tuple(figure for _, figure in gathered if figure is not None)
            self._write(replace(self._as_stocks(traced, step), reserved=reserved or None))
            _log(traced, program.problem.costs)
        if is_last:
            self._tell()

    def finish(self, iteration: int) -> None:
        """Report that a trace lacks its last iterations, because the training has ended earlier."""
        wanted = self._iterations
        if wanted is None or self._latest == wanted[-1] or not _is_writer():
            return
        if not self._latest:
            logger.warning(
                f"nothing is traced: iterations {wanted[0]} to {wanted[-1]} were to be, and the "
                f"training has ended with {iteration}"
            )
        self._tell()

    def _as_stocks(self, traced: TracedStep, step: ObservedStep) -> TracedStep:
        if not isinstance(step, StocksStep):
            return traced
        problem = step.program.problem
        shares = weight_shares(problem.costs)
        return replace(traced, weight_shares=shares, executor=problem.stock, parts=step.parts)

    def _write(self, step: TracedStep) -> None:
        if self._of_stock and len(self._traced) < _MOST_STEPS:
            self._traced.append(step)
        try:
            if self._file is None:
                self._file = TraceFile(self._path, LARGEST_WRITTEN)
            self._file.add(step)
        except OSError as error:  # a full disk does not end a training
            if not self._is_told:
                logger.error(
                    f"iteration {step.iteration} is missing in the trace {self._path}: "
                    f"{error.strerror}; further ones that are missing are not named"
                )
            self._is_told = True

    def _tell(self) -> None:
        """Log where the time of Megatron's own steps went, and the time under our schedules."""
        if self._of_stock and self._traced:
            for line in summary(trace_report(self._traced, _SECONDS), self._path.parent):
                logger.info(line)


def _is_writer() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _on_one_clock(
    program: Program, recorded: Sequence[_Recorded], offsets: list[float]
) -> Timeline:
    """Return the records of all ranks as one timeline, on the clock of pipeline rank 0."""
    events, reductions = [], []
    for (passes, own_reductions), ahead in zip(recorded, offsets, strict=True):
        events += [Event(e.rank, e.action, e.start - ahead, e.end - ahead) for e in passes]
        reductions += [
            GradientReduction(r.rank, r.stage, r.start - ahead, r.end - ahead, r.is_exact)
            for r in own_reductions
        ]
    return Timeline(program.schedule, tuple(events), tuple(reductions))


def _other_order(program: Program, measured: Timeline) -> str | None:
    """Return how the passes that Megatron ran differ from those of ``program``; None if equal."""
    for rank, expected in enumerate(program.schedule.compute_rows):
        ran = tuple(event.action for event in measured.compute[rank])
        if ran == expected:
            continue
        pairs = zip((*map(str, ran), "nothing"), (*map(str, expected), "nothing"), strict=False)
        number, (was, known) = next(
            (number, (was, known)) for number, (was, known) in enumerate(pairs, 1) if was != known
        )
        return (
            f"this Megatron runs another order than {program.schedule.name}'s: pass {number} of "
            f"pipeline rank {rank} is {was}, not {known}"
        )
    return None


def _log(step: TracedStep, costs: Costs) -> None:
    """Write a traced step's metrics to TensorBoard and W&B, at Megatron's own interval.

    The predicted ones are omitted if ``costs``, for which the step was simulated, have no estimate.
    """
    if step.iteration % log_interval():
        return
    predicted, measured = step.predicted, step.measured
    bubble, seconds = predicted.bubble_share_makespan, predicted.makespan
    log_step(
        step.iteration,
        bubble_shares=(None if costs.no_estimate else bubble, measured.bubble_share_makespan),
        seconds=(None if costs.no_estimate else seconds, measured.makespan),
    )
