"""Random schedules, and small damage to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts
from megatron_ext.schedule.costs_text import format_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions
from megatron_ext.schedule.schedule import Schedule
from tests.helpers.schedules import RECEIVES, SENDS, B, F, I, W

# Settings of a property test, which must not fail because the machine is busy.
PROPERTY = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def random_placement(random: Random) -> Placement:
    """Return a random placement on at most 4 ranks: linear, loop, V, wave, or any other in which
    each rank has a stage."""
    ranks, chunks = random.randint(1, 4), random.randint(1, 3)
    down, up = list(range(ranks)), list(reversed(range(ranks)))
    anything = down + [random.randrange(ranks) for _ in range(random.randint(0, 4))]
    random.shuffle(anything)
    shapes = {
        "line": down,
        "loop": down * chunks,
        "v": up + down,
        "wave": (up + down) * chunks,
        "arbitrary": anything,
    }
    name = random.choice(list(shapes))
    return Placement(name, tuple(shapes[name]))


def random_costs(random: Random, placement: Placement) -> Costs:
    """Return costs that differ from stage to stage; a message may take no time, or more than any
    pass."""

    def figures(low: float, high: float) -> tuple[float, ...]:
        return tuple(random.uniform(low, high) for _ in range(placement.stages))

    passes = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    seconds = {kind: figures(0.5, 3) for kind in passes}
    links = LinkCosts(random.choice([0.0, 0.1, 1.0, 10.0]))
    held = {what: figures(1e9, 3e9) for what in (Held.ACTIVATION, Held.WEIGHT_INPUTS)}
    return Costs(PassCosts(seconds, held), links, origin="random")


def with_random_links(random: Random, costs: Costs) -> Costs:
    """Return ``costs`` with a random time for each link between stages, some 0, some long."""
    hops = tuple(
        costs.links.p2p_seconds * random.choice([0, 0.5, 1, 4]) for _ in range(costs.stages - 1)
    )
    return costs.with_links(p2p_seconds=fmean(hops), p2p_seconds_by_stage=hops) if hops else costs


def random_problem(random: Random) -> Problem:
    """Return a problem with a random placement, random costs and up to five microbatches, with any
    kind of messages in `P2P`, such as batched ones."""
    placement = random_placement(random)
    p2p = random.choice(list(P2P))
    return Problem(
        placement,
        random.randint(1, 5),
        random_costs(random, placement),
        options=ScheduleOptions(p2p=p2p),
    )


def random_schedule(random: Random, problem: Problem) -> Schedule:
    """Return any order in which the passes can run, without messages.

    Each rank takes, at random, a pass that has become possible, and each microbatch on each stage
    has one backward pass or two. In half of the schedules the forward passes of all stages come in
    one random order of the microbatches, and backward passes overtake one another.
    """
    placement, in_order = problem.placement, random.random() < 0.5
    last = placement.stages - 1
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    order = list(range(problem.microbatches))
    if not in_order:
        random.shuffle(order)
    ready = [Action(0, F, k) for k in order]
    while ready:
        action = random.choice(ready)
        if action.kind is F:
            # Forward passes run in the order in which they become possible.
            action = next(a for a in ready if a[:2] == action[:2])
        elif in_order:
            action = min(a for a in ready if a[:2] == action[:2])
        ready.remove(action)
        rows[placement.rank_of[action.stage]].append(action)
        stage, kind, microbatch = action
        if kind is F and stage < last:
            ready.append(Action(stage + 1, F, microbatch))
        if kind is F and stage == last:
            ready.append(Action(stage, random.choice((B, I)), microbatch))
        if kind in (B, I) and stage > 0:
            ready.append(Action(stage - 1, random.choice((B, I)), microbatch))
        if kind is I:
            ready.append(Action(stage, W, microbatch))
    return Schedule("random", placement, tuple(map(tuple, rows)))


@dataclass(frozen=True)
class Case:
    """A random problem and a schedule that solves it, without messages."""

    problem: Problem
    schedule: Schedule

    # A failing example is printed as rows of actions, which are short enough to read.
    def __repr__(self) -> str:
        rows = "\n".join("  " + " ".join(map(str, row)) for row in self.schedule.rows)
        return f"{self.problem.placement}, {format_costs(self.problem.costs)}\n{rows}"


def random_case(seed: int) -> Case:
    random = Random(seed)
    problem = random_problem(random)
    return Case(problem, random_schedule(random, problem))


seeds = st.integers(0, 2**32 - 1)


cases = seeds.map(random_case)


def mutate(schedule: Schedule, random: Random) -> Schedule:
    """Return ``schedule`` with one small change, which may or may not break it."""
    rows = [list(row) for row in schedule.rows]
    row = random.choice([row for row in rows if row])
    at, other = random.randrange(len(row)), random.randrange(len(row))
    changes = ["drop", "duplicate", "swap", "swap neighbours", "move", "rank", "microbatch"]
    if any(action.kind in SENDS for action in row):
        changes += ["swap sends", "wait at once"]
    if any(action.kind in RECEIVES for action in row):
        changes += ["receive sooner"]
    change = random.choice(changes)
    if change == "wait at once":
        rows = [list(_waiting_at_once(row)) for row in rows]
    elif change == "rank":
        there = random.choice(rows)
        action = row.pop(at)
        there.insert(random.randint(0, len(there)), action)
    else:
        _CHANGES[change](row, at, other, random)
    return replace(schedule, rows=tuple(map(tuple, rows)))


def _drop(row: list[Action], at: int, other: int, random: Random) -> None:
    del row[at]


def _duplicate(row: list[Action], at: int, other: int, random: Random) -> None:
    row.insert(other, row[at])


def _swap(row: list[Action], at: int, other: int, random: Random) -> None:
    row[at], row[other] = row[other], row[at]


def _swap_neighbours(row: list[Action], at: int, other: int, random: Random) -> None:
    _swap(row, at, max(at - 1, 0), random)


def _move(row: list[Action], at: int, other: int, random: Random) -> None:
    row.insert(other, row.pop(at))


def _renumber(row: list[Action], at: int, other: int, random: Random) -> None:
    last = max(action.microbatch for action in row)
    row[at] = row[at]._replace(microbatch=random.randint(0, last + 1))


def _swap_sends(row: list[Action], at: int, other: int, random: Random) -> None:
    sends = [n for n, action in enumerate(row) if action.kind in SENDS]
    _swap(row, random.choice(sends), random.choice(sends), random)


def _receive_sooner(row: list[Action], at: int, other: int, random: Random) -> None:
    """Move a receive to an earlier place. This is sound if the direction has a channel of its own,
    and may deadlock if all messages share one channel."""
    at = random.choice([n for n, action in enumerate(row) if action.kind in RECEIVES])
    row.insert(random.randint(0, at), row.pop(at))


_CHANGES = {
    "drop": _drop,
    "duplicate": _duplicate,
    "swap": _swap,
    "swap neighbours": _swap_neighbours,
    "move": _move,
    "microbatch": _renumber,
    "swap sends": _swap_sends,
    "receive sooner": _receive_sooner,
}


def _waiting_at_once(row: Iterable[Action]) -> Iterator[Action]:
    """Yield ``row`` with blocking sends, the classic way to deadlock."""
    waits = {Kind.SEND_F: Kind.WAIT_F, Kind.SEND_B: Kind.WAIT_B}
    for action in row:
        if action.kind not in waits.values():
            yield action
        if action.kind in waits:
            yield action._replace(kind=waits[action.kind])
