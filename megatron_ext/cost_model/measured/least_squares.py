"""Ratios of measured to expected costs of parts, fitted by least squares to measured sums of parts.

Whole passes are measured, but costs of layers are needed. Sums with the same proportions of parts
leave some ratios undetermined: these stay close to the ratio common to all parts, so that rounding
alone gives no part a cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Singular values below this share of the largest one are taken for noise.
_LEAST_SINGULAR_VALUE = 0.02
# A model part belongs to a direction that no measured sum depends on if its entry in the direction
# is at least this large.
_TOGETHER = 0.05
# Least share of a part in some measured sum; the sums tell nothing about smaller parts.
_LEAST_SHARE = 0.01
# Largest factor between a part's scale and the scale of all parts; a larger factor shows that the
# sums are noisy.
_FARTHEST = 4.0


@dataclass(frozen=True)
class Fit:
    """Ratios of measured to expected costs of a model's parts, fitted to measured sums.

    Attributes:
        scales: ratio of measured to expected, for each part.
        alike: groups of parts whose scales the measured sums do not determine one by one, because
            the parts have the same proportions in all sums.
    """

    scales: tuple[float, ...]
    alike: tuple[tuple[int, ...], ...] = ()


def fit_scales(expected: Array, measured: Array) -> Fit:
    """Fit a scale for each part so that sums of parts come closest, in proportion, to measured
    sums.

    Scales that the sums do not determine one by one (`Fit.alike`) differ as little as the sums
    allow, so these parts keep their expected proportions. Parts too small to be seen keep their
    expected proportion to all others.

    Args:
        expected: expected value of each part (column) in each sum (row), of shape (sums, parts).
        measured: measured value of each sum.
    """
    parts = expected.shape[1]
    rows = (measured > 0) & expected.any(axis=1)
    if not rows.any():
        return Fit((0.0 if expected.any() else 1.0,) * parts)
    shares = expected[rows] / measured[rows, None]
    overall = 1 / float(shares.sum(axis=1).mean())
    scales = np.full(parts, overall)
    free = [part for part in range(parts) if overall * shares[:, part].max() > _LEAST_SHARE]
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
    """Return the least-squares solution, and the groups of parts that it does not determine.

    Among all closest solutions it is the one whose parts differ least within these groups
    (`Fit.alike`).
    """
    sizes = np.linalg.norm(matrix, axis=0)
    _, singular, directions = np.linalg.svd(matrix / sizes)
    rank = int((singular > _LEAST_SINGULAR_VALUE * singular[0]).sum())
    solution: Array = np.linalg.lstsq(matrix / sizes, sums, rcond=_LEAST_SINGULAR_VALUE)[0] / sizes
    if rank == matrix.shape[1]:
        return solution, []
    unseen = directions[rank:].T  # columns: changes of the solution that change no measured sum
    groups = _connected(np.abs(unseen @ unseen.T) > _TOGETHER)
    changes = unseen / sizes[:, None]
    # Matrix of each part's deviation from the mean of its group.
    spread = np.zeros((len(solution), len(solution)))
    for group in groups:
        spread[np.ix_(group, group)] = np.eye(len(group)) - 1 / len(group)
    steps = np.linalg.lstsq(spread @ changes, -spread @ solution, rcond=None)[0]
    return solution + changes @ steps, groups


def _connected(together: NDArray[np.bool_]) -> list[list[int]]:
    """Return the groups of two or more members that are connected in the relation ``together``."""
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
