"""Comparison as text and table rows.

The verdict comes first, one sentence a line. The tables behind it show only what differs by more
than it should, the largest difference first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.base.words import counted
from megatron_ext.recordings.compare import ParityVerdict, RunComparison, kind_of
from megatron_ext.recordings.floor import TensorDifference
from megatron_ext.recordings.run_recording import Tensor, readable_name
from megatron_ext.recordings.scalars import NORM, ComparedScalar

SHOWN = 10  # most different tensors that are listed
_KINDS = ("parameters", "optimizer states")


def rows(found: RunComparison) -> list[dict[str, str]]:
    """Return the rows of a table on what was compared of two runs, and how much differs."""
    lines = []
    for name, is_norm in (("losses", False), ("gradient norms", True)):
        row = {"": name, "compared": _number(_of(found.figures, is_norm))}
        if found.floor_figures is not None:
            row["A against itself"] = _figures(_of(found.floor_figures, is_norm))
        if found.reordered is not None:
            row["A against A reordered"] = _figures(_of(found.reordered_figures, is_norm))
        lines.append(row | {"B against A": _figures(_of(found.figures, is_norm))})
    for kind in _KINDS:
        tensors = _of_kind(found.tensors, kind)
        row = {"": kind, "compared": counted(len(tensors), "tensor")}
        if found.floor_figures is not None:
            row["A against itself"] = _tensors(_of_kind(found.floor, kind))
        if found.reordered is not None:
            row["A against A reordered"] = _tensors(_of_kind(found.reordered, kind))
        lines.append(row | {"B against A": _tensors(tensors)})
    return lines


def _of(figures: Sequence[ComparedScalar], is_norm: bool) -> list[ComparedScalar]:
    return [figure for figure in figures if (figure.name == NORM) == is_norm]


def _of_kind(tensors: Mapping[Tensor, TensorDifference], kind: str) -> list[TensorDifference]:
    return [difference for (name, _), difference in tensors.items() if kind_of(name) == kind]


def _number(figures: Sequence[ComparedScalar]) -> str:
    return counted(len({figure.iteration for figure in figures}), "iteration")


def _figures(figures: Sequence[ComparedScalar]) -> str:
    different = [figure for figure in figures if figure]
    if not different:
        return "the same"
    most = max(different, key=lambda figure: figure.relative)
    return f"{len(different)} of {len(figures)} differ, by up to {counted(most.ulps, 'ulp')}"


def _tensors(tensors: Sequence[TensorDifference]) -> str:
    different = [difference for difference in tensors if difference]
    if not different:
        return "the same" if tensors else "none"
    most = max(difference.relative for difference in different)
    text = f"{len(different)} of {len(tensors)} differ, by up to {most:.2g} of a tensor's norm"
    of_numbers = [difference.found for difference in different if difference.found is not None]
    if any(difference.crosses_zero for difference in of_numbers):
        return text
    ulps = max((difference.ulps for difference in of_numbers), default=0)
    return f"{text}, {counted(ulps, 'ulp')}"


def tensor_rows(found: RunComparison) -> list[dict[str, str]]:
    """Return the rows of a table on the tensors beyond the floor, the largest difference first."""
    return [
        {
            "tensor": readable_name(tensor),
            "ranks of B": " ".join(map(str, found.holders[tensor])),
            "elements": _elements(found.tensors[tensor]),
            "ulps": _ulps(found.tensors[tensor]),
            "norm": _norm(found.tensors[tensor]),
            "relative": f"{found.tensors[tensor].relative:.2g}",
            "of A itself": _floor(found.floor, tensor),
            "of A reordered": _floor(found.reordered or {}, tensor),
        }
        for tensor in found.beyond[:SHOWN]
    ]


def _floor(floor: Mapping[Tensor, TensorDifference], tensor: Tensor) -> str:
    return f"{floor[tensor].relative:.2g}" if tensor in floor else ""


def _elements(difference: TensorDifference) -> str:
    if difference.found is None:
        return difference.why
    text = f"{difference.found.differ} of {difference.found.elements}"
    return text + (f", {difference.found.nans} nan in one of them" if difference.found.nans else "")


def _ulps(difference: TensorDifference) -> str:
    found = difference.found
    return "" if found is None or found.crosses_zero else str(found.ulps)


def _norm(difference: TensorDifference) -> str:
    return "" if difference.found is None else f"{difference.found.norm:.2g}"


def verdict_text(found: RunComparison) -> list[str]:
    """Return the sentences of the result of the comparison, each for a line."""
    if found.verdict is ParityVerdict.SAME:
        what = "losses, parameters and optimizer states"
        lines = [f"the same to the last bit: {what}" + _norms_too(found)]
    elif found.verdict is ParityVerdict.WITHIN_THE_FLOOR:
        lines = ["within the floor: B differs from A by no more than A differs from itself"]
    elif found.verdict is ParityVerdict.WITHIN_ANOTHER_ORDER:
        lines = [
            "within what another order of sums gives: B differs from A by no more than A does from "
            "itself with the microbatches of each step reversed"
        ]
    elif found.reordered is not None:
        lines = ["different: B differs from A by more than another order of sums gives"]
    else:
        lines = ["different: B differs from A by more than A differs from itself"]
        if found.floor_figures is None and found.reordered is None:
            lines = ["different: B differs from A"]
    if found.norm_alone:
        lines.append(
            "gradient norms differ because ranks add them in another order; they are only logged, "
            "and nothing that was trained depends on them"
        )
    lines += _differences(found)
    lines.append("gradients are not compared directly, only their norm and the optimizer's results")
    is_told = found.verdict in (ParityVerdict.SAME, ParityVerdict.WITHIN_ANOTHER_ORDER)
    if found.floor_figures is None and not is_told:
        lines.append(
            "the difference of A from itself is not known: record A once more, and name that "
            "recording's folder with --second DIR"
        )
    return lines


def _norms_too(found: RunComparison) -> str:
    return "" if found.norm_alone else ", and gradient norms"


def _differences(found: RunComparison) -> list[str]:
    lines = []
    if found.first is not None:
        lines.append(f"first difference: {_first(found)}")
        if found.first.iteration == found.start:
            lines.append("the runs start from other weights: give both commands the same --load")
    if found.clipping:
        lines.append(
            f"the gradient norm is a sum over ranks, added in another order; --clip-grad "
            f"{found.clipping:g} scales all gradients by the norm, and then everything differs in "
            f"its last bits. Give both commands --clip-grad 0 to compare without clipping"
        )
    if found.copies:
        lines.append(
            f"ranks of B hold copies that differ, of "
            f"{counted(len(found.copies), 'tensor')}: {_some(found.copies)}"
        )
    if found.missing:
        lines.append(
            f"only one of A and B has {counted(len(found.missing), 'tensor')}: "
            f"{_some(found.missing)}"
        )
    return lines


def _first(found: RunComparison) -> str:
    first = found.first
    assert first is not None
    text = f"iteration {first.iteration}, {first.what}"
    for figure in found.figures:
        if (figure.iteration, figure.name) == (first.iteration, first.what):
            difference = f"{counted(figure.ulps, 'ulp')}, {figure.relative:.2g} of it"
            text += f" ({figure.a!r} and {figure.b!r}: {difference})"
    if first.ranks:
        word = "rank" if len(first.ranks) == 1 else "ranks"
        text += f" on {word} {' '.join(map(str, first.ranks))}"
    if first.others:
        text += f", and {first.others} other of {first.of} tensors"
    return text


def _some(tensors: Sequence[Tensor]) -> str:
    names = [readable_name(tensor) for tensor in tensors[:3]]
    return ", ".join(names) + (" and others" if len(tensors) > len(names) else "")


def settings(found: RunComparison) -> str | None:
    """Return a line on the arguments in which the two commands differ; None if there are none."""
    if not found.settings:
        return None
    return ", ".join(f"{name} ({a} and {b})" for name, (a, b) in found.settings.items())


def as_data(found: RunComparison) -> dict[str, Any]:
    """Return the comparison as an object for JSON."""
    first = found.first
    return {
        "verdict": found.verdict.value,
        "first_difference": None
        if first is None
        else {"iteration": first.iteration, "what": first.what, "ranks": list(first.ranks)},
        "iterations": [_figure(figure) for figure in found.figures],
        "floor_is_known": found.floor_figures is not None,
        "norm_alone": found.norm_alone,
        "clipping": found.clipping,
        "compared": {kind: len(_of_kind(found.tensors, kind)) for kind in _KINDS},
        "tensors_beyond_the_floor": [_tensor(found, tensor) for tensor in found.beyond],
        "tensors_that_differ": [
            _tensor(found, t) for t, difference in found.tensors.items() if difference
        ],
        "unequal_copies": [readable_name(tensor) for tensor in found.copies],
        "only_in_one": [readable_name(tensor) for tensor in found.missing],
        "settings": {name: list(values) for name, values in found.settings.items()},
    }


def _figure(figure: ComparedScalar) -> dict[str, Any]:
    values = {"a": _finite(figure.a), "b": _finite(figure.b), "ulps": figure.ulps}
    return {"iteration": figure.iteration, "name": figure.name, **values}


def _tensor(found: RunComparison, tensor: Tensor) -> dict[str, Any]:
    difference = found.tensors[tensor]
    data: dict[str, Any] = {
        "tensor": readable_name(tensor),
        "relative": _finite(difference.relative),
    }
    if difference.found is None:
        return data | {"why": difference.why}
    data |= {"elements": difference.found.elements, "differ": difference.found.differ}
    data |= {"ulps": difference.found.ulps, "nans": difference.found.nans}
    data |= {"norm": difference.found.norm, "crosses_zero": difference.found.crosses_zero}
    if tensor in found.floor:
        data["floor"] = _finite(found.floor[tensor].relative)
    if found.reordered is not None and tensor in found.reordered:
        data["floor_of_order"] = _finite(found.reordered[tensor].relative)
    return data


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
