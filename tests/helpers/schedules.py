"""Schedules for tests: built, written by hand, and drawn as tables."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.communication import communicate
from megatron_ext.compile.program.message_order import order_messages
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.program.waits import await_sends
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Action, Kind, parse_action
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Timeline

F, I, W, B = (  # noqa: E741 (the field's letters)
    Kind.FORWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.FULL_BACKWARD,
)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def line_problem(
    ranks: int,
    microbatches: int,
    f: float = 1,
    i: float = 1,
    w: float = 1,
    comm: float = 0,
    *,
    limit: str | None = None,
    forward_only: bool = False,
) -> Problem:
    """Return a problem with equal stages on a linear placement."""
    placement = line(ranks)
    costs = uniform(placement, f, i, w, comm)
    memory_limit = parse_limit(limit, ranks, microbatches) if limit else None
    return Problem(placement, microbatches, costs, memory_limit, forward_only)


def program(name: str, problem: Problem) -> Program:
    """Return the proved program of the family ``name``."""
    return build_program(choose(name), problem)


def without_waits(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule`` with its messages, but without waits."""
    return order_messages(communicate(schedule, problem), problem)


def with_messages(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule`` with the messages and waits that `prove` expects."""
    return await_sends(without_waits(schedule, problem), problem)


def rows_of(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return the actions in ``text``, which has a line for each rank: ``0F0 0SEND_F0``."""
    return tuple(tuple(map(parse_action, row.split())) for row in text.strip().splitlines())


def written(text: str, rank_of: Sequence[int], name: str = "written") -> Schedule:
    """Return the schedule with the rows in ``text``."""
    return Schedule(name, Placement("written", tuple(rank_of)), rows_of(text))


def names_of_stages(p: int, chunks: int) -> list[types.SimpleNamespace]:
    """Return stages that have a number and no model, as in torch's own tests of schedules."""
    torch = pytest.importorskip("torch")
    return [
        types.SimpleNamespace(
            num_stages=p * chunks,
            group_size=p,
            group_rank=0,
            is_first=chunk == 0,
            is_last=False,
            submod=torch.nn.Identity(),
        )
        for chunk in range(chunks)
    ]


def drawn(timeline: Timeline, *, messages: bool = False) -> str:
    """Return ``timeline``, whose costs are whole numbers, as a table with a column for each unit of
    time.

    ``.`` is idle time, and ``=`` continues the pass on its left. Stages are omitted if each rank
    has one. With ``messages``, a line for each channel shows which microbatch is under way.
    Overlapped passes are ``3F1+3I0``.
    """
    placement, beside = timeline.schedule.placement, timeline.schedule.overlapped_with
    ends = {event.action: event.end for event in timeline.events}
    end = round(max(event.end for event in timeline.events))
    lines: dict[str, list[str]] = {str(rank): ["."] * end for rank in range(placement.ranks)}
    for event in timeline.events:
        stage, kind, microbatch = event.action
        if kind in (F, I, W, B):
            name = f"{kind}{microbatch}"
            key = str(event.rank)
            text = name if placement.chunks == 1 else f"{stage}{name}"
            if event.action in beside:
                if kind is not F:
                    continue
                other = beside[event.action]
                text, event = f"{text}+{other}", event._replace(end=ends[other])
        elif messages and kind in (Kind.SEND_F, Kind.SEND_B):
            neighbour = stage + (1 if kind is Kind.SEND_F else -1)
            key, text = f"{event.rank}>{placement.rank_of[neighbour]}", str(microbatch)
        else:
            continue
        slots = lines.setdefault(key, ["."] * end)
        start, stop = math.floor(event.start), math.floor(event.end)
        assert (start, stop) == (event.start, event.end), f"{event} is not on the grid"
        for slot in range(start, stop):
            assert slots[slot] == ".", f"{event.action} runs into {slots[slot]}"
            slots[slot] = text if slot == start else "="
    return table("\n".join(f"{key} {' '.join(lines[key])}" for key in sorted(lines)))


def table(text: str) -> str:
    """Return ``text`` with its cells one space apart, so that tables may be written with wider
    columns."""
    return "\n".join(" ".join(row.split()) for row in text.strip().splitlines())
