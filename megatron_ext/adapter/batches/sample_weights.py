"""Weights of samples from a file, by which microbatches are ordered and dealt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ext.adapter.batches.document_lengths import Ids
from megatron_ext.config import flag


class SampleWeights:
    """Weights of ``samples`` samples, which stay in their ``file`` until they are needed.

    Raises:
        ValueError: ``file`` is no numpy array of a dimension, or has too few weights.
    """

    def __init__(self, file: Path, samples: int) -> None:
        self._name = f"{flag('microbatch_weights')} {file}"
        try:
            self._weights = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._name} is no numpy array: {error}") from error
        shape = np.shape(self._weights)
        if len(shape) != 1 or shape[0] < samples:
            raise ValueError(
                f"{self._name} has shape {shape}, and the training data has {samples:,} samples: "
                f"write one weight for each"
            )

    def __call__(self, samples: Ids) -> NDArray[np.float64]:
        """Return the weights of ``samples``. Raises ValueError if one is no positive number."""
        weights = np.asarray(self._weights[samples], dtype=np.float64)
        wrong = ~(np.isfinite(weights) & (weights > 0))
        if wrong.any():
            raise ValueError(
                f"{self._name}: the weight of sample {samples[wrong][0]} is {weights[wrong][0]}, "
                f"and no positive number"
            )
        return weights
