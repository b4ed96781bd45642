"""An order of passes, timed for many layouts at once.

Times are those of `simulate`, except that under our executor no message waits for another. Memory
is that of `peaks`, except for messages, whose memory is estimated. That is precise enough for a
choice, at a hundredth of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.compile.program.longest_paths import BatchedTimes
from megatron_ext.compile.program.pass_graph import pass_graph
from megatron_ext.compile.program.stock_messages import stock_pass_graph
from megatron_ext.planner.layouts.overlap_saving import PairedStages
from megatron_ext.planner.layouts.stage_figures import Counts, Figure, StageFigures
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.action_arrays import KINDS, ActionArrays, Floats, Ints
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule, right_behind_own_input
from megatron_ext.schedule.stock_executor import StockExecutor

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
_CODES = np.array([_KINDS.index(kind) if kind in _KINDS else -1 for kind in KINDS])
_INPUT, _FULL = KINDS.index(Kind.BACKWARD_INPUT), KINDS.index(Kind.FULL_BACKWARD)
_RIGHT_BEHIND = len(_KINDS)  # code for a weight gradient that runs right after its input gradient
_PER_STAGE = len(_KINDS) + 1
# A short step with overlapped passes that stands for a longer one: its number of microbatches per
# rank, and the microbatches in its middle, where all overlapped passes occur.
PERIODS_IN_PAIRS = 5
_MIDDLE_IN_PAIRS = (2, 3)
_MIDDLE = (0, 1)


class Order:
    """A schedule's order of passes, which gives step times for many layouts at the same time.

    Messages between ranks take the time that ``costs`` give, and wait as Megatron's ``executor``
    has it, or as this package's if it is None.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, executor: StockExecutor | None = None
    ) -> None:
        self._placement = schedule.placement
        self._sent = _share_in_flight(self._placement) * costs.links.message_bytes
        pairs = zip(schedule.rows, self._placement.stages_of, strict=True)
        self._held = [_held_by(row, stages) for row, stages in pairs]
        by_stock = None if executor is None else stock_pass_graph(schedule, costs, executor)
        graph = pass_graph(schedule, costs) if by_stock is None else by_stock
        self._times = BatchedTimes(graph, graph.lags)
        places, codes = self._times.place[graph.nodes], _codes(schedule.arrays)
        second = schedule.paired + 1
        is_first = np.ones(len(codes), dtype=bool)
        is_first[second] = False
        of_nodes = np.full(len(graph.before), _no_time(self._placement), dtype=np.intp)
        of_nodes[graph.nodes[is_first]] = codes[is_first]
        self._codes = of_nodes[self._times.order]
        self._seconds = places[second], codes[second]
        self._pairs, self._places_of_pairs = _paired_stages(schedule)
        # With overlapped passes the time of a rank is not the sum of the times of its passes.
        self._shares = None if self._pairs else _shares_of_ranks(schedule, codes)
        middle = _MIDDLE_IN_PAIRS if self._pairs else _MIDDLE
        microbatches = [k * self._placement.ranks for k in middle]
        self._final_passes = places[_final_passes(schedule.arrays, microbatches)]

    def seconds(self, of_stages: StageFigures, counts: Counts, more: int = 0) -> Floats:
        """Return the seconds of a step for each layout, plus ``more`` microbatches of steady state.

        Each of these takes as long as a microbatch in the middle of the step.

        Args:
            counts: layers of each stage, by layout.
        """
        of_passes = _seconds_of_passes(of_stages.of(counts, self._placement))
        times = of_passes[self._codes]
        if self._pairs:
            places, codes = self._seconds
            saved = of_stages.overlap_saving.by_layout(self._pairs, of_stages.rows(counts))
            slowness = of_stages.slowness(self._placement)
            if slowness is not None:
                saved = saved * slowness[[there for there, _, _ in self._pairs], None]
            times[places] = times[places] + of_passes[codes] - saved[self._places_of_pairs]
        self._times.run(times)
        makespans = np.asarray(times.max(axis=0))
        if not more:
            return makespans
        earlier, later = times[self._final_passes]
        by_microbatch = (later - earlier) / self._placement.ranks
        if self._shares is not None:
            of_ranks = self._shares @ of_passes[: _no_time(self._placement)]
            by_microbatch = np.maximum(by_microbatch, of_ranks.max(axis=0))
        return np.asarray(makespans + more * by_microbatch)

    def rank_bytes(self, figures: Floats) -> Floats:
        """Return the peak bytes of each rank for each layout: an array of layouts x ranks."""
        peaks = []
        for held, stages in zip(self._held, self._placement.stages_of, strict=True):
            of_rank = figures[:, list(stages)]
            held_forward = of_rank[..., Figure.ACTIVATION] + self._sent
            kept = np.concatenate([held_forward, of_rank[..., Figure.LEFT]], axis=1)
            besides = of_rank[..., Figure.MODEL].sum(axis=1) + of_rank[..., Figure.BESIDES].max(
                axis=1
            )
            peaks.append((kept @ held.T).max(axis=1) + besides)
        return np.stack(peaks, axis=1)


