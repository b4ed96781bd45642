"""What a schedule holds in memory, rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_ext.schedule.action import Action
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.schedule import Problem, Schedule, is_compute

Amount = Callable[[Held, int], float]  # of what, on which stage -> how much


def memory_curve(row: tuple[Action, ...], amount: Amount) -> list[float]:
    """What is held during each compute action of ``row``, in the unit of ``amount``.

    An action takes its memory at its start and gives it back at its end. One that does both (I
    turns activations into what W needs, layer by layer) counts at its end only.
    """
    held, curve = 0.0, []
    for action in row:
        rule = RULES[action.kind]
        gained = sum(amount(kind, action.stage) for kind in rule.acquires)
        lost = sum(amount(kind, action.stage) for kind in rule.releases)
        at_once = gained if not lost else 0.0
        if is_compute(action):
            curve.append(held + at_once)
        held += gained - lost
    return curve


def in_microbatches(schedule: Schedule) -> Amount:
    """The zero-bubble papers' measure: 1/v from F to W (or B), the input gradient frees nothing.

    Logits do not count: they are no layer's.
    """
    share = 1 / schedule.placement.chunks
    return lambda held, stage: 0.0 if held is Held.LOGITS else share


def in_bytes(costs: Costs) -> Amount:
    """Bytes, as ``costs`` gives them."""
    held_bytes = costs.held_bytes
    assert held_bytes is not None
    return lambda held, stage: held_bytes[held][stage]


def bytes_for(limit: MemoryLimit, costs: Costs) -> Mapping[Held, tuple[float, ...]]:
    """The bytes that ``costs`` must have for a limit in bytes. Raises ValueError without."""
    if costs.held_bytes is None:
        raise ValueError(
            f"the memory limit is {limit}, but the costs ({costs.origin}) have no "
            f"bytes: give the limit in microbatches, or a costs file with bytes"
        )
    return costs.held_bytes


def leaving_room(limit: MemoryLimit, microbatches: int, problem: Problem) -> MemoryLimit:
    """What ``limit`` leaves when every rank holds so many ``microbatches`` more.

    Raises:
        ValueError: nothing.
    """
    if limit.microbatches is not None:
        least, left = 1.0, limit.microbatches - microbatches
    else:
        assert limit.bytes is not None
        held = bytes_for(limit, problem.costs)
        activation, logits = (
            held[Held.ACTIVATION],
            held.get(Held.LOGITS, (0.0,) * len(problem.placement.rank_of)),
        )
        of_a_microbatch = max(
            sum(activation[stage] + logits[stage] for stage in stages)
            for stages in problem.placement.stages_of
        )
        least, left = of_a_microbatch, limit.bytes - microbatches * of_a_microbatch
    if left < least:
        raise ValueError(
            f"the memory limit is {limit}, and vocabulary parallelism {problem.vocabulary} holds "
            f"{microbatches} more than a schedule alone, which needs room for one; give at least "
            f"{limit.at_least(least + (microbatches * least))}"
        )
    if limit.microbatches is not None:
        return MemoryLimit(microbatches=left)
    return MemoryLimit(bytes=int(left))


def peaks(schedule: Schedule, amount: Amount) -> list[float]:
    """The largest amount each rank holds."""
    return [max(memory_curve(row, amount), default=0.0) for row in schedule.rows]
