"""Gains of ordering and dealing microbatches, and of a program for their costs, under the
recommended schedule.

Microbatches of different lengths make ranks wait for the longest. Ordering and dealing them saves
part of that under any schedule, so the gain is computed for the recommended one, on samples of the
job's lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.compile.program.unequal import with_unequal_microbatches
from megatron_ext.planner.candidate import ALIKE
from megatron_ext.planner.verdict import WORTH, Alternative, Written
from megatron_ext.schedule.dealing import MicrobatchOrder
from megatron_ext.schedule.microbatch_costs import BatchSize, MicrobatchLoads
from megatron_ext.search.for_places import judged_for_places

ORDER = ("--pipeline-microbatch-order", MicrobatchOrder.SMALL_ENDS.value)
DEAL = ("--pipeline-deal-microbatches",)
PROGRAM = ("--pipeline-costs", "profile")


@dataclass(frozen=True)
class UnequalGains:
    """Gains of arranging unequal microbatches under one schedule, medians over several steps.

    Attributes:
        schedule: name of the schedule.
        steps: number of steps.
        microbatches: number of microbatches on each replica.
        replicas: number of data-parallel replicas, of which the slowest counts.
        expert_replicas: number of these that share experts, and wait for one another in each pass.
        seconds: a step with the microbatches in order of arrival.
        order: the share of that step that ordering the microbatches saves.
        deal: the share that ordering and dealing them to the replicas saves; None for one replica.
        program: the share that a program for their places in the step saves in addition to both;
            None if none can be searched for.
        shared: the share that computing each prompt once saves of a step that computes it for each
            of its answers, in order of arrival; None if the lengths have no prompts, or are padded.
        flags: flags for the largest gain that is worth it; () if nothing is.
        refused: reason why flags that would save more cannot be written; "" if they can.
    """

    schedule: str
    steps: int
    microbatches: int
    replicas: int
    expert_replicas: int
    seconds: float
    order: float
    deal: float | None
    program: float | None
    shared: float | None
    flags: tuple[str, ...]
    refused: str = ""

    @property
    def most(self) -> float:
        """The largest share of a step's time that one of the three arrangements saves."""
        return max(self.order, self.deal or 0.0, self.program or 0.0)


def unequal_gains(
    loads: MicrobatchLoads,
    batch: BatchSize,
    taken: Alternative,
    written: Written,
    refusal_of: Callable[[Written], str | None],
) -> UnequalGains:
    """Return the gains of arranging unequal microbatches under the recommended schedule.

    Of the three arrangements, the one with the fewest flags that saves within `ALIKE` of the most
    is written. It has to save `WORTH` of a step.

    Args:
        loads: relative costs of the microbatches.
        batch: as ``loads`` were read with.
        taken: the recommended alternative.
        written: flags for ``taken``.
        refusal_of: function that returns why a training with some flags could not start, or None.
    """
    candidate = taken.candidate
    program = candidate.program()
    costs, replicas = loads.costs(program.problem.costs), batch.replicas
    unequal, _ = judged_for_places(program, costs, replicas, expert_replicas=batch.expert_replicas)
    outside = taken.seconds - candidate.step
    seconds = unequal.arrival + outside
    is_dealt = replicas > 1
    order, deal, profile = (
        None if makespan is None else 1 - (makespan + outside) / seconds
        for makespan in (unequal.ordered, unequal.dealt, unequal.profile)
    )
    assert order is not None
    shared = None
    if loads.unshared is not None:
        factors = loads.unshared.costs(program.problem.costs)
        unshared = with_unequal_microbatches(
            program, factors, replicas, expert_replicas=batch.expert_replicas
        )
        shared = 1 - seconds / (unshared.arrival + outside)
    dealt = (*ORDER, *(DEAL if is_dealt else ()))
    parts = {(): 0.0, ORDER: order, dealt: deal, (*dealt, *PROGRAM): profile}
    saved = {flags: share for flags, share in parts.items() if share is not None}
    refused, flags = "", _fewest(saved)
    while flags:
        why = refusal_of(Written(written.added, written.dropped, flags))
        if why is None:
            break
        refused = refused or why
        saved = {fewer: share for fewer, share in saved.items() if len(fewer) < len(flags)}
        flags = _fewest(saved)
    return UnequalGains(
        schedule=candidate.schedule,
        steps=unequal.steps,
        microbatches=batch.microbatches,
        replicas=replicas,
        expert_replicas=batch.expert_replicas,
        seconds=seconds,
        order=order,
        deal=deal if is_dealt else None,
        program=profile,
        shared=shared,
        flags=flags,
        refused=refused,
    )


def _fewest(saved: dict[tuple[str, ...], float]) -> tuple[str, ...]:
    """Return the fewest flags that save nearly as much (`ALIKE`) as all flags; () if that is too
    little."""
    most = max(saved.values())
    if most < WORTH:
        return ()
    return min((flags for flags in saved if saved[flags] >= most - ALIKE), key=len)