def _codes(arrays: ActionArrays) -> NDArray[np.intp]:
    """Return a number for the stage and kind of each pass, with which its seconds are looked up."""
    codes = _CODES[arrays.kind]
    assert (codes >= 0).all()
    codes[right_behind_own_input(arrays)] = _RIGHT_BEHIND
    return np.asarray(arrays.stage * _PER_STAGE + codes)


def _paired_stages(schedule: Schedule) -> tuple[list[PairedStages], NDArray[np.intp]]:
    """Return the stages of overlapped passes without repetitions, and for each pair of overlapped
    passes the index of its stages in that list."""
    arrays = schedule.arrays
    back = [arrays.stage_kinds[code] for code in arrays.stage_kind[schedule.paired + 1].tolist()]
    forwards = arrays.stage[schedule.paired].tolist()
    pairs = [(there, stage, kind) for there, (stage, kind) in zip(forwards, back, strict=True)]
    distinct = sorted(set(pairs))
    place = {stages: n for n, stages in enumerate(distinct)}
    return distinct, np.array([place[stages] for stages in pairs], dtype=np.intp)


def _final_passes(arrays: ActionArrays, microbatches: Sequence[int]) -> Ints:
    """Return the last backward passes (I or B, on the first stage) of ``microbatches``."""
    is_back = (arrays.stage == 0) & np.isin(arrays.kind, (_INPUT, _FULL))
    return arrays.numbers[is_back & np.isin(arrays.microbatch, microbatches)]


def _shares_of_ranks(schedule: Schedule, codes: NDArray[np.intp]) -> Floats:
    """Return how often each rank runs each kind of pass of each stage, per microbatch."""
    placement = schedule.placement
    shares = np.zeros((placement.ranks, placement.stages * _PER_STAGE))
    np.add.at(shares, (schedule.arrays.rank, codes), 1.0)
    return np.asarray(shares / (1 + schedule.arrays.microbatch.max()))


def _share_in_flight(placement: Placement) -> float:
    """Return the share of a stage's microbatches whose sent output the stage still holds.

    A sent tensor is held until something that comes back shows that it has arrived. On a V that is
    soon.
    """
    if not placement.in_turn:
        return 0.5
    return 1.0 if placement.chunks == 1 else 0.7


def _no_time(placement: Placement) -> int:
    """Return the code of nodes that take no time. It is greater by 1 than the largest code of a
    pass."""
    return placement.stages * _PER_STAGE


def _seconds_of_passes(figures: Floats) -> Floats:
    """Return the seconds of each stage and kind of pass for each layout.

    A last entry, 0, is for nodes that take no time.
    """
    forward, inputs, weights, saving = (
        figures[..., figure]
        for figure in (Figure.FORWARD, Figure.INPUT, Figure.WEIGHT, Figure.FUSED_BACKWARD_SAVING)
    )
    kinds = [
        forward,
        inputs,
        weights,
        inputs + weights - saving,
        weights - saving,
    ]
    by_stage = np.stack(kinds, axis=-1)
    of_passes = by_stage.reshape(len(figures), -1).T
    return np.concatenate([of_passes, np.zeros((1, len(figures)))])


def _held_by(row: Sequence[Action], stages: Sequence[int]) -> Floats:
    """Return how many microbatches a rank stores, for each moment at which its memory may be at its
    peak.

    A moment has two numbers for each of the rank's ``stages``: first, for all stages, the
    microbatches between F and I, then, for all stages, those between I and W.
    """
    chunk = {stage: number for number, stage in enumerate(stages)}
    held = [0] * (2 * len(stages))
    moments: set[tuple[int, ...]] = set()
    for stage, kind, _ in row:
        number = chunk[stage]
        if kind is Kind.FORWARD:
            held[number] += 1
            moments.add(tuple(held))
            continue
        moments.add(tuple(held))
        if kind is Kind.BACKWARD_WEIGHT:
            held[len(stages) + number] -= 1
        else:
            held[number] -= 1
            held[len(stages) + number] += kind is Kind.BACKWARD_INPUT
    return _largest(np.array(sorted(moments), dtype=float))


def _largest(moments: Floats) -> Floats:
    """Return the ``moments`` of peak memory that no other moment exceeds in every kind of
    memory."""
    kept: list[Floats] = []
    for moment in moments[np.argsort(-moments.sum(axis=1), kind="stable")]:
        if not kept or not (np.stack(kept) >= moment).all(axis=1).any():
            kept.append(moment)
    return np.stack(kept)
