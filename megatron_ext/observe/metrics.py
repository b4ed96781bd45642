"""Metrics of the steps of a training, interval by interval: bubble, seconds, slowest rank, peak
memory.

Each rank reports sums over its own steps, by its own clock. The pipeline's messages bound the
offset between two clocks, as none arrives before it was sent.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

from megatron_ext.base.words import bytes_text
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Timeline

POINTS = 0.05  # largest accepted difference between measured and predicted bubble share
PATIENCE = 100  # number of iterations with a larger difference after which a remark is logged


def telling_passes(program: Program, rank: int) -> list[int]:
    """Return the numbers, among the passes of ``rank``, of those that tell its clock's offset.

    There are two passes for each of its stages: F of the first microbatch, and I (or B) of the last
    one. For a stage with forward passes alone the second is F of the last microbatch. Ranks mostly
    wait for the inputs of these passes, so their times show when a message arrived.
    """
    last_forward, last_backward = program.problem.forwards[-1], program.problem.backwards[-1]
    place = {
        (action.stage, kind, action.microbatch): number
        for number, action in enumerate(program.schedule.compute_rows[rank])
        for kind in RULES[action.kind].covers
    }
    return [
        number
        for stage in program.schedule.placement.stages_of[rank]
        for number in (
            place[stage, Kind.FORWARD, 0],
            place.get(
                (stage, Kind.BACKWARD_INPUT, last_backward),
                place[stage, Kind.FORWARD, last_forward],
            ),
        )
    ]


@dataclass(frozen=True)
class RankSums:
    """Sums that a rank reports of several steps of one program. Seconds are sums over the steps.

    Attributes:
        steps: number of steps.
        busy: seconds of the passes.
        span: seconds from the start of its first pass to the end of its last.
        times: begin and end of each of the `telling_passes`, after the start of the first pass.
        allocated, reserved: the largest number of bytes so far of the allocator; 0 without a GPU.
    """

    steps: float = 0.0
    busy: float = 0.0
    span: float = 0.0
    times: tuple[float, ...] = ()
    allocated: float = 0.0
    reserved: float = 0.0

    def __add__(self, later: RankSums) -> RankSums:
        return RankSums(
            self.steps + later.steps,
            self.busy + later.busy,
            self.span + later.span,
            tuple(map(sum, zip_longest(self.times, later.times, fillvalue=0.0))),
            max(self.allocated, later.allocated),
            max(self.reserved, later.reserved),
        )

    def numbers(self, chunks: int) -> list[float]:
        """Return these sums as a list that has the same length on all ranks.

        ``chunks`` is the largest number of chunks of a rank.
        """
        plain = [getattr(self, name) for name in _PLAIN]
        unused = [0.0] * (4 * chunks - len(self.times))
        return [*plain, *self.times, *unused]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> RankSums:
        """Return the sums of a rank from the list that `numbers` has made."""
        plain = dict(zip(_PLAIN, numbers, strict=False))
        return cls(**plain, times=tuple(numbers[len(_PLAIN) :]))


_PLAIN = [field.name for field in fields(RankSums) if field.name != "times"]


@dataclass(frozen=True)
class Metrics:
    """Mean pipeline metrics of the steps of several iterations, next to the prediction.

    Attributes:
        bubble_shares: idle share of a step over all ranks, predicted and measured. The predicted
            one is None if there is no estimate.
        seconds: seconds of a step, predicted and measured: its makespan, or its span if steps
            overlap. The prediction has its costs scaled by one factor, so that its passes take as
            long as the measured ones; it is None if there is no estimate.
        overlap: whether steps overlap.
        slowest: the rank whose passes take longest, compared with the prediction for each rank.
        slower: share by which its passes take longer than the other ranks'.
        ratios: by rank, seconds of its passes over the predicted ones.
        busy: by rank, seconds of its passes in a step.
        allocated, reserved: the most bytes, and the rank that has them; None if not measured.
    """

    bubble_shares: tuple[float | None, float]
    seconds: tuple[float | None, float]
    overlap: bool
    slowest: int
    slower: float
    allocated: tuple[int, int] | None
    reserved: tuple[int, int] | None
    ratios: tuple[float, ...] = ()
    busy: tuple[float, ...] = ()

    def line(self, first: int, last: int) -> str:
        """Return one line of text with the metrics of the iterations from ``first`` to ``last``."""
        iterations = f"iteration {last}" if first == last else f"iterations {first} to {last}"
        (predicted_share, share), (predicted, seconds) = self.bubble_shares, self.seconds
        step = "span" if self.overlap else "makespan"
        of_share = "no estimate" if predicted_share is None else f"predicted {predicted_share:.1%}"
        of_step = "no estimate" if predicted is None else f"predicted {_seconds(predicted)}"
        words = [
            f"{iterations}: bubble {share:.1%} of the {step} ({of_share})",
            f"step {_seconds(seconds)} ({of_step})",
            f"slowest rank {self.slowest}, its passes take {1 + self.slower:.2f} times the others'",
        ]
        if self.allocated is not None and self.reserved is not None:
            (allocated, fullest), (reserved, widest) = self.allocated, self.reserved
            words.append(
                f"peak {bytes_text(allocated)} allocated (rank {fullest}), "
                f"{bytes_text(reserved)} reserved (rank {widest})"
            )
        return ", ".join(words)

    def figures(self) -> dict[str, float]:
        """Return the measured metrics by name, for TensorBoard and the like."""
        figures: dict[str, float] = {
            "pipeline/slowest rank": self.slowest,
            "pipeline/slowest rank, slower by": self.slower,
        }
        for name, most in (("allocated", self.allocated), ("reserved", self.reserved)):
            if most is not None:
                figures[f"pipeline/peak bytes {name}"] = most[0]
                figures[f"pipeline/peak bytes {name}, rank"] = most[1]
        return figures


def metrics_of(
    ranks: Sequence[RankSums], predicted: Timeline, *, overlap: bool, has_estimate: bool = True
) -> Metrics | None:
    """Return the pipeline metrics of the steps whose sums ``ranks`` report.

    ``predicted`` is the predicted step. Return None if a rank has run no step. ``overlap`` says
    whether a rank begins the next step before the others have ended this one. If not
    ``has_estimate``, ``predicted`` has costs of another model, and only its order counts.
    """
    if not all(rank.steps for rank in ranks):
        return None
    busy = [rank.busy / rank.steps for rank in ranks]
    ends = [rank.span / rank.steps for rank in ranks]
    if overlap:
        seconds, unscaled = max(ends), predicted.span
    else:
        begins = _begins(predicted.schedule, ranks)
        seconds = max(map(operator.add, begins, ends)) - min(begins)
        unscaled = predicted.makespan
    work = sum(busy) / len(busy)
    ratios = _ratios(busy, predicted)
    slowest = max(range(len(ratios)), key=ratios.__getitem__)
    share, scaled = 1 - predicted.work / unscaled, unscaled * work / predicted.work
    return Metrics(
        (share if has_estimate else None, 1 - work / seconds),
        (scaled if has_estimate else None, seconds),
        overlap,
        slowest,
        ratios[slowest] / statistics.median_low(ratios) - 1,
        _most([rank.allocated for rank in ranks]),
        _most([rank.reserved for rank in ranks]),
        tuple(ratios),
        tuple(busy),
    )


def _begins(schedule: Schedule, ranks: Sequence[RankSums]) -> list[float]:
    """Return the start of each rank's first pass, by the clock of the first stage's rank.

    Messages bound the offset between the clocks of two ranks: F of a stage ends before F of the
    next stage begins, and I of the stage begins after I of the next stage has ended. The middle
    between the bounds is used. If both ranks waited, the bounds are two messages apart. A stage
    with forward passes alone receives nothing back, so it has only one bound, which is used as it
    is.
    """
    placement = schedule.placement
    sends_back = {
        action.stage - 1 for row in schedule.rows for action in row if action.kind is Kind.SEND_B
    }
    times: dict[int, list[float]] = {}
    for rank, stages in zip(ranks, placement.stages_of, strict=True):
        for chunk, stage in enumerate(stages):
            sums = rank.times[4 * chunk : 4 * chunk + 4]
            times[stage] = [time / rank.steps for time in sums]
    # For each two neighbouring ranks: lower bounds of the second rank's clock offset from the
    # first, as no message arrives before it is sent.
    least: dict[tuple[int, int], list[float]] = {}
    pairs = []
    for stage in range(placement.last):
        neighbours = placement.rank_of[stage], placement.rank_of[stage + 1]
        if neighbours[0] == neighbours[1]:
            continue
        _, sent, back, _ = times[stage]
        arrived, _, _, sent_back = times[stage + 1]
        least.setdefault(neighbours, []).append(sent - arrived)
        if stage in sends_back:
            least.setdefault(neighbours[::-1], []).append(sent_back - back)
        pairs.append(neighbours)
    begins = {placement.rank_of[0]: 0.0}
    for neighbours in pairs:
        sender, other = neighbours
        if other not in begins:
            earliest = max(least[neighbours])
            latest = -max(least[neighbours[::-1]]) if neighbours[::-1] in least else earliest
            begins[other] = begins[sender] + (earliest + latest) / 2
    return [begins[number] for number in range(placement.ranks)]


def _ratios(busy: Sequence[float], predicted: Timeline) -> list[float]:
    return [
        seconds / (sum(event.end - event.start for event in row) or 1.0)
        for seconds, row in zip(busy, predicted.compute, strict=True)
    ]


def _most(figures: Sequence[float]) -> tuple[int, int] | None:
    most = max(figures)
    return (int(most), figures.index(most)) if most else None


class Departure:
    """Watcher that remarks, once, that measured bubbles have long differed from the predicted one.

    Long is `PATIENCE` iterations.
    """

    def __init__(self) -> None:
        self._iterations = 0  # number of iterations so far in which the bubble has differed
        self._has_told = False

    def see(self, metrics: Metrics, iterations: int) -> str | None:
        """Return the remark on the bubble if it is due now, else None.

        ``iterations`` is the number of iterations since the last call, ``metrics`` are theirs.
        """
        predicted, measured = metrics.bubble_shares
        if predicted is None:
            return None
        has_left = abs(measured - predicted) > POINTS
        self._iterations = self._iterations + iterations if has_left else 0
        if self._iterations < PATIENCE or self._has_told:
            return None
        self._has_told = True
        return (
            f"for {self._iterations} iterations the bubble has been more than {100 * POINTS:.0f} "
            f"points {'above' if measured > predicted else 'below'} what is predicted "
            f"({measured:.1%}, predicted {predicted:.1%}): in the next launch write "
            f"--pipeline-trace traces --pipeline-trace-iters 10:12, and 'megatron-ext trace "
            f"traces' tells why"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"
