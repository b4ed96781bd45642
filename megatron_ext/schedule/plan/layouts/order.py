"""An order of passes, timed for many layouts at once.

Time is that of `simulate` but for messages that wait for one another, memory that of `peaks` but
for what messages hold, which is estimated: near enough to choose by, and a hundredth of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.plan.layouts.figures import Figure, Floats
from megatron_ext.schedule.schedule import Schedule, followed_by_own_w

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
_RIGHT_BEHIND = len(_KINDS)  # a weight gradient whose input gradient came just before
_PER_STAGE = len(_KINDS) + 1
_NOTHING = -1


class Order:
    """The order of a ``schedule`` which has passes of `_KINDS` only, with the messages of
    ``costs``."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._placement = schedule.placement
        self._sent = _share_under_way(self._placement) * costs.message_bytes
        pairs = zip(schedule.rows, self._placement.stages_of, strict=True)
        self._held = [_held_by(row, stages) for row, stages in pairs]
        walk = _Walk(schedule)
        levels = np.array(walk.levels)
        by_level = np.argsort(levels, kind="stable")
        place = np.empty(len(levels) + 1, dtype=np.int64)
        place[by_level] = np.arange(len(levels))
        place[_NOTHING] = len(levels)
        self._passes = np.array(walk.passes)[by_level]
        self._before = place[np.array(walk.before)[by_level]]
        self._needed = place[np.array(walk.needed)[by_level]]
        links = range(self._placement.last)
        hops = np.array([*map(costs.hop_behind, links), 0.0])  # the last one is of no message
        self._hops = hops[walk.links][by_level, None]
        ends = np.diff(levels[by_level], prepend=-1, append=levels.max() + 1)
        self._bounds: list[int] = np.flatnonzero(ends).tolist()
        self._shares = _shares_of_ranks(schedule, walk)
        self._way_back = int(place[walk.made[0, 0, False]])
        later = walk.made.get((0, self._placement.ranks, False))
        self._way_back_later = None if later is None else int(place[later])

    def seconds(self, figures: Floats, more: int = 0) -> Floats:
        """Of a step, by layout; of one with so many ``more`` microbatches, each of which takes what
        one in the middle does.

        Args:
            figures: by layout, stage and `Figure`.
        """
        of_passes = seconds_of_passes(figures)
        lasts = of_passes[self._passes]
        ends = np.zeros((len(lasts) + 1, len(figures)))
        for start, end in zip(self._bounds, self._bounds[1:], strict=False):
            level = slice(start, end)
            ready = ends[self._needed[level]]
            ready += self._hops[level]
            np.maximum(ready, ends[self._before[level]], out=ready)
            np.add(ready, lasts[level], out=ends[level])
        whole = np.asarray(ends.max(axis=0))
        if not more:
            return whole
        assert self._way_back_later is not None
        period = ends[self._way_back_later] - ends[self._way_back]
        by_microbatch = np.maximum(
            period / self._placement.ranks, (self._shares @ of_passes).max(axis=0)
        )
        return np.asarray(whole + more * by_microbatch)

    def rank_bytes(self, figures: Floats) -> Floats:
        """What each rank holds at its peak, by layout and rank."""
        peaks = []
        for held, stages in zip(self._held, self._placement.stages_of, strict=True):
            own = figures[:, list(stages)]
            held_forward = own[..., Figure.ACTIVATION] + self._sent
            kept = np.concatenate([held_forward, own[..., Figure.LEFT]], axis=1)
            peaks.append((kept @ held.T).max(axis=1) + own[..., Figure.MODEL].sum(axis=1))
        return np.stack(peaks, axis=1)


