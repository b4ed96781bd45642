"""An order of passes in which some run as pairs, timed for many layouts at once."""

from __future__ import annotations

import numpy as np

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.plan.layouts.figures import Counts, Floats, StageFigures
from megatron_ext.schedule.plan.layouts.hidden import PairedStages
from megatron_ext.schedule.plan.layouts.order import seconds_of_passes
from megatron_ext.schedule.schedule import Schedule

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
_RIGHT_BEHIND = len(_KINDS)  # a weight gradient whose input gradient came just before
_PER_STAGE = len(_KINDS) + 1
_NOTHING = -1
PERIODS = 5  # microbatches a rank, of a step that tells of a longer one
_IN_THE_MIDDLE = (2, 3)  # of these, where all that runs in pairs does


class PairedOrder:
    """The order of ``schedule``, which has passes of `_KINDS` only, with the messages of
    ``costs``."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        walk = _Walk(schedule)
        levels = np.array(walk.levels)
        by_level = np.argsort(levels, kind="stable")
        size = len(levels)
        place = np.empty(size + 1, dtype=np.int64)
        place[by_level] = np.arange(size)
        place[_NOTHING] = size
        self._codes = np.array(walk.codes)[by_level]
        self._before = place[np.array(walk.before)[by_level]]
        self._needed = place[np.array(walk.needed)[by_level]]
        links = range(schedule.placement.last)
        hops = np.array([*map(costs.hop_behind, links), 0.0])  # the last one is of no message
        self._hops = hops[np.array(walk.links)[by_level]]
        ends = np.diff(levels[by_level], prepend=-1, append=levels.max() + 1)
        self._bounds: list[int] = np.flatnonzero(ends).tolist()
        self._pairs = sorted(set(walk.pairs.values()))
        index = {pair: number for number, pair in enumerate(self._pairs)}
        self._hidden_at = np.full(size, len(self._pairs), dtype=np.int64)
        for number, pair in walk.pairs.items():
            self._hidden_at[place[number]] = index[pair]
        self._ranks = schedule.placement.ranks
        ways_back = [walk.made.get((0, k * self._ranks, False), _NOTHING) for k in _IN_THE_MIDDLE]
        self._ways_back = place[ways_back]

    def seconds(self, of_stages: StageFigures, counts: Counts, more: int = 0) -> Floats:
        """Of a step, by layout; of one with so many ``more`` microbatches, each of which takes what
        one in the middle does.

        Args:
            counts: layers of each stage, by layout.
        """
        nothing = np.zeros((1, len(counts)))
        passes = np.concatenate([seconds_of_passes(of_stages.of(counts)), nothing])
        hidden = np.concatenate(
            [of_stages.hidden.by_layout(self._pairs, of_stages.rows(counts)), nothing]
        )
        lasts = passes[self._codes].sum(axis=1) - hidden[self._hidden_at]
        ends = np.zeros((len(lasts) + 1, len(counts)))
        for start, end in zip(self._bounds, self._bounds[1:], strict=False):
            level = slice(start, end)
            ready = (ends[self._needed[level]] + self._hops[level, :, None]).max(axis=1)
            np.maximum(ready, ends[self._before[level]], out=ready)
            np.add(ready, lasts[level], out=ends[level])
        whole = np.asarray(ends.max(axis=0))
        earlier, later = ends[self._ways_back]
        return np.asarray(whole + more * (later - earlier) / self._ranks)


class _Walk:
    """A schedule's passes, each after all that it waits for. By node, a pass or a pair of them:

    Attributes:
        codes: its passes, by stage and kind; where there is one, the second is nothing.
        before: the node before it on its rank.
        needed: what makes what its passes take.
        links: the stages before the links by which that comes from other ranks.
        levels: how many nodes one after the other are before it.
        pairs: the stages of those that are pairs.
        made: the node of a pass by its stage and microbatch, and whether it is a forward pass.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._placement, self._rows = schedule.placement, schedule.rows
        self._beside = schedule.beside
        self._at = [0] * len(self._rows)
        self._latest = [_NOTHING] * len(self._rows)
        self._last: list[Action | None] = [None] * len(self._rows)
        self.made: dict[tuple[int, int, bool], int] = {}  # stage, microbatch, whether forward
        self.codes: list[tuple[int, int]] = []
        self.before: list[int] = []
        self.needed: list[tuple[int, int]] = []
        self.links: list[tuple[int, int]] = []
        self.levels: list[int] = []
        self.pairs: dict[int, PairedStages] = {}
        while sum(self._go_on(rank) for rank in range(len(self._rows))):
            pass
        ends = zip(self._at, self._rows, strict=True)
        assert all(at == len(row) for at, row in ends), "the order hangs"

    def _go_on(self, rank: int) -> bool:
        """Run passes of ``rank`` until one has to wait; whether any has run."""
        row, start = self._rows[rank], self._at[rank]
        while self._at[rank] < len(row):
            first = row[self._at[rank]]
            other = self._beside.get(first)
            passes = (first,) if other is None else (first, other)
            sources = [self._source(action, rank) for action in passes]
            if None in sources:
                break
            self._run(rank, passes, [source for source in sources if source is not None])
        return self._at[rank] > start

    def _source(self, action: Action, rank: int) -> tuple[int, int] | None:
        """The node that makes what ``action`` takes, and the stage before the link by which that
        comes; None: not yet made."""
        stage, kind, k = action
        source = None
        if kind is Kind.FORWARD and stage:
            source = stage - 1, k, True
        elif kind not in (Kind.FORWARD, Kind.BACKWARD_WEIGHT) and stage < self._placement.last:
            source = stage + 1, k, False
        if source is None:
            return _NOTHING, _NOTHING
        number, is_far = self.made.get(source), self._placement.rank_of[source[0]] != rank
        link = min(stage, source[0]) if is_far else _NOTHING
        return None if number is None else (number, link)

    def _run(self, rank: int, passes: tuple[Action, ...], sources: list[tuple[int, int]]) -> None:
        number, before = len(self.codes), self._latest[rank]
        for stage, kind, k in passes:
            if kind is not Kind.BACKWARD_WEIGHT:
                self.made[stage, k, kind is Kind.FORWARD] = number
        (source, link), (other, other_link) = (sources * 2)[:2]
        waits = [self.levels[n] for n in (before, source, other) if n != _NOTHING]
        self.levels.append(1 + max(waits, default=_NOTHING))
        self.codes.append(self._codes_of(rank, passes))
        self.before.append(before)
        self.needed.append((source, other))
        self.links.append((link, other_link))
        if len(passes) == 2:
            self.pairs[number] = passes[0].stage, passes[1].stage, passes[1].kind
        self._latest[rank], self._last[rank] = number, passes[-1]
        self._at[rank] += len(passes)

    def _codes_of(self, rank: int, passes: tuple[Action, ...]) -> tuple[int, int]:
        first, *rest = (a.stage * _PER_STAGE + _KINDS.index(a.kind) for a in passes)
        if passes[0].kind is Kind.BACKWARD_WEIGHT:
            is_behind = self._last[rank] == passes[0]._replace(kind=Kind.BACKWARD_INPUT)
            first += is_behind * (_RIGHT_BEHIND - _KINDS.index(Kind.BACKWARD_WEIGHT))
        return first, rest[0] if rest else self._placement.stages * _PER_STAGE
