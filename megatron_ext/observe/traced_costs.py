"""Measured costs of traced steps of Megatron's own schedules, for `what_if`.

To predict another schedule from a trace, the costs of passes and messages are needed. A pass costs
the median seconds of its kind on its stage. For messages, the time from the end of the pass that
made an input to the start of the pass that waited for it is measured; the cost of a message is the
first quartile of these times.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_ext.observe.replay import Replay
from megatron_ext.observe.trace import TracedStep
from megatron_ext.observe.what_if import TracedCosts
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.timeline import Timeline

# The seconds of a message are the first quartile of its delays, as longer delays contain other
# waiting.
_QUICK = 4


def traced_costs(steps: Sequence[TracedStep]) -> TracedCosts | None:
    """Return measured costs of Megatron's own schedule, as medians over the traced ``steps``.

    None if the steps are not Megatron's own.
    """
    latest = steps[-1]
    if latest.weight_shares is None:
        return None
    assert latest.executor is not None
    schedule = latest.measured.schedule
    schedule = replace(schedule, rows=schedule.compute_rows)
    alike = [
        step.measured for step in steps if step.measured.schedule.compute_rows == schedule.rows
    ]
    seconds = defaultdict(list)
    for event in (event for step in alike for row in step.compute for event in row):
        seconds[event.action.kind, event.action.stage].append(event.end - event.start)
    medians = {key: statistics.median(figures) for key, figures in seconds.items()}
    stages = range(schedule.placement.stages)
    delays = sorted(delay for step in alike for delay in _delays(step))
    return TracedCosts(
        schedule,
        microbatches=schedule.microbatches,
        forward=tuple(medians[Kind.FORWARD, stage] for stage in stages),
        backward=tuple(medians[Kind.FULL_BACKWARD, stage] for stage in stages),
        weight_shares=latest.weight_shares,
        executor=latest.executor,
        message=max(delays[len(delays) // _QUICK], 0.0) if delays else 0.0,
        parts=latest.parts,
    )


def _delays(step: Timeline) -> Iterator[float]:
    """Yield the seconds that passes waited for messages from other ranks in a traced step.

    The seconds count from the end of the pass that made the input to the start of the waiting pass.
    """
    replay = Replay(step.schedule)
    events = {event.action: event for row in step.compute for event in row}
    for action, (free, made) in replay.ready(events).items():
        makers = [events[maker] for maker in replay.inputs[action]]
        if made > free and all(maker.rank != events[action].rank for maker in makers):
            yield events[action].start - made
