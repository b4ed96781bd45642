"""Explanation of a measured step: its time by parts, and the largest single causes.

Every answer is a replay of the step (`replay`) without the thing in question: the makespan if a
message had arrived at once, or if a pass had taken as long as others of its kind. A late pass or
message that nothing waited for therefore counts as 0 s, however late it was.
"""

from __future__ import annotations

import enum
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ext.observe.replay import Replay, SecondsOf
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.timeline import Event, Timeline

TOP = 3
WORTH_NAMING = 0.005  # least cause of a bubble that is named, as a share of the makespan
SLOW = 1.5  # a pass is slow if it takes this multiple of the median of its stage and kind
SLOW_PASSES_TRIED = 10


class MakespanPart(enum.StrEnum):
    """Parts into which the makespan of a measured step is split; they add up to the makespan."""

    WORK = "passes"
    SCHEDULE = "the schedule's own bubble"
    COSTS = "passes in other proportions than predicted"
    SLOW_RANKS = "slow ranks"
    SLOW_PASSES = "slow passes"
    BETWEEN = "between passes"
    MESSAGES = "late messages"


@dataclass(frozen=True)
class Cause:
    """Cause of a longer step: without this cause the makespan would be shorter by ``seconds``."""

    seconds: float
    text: str


@dataclass(frozen=True)
class Explanation:
    """Explanation of a measured step's makespan: its parts and the largest causes of delay.

    Attributes:
        parts: seconds of the makespan, by part. A part can be negative, because of single passes
            that were faster than usual, or the clocks' error if messages are fast.
        causes: the largest causes, at most `TOP`, largest first. They overlap, and do not add up.
    """

    parts: Mapping[MakespanPart, float]
    causes: tuple[Cause, ...]


def explain(measured: Timeline, predicted: Timeline) -> Explanation:
    """Return the parts of the makespan of a measured step, and the largest single causes of delay.

    A pass is late because of a message if it starts after its rank is free and after another rank
    has made its input. A rank is slow if its passes, at their medians, take longer than predicted,
    compared with the other ranks. The schedule's own bubble is that of the passes as predicted,
    with messages that take no time.
    """
    step = _Step(measured, predicted)
    base = measured.makespan
    work = sum(map(step.at_par, step.events)) / len(measured.compute)
    costs = {e.action: e.end - e.start for row in predicted.compute for e in row}
    scale = work / predicted.work
    # Makespan that is left after each cause of idle time is removed, together with the causes
    # before it.
    left = {
        MakespanPart.MESSAGES: step.makespan(step.seconds, step.delay_without_messages),
        MakespanPart.BETWEEN: step.makespan(step.seconds, _no_delay),
        MakespanPart.SLOW_PASSES: step.makespan(step.usual, _no_delay),
        MakespanPart.SLOW_RANKS: step.makespan(step.at_par, _no_delay),
        MakespanPart.COSTS: step.makespan(lambda action: costs[action] * scale, _no_delay),
        MakespanPart.SCHEDULE: work,
        MakespanPart.WORK: 0.0,
    }
    before = [base, *left.values()]
    parts = {part: before[n] - makespan for n, (part, makespan) in enumerate(left.items())}
    causes = sorted(step.causes(), key=lambda cause: -cause.seconds)
    worth = [cause for cause in causes if cause.seconds > WORTH_NAMING * base]
    return Explanation({part: parts[part] for part in MakespanPart}, tuple(worth[:TOP]))


def seconds_over_predicted(measured: Timeline, predicted: Timeline) -> list[float]:
    """Return, by rank, the median seconds of its passes divided by their predicted seconds."""
    return _Step(measured, predicted).ratios


def _no_delay(action: Action) -> float:
    return 0.0


