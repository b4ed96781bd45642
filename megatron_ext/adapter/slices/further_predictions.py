"""Multi-token prediction for one slice of a sequence, which looks at tokens of later slices.

Megatron's functions shift tokens, positions, labels and masks, so they get these tensors, and the
borders of a pack's documents, for the whole sequence. Losses are tensors of the whole sequence too,
with 0 for tokens of other slices. Embeddings and predictions are computed for the slice alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from megatron_ext.adapter.slices.model_call import whole_call
from megatron_ext.runtime.slices.running_slice import Span, running_slice


def predict(original: Callable[..., Any], block: Any, *, embedding: Any, **kwargs: Any) -> Any:
    """Run MultiTokenPredictionBlock's forward for the running slice of a sequence, if any."""
    if (span := running_slice.span) is not None:
        kwargs |= whole_call.arguments("input_ids", "position_ids")
        embedding = partial(_look_up, embedding, span)
    return original(block, embedding=embedding, **kwargs)


def embed(original: Callable[..., Any], layer: Any, **kwargs: Any) -> Any:
    """Shift tokens by MultiTokenPredictionLayer's _get_embeddings, for a slice of a sequence.

    Tokens are shifted within each document of a packed sequence.
    """
    if running_slice.span is not None:
        kwargs |= whole_call.arguments("packed_seq_params")
    return original(layer, **kwargs)


def make_losses(
    original: Callable[..., Tensor],
    *,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    **kwargs: Any,
) -> Tensor:
    """Run Megatron's process_mtp_loss for the running slice of a sequence, if there is one."""
    compute = compute_language_model_loss
    if (span := running_slice.span) is not None:
        kwargs |= whole_call.arguments("labels", "loss_mask", "input_ids", "packed_seq_params")
        compute = partial(_compare, compute, span)
    return original(compute_language_model_loss=compute, **kwargs)


def count_right(
    original: Callable[..., Any],
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Count accepted multi-token predictions of the running slice of a sequence, if there is one.

    Wraps Megatron's _compute_mtp_acceptance_counts.
    """
    if (span := running_slice.span) is not None:
        labels, mask = (tensor[:, span.begin : span.end] for tensor in (labels, mask))
    return original(logits, labels, mask, *args, **kwargs)


def _look_up(embedding: Any, span: Span, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    sliced = (tensor[..., span.begin : span.end] for tensor in (input_ids, position_ids))
    return embedding(**dict(zip(("input_ids", "position_ids"), sliced, strict=True)))


def _compare(
    compute: Callable[[Tensor, Tensor], Tensor], span: Span, labels: Tensor, logits: Tensor
) -> Tensor:
    """Return losses [b, s] of whole sequences, which are 0 outside the slice of ``logits``."""
    losses = compute(labels[:, span.begin : span.end], logits)
    return pad(losses, (span.begin, span.length - span.end))
