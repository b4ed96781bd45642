"""Cost of samples whose attention stays inside documents, from the index of Megatron's dataset.

Every sample has the same number of tokens, so what differs is attention: the sum of the squared
lengths of its documents (``--dataloader-inter-document-masking``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def squared_lengths(dataset: Any, samples: Ids) -> NDArray[np.float64]:
    """Return the sum of the squared document lengths of each of ``samples``, in tokens squared.

    Raises:
        ValueError: the lengths of documents in such a dataset are not known.
    """
    if isinstance(dataset, BlendedDataset):
        return _of_blend(dataset, samples)
    if not isinstance(dataset, GPTDataset):
        raise ValueError(
            "--pipeline-microbatch-order, --pipeline-deal-microbatches: the lengths of the "
            f"documents in samples of a {type(dataset).__name__} are not known; drop the flags, "
            "or order the microbatches in the code that makes them"
        )
    # Megatron maps the dataset into memory when its first sample is read.
    if dataset.shuffle_index is None:
        dataset._query_document_sample_shuffle_indices(0)
    places = dataset.shuffle_index[samples]
    (first, offset), (last, end) = (
        np.asarray(dataset.sample_index[at], dtype=np.int64).T for at in (places, places + 1)
    )
    numbers = last - first + 1  # number of documents of each sample
    starts = np.cumsum(numbers) - numbers
    within = np.arange(numbers.sum()) - np.repeat(starts, numbers)
    documents = dataset.document_index[np.repeat(first, numbers) + within]
    lengths = np.asarray(dataset.dataset.sequence_lengths[documents], dtype=np.int64)
    # The sample contains only a part of its first and of its last document.
    lengths[starts + numbers - 1] = end
    lengths[starts] -= offset
    short = dataset.config.sequence_length - np.add.reduceat(lengths, starts)
    lengths[starts + numbers - 1] += short  # padding counts as a part of the sample's last document
    return np.asarray(np.add.reduceat(lengths.astype(np.float64) ** 2, starts))


def is_packed(dataset: Any) -> bool:
    """Return whether ``dataset`` is one of Megatron-Bridge's packed conversations."""
    return any(kind.__name__ == "GPTSFTPackedDataset" for kind in type(dataset).__mro__)


def packed_squares(dataset: Any, samples: Ids) -> NDArray[np.float64]:
    """Return, for each of ``samples``, the sum of its conversations' squared lengths in tokens.

    ``dataset`` is one of Megatron-Bridge's, whose samples are packs of conversations.
    """
    borders = (np.array(dataset[sample]["seq_boundaries"]) for sample in samples.tolist())
    return np.array([np.square(np.diff(one).astype(np.float64)).sum() for one in borders])


def _of_blend(dataset: Any, samples: Ids) -> NDArray[np.float64]:
    if dataset.dataset_index is None:
        dataset[0]
    of_dataset = np.asarray(dataset.dataset_index[samples])
    inside = np.asarray(dataset.dataset_sample_index[samples])
    squares = np.zeros(len(samples))
    for number in np.unique(of_dataset):
        members = of_dataset == number
        squares[members] = squared_lengths(dataset.datasets[number], inside[members])
    return squares
