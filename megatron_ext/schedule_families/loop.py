"""Families with several chunks a rank in a loop: chunk c of rank r is stage c*p + r.

The microbatches are cut into groups, and each group goes through all chunks in turn, forward from
the first chunk and backward from the last. This gives each rank an order of forwards and one of
backwards. A family determines how many forwards a rank is ahead of its backwards. The last group
may be incomplete.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import batched

from megatron_ext.compile.program.pass_graph import pass_graph
from megatron_ext.compile.registry import Maturity, family
from megatron_ext.schedule.action import Action, Kind, Rows, token_share
from megatron_ext.schedule.placement import loop
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.best import best_known, best_schedule
from megatron_ext.search.weight_gradient_filling import (
    TimedOrder,
    fill_best,
    least_memory,
    memory_of,
)


@family(
    "interleaved",
    loop,
    source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2",
    maturity=Maturity.STABLE,
    takes_slices=True,
    aliases=("ScheduleInterleaved1F1B", "Interleaved1F1B", "slimpipe"),
    keeps_pairs=True,
)
def interleaved(problem: Problem, *, group: int = 0) -> Schedule:
    """Megatron's interleaved 1F1B, action for action.

    ``group`` (by default p) is the microbatch group size per virtual stage. On p ranks with v
    chunks: bubble (p-1)(F+I+W)/v; peak (v-1)*group + 2p-1 chunks, or all m microbatches.

    With k slices of the sequence the groups consist of slices: bubble (p-1)(F+I+W)/(vk). It is then
    Seq1F1B-I (Sun et al. 2024, arXiv:2406.03488), whose original warm-up makes ranks wait for one
    another if k > p. If k is a multiple of p, it is SlimPipe (Li et al. 2025, arXiv:2504.14519),
    with one microbatch a group.

    With p = 2, m = 2:

    ::

        0  0F0 0F1 2F0 2F1 .   .   2B0 =   .   2B1 =   0B0 =   0B1 =
        1  .   1F0 1F1 3F0 3B0 =   3F1 3B1 =   1B0 =   1B1 =   .   .
    """
    return Schedule(
        "interleaved", problem.placement, _interleaved("interleaved", problem, group, _FULL)
    )


@family(
    "breadth-first",
    loop,
    source="Lamy-Poirier 2023, arXiv:2211.05953",
    takes_slices=True,
    aliases=("ScheduleLoopedBFS", "LoopedBFS", "layered-accumulation", "modular-pipeline"),
)
def breadth_first(problem: Problem) -> Schedule:
    """All microbatches go through a model chunk before any goes through the next chunk.

    The parameters of a chunk are therefore gathered, and its gradients reduced, only once. On p
    ranks with v chunks and m microbatches: bubble (p-1)(F+I+W)/v, peak m microbatches.

    With p = 2, m = 2:

    ::

        0  0F0 0F1 2F0 2F1 .   .   .   2B0 =   2B1 =   0B0 =   0B1 =
        1  .   1F0 1F1 3F0 3F1 3B0 =   3B1 =   1B0 =   1B1 =   .   .
    """
    order = _units(problem, problem.pieces, _FULL)
    return Schedule("breadth-first", problem.placement, order)


@family(
    "units",
    loop,
    source="Tang et al. 2024, arXiv:2402.03791 (ZeroPP), from its abstract",
    maturity=Maturity.LABORATORY,
    splits_backward=True,
    uses_costs=True,
    takes_slices=True,
)
def units(problem: Problem, *, u: int = 0) -> Schedule:
    """Breadth-first in units of ``u`` microbatches, with W split off and placed in the gaps.

    A chunk's parameters are gathered once for each unit and direction. A unit holds u microbatches,
    and W of the previous unit may wait, so the peak is at most 2u microbatches, and within the
    memory limit. u = 0 stands for p, or p/k with k slices of the sequence. With a limit it stands
    for the fastest of three sizes: the largest that fits, two thirds of it, and half of it.

    With p = 2, m = 2:

    ::

        0  0F0 0F1 2F0 2F1 .   .   2I0 2I1 0I0 0I1 2W0 2W1 0W0 0W1
        1  .   1F0 1F1 3F0 3F1 3I0 3I1 1I0 1I1 3W0 3W1 1W0 1W1 .
    """
    if u < 0:
        raise ValueError(
            f"units: u is {u}; write the number of microbatches of a unit, or 0 for the default"
        )
    p, m, slices = problem.ranks, problem.microbatches, problem.slices.count
    tried = [u or -(-p // slices)] if u or problem.memory_limit is None else _within(problem)
    filled = [
        _filled("units", problem, _units(problem, slices * min(number, m), _SPLIT), 2 * number)
        for number in tried
    ]
    best = min(filled, key=lambda order: order.order(problem.options.steps_overlap))
    return Schedule("units", problem.placement, best.rows)


def _within(problem: Problem) -> list[int]:
    """Return the sizes of a unit, in microbatches, to try within the memory limit, largest
    first."""
    memory = memory_of(problem)
    most = problem.microbatches
    for rank, stages in enumerate(problem.placement.stages_of):
        need = sum(map(memory.of, stages))
        while most > 1 and not memory.fits(rank, most * need):
            most -= 1
    return sorted({most, max(2 * most // 3, 1), max(most // 2, 1)}, reverse=True)


def _units(problem: Problem, u: int, backward: Kind) -> Rows:
    """Return the rows of a breadth-first schedule in units of ``u`` microbatches or slices.

    A unit runs its microbatches through all chunks of a rank, and back.
    """
    orders = problem.orders
    units_of = list(zip(*(batched(order, u) for order in orders), strict=True))
    return tuple(
        tuple(
            Action(stage, kind, k)
            for there, back in units_of
            for kind, directed, ks in (
                # Forward passes run from the first chunk to the last.
                (Kind.FORWARD, stages, there),
                # Backward passes run from the last chunk to the first.
                (backward, stages[::-1], back),
            )
            for stage in directed
            for k in ks
        )
        for stages in problem.placement.stages_of
    )


@family(
    "interleaved-zb",
    loop,
    source="Narayanan et al. 2021, arXiv:2104.04473, with W as in Qi et al. 2024, arXiv:2401.10241",
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    takes_slices=True,
    aliases=("ScheduleInterleavedZeroBubble", "InterleavedZeroBubble"),
    keeps_pairs=True,
)
def interleaved_zb(problem: Problem, *, group: int = 0) -> Schedule:
    """The order of `interleaved` (1F1B) with W split off and deferred into the bubbles.

    Every rank may hold as much memory for deferred W as the first rank's peak. At equal costs and m
    >= 2p microbatches on p ranks with v chunks, the makespan's bubble is (p-1)F/v.

    With p = 3, m = 3:

    ::

        0  0F0 0F1 0F2 3F0 3F1 3F2 .   .   3I0 3W0 3I1 3W1 3I2 0I0 0I1 0I2 3W2 0W0 0W1 0W2
        1  .   1F0 1F1 1F2 4F0 4F1 4F2 4I0 4W0 4I1 4W1 4I2 1I0 1I1 1I2 4W2 1W0 1W1 1W2 .
        2  .   .   2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 2I0 2I1 2I2 5W0 5W1 5W2 2W0 2W1 2W2
    """
    order = _interleaved("interleaved-zb", problem, group, _SPLIT)
    return _with_weight_gradients("interleaved-zb", problem, order)


@family(
    "gis",
    loop,
    source="Wan et al. 2025, arXiv:2503.01328 (PipeOffload), section 3.1",
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    takes_slices=True,
)
def gis(problem: Problem, *, group: int = 0) -> Schedule:
    """Generalized interleaved schedule: fewer warm-up passes than 1F1B's, and W fill the bubbles.

    Rank r of p, with v chunks, is (v-1)*group + p - r passes ahead. Groups have g = ``group`` (by
    default p) microbatches, from ceil(p/2) to p: peak (v-1)g + p chunks. Bubble (p-1)(F+I-W)/v; the
    paper defers no W and has (p-1)(F+I)/v. At equal costs and with m a multiple of g, a smaller g
    adds (p-g)(v-1)(F+I-W)/v.

    With p = 3, m = 3:

    ::

        0  0F0 0F1 0F2 3F0 3F1 3F2 .   .   3I0 3W0 3I1 3W1 3I2 0I0 0I1 0I2 3W2 0W0 0W1 0W2
        1  .   1F0 1F1 1F2 4F0 4F1 .   4I0 4F2 4I1 4W0 4I2 1I0 1I1 1I2 4W1 4W2 1W0 1W1 1W2
        2  .   .   2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 2I0 2I1 2I2 5W0 5W1 5W2 2W0 2W1 2W2
    """
    return _gis("gis", problem, group or _rounded_to_microbatches(problem, problem.ranks))


@family(
    "gis-h",
    loop,
    source="Wan et al. 2025, arXiv:2503.01328 (PipeOffload), section 3.2",
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    takes_slices=True,
)
def gis_h(problem: Problem) -> Schedule:
    """The interleaved schedule `gis` with the smallest groups, ceil(p/2) of p: the least memory.

    With p = 3, m = 3:

    ::

        0  0F0 0F1 .   3F0 3F1 0F2 .   .   3I0 3W0 3F2 3I1 3W1 0I0 0W0 0I1 3I2 0W1 3W2 0I2 0W2
        1  .   1F0 1F1 .   4F0 4F1 .   4I0 1F2 4I1 4W0 4F2 1I0 4W1 1I1 4I2 1W0 1W1 1I2 4W2 1W2
        2  .   .   2F0 2F1 .   5F0 5I0 5F1 5I1 2F2 2I0 5W0 5F2 2I1 5I2 5W1 2W0 2I2 2W1 5W2 2W2
    """
    return _gis("gis-h", problem, _rounded_to_microbatches(problem, -(-problem.ranks // 2)))


@family(
    "loop-auto",
    loop,
    source="ours; loops are those of Narayanan et al. 2021, arXiv:2104.04473",
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    searches=True,
    steps_overlap=True,
    fits_recompute=True,
    takes_slices=True,
    at_once=partial(best_known, "loop-auto"),
    keeps_pairs=True,
)
def loop_auto(problem: Problem) -> Schedule:
    """Searched schedule on a loop: the least makespan within the memory limit, with W split off.

    Without a limit, memory is limited to p microbatches. With post-validation the least span is
    searched. The passes are in no groups, so any number of microbatches is possible.

    Raises:
        ValueError: nothing on this placement fits into the limit.
    """
    return best_schedule("loop-auto", problem)


def _gis(name: str, problem: Problem, group: int) -> Schedule:
    p, most = problem.ranks, _rounded_to_microbatches(problem, problem.ranks)
    if not -(-p // 2) <= group <= most:
        raise ValueError(
            f"{name}: group is {group}, and with {p} pipeline ranks a group has {-(-p // 2)} to "
            f"{most} microbatches; write {name}:group={most} (or 0, which is the same)"
        )
    _check_group(name, problem, group, most)
    before = (problem.placement.chunks - 1) * group + problem.slices.count - 1
    ahead = [before + p - rank for rank in range(p)]
    return _with_weight_gradients(name, problem, _rows(name, problem, group, ahead, _SPLIT))


_FULL, _SPLIT = Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT


def _interleaved(name: str, problem: Problem, group: int, backward: Kind) -> Rows:
    p, slices = problem.ranks, problem.slices.count
    least = _rounded_to_microbatches(problem, p)
    group = group or least
    if group < p:
        raise ValueError(
            f"{name}: group is {group}, fewer {_pieces(problem)} than the {p} pipeline ranks, so "
            f"a rank would wait for its own chunks; write group={least} or more"
        )
    _check_group(name, problem, group, least)
    group = min(group, problem.pieces)
    # Each rank starts with the forward passes of Megatron's warm-up and one more. The backward
    # passes of a sliced microbatch start with its last slice.
    before = (problem.placement.chunks - 1) * group + slices - 1
    ahead = [before + 2 * (p - rank) - 1 for rank in range(p)]
    return _rows(name, problem, group, ahead, backward)


def _rounded_to_microbatches(problem: Problem, passes: int) -> int:
    """Return the number of ``passes``, one a slice, rounded up to whole microbatches."""
    slices = problem.slices.count
    return slices * -(-passes // slices)


def _check_group(name: str, problem: Problem, group: int, alternative: int) -> None:
    slices = problem.slices.count
    if group % slices:
        raise ValueError(
            f"{name}: group is {group}, and microbatches have {slices} slices: backward passes "
            "begin with a microbatch's last slice, so a group has to hold whole microbatches; "
            f"write group={alternative} or another multiple of {slices}"
        )


def _pieces(problem: Problem) -> str:
    return "microbatches" if problem.slices.count == 1 else "slices"


def _rows(name: str, problem: Problem, group: int, ahead: list[int], backward: Kind) -> Rows:
    """Return rows that alternate one forward and one backward pass in interleaved order.

    Rank r runs ``ahead[r]`` forward passes before its first backward pass.
    """
    there, back = (list(batched(o, group)) for o in (problem.forwards, problem.backwards))
    rows = []
    for stages, lead in zip(problem.placement.stages_of, ahead, strict=True):
        forwards = [Action(s, Kind.FORWARD, k) for ks in there for s in stages for k in ks]
        backwards = [Action(s, backward, k) for ks in back for s in reversed(stages) for k in ks]
        row = forwards[:lead]  # warm-up
        # After the warm-up a backward pass alternates with a forward pass; at the end (the
        # cool-down) no forward passes are left.
        for n, action in enumerate(backwards):
            row += [action, *forwards[lead + n : lead + n + 1]]
        rows.append(tuple(row))
    if pass_graph(Schedule(name, problem.placement, tuple(rows)), problem.costs).stuck:
        raise ValueError(
            f"{name}: {problem.pieces} {_pieces(problem)} in groups of {group} leave a last group "
            f"of {problem.pieces % group}, in which {problem.ranks} pipeline ranks would deadlock; "
            f"write a number of {_pieces(problem)} that is a multiple of {group}, or another group "
            f"size"
        )
    return tuple(rows)


def _with_weight_gradients(name: str, problem: Problem, order: Rows) -> Schedule:
    """Return the ranks' ``order`` of F and I with W filled into the gaps.

    Every rank may hold as much memory as the rank that needs most without deferred W.
    """
    ahead = 0.0
    for row in order:
        held = 0.0
        for action in row:
            tokens = token_share(action.microbatch)
            held += tokens if action.kind is Kind.FORWARD else -tokens
            ahead = max(ahead, held)
    filled = _filled(name, problem, order, ahead / problem.placement.chunks)
    return Schedule(name, problem.placement, filled.rows)


def _filled(name: str, problem: Problem, order: Rows, microbatches: float) -> TimedOrder:
    """Return the ranks' ``order`` of F and I with W filled into the gaps, within memory.

    Each rank may hold ``microbatches``, or what the order needs without deferred W if that is more.
    The memory limit is respected.

    Raises:
        ValueError: the order itself does not fit into the limit.
    """
    memory = memory_of(problem, microbatches)
    least = least_memory(order, memory)
    limit = problem.memory_limit
    if limit is not None:
        within = memory_of(problem)
        for rank in range(problem.ranks):
            if not within.fits(rank, least[rank]):
                raise ValueError(
                    f"{name}: the order of rank {rank} does not fit into the memory limit of "
                    f"{limit}; the least feasible limit for it is {limit.at_least(max(least))}"
                )
    # A limit in bytes is raised to what the order needs, since the chunks that a rank stores most
    # of may be larger than its other chunks.
    memory = replace(memory, allowed=tuple(map(max, memory.allowed, least)))
    return fill_best(order, problem, memory, by_span=problem.options.steps_overlap)