class _Step:
    """A measured step that can be replayed with other times of its passes and messages."""

    def __init__(self, measured: Timeline, predicted: Timeline) -> None:
        self.measured = measured
        self.replay = Replay(measured.schedule)
        self.events = {event.action: event for row in measured.compute for event in row}
        ready = self.replay.ready(self.events)
        self.delays = {a: event.start - max(ready[a]) for a, event in self.events.items()}
        # Rank that sends the message which a pass waits for, if there is one.
        self.sender: dict[Action, int] = {}
        for action, event in self.events.items():
            makers = [self.events[maker] for maker in self.replay.inputs[action]]
            others = [maker for maker in makers if maker.rank != event.rank]
            if others:
                self.sender[action] = max(others, key=lambda maker: maker.end).rank
        groups = defaultdict(list)
        for action, event in self.events.items():
            groups[action.stage, action.kind].append(event.end - event.start)
        self.medians = {key: statistics.median(group) for key, group in groups.items()}
        self.ratios = self._ratios(predicted)
        self.par = statistics.median_low(self.ratios)

    def _ratios(self, predicted: Timeline) -> list[float]:
        """Return, by rank, the median seconds of its passes divided by their predicted seconds."""
        return [
            sum(self.usual(event.action) for event in row)
            / (sum(event.end - event.start for event in row) or 1.0)
            for row in predicted.compute
        ]

    def makespan(self, seconds: SecondsOf, delay: SecondsOf) -> float:
        return self.replay.run(seconds, delay).makespan

    def seconds(self, action: Action) -> float:
        event = self.events[action]
        return event.end - event.start

    def usual(self, action: Action) -> float:
        return self.medians[action.stage, action.kind]

    def at_par(self, action: Action) -> float:
        """Return the seconds that ``action`` would take on a rank that is not slow."""
        return self.usual(action) * min(1.0, self.par / self.ratios[self.events[action].rank])

    def delay(self, action: Action) -> float:
        return self.delays[action]

    def delay_without_messages(self, action: Action) -> float:
        return 0.0 if action in self.sender else self.delays[action]

    def causes(self) -> Iterator[Cause]:
        yield from self._slow_ranks()
        yield from self._slow_passes()
        yield from self._delays()

    def _cause(self, text: str, seconds: SecondsOf, delay: SecondsOf) -> Cause:
        return Cause(self.measured.makespan - self.makespan(seconds, delay), text)

    def _slow_ranks(self) -> Iterator[Cause]:
        for rank, ratio in enumerate(self.ratios):
            slowness = ratio / self.par
            if slowness <= 1:
                continue

            def as_others(action: Action, rank: int = rank, slowness: float = slowness) -> float:
                is_slow = self.events[action].rank == rank
                return self.seconds(action) / (slowness if is_slow else 1.0)

            yield self._cause(
                f"rank {rank} is slow: compared with other ranks its passes take "
                f"{slowness:.2f} times what is predicted",
                as_others,
                self.delay,
            )

    def _slow_passes(self) -> Iterator[Cause]:
        slow = [a for a in self.events if self.seconds(a) > SLOW * self.usual(a)]
        slow.sort(key=lambda a: self.usual(a) - self.seconds(a))
        for slow_one in slow[:SLOW_PASSES_TRIED]:

            def as_usual(action: Action, slow_one: Action = slow_one) -> float:
                return self.usual(action) if action == slow_one else self.seconds(action)

            event, usual = self.events[slow_one], self.usual(slow_one)
            yield self._cause(
                f"{slow_one} on rank {event.rank} was a slow pass: "
                f"{_ms(event.end - event.start)}, usually {_ms(usual)}",
                as_usual,
                self.delay,
            )

    def _delays(self) -> Iterator[Cause]:
        """Yield as causes the delays by messages between each two ranks, and by other waiting."""
        groups: dict[tuple[int, int | None], list[Event]] = defaultdict(list)
        for action, event in self.events.items():
            if self.delays[action] > 0:
                groups[event.rank, self.sender.get(action)].append(event)
        for (rank, sender), events in groups.items():
            actions = [event.action for event in events]
            blocked = set(actions)

            def at_once(action: Action, blocked: set[Action] = blocked) -> float:
                return 0.0 if action in blocked else self.delays[action]

            # The first of equal delays is taken, so that every process names the same action.
            worst = max(actions, key=self.delay)
            total = _ms(sum(map(self.delay, actions)))
            amounts = f"{total} in all, most before {worst}: {_ms(self.delays[worst])}"
            if sender is None:
                text = f"rank {rank} did nothing between passes, waiting for no other: {amounts}"
            else:
                text = f"messages from rank {sender} to rank {rank} came late: {amounts}"
            yield self._cause(text, self.seconds, at_once)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
