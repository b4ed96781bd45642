"""The spreads of predicted ratios of steps, computed from the measurements. A test compares them
with the numbers in planner/spread.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_ext.planner.spread import ComparisonKind
from scripts.evaluation.gains import LAYERS_MOVED, StepRatio, jobs, over_1f1b, overlaps
from scripts.evaluation.predictions import PredictedStep


def measured_errors(
    found: Sequence[PredictedStep], sizes: Sequence[float]
) -> Mapping[ComparisonKind, list[float]]:
    """Return the errors of the predicted ratios of two measured steps, by what differs in them.

    Args:
        sizes: predicted ratios divided by measured ones, of pairs of steps with other sizes.
    """
    zero_bubble = [one for one in found if one.step.job.startswith("zb ")]
    over = over_1f1b(found)
    return {
        ComparisonKind.SCHEDULES: [
            StepRatio(a, b).error
            for rows in jobs(zero_bubble).values()
            for a, b in itertools.combinations(rows, 2)
        ],
        ComparisonKind.LAYOUTS: [ratio.error for ratio in over[LAYERS_MOVED]],
        ComparisonKind.VOCABULARY: [
            ratio.error for name, pairs in over.items() if "vocab" in name for ratio in pairs
        ],
        ComparisonKind.SIZES: [ratio - 1 for ratio in sizes],
        ComparisonKind.OVERLAP: [
            ratio.error for name, ratio in overlaps(found) if "experts" in name
        ],
    }


def spread_of(errors: Sequence[float]) -> float:
    """Return the share that 90 % of ``errors`` do not exceed in size."""
    return float(np.percentile(np.abs(errors), 90))
