"""Sum of the gradients of tied embeddings whose two copies are on one rank.

If the copies are on two ranks, Megatron all-reduces the gradients over the embedding group. On a V
that group has one rank, and Megatron does nothing; if multi-token prediction has a stage of its
own, the group has two ranks, and on the rank with two copies Megatron reduces only the first
stage's gradient.

Not patched: `_allreduce_position_embedding_grads` (one stage has position embeddings).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.adapter.tied import tied_weights
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect, wrap

_MODULE = "megatron.core.distributed.finalize_model_grads"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that sums the gradients of the embedding's two copies on one rank."""
    return (
        wrap(
            f"{_MODULE}:_allreduce_word_embedding_grads",
            sum_gradients,
            reason="a V has both copies of the embedding on one rank, which sums their gradients",
            digests={"0.18, 0.19, 0.20": "9ea2c48019e5"},
        ),
        expect(
            f"{_MODULE}:_get_main_grad_attr",
            reason="this function tells which attribute of a parameter holds its gradient",
            signature="(param)",
        ),
    )


def sum_gradients(
    original: Callable[..., None], model: list[torch.nn.Module], *args: Any, **kwargs: Any
) -> None:
    """Set the gradients of a tied embedding's two copies to their sum.

    If multi-token prediction has a third copy on another rank, Megatron adds its gradient to the
    sum.
    """
    gradients = [_gradient(weight) for weight in tied_weights(model) or ()]
    # A frozen copy of the embedding has the gradient None.
    copies = [gradient for gradient in gradients if gradient is not None]
    if len(copies) == 2:
        first, last = copies
        first.add_(last)
    original(model, *args, **kwargs)
    if len(copies) == 2:
        last.copy_(first)


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor | None:
    return getattr(weight, "main_grad", weight.grad)
