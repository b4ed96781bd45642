"""The turns of a race, and what they show.

In a round each schedule has two turns, in an order and then in its reverse (A B C C B A), so that a
steady drift, as of a GPU that warms up, affects all schedules equally. A round gives one ratio for
each candidate. The candidate is judged by the median of its ratios, and their quartiles are the
spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TURNS = 2  # turns of each schedule in a round
WARM_UP = 1  # first iterations of a turn, right after the schedule was changed, which are not timed
TIMED = 4  # number of timed iterations of a turn
ROUNDS = 5
ROUNDS_TO_DROP = 2  # number of rounds after which a schedule can first be dropped from the race
# A schedule is dropped if even its upper quartile is slower than the baseline by this share.
SLOWER = 0.02

Round = Mapping[str, Sequence[float]]  # seconds of an iteration in each turn, by schedule


@dataclass(frozen=True)
class Ratio:
    """Speed of a candidate relative to the baseline: the median over the rounds, and their
    quartiles."""

    median: float
    lower: float
    upper: float
    rounds: int

    @property
    def spread(self) -> str:
        return f"{self.lower:.3f} to {self.upper:.3f}"

    @property
    def is_faster(self) -> bool:
        """Whether the candidate is faster by more than the spread."""
        return self.lower > 1

    @property
    def is_slower(self) -> bool:
        """Whether the candidate is slower by so much, beyond the spread, that no more rounds are
        needed."""
        return self.rounds >= ROUNDS_TO_DROP and self.upper < 1 - SLOWER


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """Return the `Ratio` that sums up ``ratios``, which has one number for each round."""
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0], 1)
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, lower, upper, len(ratios))


class Race:
    """Turns of a race, and the seconds that iterations took in them.

    Attributes:
        baseline: is in every round.
        candidates: those that are still in the race.
        dropped: why the other candidates were dropped, by schedule.
        rounds: the rounds that have ended.
    """

    def __init__(self, baseline: str, candidates: Sequence[str]) -> None:
        self.baseline = baseline
        self.candidates = list(candidates)
        self.dropped: dict[str, str] = {}
        self.rounds: list[Round] = []
        # Turns of the current round: schedule, and seconds of an iteration.
        self._turns: list[tuple[str, float]] = []

    @property
    def current(self) -> str:
        """Schedule whose turn it is; the baseline when the race is over."""
        return self.baseline if self.is_over else self._order[len(self._turns)]

    @property
    def is_over(self) -> bool:
        return not self.candidates or len(self.rounds) >= ROUNDS

    @property
    def is_between_rounds(self) -> bool:
        return not self._turns

    @property
    def iterations_left(self) -> int:
        """Number of iterations left, at most: fewer if a candidate is dropped."""
        turns = (ROUNDS - len(self.rounds)) * len(self._order) - len(self._turns)
        return 0 if self.is_over else turns * (WARM_UP + TIMED)

    @property
    def _order(self) -> list[str]:
        there = [self.baseline, *self.candidates]
        return there + there[::-1]

    def drop(self, candidate: str, why: str) -> None:
        """Drop ``candidate`` from the following rounds. This is called between rounds only."""
        assert self.is_between_rounds
        self.candidates.remove(candidate)
        self.dropped[candidate] = why

    def end_turn(self, seconds: float) -> None:
        """Record the ``seconds`` per iteration of the turn that ends, and its round if complete."""
        self._turns.append((self.current, seconds))
        if len(self._turns) < len(self._order):
            return
        turns, self._turns = self._turns, []
        self.add_round({spec: [s for who, s in turns if who == spec] for spec in self._contenders})

    def add_round(self, measured: Round) -> None:
        """Record the times of this race's schedules in the round ``measured``; drop slow
        candidates.
        """
        self.rounds.append({who: measured[who] for who in self._contenders if who in measured})
        for candidate in list(self.candidates):
            ratio = self.ratio(candidate)
            if ratio is not None and ratio.is_slower:
                slower = f"{ratio.median:.3f} times as fast as {self.baseline}"
                self.drop(candidate, f"{slower} after {ratio.rounds} rounds")

    @property
    def _contenders(self) -> list[str]:
        return [self.baseline, *self.candidates]

    def ratio(self, candidate: str) -> Ratio | None:
        """Return the speed of ``candidate`` relative to the baseline, over the rounds in which both
        were timed; None if there is none yet."""
        ratios = [
            sum(measured[self.baseline]) / sum(measured[candidate])
            for measured in self.rounds
            if candidate in measured
        ]
        return ratio_of(ratios) if ratios else None

    def seconds(self, spec: str) -> float | None:
        """Return the median seconds of an iteration under ``spec``; None if none was timed yet."""
        turns = [seconds for measured in self.rounds for seconds in measured.get(spec, ())]
        return statistics.median(turns) if turns else None

    @property
    def best(self) -> str | None:
        """Candidate with the best ratio, including those that were dropped; None if no candidate
        has one."""
        ratios = {
            spec: ratio.median
            for spec in [*self.candidates, *self.dropped]
            if (ratio := self.ratio(spec)) is not None
        }
        return max(ratios, key=ratios.__getitem__, default=None)

    @property
    def winner(self) -> str:
        """The best candidate, if it is faster beyond the spread, otherwise the baseline."""
        best = self.best
        if best is None or (ratio := self.ratio(best)) is None or not ratio.is_faster:
            return self.baseline
        return best
