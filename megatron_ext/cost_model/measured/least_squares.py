"""How much more parts take than was expected, by sums of them that were measured: least squares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_TOLD_APART = 0.02  # of the largest singular value: what is less is noise
_TOGETHER = 0.05  # of a direction that no sum sees: who has less has no part in it
_SEEN = 0.01  # of a sum: a part that is less in all of them is not seen there
_FARTHEST = 4.0  # times the scale of all: what is farther off tells how sums were disturbed


@dataclass(frozen=True)
class Fit:
    """Scales of parts.

    Attributes:
        scales: what was measured over what was expected, of each part.
        alike: parts that no sum tells apart, in groups.
    """

    scales: tuple[float, ...]
    alike: tuple[tuple[int, ...], ...] = ()


def fit_scales(expected: Array, measured: Array) -> Fit:
    """The scales by which sums of parts come closest, in proportion, to those that were measured.

    Parts that no sum tells apart have scales that differ as little as sums allow: they keep the
    proportions that were expected. So does, to all the others, what is too small to be seen.

    Args:
        expected: of each sum (a row) what is expected of each part, (sums, parts).
        measured: each sum.
    """
    parts = expected.shape[1]
    rows = (measured > 0) & expected.any(axis=1)
    if not rows.any():
        return Fit((0.0 if expected.any() else 1.0,) * parts)
    shares = expected[rows] / measured[rows, None]
    overall = 1 / float(shares.sum(axis=1).mean())
    scales = np.full(parts, overall)
    free = [part for part in range(parts) if overall * shares[:, part].max() > _SEEN]
    alike: list[list[int]] = []
    while free:
        fixed = [part for part in range(parts) if part not in free]
        solved, groups = _least_spread(shares[:, free], 1 - shares[:, fixed] @ scales[fixed])
        alike = [[free[part] for part in group] for group in groups]
        ratios = np.maximum(solved / overall, 1e-9)
        off = np.maximum(ratios, 1 / ratios)
        worst = int(off.argmax())
        if off[worst] <= _FARTHEST:
            scales[free] = solved
            break
        scales[free[worst]] *= min(max(float(ratios[worst]), 1 / _FARTHEST), _FARTHEST)
        del free[worst]
    return Fit(tuple(scales.tolist()), tuple(map(tuple, alike)))


def _least_spread(matrix: Array, sums: Array) -> tuple[Array, list[list[int]]]:
    """Of all solutions that come as close the one whose parts differ least within the groups that
    no row tells apart; and these groups."""
    sizes = np.linalg.norm(matrix, axis=0)
    _, singular, directions = np.linalg.svd(matrix / sizes)
    rank = int((singular > _TOLD_APART * singular[0]).sum())
    solution: Array = np.linalg.lstsq(matrix / sizes, sums, rcond=_TOLD_APART)[0] / sizes
    if rank == matrix.shape[1]:
        return solution, []
    unseen = directions[rank:].T  # ways to change it that no row sees, as columns
    groups = _connected(np.abs(unseen @ unseen.T) > _TOGETHER)
    changes = unseen / sizes[:, None]
    spread = np.zeros((len(solution), len(solution)))  # what a part is off its group's mean
    for group in groups:
        spread[np.ix_(group, group)] = np.eye(len(group)) - 1 / len(group)
    steps = np.linalg.lstsq(spread @ changes, -spread @ solution, rcond=None)[0]
    return solution + changes @ steps, groups


def _connected(together: NDArray[np.bool_]) -> list[list[int]]:
    """Groups of two and more, by pairs."""
    groups: list[list[int]] = []
    left = set(range(len(together)))
    while left:
        group = {left.pop()}
        while more := {int(b) for a in group for b in np.flatnonzero(together[a])} - group:
            group |= more
        left -= group
        if len(group) > 1:
            groups.append(sorted(group))
    return groups