def _shares_of_ranks(schedule: Schedule, walk: _Walk) -> Floats:
    """How often each rank runs each kind of pass of each stage for a microbatch."""
    ranks = [schedule.placement.rank_of[number // _PER_STAGE] for number in walk.passes]
    shares = np.zeros((schedule.placement.ranks, schedule.placement.stages * _PER_STAGE))
    np.add.at(shares, (ranks, walk.passes), 1.0)
    return np.asarray(shares / walk.microbatches)


def _share_under_way(placement: Placement) -> float:
    """Of the microbatches that a stage holds, for how many it holds what it has sent, too: until
    something that comes back shows that it has arrived. On a V that is soon."""
    if not placement.in_turn:
        return 0.5
    return 1.0 if placement.chunks == 1 else 0.7


def seconds_of_passes(figures: Floats) -> Floats:
    """By stage and kind of pass, and by layout."""
    forward, inputs, weights, spared = (
        figures[..., figure]
        for figure in (Figure.FORWARD, Figure.INPUT, Figure.WEIGHT, Figure.SPARED)
    )
    kinds = [forward, inputs, weights, inputs + weights - spared, weights - spared]
    by_stage = np.stack(kinds, axis=-1)
    return np.ascontiguousarray(by_stage.reshape(len(figures), -1).T)


class _Walk:
    """A schedule's passes, each after all that it waits for. By pass:

    Attributes:
        passes: its stage and kind, as a number.
        before: the pass that its rank runs before it.
        needed: the one that makes what it takes.
        links: the stage before the link by which that comes from another rank.
        levels: how many passes one after the other are before it.
        made: the pass by its stage and microbatch, and whether it is a forward pass.
        microbatches: of all.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._placement, self._rows = schedule.placement, schedule.rows
        self._behind = [followed_by_own_w(row) for row in schedule.rows]
        self._at = [0] * len(self._rows)
        self._latest = [_NOTHING] * len(self._rows)
        self.made: dict[tuple[int, int, bool], int] = {}  # stage, microbatch, whether forward
        self.passes: list[int] = []
        self.before: list[int] = []
        self.needed: list[int] = []
        self.links: list[int] = []
        self.levels: list[int] = []
        self.microbatches = 0
        waiting = list(range(len(self._rows)))
        while waiting:
            waiting += self._go_on(waiting.pop())
        assert len(self.passes) == sum(map(len, self._rows)), "the order hangs"

    def _go_on(self, rank: int) -> list[int]:
        """Run passes of ``rank`` until one has to wait; the ranks that may go on for them."""
        row, woken = self._rows[rank], []
        while self._at[rank] < len(row):
            action = row[self._at[rank]]
            source = self._source(action)
            number = _NOTHING if source is None else self.made.get(source)
            if number is None:
                break
            self._run(rank, action, number)
            stage, kind, _ = action
            other = None
            if kind is Kind.FORWARD:
                other = self._placement.next(stage)
            elif kind is not Kind.BACKWARD_WEIGHT:
                other = self._placement.previous(stage)
            if other is not None and self._placement.rank_of[other] != rank:
                woken.append(self._placement.rank_of[other])
        return list(dict.fromkeys(woken))

    def _source(self, action: Action) -> tuple[int, int, bool] | None:
        """What makes that which ``action`` takes; None: nothing, or its rank has run it."""
        stage, kind, k = action
        if kind is Kind.FORWARD:
            return (stage - 1, k, True) if stage else None
        if kind is Kind.BACKWARD_WEIGHT or stage == self._placement.last:
            return None
        return stage + 1, k, False

    def _run(self, rank: int, action: Action, number: int) -> None:
        stage, kind, k = action
        code = _KINDS.index(kind)
        if kind is Kind.BACKWARD_WEIGHT:
            code = _RIGHT_BEHIND if (stage, k) in self._behind[rank] else code
        else:
            self.made[stage, k, kind is Kind.FORWARD] = len(self.passes)
        self.microbatches = max(self.microbatches, k + 1)
        before = self._latest[rank]
        source = self._source(action)
        is_far = source is not None and self._placement.rank_of[source[0]] != rank
        self.links.append(min(stage, source[0]) if source and is_far else _NOTHING)
        self._latest[rank] = len(self.passes)
        self._at[rank] += 1
        self.passes.append(stage * _PER_STAGE + code)
        self.before.append(before)
        self.needed.append(number)
        self.levels.append(1 + max(self._level(before), self._level(number)))

    def _level(self, number: int) -> int:
        return _NOTHING if number == _NOTHING else self.levels[number]


def _held_by(row: Sequence[Action], stages: Sequence[int]) -> Floats:
    """How many microbatches of each of a rank's ``stages`` it holds from F to I, and behind these
    from I to W, at each moment when that may be the most."""
    chunk = {stage: number for number, stage in enumerate(stages)}
    held = [0] * (2 * len(stages))
    seen: set[tuple[int, ...]] = set()
    for stage, kind, _ in row:
        number = chunk[stage]
        if kind is Kind.FORWARD:
            held[number] += 1
            seen.add(tuple(held))
            continue
        seen.add(tuple(held))
        if kind is Kind.BACKWARD_WEIGHT:
            held[len(stages) + number] -= 1
        else:
            held[number] -= 1
            held[len(stages) + number] += kind is Kind.BACKWARD_INPUT
    return _largest(np.array(sorted(seen), dtype=float))


def _largest(moments: Floats) -> Floats:
    """Those of ``moments`` that no other one is as much as in everything."""
    kept: list[Floats] = []
    for moment in moments[np.argsort(-moments.sum(axis=1), kind="stable")]:
        if not kept or not (np.stack(kept) >= moment).all(axis=1).any():
            kept.append(moment)
    return np.stack(kept)
