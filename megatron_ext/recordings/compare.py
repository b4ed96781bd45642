"""Comparison of two recordings: whether they have the same numbers, and the first difference.

Where kernels vary, two runs of one command differ too, so "equal" is not enough. With recordings of
A, B, A a second time, and A with its sums in another order, four verdicts are possible: B has the
same bits, differs from A no more than A's second run does, no more than A with its sums in another
order does, or more than that. The first difference says where to look.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ext.recordings.comparable import argument_differences, refusal
from megatron_ext.recordings.floor import (
    CHANCE,
    ORDERS,
    TensorDifference,
    compare_tensors,
    exceeds,
    usual,
)
from megatron_ext.recordings.piece import STATES
from megatron_ext.recordings.run_recording import (
    Copies,
    Iteration,
    RunRecording,
    Tensor,
    digest_of,
    readable_name,
)
from megatron_ext.recordings.scalars import (
    NORM,
    ComparedScalar,
    compared_scalars,
    floor_of,
    standstill,
)

# Relative size of the last bit of a single-precision loss: a sum with another order of terms may
# differ by it.
_LAST_BIT = 2.0**-23
# Largest difference in ulps between two norms whose squares were summed in different orders.
NORM_ULPS = 8


class ParityVerdict(enum.StrEnum):
    """Verdict on the numbers of two runs A and B.

    Attributes:
        SAME: they are the same to the last bit.
        WITHIN_THE_FLOOR: B differs from A by no more than A differs from a second run of itself.
        WITHIN_ANOTHER_ORDER: B differs from A by no more than A differs from a run of itself with
            its sums in another order.
        DIFFER: B differs from A by more than that.
    """

    SAME = "same"
    WITHIN_THE_FLOOR = "within the floor"
    WITHIN_ANOTHER_ORDER = "within what another order of sums gives"
    DIFFER = "differ"


@dataclass(frozen=True)
class First:
    """First difference between two runs.

    Attributes:
        iteration: iteration after which they differ; the one before the first if they start
            differently.
        what: name of the loss, the norm or the tensor that differs.
        ranks: ranks of run B that have the tensor.
        others: number of other tensors that differ after that iteration.
        of: number of all tensors.
    """

    iteration: int
    what: str
    ranks: tuple[int, ...] = ()
    others: int = 0
    of: int = 0


@dataclass(frozen=True)
class RunComparison:
    """Comparison of run B with run A, and of A with a second run of itself.

    The floor is the difference of A from its second run, which chance alone explains.

    Attributes:
        verdict: the result.
        first: first difference beyond the floor; None if there is none.
        figures: losses and gradient norms of A and B.
        floor_figures: losses and gradient norms of A and its second run; None without a second run.
        tensors: differences of each tensor that both A and B have after the last iteration.
        floor: differences of the tensors of A and its second run.
        beyond: tensors that differ by more than the floor, the largest difference first.
        missing: tensors that only one of A and B has.
        copies: tensors whose copies on ranks of B differ from one another.
        norm_alone: whether only gradient norms differ, and only as sums in another order do.
        clipping: value of --clip-grad if such a norm differs in the iteration of the first
            difference and gradients are clipped; else 0.
        settings: arguments in which A and B differ.
        holders: for each tensor beyond the floor, the ranks of B that have a part of it.
        start: iteration from which both runs started.
        reordered: differences of the tensors of A and a run of A with its sums in another order, a
            second floor for differences beyond the first; None if there is no such run.
        reordered_figures: losses and gradient norms of these two runs.
    """

    verdict: ParityVerdict
    first: First | None
    figures: Sequence[ComparedScalar]
    floor_figures: Sequence[ComparedScalar] | None
    tensors: Mapping[Tensor, TensorDifference]
    floor: Mapping[Tensor, TensorDifference]
    beyond: Sequence[Tensor]
    missing: Sequence[Tensor]
    copies: Sequence[Tensor]
    norm_alone: bool
    clipping: float
    settings: Mapping[str, tuple[object, object]]
    holders: Mapping[Tensor, tuple[int, ...]]
    start: int
    reordered: Mapping[Tensor, TensorDifference] | None = None
    reordered_figures: Sequence[ComparedScalar] = ()


def compare_runs(
    a: RunRecording,
    b: RunRecording,
    second: RunRecording | None = None,
    reordered: RunRecording | None = None,
) -> RunComparison:
    """Compare the recording of run ``b`` with that of run ``a``.

    Args:
        second: recording of a second run of ``a``'s command, which differs from the first by chance
            alone: the floor of the comparison.
        reordered: recording of ``a``'s command with its sums in another order, for the second
            floor.

    Raises:
        ValueError: the runs cannot be compared, a run's loss or gradients do not change, or a
            tensor was not recorded completely.
    """
    found = _compare_with_floor(a, b, second)
    if reordered is None:
        return found
    _check(a, reordered, None)
    tensors, figures = compare_tensors(a, reordered), compared_scalars(a, reordered)
    found = replace(found, reordered=tensors, reordered_figures=figures)
    if found.verdict is not ParityVerdict.DIFFER:
        return found
    beyond = _beyond_the_floor(found.tensors, tensors, ORDERS)
    others = [
        figure
        for figure in _figures_beyond(found.figures, figures, ORDERS, _LAST_BIT)
        if not _is_reordered_sum(figure)
    ]
    if beyond or others or found.missing or found.copies:
        return replace(
            found, beyond=beyond, holders={tensor: _holders(b, tensor) for tensor in beyond}
        )
    within = ParityVerdict.WITHIN_ANOTHER_ORDER
    return replace(found, verdict=within, beyond=(), holders={}, first=None, clipping=0.0)


def _compare_with_floor(
    a: RunRecording, b: RunRecording, second: RunRecording | None
) -> RunComparison:
    _check(a, b, second)
    found, floor = compare_tensors(a, b), compare_tensors(a, second) if second else {}
    figures, floor_figures = compared_scalars(a, b), compared_scalars(a, second) if second else None
    missing = sorted(_missing(a, b))
    copies = sorted(_unequal_copies(b) - _unequal_copies(a))
    is_noisy = any(floor.values()) or any(floor_figures or ())
    far = _beyond_the_floor(found, floor)
    figures_beyond = _figures_beyond(figures, floor_figures or ())
    others = [figure for figure in figures_beyond if figure.name != NORM]
    differs_in_tensors = bool(far or missing or copies)
    if not is_noisy:
        differs_in_tensors |= any(_differing(x, y) for x, y in _pairs(a, b))
    norm_alone = (
        bool(figures_beyond)
        and not others
        and not differs_in_tensors
        and all(map(_is_reordered_sum, figures_beyond))
    )
    first = None
    if (figures_beyond or differs_in_tensors) and not norm_alone:
        first = _first_with_floor(a, figures_beyond, far) if is_noisy else _first(a, b, figures)
    verdict = _verdict(
        figures, found, bool(figures_beyond or differs_in_tensors) and not norm_alone
    )
    return RunComparison(
        verdict=verdict,
        first=first,
        figures=figures,
        floor_figures=floor_figures,
        tensors=found,
        floor=floor,
        beyond=far,
        missing=missing,
        copies=copies,
        norm_alone=norm_alone,
        clipping=_clipping(a, first, figures),
        settings=argument_differences(a.arguments, b.arguments),
        start=a.first,
        holders={tensor: _holders(b, tensor) for tensor in far},
    )


def _check(a: RunRecording, b: RunRecording, second: RunRecording | None) -> None:
    for other in (b, second):
        if other is None:
            continue
        both = f"{a.folder} and {other.folder}"
        if why := refusal(a.arguments, other.arguments, both):
            raise ValueError(why)
        spans = [(run.first, len(run.trained)) for run in (a, other)]
        if spans[0] != spans[1]:
            of = [f"{n} iterations from {first} on" for first, n in spans]
            raise ValueError(
                f"{both} cannot be compared: {of[0]}, and {of[1]}; record both from one "
                f"checkpoint, with the same --iterations"
            )
    for run in (a, b):
        if why := standstill(run):
            raise ValueError(f"the recording {run.folder} is of a run that shows nothing: {why}")


def _verdict(
    figures: Sequence[ComparedScalar], found: Mapping[Tensor, TensorDifference], differs: bool
) -> ParityVerdict:
    if differs:
        return ParityVerdict.DIFFER
    losses = any(figure for figure in figures if figure.name != NORM)
    return ParityVerdict.WITHIN_THE_FLOOR if losses or any(found.values()) else ParityVerdict.SAME


def _beyond_the_floor(
    found: Mapping[Tensor, TensorDifference],
    floor: Mapping[Tensor, TensorDifference],
    times: float = CHANCE,
) -> list[Tensor]:
    """Return tensors whose difference exceeds ``times`` the floor, the largest difference first.

    Args:
        found: differences of the tensors of runs A and B.
        floor: differences of the tensors of A and a second run of A.
    """
    kinds = {
        kind: usual({t: d for t, d in floor.items() if kind_of(t[0]) == kind})
        for kind in ("parameters", "optimizer states")
    }
    beyond = [
        tensor
        for tensor, difference in found.items()
        if difference
        and exceeds(difference.relative, _floor(floor, tensor), kinds[kind_of(tensor[0])], times)
    ]
    return sorted(beyond, key=lambda tensor: -found[tensor].relative)


def _floor(floor: Mapping[Tensor, TensorDifference], tensor: Tensor) -> float:
    return floor[tensor].relative if tensor in floor else 0.0


def kind_of(name: str) -> str:
    """Return the kind of the tensor with this ``name`` in torch_dist, as a table shows it."""
    return "optimizer states" if name.startswith(STATES) else "parameters"


def _figures_beyond(
    figures: Sequence[ComparedScalar],
    floor_figures: Sequence[ComparedScalar],
    times: float = CHANCE,
    usual: float = 0.0,
) -> list[ComparedScalar]:
    """Return the losses and norms of two runs whose difference exceeds ``times`` the floor.

    Args:
        floor_figures: losses and norms of A and its second run, whose largest relative difference
            is the floor of each name.
        usual: relative difference that counts in place of a smaller floor.
    """
    floor = floor_of(floor_figures)
    return (
        [
            figure
            for figure in figures
            if figure and exceeds(figure.relative, floor[figure.name], usual, times)
        ]
        if floor_figures
        else [figure for figure in figures if figure]
    )


def _pairs(a: RunRecording, b: RunRecording) -> Iterator[tuple[Iteration, Iteration]]:
    return zip(a.iterations, b.iterations, strict=True)


def _differing(a: Iteration, b: Iteration) -> list[Tensor]:
    """Return the tensors of both runs whose digests differ after an iteration.

    A tensor of which one run has a smaller part is not compared here, but after the last iteration.
    """
    different = []
    for tensor in a.tensors.keys() & b.tensors.keys():
        (digest, size), (other, other_size) = (digest_of(x.tensors[tensor]) for x in (a, b))
        if size == other_size and digest != other:
            different.append(tensor)
    return sorted(different, key=_in_order)


def _missing(a: RunRecording, b: RunRecording) -> set[Tensor]:
    """Return the tensors that only one of two runs has after the last iteration.

    Optimizer states that only one run has after an earlier iteration are among them. Parameters are
    not compared there, because they have no digests while ranks still gather them.
    """
    missing = set(a.tensors.keys() ^ b.tensors.keys())
    for one, other in _pairs(a, b):
        missing |= {t for t in one.tensors.keys() ^ other.tensors.keys() if t[0].startswith(STATES)}
    return missing


def _in_order(tensor: Tensor) -> tuple[object, ...]:
    """Return a sort key for tensors: parameters before optimizer states, then by layer and name."""
    name, index = tensor
    return kind_of(name) != "parameters", index, name


def _first(a: RunRecording, b: RunRecording, figures: Sequence[ComparedScalar]) -> First:
    """Return the first difference between A and B, for an A that equals its second run.

    A norm that differs only as a sum in another order is ignored: some tensor of the same iteration
    or of a later one is the difference.
    """
    for one, other in _pairs(a, b):
        for figure in figures:
            if figure.iteration != one.number or one is a.iterations[0]:
                continue
            if figure and not _is_reordered_sum(figure):
                return First(one.number, figure.name)
        if different := _differing(one, other):
            tensor = different[0]
            return First(
                one.number,
                readable_name(tensor),
                _ranks(one.tensors[tensor], other.tensors[tensor]),
                len(different) - 1,
                len(one.tensors.keys() & other.tensors.keys()),
            )
    return First(a.trained[-1].number, "the tensors after the last iteration")


def _is_reordered_sum(figure: ComparedScalar) -> bool:
    """Return whether ``figure`` is a norm that differs only as its sum in another order would."""
    is_number = math.isfinite(figure.a) and math.isfinite(figure.b)
    return bool(figure) and is_number and figure.name == NORM and figure.ulps <= NORM_ULPS


def _first_with_floor(
    a: RunRecording, beyond: Sequence[ComparedScalar], far: Sequence[Tensor]
) -> First:
    """Return the first difference between A and B, for an A that differs from its second run.

    It is the first loss or norm beyond the floor, or else the tensor with the largest difference at
    the end.

    Args:
        beyond: losses and norms beyond the floor.
        far: tensors beyond the floor, the largest difference first.
    """
    others = [figure for figure in beyond if not (far and _is_reordered_sum(figure))]
    if others:
        return First(others[0].iteration, others[0].name)
    last = a.trained[-1].number
    return First(last, readable_name(far[0]) if far else "tensors that only one of them has")


def _ranks(a: Copies, b: Copies) -> tuple[int, ...]:
    """Return the ranks of run B that have a piece of a tensor with another digest than in run A.

    If A has the tensor in other pieces, these are all ranks with any piece.
    """
    alike = a.keys() == b.keys()
    ranks = {
        rank
        for place, held in b.items()
        for rank, digest in held
        if not alike or digest not in {expected for _, expected in a[place]}
    }
    return tuple(sorted(ranks))


def _unequal_copies(run: RunRecording) -> set[Tensor]:
    return {
        tensor
        for iteration in run.iterations
        for tensor, copies in iteration.tensors.items()
        if any(len({digest for _, digest in held}) > 1 for held in copies.values())
    }


def _holders(run: RunRecording, tensor: Tensor) -> tuple[int, ...]:
    copies = run.iterations[-1].tensors.get(tensor, {})
    return tuple(sorted({rank for held in copies.values() for rank, _ in held}))


def _clipping(a: RunRecording, first: First | None, figures: Sequence[ComparedScalar]) -> float:
    """Return the value of --clip-grad if clipping spreads a norm's difference; else 0.

    A norm that is summed in another order differs in its last bits. Clipping by such a norm changes
    all gradients.
    """
    threshold = float(a.arguments.get("clip_grad") or 0)
    if first is None or not threshold:
        return 0.0
    norms = [f for f in figures if f.iteration == first.iteration and _is_reordered_sum(f)]
    is_clipped = any(max(norm.a, norm.b) > threshold for norm in norms)
    return threshold if is_clipped else 0.0
