"""Weights of samples from a file, by which microbatches are ordered and dealt.

What a microbatch costs may not follow from its tokens, as with images. A user can give a weight for
each sample instead. A file may have more weights than fit into memory, so each weight is read when
it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.config import flag
from megatron_ext.features.arrangement.adapter.document_lengths import Ids


def weights_in(file: Path) -> NDArray[Any]:
    """Return the weights of samples in ``file``, mapped into memory and read when needed.

    Raises:
        ValueError: ``file`` is no numpy array of numbers in one dimension.
    """
    name = f"{flag('microbatch_weights')} {file}"
    try:
        weights: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as a numpy array: {error}") from error
    if not isinstance(weights, np.ndarray) or weights.dtype.kind not in "iuf":
        raise ValueError(f"{name} is no array of numbers: save one with numpy.save")
    if weights.ndim != 1:
        raise ValueError(f"{name} has shape {weights.shape}: write one number for each sample")
    return weights


class SampleWeights:
    """Weights of the training's samples, which stay in their ``file`` until they are needed.

    ``samples`` is the number of samples in the training data.

    Raises:
        ValueError: as `weights_in`, or ``file`` has too few weights.
    """

    def __init__(self, file: Path, samples: int) -> None:
        self._name = f"{flag('microbatch_weights')} {file}"
        self._weights = weights_in(file)
        if len(self._weights) < samples:
            raise ValueError(
                f"{self._name} has shape {self._weights.shape}, and the training data has "
                f"{samples:,} samples: write one weight for each"
            )

    def __call__(self, samples: Ids) -> NDArray[np.float64]:
        """Return the weights of ``samples``.

        Raises ValueError if a weight is no positive number.
        """
        weights = np.asarray(self._weights[samples], dtype=np.float64)
        wrong = ~(np.isfinite(weights) & (weights > 0))
        if wrong.any():
            raise ValueError(
                f"{self._name}: the weight of sample {samples[wrong][0]} is {weights[wrong][0]}, "
                "and every weight must be a positive number"
            )
        return weights
