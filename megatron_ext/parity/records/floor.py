"""What a run differs by from itself, and what is more than that.

Kernels on a GPU may add in another order each time. How far a tensor then gets from itself is
measured once, and a second measurement would be near it but not the same; so twice of it still
counts as the floor. A tensor may by chance have none in one pair of runs: then the median tensor's
counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from megatron_ext.parity.records.recording import RunRecording, Tensor
from megatron_ext.parity.records.ulps import Difference, difference

_CHANCE = 2.0  # two pairs of runs of one line differ by no more than this factor


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of two runs differs.

    Attributes:
        found: between the runs; None where types or shapes are not the same.
        why: what is not the same then.
    """

    found: Difference | None
    why: str = ""

    @property
    def relative(self) -> float:
        return self.found.relative if self.found is not None else math.inf

    def __bool__(self) -> bool:
        return self.found is None or bool(self.found)


def exceeds(found: float, floor: float, usual: float) -> bool:
    """Whether a relative difference is more than the ``floor`` of what differs, where ``usual`` is
    the floor of others of its kind. NaN is more than anything."""
    return not found <= _CHANCE * max(floor, usual)


def compare_tensors(a: RunRecording, b: RunRecording) -> dict[Tensor, TensorDifference]:
    """Each tensor that both have after the last iteration, compared."""
    return {tensor: _compare(a, b, tensor) for tensor in a.tensors if tensor in b.tensors}


def _compare(a: RunRecording, b: RunRecording, tensor: Tensor) -> TensorDifference:
    dtype, bits = a.whole(tensor)
    other_dtype, other = b.whole(tensor)
    if dtype != other_dtype:
        return TensorDifference(None, f"{dtype} and {other_dtype}")
    if bits.shape != other.shape:
        return TensorDifference(None, f"shape {bits.shape} and {other.shape}")
    return TensorDifference(difference(bits, other, dtype))


def usual(differences: Mapping[Tensor, TensorDifference]) -> float:
    """The median of relative differences; 0 where there is nothing to compare."""
    return median([d.relative for d in differences.values()] or [0.0])
