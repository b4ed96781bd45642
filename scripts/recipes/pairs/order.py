"""An order of passes in which some run as pairs, timed for many layouts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.plan.layouts.figures import Counts, Figure, Floats
from scripts.recipes.pairs.hiding import Hiding, Pair

Rows = Sequence[Sequence[Action]]

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
_RIGHT_BEHIND = len(_KINDS)  # a weight gradient whose input gradient came just before
_PER_STAGE = len(_KINDS) + 1
_NOTHING = -1


class Walk:
    """The passes of ``rows``, each after what it waits for. By node, which is a pass or a pair:

    Attributes:
        passes: its one or two passes.
        ranks: where it runs.
        before: the node before it on its rank.
        needed: what makes what its first and its second pass take, and ``far``, whether another
            rank does.
        levels: how many nodes one after the other are before it.
    """

    def __init__(self, rows: Rows, placement: Placement, with_pairs: bool) -> None:
        self._placement, self._rows, self._with_pairs = placement, rows, with_pairs
        self._at = [0] * len(rows)
        self._latest = [_NOTHING] * len(rows)
        self._apart: set[tuple[int, int]] = set()  # rank and place of a pair that would hang
        self.made: dict[tuple[int, int, bool], int] = {}  # stage, microbatch, whether forward
        self.passes: list[tuple[Action, ...]] = []
        self.ranks: list[int] = []
        self.before: list[int] = []
        self.needed: list[tuple[int, int]] = []
        self.far: list[tuple[bool, bool]] = []
        self.levels: list[int] = []
        while True:
            while any([self._go_on(rank) for rank in range(len(rows))]):
                pass
            if all(at == len(row) for at, row in zip(self._at, rows, strict=True)):
                break
            self._take_apart()

    def _take_apart(self) -> None:
        for rank in range(len(self._rows)):
            passes = self._next(rank)
            if len(passes) == 2 and self._source(passes[0], rank) is not None:
                self._apart.add((rank, self._at[rank]))
                return
        raise ValueError("the order hangs")

    def _next(self, rank: int) -> Sequence[Action]:
        row, at = self._rows[rank], self._at[rank]
        first, *rest = row[at : at + 2]
        if not rest or not self._with_pairs or (rank, at) in self._apart:
            return (first,)
        is_pair = first.kind is Kind.FORWARD and rest[0].kind in (
            Kind.BACKWARD_INPUT,
            Kind.FULL_BACKWARD,
        )
        return (first, rest[0]) if is_pair and first.microbatch != rest[0].microbatch else (first,)

    def _go_on(self, rank: int) -> bool:
        ran = False
        while self._at[rank] < len(self._rows[rank]):
            passes = self._next(rank)
            sources = [self._source(action, rank) for action in passes]
            if None in sources:
                break
            self._run(rank, passes, [source for source in sources if source is not None])
            ran = True
        return ran

    def _source(self, action: Action, rank: int) -> tuple[int, bool] | None:
        """The node that makes what ``action`` takes, and whether it is far; None: not yet made."""
        stage, kind, k = action
        if kind is Kind.FORWARD:
            source = (stage - 1, k, True) if stage else None
        elif kind is Kind.BACKWARD_WEIGHT or stage == self._placement.last:
            source = None
        else:
            source = (stage + 1, k, False)
        if source is None:
            return _NOTHING, False
        number = self.made.get(source)
        if number is None:
            return None
        return number, self._placement.rank_of[source[0]] != rank

    def _run(self, rank: int, passes: Sequence[Action], sources: list[tuple[int, bool]]) -> None:
        number = len(self.passes)
        for stage, kind, k in passes:
            if kind is not Kind.BACKWARD_WEIGHT:
                self.made[stage, k, kind is Kind.FORWARD] = number
        before = self._latest[rank]
        sources = [*sources, (_NOTHING, False)][:2]
        waits = [before, *(source for source, _ in sources)]
        self.levels.append(1 + max(_NOTHING if w == _NOTHING else self.levels[w] for w in waits))
        self.passes.append(tuple(passes))
        self.ranks.append(rank)
        self.before.append(before)
        self.needed.append((sources[0][0], sources[1][0]))
        self.far.append((sources[0][1], sources[1][1]))
        self._latest[rank] = number
        self._at[rank] += len(passes)

    def pairs(self) -> Iterator[tuple[int, Pair]]:
        """Each pair with its node."""
        for number, passes in enumerate(self.passes):
            if len(passes) == 2:
                f, b = passes
                yield number, Pair(f.stage, b.stage, b.kind is Kind.FULL_BACKWARD)


class PairedOrder:
    """The order ``rows``.

    Args:
        hiding: what pairs hide; None: there are none.
        hides_alone: whether whole backward passes outside of pairs hide messages behind their W.
    """

    def __init__(
        self,
        rows: Rows,
        placement: Placement,
        hop: float,
        hiding: Hiding | None,
        hides_alone: bool = False,
    ) -> None:
        walk = Walk(rows, placement, hiding is not None)
        self._hiding, self._hides_alone = hiding, hides_alone
        self._stages = placement.stages
        levels = np.array(walk.levels)
        by_level = np.argsort(levels, kind="stable")
        size = len(levels)
        place = np.empty(size + 1, dtype=np.int64)
        place[by_level] = np.arange(size)
        place[_NOTHING] = size
        self._codes = np.array([_codes_of(walk, n) for n in range(size)])[by_level]
        self._before = place[np.array(walk.before)[by_level]]
        self._needed = place[np.array(walk.needed)[by_level]]
        self._hops = hop * np.array(walk.far, dtype=float)[by_level]
        ends = np.diff(levels[by_level], prepend=-1, append=levels.max() + 1)
        self._bounds: list[int] = np.flatnonzero(ends).tolist()
        made = dict(walk.pairs())
        self._pairs = sorted(set(made.values()))
        index = {pair: n for n, pair in enumerate(self._pairs)}
        self._hidden_at = np.full(size, len(self._pairs), dtype=np.int64)
        for number, pair in made.items():
            self._hidden_at[place[number]] = index[pair]
        self.paired_share = 2 * len(made) / sum(
            action.kind is not Kind.BACKWARD_WEIGHT for row in rows for action in row
        )

    def seconds(self, figures: Floats, counts: Counts) -> Floats:
        """Of a step, by layout.

        Args:
            figures: by layout, stage and `Figure`.
            counts: layers of each stage, by layout.
        """
        lasts = self._seconds_of_nodes(figures, counts)
        ends = np.zeros((len(lasts) + 1, len(figures)))
        for start, end in zip(self._bounds, self._bounds[1:], strict=False):
            level = slice(start, end)
            ready = ends[self._before[level]]
            for which in range(2):
                at = ends[self._needed[level, which]] + self._hops[level, which, None]
                np.maximum(ready, at, out=ready)
            np.add(ready, lasts[level], out=ends[level])
        return np.asarray(ends.max(axis=0))

    def _seconds_of_nodes(self, figures: Floats, counts: Counts) -> Floats:
        passes = seconds_of_passes(figures)
        nothing = np.zeros((1, len(figures)))
        table = np.concatenate([passes, nothing])
        lasts = np.asarray(table[self._codes[:, 0]] + table[self._codes[:, 1]])
        if self._hiding is None:
            return lasts
        hidden = np.concatenate([self._hiding.of_pairs(self._pairs, counts), nothing])
        lasts -= hidden[self._hidden_at]
        if self._hides_alone:
            alone = self._hiding.alone(counts)
            whole = self._codes[:, 0] % _PER_STAGE == _KINDS.index(Kind.FULL_BACKWARD)
            lasts[whole] -= alone[self._codes[whole, 0] // _PER_STAGE]
        return lasts


def seconds_of_passes(figures: Floats) -> Floats:
    """By stage and kind of pass, and by layout."""
    forward, inputs, weights, spared = (
        figures[..., figure]
        for figure in (Figure.FORWARD, Figure.INPUT, Figure.WEIGHT, Figure.SPARED)
    )
    kinds = [forward, inputs, weights, inputs + weights - spared, weights - spared]
    by_stage = np.stack(kinds, axis=-1)
    return np.ascontiguousarray(by_stage.reshape(len(figures), -1).T)


def _codes_of(walk: Walk, number: int) -> tuple[int, int]:
    """Of its passes; of nothing: one behind all."""
    passes, before = walk.passes[number], walk.before[number]
    nothing = walk._placement.stages * _PER_STAGE
    first, *rest = [action.stage * _PER_STAGE + _KINDS.index(action.kind) for action in passes]
    if passes[0].kind is Kind.BACKWARD_WEIGHT and before != _NOTHING:
        own = passes[0]._replace(kind=Kind.BACKWARD_INPUT)
        first += (_RIGHT_BEHIND - _KINDS.index(Kind.BACKWARD_WEIGHT)) * (own in walk.passes[before])
    return (first, rest[0]) if rest else (first, nothing)
