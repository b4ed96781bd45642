"""Families that were published with two copies of the model, folded onto one.

Chimera and BitPipe hold every stage twice, and microbatches enter from both ends of the pipeline.
Rank p-1-r does the same as rank r with the copies exchanged, so ranks r < p/2 alone are a schedule
of one copy with half the microbatches, and the others are its second data-parallel replica
(`compile.two_copies`). The families here are these halves: p ranks and m microbatches in the papers
are p/2 ranks and m/2 microbatches here, with data parallelism doubled.
"""

from __future__ import annotations

from operator import itemgetter

from megatron_ext.compile.registry import Maturity, family
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Placement, v, wave
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


@family(
    "chimera",
    v,
    source="Li and Hoefler 2021, arXiv:2107.06925",
    maturity=Maturity.LABORATORY,
    takes_slices=True,
)
def chimera(problem: Problem) -> Schedule:
    """Chimera, folded to one model copy on a V: units of p microbatches, one after the other.

    On p ranks: bubble (p-1)(B + (m/p-1)(B-F)) if the number of microbatches m is a multiple of p
    and B >= F; peak p microbatches.

    With p = 2, m = 2:

    ::

        0  .   1F0 2F0 1F1 2F1 .   2B0 =   1B0 =   2B1 =   1B1 =   .   .
        1  0F0 0F1 .   3F0 3B0 =   3F1 3B1 =   .   0B0 =   .   .   0B1 =
    """
    return _units("chimera", problem)


def two_waves(ranks: int) -> Placement:
    """Return the placement of two V's one after the other, with 4 chunks on each of ``ranks``."""
    return wave(ranks, waves=2)


@family(
    "bitpipe",
    two_waves,
    source="Wu et al. 2024, arXiv:2410.19367",
    maturity=Maturity.LABORATORY,
    takes_slices=True,
)
def bitpipe(problem: Problem) -> Schedule:
    """BitPipe, folded to one model copy: Chimera's order on two V's, four chunks a rank.

    On p ranks the bubble is half of Chimera's, and the peak is p microbatches.

    With p = 2, m = 2:

    ::

        0  .   1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 .   6B0 =   5B0 =   6B1 =   5B1 =   2B0 =   1B0 =   2B1 =   1B1 =   .   .
        1  0F0 0F1 .   3F0 4F0 3F1 4F1 7F0 7B0 =   7F1 7B1 =   .   4B0 =   3B0 =   4B1 =   3B1 =   0B0 =   .   .   0B1 =
    """  # noqa: E501
    return _units("bitpipe", problem)


def _units(name: str, problem: Problem) -> Schedule:
    """Return the folded Chimera schedule: each pass of a microbatch has a time slot.

    A microbatch goes through all stages and back, a slot each. In a unit of p microbatches the next
    microbatch starts two slots later. The next unit starts when a rank has had all passes of one
    unit. No two passes of a rank share a slot, so the slots give their order.

    Slices of a sequence follow the same rule as microbatches, but their backward passes are delayed
    by the slices behind them in the microbatch, and a unit has whole microbatches. Passes that
    share a slot then do not depend on one another.
    """
    placement, p, slices = problem.placement, problem.ranks, problem.slices.count
    of_unit = slices * -(-p // slices)
    slots = 2 * placement.chunks * of_unit
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for n, (there, back) in enumerate(zip(*problem.orders, strict=True)):
        unit, place = divmod(n, of_unit)
        start = unit * slots + 2 * place  # slot of F on the first stage
        end = start + 2 * (placement.stages + slices - 1) - 1  # slot of B on the first stage
        for stage, rank in enumerate(placement.rank_of):
            rows[rank].append((start + stage, Action(stage, Kind.FORWARD, there)))
            rows[rank].append((end - stage, Action(stage, Kind.FULL_BACKWARD, back)))
    in_turn = tuple(tuple(action for _, action in sorted(row, key=itemgetter(0))) for row in rows)
    return Schedule(name, placement, in_turn)
