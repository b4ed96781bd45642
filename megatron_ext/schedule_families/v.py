"""Families with two chunks a rank in a V: from the last rank to the first and back to the last,
with the loss.

The V's open end, stages 0 and 2p-1, is on the last rank. The papers have it on their first, so
their device i (from 0) is rank p-1-i here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from megatron_ext.compile.registry import Maturity, family
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.best import best_known, best_schedule
from megatron_ext.search.building_block import BuildingBlock, squeeze

_F, _I, _W, _B = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD
_CONTROLLABLE_MEMORY = "Qi et al. 2024, arXiv:2405.15362"
_INTERVAL = 6  # slots of an interval, which has F, I and W of both chunks

Pass = tuple[int, Kind]  # chunk, kind


@family(
    "zb-v",
    v,
    source="Qi et al. 2024, arXiv:2401.10241, section 6",
    maturity=Maturity.STABLE,
    splits_backward=True,
    steps_overlap=True,
    takes_slices=True,
    aliases=("ScheduleZBVZeroBubble", "ZBVZeroBubble"),
    keeps_pairs=True,
)
def zb_v(problem: Problem) -> Schedule:
    """ZB-V: F, I and W of a rank's two chunks alternate; at equal costs no rank idles in between.

    If F, I and W cost the same, the span has no bubble, and the makespan's is (p-1)F/2, as the
    first microbatch has to reach the last of p ranks. Peak memory p microbatches, as 1F1B's. With k
    slices of the sequence, each chunk starts with k-1 more forwards: peak (p+k-1)/k microbatches.

    With p = 2, m = 3:

    ::

        0  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
        1  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
    """
    p, more = problem.ranks, problem.slices.count - 1
    least = 2 * p - 1 + more
    m = _pieces(problem, least)

    def passes(device: int) -> Iterator[Pass]:
        backward_0, backward_1 = [(0, _I), (0, _W)], [(1, _I), (1, _W)]
        # The warm-up runs F of chunk 0, F of both chunks, then F, I and W of chunk 1.
        yield from [(0, _F)] * (2 * (p - device) - 1)
        yield from [(1, _F), (0, _F)] * (device + more)
        yield from [(1, _F), *backward_1] * (p - device)
        # The steady state runs F, I and W of each chunk, at its end without F of chunk 0.
        yield from [(0, _F), *backward_0, (1, _F), *backward_1] * (m - least + device)
        yield from [*backward_0, (1, _F), *backward_1] * (p - device - 1)
        # Backward passes of the ``more`` slices by which the warm-up is longer than without slices.
        yield from [*backward_0, *backward_1] * more
        # The cool-down runs I first, then the W that fill its gaps.
        yield from [(0, _I), (1, _I)] * device
        yield from backward_0 * (p - device)
        yield from [(1, _W)] * device
        yield from [(0, _W)] * device

    return _from_device_passes("zb-v", problem, passes, least)


@family(
    "v-half",
    v,
    source=f"{_CONTROLLABLE_MEMORY}, section 3.2, V-Half",
    maturity=Maturity.STABLE,
    splits_backward=True,
    takes_slices=True,
)
def v_half(problem: Problem) -> Schedule:
    """V-Half: half of 1F1B's memory on a V, with a peak of (p+2)//2 microbatches on p ranks.

    At equal costs the steady phase has no bubble. The first chunk's F and the second's I move along
    the V at two slots a rank, the other passes at one.

    With p = 3, m = 2:

    ::

        0  .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 3I1 2I1 3W1 2W1 .
        1  .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1I0 4I1 4W1 1W0 1I1 1W1 .
        2  0F0 0F1 .   .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   0I1 0W1
    """
    p = problem.ranks
    t = 3 if p % 2 == 0 else 0
    block = {
        _F: _per_stage(p, lambda i: 2 * i, lambda i: 3 * p - i - 2),  # slots of F in chunks 0 and 1
        # Slots of I on the stages of chunk 0, and of chunk 1.
        _I: _per_stage(p, lambda i: 6 * p + t - i - 2, lambda i: 3 * p + t + 2 * i - 1),
    }
    return _from_block("v-half", problem, block, peak=(p + 2) // 2)


@family(
    "v-min",
    v,
    source=f"{_CONTROLLABLE_MEMORY}, section 3.2, V-Min",
    splits_backward=True,
    takes_slices=True,
)
def v_min(problem: Problem) -> Schedule:
    """V-Min: the least memory on a V, with a peak of (p+4)//3 microbatches on p ranks.

    Every pass directly follows the pass that it depends on. If F, I and W differ in cost, each rank
    waits for the slowest kind at every step.

    With p = 4, m = 2:

    ::

        0  .   .   .   3F0 4F0 3F1 4F1 .   .   .   .   4I0 3I0 4W0 3W0 4I1 3I1 4W1 3W1 .   .
        1  .   .   2F0 2F1 .   5F0 .   5F1 .   .   5I0 5W0 .   2I0 5I1 2W0 5W1 2I1 2W1 .   .
        2  .   1F0 1F1 .   .   .   6F0 .   6F1 6I0 6W0 .   6I1 6W1 1I0 1W0 .   .   1I1 1W1 .
        3  0F0 0F1 .   .   .   .   .   7F0 7I0 7W0 7F1 7I1 7W1 .   .   0I0 0W0 .   .   0I1 0W1
    """
    p = problem.ranks
    t = 2 if p % 3 == 0 else 0
    block = {
        _F: _per_stage(p, lambda i: i, lambda i: 2 * p - i - 1),  # F of chunks 0 and 1
        # I of chunks 0 and 1
        _I: _per_stage(p, lambda i: 4 * p + t - i - 1, lambda i: 2 * p + t + i),
    }
    return _from_block("v-min", problem, block, peak=(p + 4) // 3)


@family("1f1b-v", v, source=f"{_CONTROLLABLE_MEMORY}, 1F1B-V", takes_slices=True)
def one_forward_one_backward_v(problem: Problem) -> Schedule:
    """1F1B on a V, backward passes unsplit: two thirds of 1F1B's memory.

    The peak on p ranks is 2p//3 + 1 microbatches. Forwards directly follow one another. So do
    backwards, but after every third there are three more slots; otherwise they would collide with
    the forwards.

    With p = 2, m = 3:

    ::

        0  .   1F0 2F0 1F1 2F1 .   2B0 =   1B0 =   1F2 2F2 2B1 =   1B1 =   2B2 =   1B2 =   .   .
        1  0F0 0F1 0F2 3F0 3B0 =   3F1 3B1 =   .   0B0 =   3F2 3B2 =   .   0B1 =   .   .   0B2 =
    """
    p = problem.ranks
    first = 2 * p + (3 if p % 3 == 0 else 0)
    # Slots by which backward passes are delayed, so that those of the last rank do not collide with
    # its forward passes.
    delayed = (1 - p) % 3

    def backward(stage: int) -> int:
        before = 2 * p - 1 - stage  # number of stages whose backward pass comes earlier
        return first + 2 * before + 3 * ((before + delayed) // 3)

    block = {_F: tuple(range(2 * p)), _B: tuple(map(backward, range(2 * p)))}
    return _from_block("1f1b-v", problem, block, peak=2 * p // 3 + 1)


@family(
    "dualpipe-v",
    v,
    source="DualPipe (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1) cut in half",
    splits_backward=True,
    takes_slices=True,
    aliases=("ScheduleDualPipeV", "DualPipeV"),
    keeps_pairs=True,
)
def dualpipe_v(problem: Problem) -> Schedule:
    """DualPipe-V: F of one chunk alternates with B of the other; W is separate if it fills a gap.

    The peak on p ranks is p + 1/2 microbatches. The original runs a compound of F and B. Here these
    are two passes, and each sends when it is done, not when both are. With k slices of the
    sequence, each chunk starts with k-1 more forwards. The steps are numbered as in DualPipe's
    source (dualpipe.py); its zero bubble (zb) is the split backward.

    With p = 2, m = 3:

    ::

        0  .   1F0 2F0 1F1 2F1 1F2 .   2B0 =   2F2 1B0 =   2B1 =   1B1 =   2I2 1I2 2W2 1W2
        1  0F0 0F1 .   3F0 0F2 3B0 =   3F1 3B1 =   3F2 .   0B0 =   3B2 =   0I1 0W1 0I2 0W2
    """
    p, more = problem.ranks, problem.slices.count - 1
    least = 2 * p + more
    m = _pieces(problem, least)

    def passes(device: int) -> Iterator[Pass]:
        ahead, turns = p - device - 1, device + 1
        cool_down = [(1, _I), (0, _I)] * turns
        split = [*cool_down[turns:], *[(0, _I)] * ahead]
        weights = [(chunk, _W) for chunk, _ in split]
        # DualPipe's step 1: nF0 (n times F of chunk 0).
        yield from [(0, _F)] * (2 * ahead)
        # DualPipe's step 2: nF0F1 (F of both chunks).
        yield from [(0, _F), (1, _F)] * (turns + more)
        # DualPipe's step 3: nB1W1F1, with backward passes split into I and W (zb).
        yield from [(1, _I), (1, _W), (1, _F)] * ahead
        # DualPipe's step 4, the steady state: nF0B1F1B0.
        yield from [(0, _F), (1, _B), (1, _F), (0, _B)] * (m - least + turns)
        # DualPipe's step 5: nB1F1B0 (no F of chunk 0 is left).
        yield from [(1, _B), (1, _F), (0, _B)] * ahead
        # Backward passes of the ``more`` slices by which step 2 is longer than without slices.
        yield from [(1, _B), (0, _B)] * more
        # DualPipe's step 6: nB1B0, the second half with split backward passes (zb).
        yield from [(chunk, _B) for chunk, _ in cool_down[:turns]]
        yield from split[:turns]
        # DualPipe's step 7: nWB0, with split backward passes (zb).
        for weight, backward in zip(weights, split[turns:], strict=False):
            yield from (weight, backward)
        # DualPipe's step 8: nW (the remaining W).
        yield from weights[ahead:]

    return _from_device_passes("dualpipe-v", problem, passes, least)


def _from_device_passes(
    name: str, problem: Problem, passes: Callable[[int], Iterator[Pass]], least: int
) -> Schedule:
    """Return the V schedule whose ``passes`` are given for the paper's devices, in microbatch
    order.

    With fewer than ``least`` microbatches, or slices, it is the schedule of ``least`` without the
    first ones: the warm-up shrinks, and the cool-down, in which W fills the gaps, stays.
    """
    p = problem.ranks
    omitted = _pieces(problem, least) - problem.pieces

    def row(device: int) -> Iterator[Action]:
        done: Counter[tuple[int, Kind]] = Counter()
        for chunk, kind in passes(device):
            covered = [(chunk, part) for part in RULES[kind].covers]
            k = done[covered[0]] - omitted
            done.update(covered)
            if k >= 0:
                order = problem.forwards if kind is _F else problem.backwards
                yield Action(2 * p - 1 - device if chunk else device, kind, order[k])

    rows = tuple(tuple(row(p - 1 - rank)) for rank in range(p))
    return Schedule(name, problem.placement, rows)


def _pieces(problem: Problem, least: int) -> int:
    """Return the number of microbatches (or slices), increased to at least ``least``.

    Slices are added by whole microbatches.
    """
    slices = problem.slices.count
    return problem.pieces + slices * max(-(-(least - problem.pieces) // slices), 0)


def _per_stage(
    p: int, chunk_0: Callable[[int], int], chunk_1: Callable[[int], int]
) -> tuple[int, ...]:
    """Return one number for each stage of a V, given functions of the paper's device number.

    ``chunk_0`` gives the numbers of the first chunks, ``chunk_1`` of the second ones.
    """
    return (*map(chunk_0, range(p)), *map(chunk_1, reversed(range(p))))


def _from_block(
    name: str, problem: Problem, starts: dict[Kind, tuple[int, ...]], peak: int
) -> Schedule:
    """Return the V schedule that repeats a building block, with a peak of at most ``peak``
    microbatches.

    The block, ``starts``, is the slot of each pass of one microbatch. With slices the block is that
    of one slice; its backward pass is later by the distance between the first and the last slice of
    a microbatch.
    """
    slices = problem.slices.count
    later = (slices - 1) * _INTERVAL
    starts = {k: tuple(s + later * (k is not _F) for s in row) for k, row in starts.items()}
    block = BuildingBlock(_INTERVAL, starts)
    if _I in starts:
        block = block.with_weight_gradients(problem.placement)
    passes = block.unroll(problem.pieces)
    numbered = squeeze(passes, problem.placement, 2 * (peak + slices - 1), slices)
    if slices == 1:
        return Schedule(name, problem.placement, numbered)
    rows = tuple(
        tuple(
            a._replace(microbatch=(problem.forwards if a.kind is _F else problem.backwards)[n])
            for a in row
            for n in (a.microbatch,)
        )
        for row in numbered
    )
    return Schedule(name, problem.placement, rows)


@family(
    "v-auto",
    v,
    source="ours; the V is that of Qi et al. 2024, arXiv:2405.15362",
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    searches=True,
    steps_overlap=True,
    fits_recompute=True,
    takes_slices=True,
    keeps_pairs=True,
    at_once=partial(best_known, "v-auto"),
)
def v_auto(problem: Problem) -> Schedule:
    """Searched schedule on a V: the least makespan within the memory limit, with W split off.

    Without a limit, memory is limited to p microbatches on p ranks, as ZB-V needs, or, with slices,
    to as much as 1F1B needs. With post-validation the least span is searched. If recompute has to
    fit into the limit, the search places R too, except with slices.

    Raises:
        ValueError: no V schedule fits into the limit.
    """
    return best_schedule("v-auto", problem)
