"""An order of passes in which some run as pairs, timed for many layouts at once."""

from __future__ import annotations

from functools import cache

import numpy as np

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.model.model import Stage
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.plan.layouts.figures import Counts, Floats
from megatron_ext.schedule.plan.layouts.layout import Layout
from megatron_ext.schedule.plan.layouts.order import seconds_of_passes
from megatron_ext.schedule.plan.layouts.work import Work
from megatron_ext.schedule.schedule import Schedule

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
_RIGHT_BEHIND = len(_KINDS)  # a weight gradient whose input gradient came just before
_PER_STAGE = len(_KINDS) + 1
_NOTHING = -1
PERIODS = 5  # microbatches a rank, of a step that tells of a longer one
_IN_THE_MIDDLE = (2, 3)  # of these, where all that runs in pairs does

PairedStages = tuple[int, int, Kind]  # of F, of the backward pass, and its kind


class Hidden:
    """What pairs of passes hide under ``work``, looked up by layout."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._seconds = cache(self._of)

    def by_layout(self, pairs: list[PairedStages], counts: Counts) -> Floats:
        """Seconds, by pair and layout."""
        stages = [Layout(tuple(layers)).of(self._work.model) for layers in counts.tolist()]
        rows = [[self._seconds(of[f], of[b], kind) for of in stages] for f, b, kind in pairs]
        return np.array(rows, dtype=float).reshape(len(pairs), len(counts))

    def _of(self, there: Stage, back: Stage, kind: Kind) -> float:
        costs = self._work.costs_of((there, back), line(2))
        return costs.saved_by(Action(0, Kind.FORWARD, 0), Action(1, kind, 0))


class PairedOrder:
    """The order of ``schedule``, which has passes of `_KINDS` only.

    Args:
        hop: seconds of a message.
        hidden: what its pairs hide.
    """

    def __init__(self, schedule: Schedule, hop: float, hidden: Hidden) -> None:
        walk = _Walk(schedule)
        self._hidden = hidden
        levels = np.array(walk.levels)
        by_level = np.argsort(levels, kind="stable")
        size = len(levels)
        place = np.empty(size + 1, dtype=np.int64)
        place[by_level] = np.arange(size)
        place[_NOTHING] = size
        self._codes = np.array(walk.codes)[by_level]
        self._before = place[np.array(walk.before)[by_level]]
        self._needed = place[np.array(walk.needed)[by_level]]
        self._hops = hop * np.array(walk.far, dtype=float)[by_level]
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

    def seconds(self, figures: Floats, counts: Counts, more: int = 0) -> Floats:
        """Of a step, by layout; of one with so many ``more`` microbatches, each of which takes what
        one in the middle does.

        Args:
            figures: by layout, stage and `Figure`.
            counts: layers of each stage, by layout.
        """
        nothing = np.zeros((1, len(figures)))
        passes = np.concatenate([seconds_of_passes(figures), nothing])
        hidden = np.concatenate([self._hidden.by_layout(self._pairs, counts), nothing])
        lasts = passes[self._codes].sum(axis=1) - hidden[self._hidden_at]
        ends = np.zeros((len(lasts) + 1, len(figures)))
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
        needed: what makes what its passes take, and ``far``, whether another rank does.
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
        self.far: list[tuple[bool, bool]] = []
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

    def _source(self, action: Action, rank: int) -> tuple[int, bool] | None:
        """The node that makes what ``action`` takes, and whether it is far; None: not yet made."""
        stage, kind, k = action
        source = None
        if kind is Kind.FORWARD and stage:
            source = stage - 1, k, True
        elif kind not in (Kind.FORWARD, Kind.BACKWARD_WEIGHT) and stage < self._placement.last:
            source = stage + 1, k, False
        if source is None:
            return _NOTHING, False
        number = self.made.get(source)
        return None if number is None else (number, self._placement.rank_of[source[0]] != rank)

    def _run(self, rank: int, passes: tuple[Action, ...], sources: list[tuple[int, bool]]) -> None:
        number, before = len(self.codes), self._latest[rank]
        for stage, kind, k in passes:
            if kind is not Kind.BACKWARD_WEIGHT:
                self.made[stage, k, kind is Kind.FORWARD] = number
        (source, is_far), (other, is_other_far) = (sources * 2)[:2]
        waits = [self.levels[n] for n in (before, source, other) if n != _NOTHING]
        self.levels.append(1 + max(waits, default=_NOTHING))
        self.codes.append(self._codes_of(rank, passes))
        self.before.append(before)
        self.needed.append((source, other))
        self.far.append((is_far, is_other_far))
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
