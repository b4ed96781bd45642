"""Floor of a comparison: the difference of a run from itself, and differences beyond it.

Kernels on a GPU may sum in a different order each time. The difference of a tensor from itself is
measured once, and a second measurement would be close but not equal, so up to twice the floor still
counts as within it. A tensor may by chance be equal in one pair of runs: then the median tensor's
floor applies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from megatron_ext.recordings.run_recording import RunRecording, Tensor
from megatron_ext.recordings.ulps import Difference, bits_difference

CHANCE = 2.0  # largest factor between the noise of one pair of runs and that of another pair
# Largest factor between the differences that two other orders of sums make. Slices split each sum
# over tokens, and reversed microbatches reorder only the sum over microbatches.
ORDERS = 32.0


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a tensor between two runs.

    Attributes:
        found: difference in numbers; None if the types or shapes of the two tensors differ.
        why: text on how types or shapes differ, in that case.
    """

    found: Difference | None
    why: str = ""

    @property
    def relative(self) -> float:
        return self.found.relative if self.found is not None else math.inf

    def __bool__(self) -> bool:
        return self.found is None or bool(self.found)


def exceeds(found: float, floor: float, usual: float, times: float = CHANCE) -> bool:
    """Return whether the relative difference ``found`` of a tensor exceeds ``times`` its floor.

    Args:
        found: relative difference of the tensor between runs A and B. NaN exceeds every floor.
        floor: its relative difference between A and a second run of A.
        usual: floor of the other tensors of its kind, which counts if it is larger.
    """
    return not found <= times * max(floor, usual)


def compare_tensors(a: RunRecording, b: RunRecording) -> dict[Tensor, TensorDifference]:
    """Return the difference of each tensor that both runs have after the last iteration."""
    return {tensor: _compare(a, b, tensor) for tensor in a.tensors if tensor in b.tensors}


def _compare(a: RunRecording, b: RunRecording, tensor: Tensor) -> TensorDifference:
    dtype, bits = a.full_tensor(tensor)
    other_dtype, other = b.full_tensor(tensor)
    if dtype != other_dtype:
        return TensorDifference(None, f"{dtype} and {other_dtype}")
    if bits.shape != other.shape:
        return TensorDifference(None, f"shape {bits.shape} and {other.shape}")
    return TensorDifference(bits_difference(bits, other, dtype))


def usual(differences: Mapping[Tensor, TensorDifference]) -> float:
    """Return the median of the relative differences of tensors; 0 without any tensor."""
    return median([d.relative for d in differences.values()] or [0.0])
