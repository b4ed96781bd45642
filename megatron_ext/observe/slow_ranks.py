"""Ranks that are slower than the costs of their stages, the time that they cost, and remedies.

The time of a rank's passes is compared with the costs of its stages, and with the same rank of
other pipelines (data-parallel replicas and tensor-parallel ranks), which have the same stages:

    slow here, not in other pipelines     a slow GPU
    slow in all pipelines                 the stage takes longer than its cost
    all ranks of one pipeline slow        a slow replica, which no layout helps
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.observe.explain import seconds_over_predicted
from megatron_ext.observe.replay import Replay
from megatron_ext.observe.trace import TracedStep
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.rank_speeds import RankSpeeds
from megatron_ext.schedule.timeline import Timeline

SLOW = 0.05  # share of time by which a slow rank exceeds the others; less is noise
PATIENCE = 100  # number of slow iterations of a rank after which the log names the rank


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of the passes of a step on each rank of one data-parallel replica's pipeline.

    Attributes:
        last: global rank of its last pipeline rank, which names the pipeline.
        busy: seconds by pipeline rank.
    """

    last: int
    busy: tuple[float, ...]


def slow_ranks(ratios: Sequence[float]) -> dict[int, float]:
    """Return the time of each slow rank relative to the median rank.

    ``ratios``: by rank, the seconds of its passes over those of the costs of its stages.
    """
    par = statistics.median_low(ratios)
    slowness = {rank: ratio / par for rank, ratio in enumerate(ratios)}
    return {rank: times for rank, times in slowness.items() if times > 1 + SLOW}


def speeds_of(ratios: Sequence[float]) -> RankSpeeds | None:
    """Return the relative speed of each rank, 1 for one that is not slow; None if none is slow.

    ``ratios``: by rank, the seconds of its passes over those of the costs of its stages.
    """
    slow = slow_ranks(ratios)
    if not slow:
        return None
    return _speeds(slow, len(ratios), digits=4)


def _speeds(slow: Mapping[int, float], ranks: int, digits: int) -> RankSpeeds:
    return RankSpeeds(tuple(round(1 / slow.get(rank, 1.0), digits) for rank in range(ranks)))


def speeds_in(steps: Sequence[TracedStep]) -> tuple[RankSpeeds | None, RankSpeeds | None]:
    """Return the relative speeds of ranks in traced ``steps``: certain ones, and likely ones.

    A rank is certainly slow if it is slow in each of several steps, by more than its steps differ.
    Likely speeds are those of the steps' medians, and may be noise. Either is None if no rank is
    slow.
    """
    of_steps = [seconds_over_predicted(step.measured, step.predicted) for step in steps]
    medians = [statistics.median(ratios) for ratios in zip(*of_steps, strict=True)]
    relative = [[ratio / statistics.median_low(step) for ratio in step] for step in of_steps]

    def is_sure(rank: int) -> bool:
        times = [step[rank] for step in relative]
        return len(times) > 1 and min(times) - 1 > max(SLOW, max(times) - min(times))

    sure = {rank: times for rank, times in slow_ranks(medians).items() if is_sure(rank)}
    return _speeds(sure, len(medians), digits=4) if sure else None, speeds_of(medians)


def share_lost(predicted: Timeline, slow: Mapping[int, float]) -> float:
    """Return the share by which ``slow`` ranks lengthen the ``predicted`` step.

    ``slow`` has the factor on the time of each slow rank. Both steps are replayed with messages
    that take no time.
    """
    events = {event.action: event for row in predicted.compute for event in row}

    def seconds(action: Action) -> float:
        return events[action].end - events[action].start

    def slowed(action: Action) -> float:
        return seconds(action) * slow.get(events[action].rank, 1.0)

    replay = Replay(predicted.schedule)
    return replay.run(slowed).makespan / replay.run(seconds).makespan - 1


