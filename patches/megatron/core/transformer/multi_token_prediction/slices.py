"""Multi-token prediction for one slice, from the shifted tokens of the whole sequence.

Not patched: the layers, whose attention is patched in its own file; the weighting and logging of
losses, in which the losses of all slices add up.
"""

from __future__ import annotations

from megatron.core.transformer import multi_token_prediction

from megatron_ext.adapter.slices.further_predictions import (
    count_right,
    embed,
    make_losses,
    predict,
)
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_MODULE = multi_token_prediction.__name__
_COUNT = "_compute_mtp_acceptance_counts"  # a function of Megatron 0.19 and later
_REASON = "a slice predicts tokens of the slices after it"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches by which multi-token prediction reads tokens of the next slices."""
    counts: tuple[Patch, ...] = ()
    if hasattr(multi_token_prediction, _COUNT):
        counts = (wrap(f"{_MODULE}:{_COUNT}", count_right, reason=_REASON),)
    return (
        wrap(f"{_MODULE}:MultiTokenPredictionBlock.forward", predict, reason=_REASON),
        wrap(f"{_MODULE}:MultiTokenPredictionLayer._get_embeddings", embed, reason=_REASON),
        wrap(f"{_MODULE}:process_mtp_loss", make_losses, reason=_REASON),
        *counts,
    )
