"""Replay of the passes of a schedule with other durations.

To know what a slow pass or a late message has cost, the step is simulated once more with the
measured durations of its passes, one of which is changed. Only passes are replayed: messages are
part of the delay after which a pass starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from megatron_ext.compile.program.graph import needed, partner_of
from megatron_ext.compile.program.longest_paths import Precedence
from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule, is_compute
from megatron_ext.schedule.timeline import Event, Timeline

Inputs = dict[Action, tuple[Action, ...]]
SecondsOf = Callable[[Action], float]


@dataclass(frozen=True)
class Replay:
    """Replay of the passes of a measured step of ``schedule`` with changed durations.

    Messages are not simulated here: their time is part of the delay given for a pass, or 0.
    """

    schedule: Schedule

    @cached_property
    def inputs(self) -> Inputs:
        """For each pass of the schedule, the passes that make its inputs."""
        rows = self.schedule.compute_rows
        passes = {action for row in rows for action in row}
        placement = self.schedule.placement
        inputs = {a: tuple(m for m in _makers(a, placement) if m in passes) for a in passes}
        return _of_pairs(inputs, self.schedule) if self.schedule.pairs else inputs

    @cached_property
    def _graph(self) -> Precedence:
        """Graph in which each pass waits for its inputs and for the pass before it on its rank."""
        rows = self.schedule.compute_rows
        node = {action: number for number, action in enumerate(chain.from_iterable(rows))}
        waits = [(node[later], node[earlier]) for row in rows for earlier, later in pairwise(row)]
        waits += [(node[a], node[maker]) for a, makers in self.inputs.items() for maker in makers]
        later, earlier = np.array(waits, dtype=np.int32).reshape(-1, 2).T
        graph = Precedence(before=NodeLists.of(later, earlier, len(node)))
        assert not graph.stuck, "passes wait for one another"
        return graph

    def ready(self, measured: dict[Action, Event]) -> dict[Action, tuple[float, float]]:
        """Return for each pass of a measured step when its rank was free, and its inputs made.

        For passes without inputs the second time is the start of the step.
        """
        start = min(event.start for event in measured.values())
        ready_at = {}
        for row in self.schedule.compute_rows:
            free = start
            for action in row:
                made = max((measured[maker].end for maker in self.inputs[action]), default=start)
                ready_at[action] = free, made
                free = measured[action].end
        return ready_at

    def run(self, seconds: SecondsOf, delay: SecondsOf = lambda action: 0.0) -> Timeline:
        """Return the timeline of the passes with other durations and delays.

        Each pass starts ``delay`` seconds after its rank is free and its inputs are made, and takes
        ``seconds``.
        """
        passes = [(r, action) for r, row in enumerate(self.schedule.compute_rows) for action in row]
        late = [delay(action) for _, action in passes]
        taken = [wait + seconds(action) for wait, (_, action) in zip(late, passes, strict=True)]
        ready, ends = self._graph.longest_paths(taken)
        events = (
            Event(rank, action, start + wait, end)
            for (rank, action), start, wait, end in zip(passes, ready, late, ends, strict=True)
        )
        return Timeline(self.schedule, tuple(events))


def _of_pairs(inputs: Inputs, schedule: Schedule) -> Inputs:
    """Return the ``inputs`` of passes, changed for overlapped passes, which run as one.

    Each of the two needs the inputs of both, and the output of the forward pass is available only
    when the backward pass has ended.
    """
    ends = {overlapped.forward: overlapped.backward for overlapped in schedule.pairs}
    moved = {a: tuple(ends.get(maker, maker) for maker in makers) for a, makers in inputs.items()}
    for forward, backward in schedule.pairs:
        moved[forward] = tuple(dict.fromkeys((*moved[forward], *moved[backward])))
        moved[backward] = (forward,)
    return moved


def _makers(action: Action, placement: Placement) -> Iterator[Action]:
    """Yield the passes that may make the inputs of ``action``, over messages and collectives."""
    lane = RULES[action.kind].lane
    ends = [action]
    if lane is Lane.RECEIVE:
        ends.append(partner_of(action, placement))
    elif lane is Lane.COLLECTIVE:
        ends = [action._replace(stage=stages[0]) for stages in placement.stages_of]
    for need in (need for end in ends for _, needs in needed(end, placement) for need in needs):
        if is_compute(need):
            yield need
        else:
            yield from _makers(need, placement)
