"""Metrics of training steps (``--pipeline-metrics``), for the pipeline of the last global rank,
which has Megatron's log and its TensorBoard and W&B writers. The other pipelines report only how
long their ranks' passes take, so that a slow GPU can be distinguished from a slow stage.

Nothing waits for metrics. Passes are recorded as for a trace, and finished records are read before
the next step. If an iteration's metrics are logged, the ranks start to exchange a few numbers
before the next step, and the last rank reads them after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.adapter.observers.observer import ObservedStep, StepObserver
from megatron_ext.adapter.observers.writers import log_step
from megatron_ext.adapter.training_globals import (
    current_iteration,
    has_writers,
    line_interval,
    log_interval,
)
from megatron_ext.base.logger import logger
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.features.metrics.adapter.pipelines import Pipelines
from megatron_ext.observe.metrics import Departure, Metrics, RankSums, metrics_of
from megatron_ext.observe.slow_ranks import PipelineTimes, SlowRanks
from megatron_ext.runtime.measure.exchange import AsyncAllGather
from megatron_ext.runtime.measure.step_sums import StepSums
from megatron_ext.schedule.timeline import Timeline

WARM_UP = 1  # first steps that are not measured, since kernels load and caches fill in them


@dataclass(frozen=True)
class _Due:
    """Metrics of iterations ``first`` to ``last`` under ``program``, which ranks still exchange."""

    exchange: AsyncAllGather
    program: Program
    first: int
    last: int


class StepMetrics(StepObserver[ObservedStep]):
    """Observer that logs the metrics of an interval's steps.

    ``overlap``: consecutive steps overlap, as with post-validation.
    """

    def __init__(self, *, overlap: bool) -> None:
        device = torch.device(torch.cuda.current_device())
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._steps = StepSums(device)
        self._pipelines = Pipelines()
        self._log = _Log(overlap, self._pipelines)
        self._calls = 0
        self._iteration = 0  # iteration of the latest step
        self._first = 0  # first iteration whose metrics the ranks have not exchanged yet
        self._pipeline: dist.ProcessGroup | None = None
        self._due: deque[_Due] = deque()

    def begin(self, step: ObservedStep) -> None:
        """Record the step, and start to exchange the previous interval's metrics if they are due.

        The exchange is over the pipeline.
        """
        self._calls += 1
        iteration = current_iteration() or self._calls
        self._pipeline = step.pipeline
        self._steps.add_up()
        if iteration != self._iteration:  # Megatron may rerun an iteration
            self._exchange_if_due()
        self._iteration = iteration
        if self._calls > WARM_UP:
            self._steps.begin(step.recorder)

    def end(self, step: ObservedStep) -> None:
        """Store the record of the step, and log the metrics that have arrived."""
        if self._pipeline is None:
            return
        if step.program is not self._steps.program:
            self._first = self._iteration
        self._steps.end(step.program, step.pipeline.rank())
        self._log_what_has_come()

    def finish(self, iteration: int) -> None:
        """Log the remaining metrics at the training's end, if Megatron logs this iteration.

        Collective over the pipeline.
        """
        if self._pipeline is None:
            return
        self._steps.add_up()
        self._exchange_if_due()
        for due in self._due:
            due.exchange.wait()
        self._log_what_has_come()

    def _last_rank(self) -> int:
        assert self._pipeline is not None
        return dist.get_process_group_ranks(self._pipeline)[-1]

    def _exchange_if_due(self) -> None:
        program, at = self._steps.program, self._iteration
        if program is None or at < self._first or not _is_logged(at):
            return
        assert self._pipeline is not None
        numbers = self._steps.take().numbers(program.schedule.placement.chunks)
        exchange = AsyncAllGather(self._pipeline, numbers, self._stream)
        self._due.append(_Due(exchange, program, self._first, at))
        self._first = at + 1

    def _log_what_has_come(self) -> None:
        while self._due and self._due[0].exchange.has_come():
            due = self._due.popleft()
            ranks = [RankSums.of(numbers) for numbers in due.exchange.rows()]
            if dist.get_rank() == dist.get_world_size() - 1:
                self._log.add(ranks, due.program, due.first, due.last)
            elif dist.get_rank() == self._last_rank() and all(rank.steps for rank in ranks):
                self._pipelines.publish([rank.busy / rank.steps for rank in ranks])


class _Log:
    """Writer of metrics to Megatron's log, TensorBoard and W&B, at Megatron's intervals."""

    def __init__(self, overlap: bool, pipelines: Pipelines | None = None) -> None:
        self._overlap = overlap
        self._pipelines = pipelines
        self._departure = Departure()
        self._slow_ranks = SlowRanks()
        self._program: Program | None = None
        self._predicted: Timeline | None = None  # simulated timeline of the current program
        self._first = 0  # first iteration that the next log line is about
        self._since: list[RankSums] = []  # sums of each rank's times since the last log line
        self._has_said = False

    def add(self, ranks: list[RankSums], program: Program, first: int, last: int) -> None:
        """Add all ranks' times of iterations ``first`` to ``last``, and log the metrics if due."""
        if program is not self._program or self._predicted is None:
            self._program, self._since = program, []
            self._predicted = simulate(program, program.problem.costs)
        if not self._since:
            self._first, self._since = first, [RankSums()] * len(ranks)
        self._since = [sums + new for sums, new in zip(self._since, ranks, strict=True)]
        metrics = self._metrics_of(ranks)
        if metrics is not None and last % log_interval() == 0:
            log_step(
                last,
                bubble_shares=metrics.bubble_shares,
                seconds=metrics.seconds,
                more=metrics.figures(),
            )
        if last % line_interval() == 0:
            self._write_line(last)

    def _write_line(self, last: int) -> None:
        assert self._predicted is not None
        metrics = self._metrics_of(self._since)
        self._since = []
        if metrics is None:
            self._say_that_nothing_is_known(last)
            return
        logger.info(metrics.line(self._first, last))
        iterations = last - self._first + 1
        others = [] if self._pipelines is None else self._pipelines.others()
        times = PipelineTimes(dist.get_rank(), metrics.busy)
        slow = self._slow_ranks.see(metrics.ratios, self._predicted, iterations, times, others)
        for warning in (self._departure.see(metrics, iterations), slow):
            if warning is not None:
                logger.warning(warning)

    def _metrics_of(self, ranks: Sequence[RankSums]) -> Metrics | None:
        assert self._predicted is not None and self._program is not None
        return metrics_of(
            ranks,
            self._predicted,
            overlap=self._overlap,
            has_estimate=not self._program.problem.costs.no_estimate,
        )

    def _say_that_nothing_is_known(self, last: int) -> None:
        assert self._program is not None
        if not self._has_said:
            logger.warning(
                f"no metrics of the iterations from {self._first} to {last}: on some rank no step "
                f"ran the passes of {self._program.schedule.name} in its order"
            )
        self._has_said = True


def _is_logged(iteration: int) -> bool:
    """Return whether Megatron logs ``iteration`` or writes it to its writers.

    The result is equal on all ranks.
    """
    return iteration % line_interval() == 0 or (has_writers() and iteration % log_interval() == 0)
