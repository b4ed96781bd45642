"""Sparse attention (DSA) of a slice's queries to keys of all tokens up to its end.

Not patched: the choice among these keys, the attention to the chosen keys, and the indexer's loss,
which all follow the rows and the mask that they get; layers that share one choice of keys, which
are refused with recompute.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.sparse_attention import (
    attend_sparsely,
    index,
    knows_places,
    mask_by_places,
)
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_FOLDER = "megatron.core.transformer.experimental_attention_variant"
_REASON = "a slice of a sequence attends to the slices before it"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches by which a slice's queries choose among keys of earlier slices.

    There are none if Megatron's sparse attention cannot be told where the queries begin.
    """
    if not knows_places():
        return ()
    return (
        wrap(f"{_FOLDER}.dsa:DSAttention.forward", attend_sparsely, reason=_REASON),
        wrap(f"{_FOLDER}.dsa:DSAIndexer.forward_before_topk", index, reason=_REASON),
        wrap(
            f"{_FOLDER}.dsa_masking:build_dsattention_forward_mask",
            mask_by_places,
            reason="the first query of a slice is not at the first key of its sequence",
        ),
    )