class SlowRanks:
    """Watcher that remarks, once, that the same ranks have been slow for `PATIENCE` iterations."""

    def __init__(self) -> None:
        # Number of iterations so far in which each rank has been slow.
        self._iterations: dict[int, int] = {}
        self._told: set[int] = set()

    def see(
        self,
        ratios: Sequence[float],
        predicted: Timeline,
        iterations: int,
        this_pipeline: PipelineTimes,
        others: Sequence[PipelineTimes],
    ) -> str | None:
        """Return the remark on slow ranks if it is due now, else None.

        Args:
            iterations: number of iterations since the last call.
            ratios: by rank, the seconds of its passes over those of the costs of its stages.
            this_pipeline: times of the pipeline that ``ratios`` are of.
            others: times of the other pipelines, as far as they are known.
        """
        pipelines = [
            this_pipeline,
            *(one for one in others if len(one.busy) == len(this_pipeline.busy)),
        ]
        slow = dict(slow_ranks(ratios))
        for one in pipelines[1:]:
            for rank, times in slow_in(one, pipelines).items():
                slow[rank] = max(slow.get(rank, 1.0), times)
        self._iterations = {rank: self._iterations.get(rank, 0) + iterations for rank in slow}
        due = [rank for rank, count in self._iterations.items() if count >= PATIENCE]
        if not set(due) - self._told:
            return None
        self._told |= set(due)
        of_due = {rank: slow[rank] for rank in sorted(due)}
        since = f"for {min(self._iterations[rank] for rank in due)} iterations"
        replicas = _slow_replicas(pipelines)
        if replicas and not slow_ranks(ratios) and all(map(_is_in(replicas, pipelines), due)):
            listed = ", ".join(str(one.last) for one in replicas)
            return (
                f"{since} all ranks of the pipeline that ends on global rank {listed} have been "
                f"slow, up to {max(of_due.values()):.2f} times: a slow replica, which "
                f"no layout helps"
            )
        speeds = _speeds(of_due, len(ratios), digits=2)
        which = "; ".join(_words(rank, times, pipelines) for rank, times in of_due.items())
        lost = share_lost(predicted, of_due)
        return (
            f"{since} {which}: the step is {lost:.0%} longer by it. A layout for these ranks: "
            f"megatron-ext plan --rank-speeds {speeds} -- and this launch command"
        )


def slow_in(one: PipelineTimes, pipelines: Sequence[PipelineTimes]) -> dict[int, float]:
    """Return the slow ranks of pipeline ``one``, with their time relative to other pipelines."""
    slow = {}
    for rank, busy in enumerate(one.busy):
        others = [other.busy[rank] for other in pipelines if other is not one]
        if others and busy > (1 + SLOW) * statistics.median_low(others):
            slow[rank] = busy / statistics.median_low(others)
    return slow


def _words(rank: int, times: float, pipelines: Sequence[PipelineTimes]) -> str:
    name = f"pipeline rank {rank} has been {times:.2f} times as slow as its stage's cost"
    if len(pipelines) == 1:
        return f"{name} (its GPU is slow, or the cost is wrong: --pipeline-costs profile measures)"
    where = [one.last for one in pipelines if rank in slow_in(one, pipelines)]
    if not where:
        return f"{name} in all {len(pipelines)} pipelines: its stage takes longer, not one GPU"
    listed = ", ".join(map(str, where))
    return (
        f"pipeline rank {rank} has been {times:.2f} times as slow as in other pipelines, in the "
        f"one that ends on global rank {listed}: a slow GPU"
    )


def _slow_replicas(pipelines: Sequence[PipelineTimes]) -> list[PipelineTimes]:
    return [one for one in pipelines if len(slow_in(one, pipelines)) == len(one.busy)]


def _is_in(
    replicas: Sequence[PipelineTimes], pipelines: Sequence[PipelineTimes]
) -> Callable[[int], bool]:
    """Return a function that tells whether a rank is slow in no pipeline except ``replicas``."""
    others = [one for one in pipelines if one not in replicas]
    return lambda rank: not any(rank in slow_in(one, pipelines) for one in others)
