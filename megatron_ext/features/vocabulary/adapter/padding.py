"""Padding of a vocabulary that is partitioned over pipeline ranks.

Megatron pads a vocabulary to a multiple of the tensor-parallel ranks, and asserts that the parts
are equal. Here pipeline ranks have parts too, so the multiple is larger.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_ext.features.vocabulary.adapter.vocabulary_rows import check_divisible


def pad_vocabulary(args: Any) -> str | None:
    """Set the padding of the vocabulary to a multiple of 2 x pipeline x tensor-parallel ranks.

    The multiple is that of Yeung et al. 2024.

    Returns:
        A line that tells the padding if it differs from Megatron's; None if it does not.

    Raises:
        ValueError: the vocabulary cannot be sharded.
    """
    ranks = args.pipeline_model_parallel_size
    tensor_parallel = args.tensor_model_parallel_size
    shards = ranks * tensor_parallel
    given = args.padded_vocab_size
    # A padded size that the user or the checkpoint has set is checked, not changed.
    if given is not None:
        check_divisible(given, shards)
        return None
    if args.vocab_size is not None and args.vocab_size < shards:
        raise ValueError(
            f"--vocab-size {args.vocab_size} cannot be split over {shards} ranks (pipeline x "
            f"tensor parallel): drop --pipeline-vocab-parallel"
        )
    before = args.make_vocab_size_divisible_by
    args.make_vocab_size_divisible_by = math.lcm(before, 2 * ranks)
    sizes = [before * tensor_parallel, args.make_vocab_size_divisible_by * tensor_parallel]
    words = "a multiple of "
    if args.vocab_size is not None:
        sizes = [math.ceil(args.vocab_size / size) * size for size in sizes]
        words = ""
    if sizes[0] == sizes[1]:
        return None
    return (
        f"the vocabulary is padded to {words}{sizes[1]}, not {sizes[0]}, so that it divides "
        f"over {ranks} pipeline x {tensor_parallel} tensor parallel ranks"
    )
