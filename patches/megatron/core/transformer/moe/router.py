"""Auxiliary losses of routers over whole microbatches, although these run slice by slice.

A router's loss compares the tokens of all experts in a microbatch. In a slice it would balance the
experts of that slice alone, which trains another model (`adapter.slices.router_losses`).

Not patched: the choice of experts and the counts for their biases, which are per token; the global
loss, quantile balancing and Sinkhorn's, which are refused.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.router_losses import (
    attach,
    balance,
    count_first,
    making,
    z_loss,
)
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_LOSSES = "megatron.core.transformer.moe.moe_utils"
_REASON = "a router's losses in a slice are those of the whole microbatch"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that sum a router's auxiliary losses over all slices of a microbatch."""
    return (
        *(
            wrap(f"{_ROUTER}.{name}", making(name), reason=_REASON)
            for name in ("_apply_aux_loss", "_apply_seq_aux_loss", "apply_z_loss")
        ),
        wrap(f"{_ROUTER}.routing", count_first, reason=_REASON),
        wrap(
            f"{_ROUTER}.attach_and_log_load_balancing_loss",
            attach,
            reason=_REASON,
            signature="(self, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, "
            "needs_dp_avg=True, valid_token_count=None)",
        ),
        wrap(
            f"{_LOSSES}:switch_load_balancing_loss_func",
            balance,
            reason=_REASON,
            signature="(probs, tokens_per_expert, total_num_tokens, topk, num_experts, "
            "moe_aux_loss_coeff, fused=False, padding_mask=None)",
        ),
        wrap(
            f"{_LOSSES}:z_loss_func",
            z_loss,
            reason=_REASON,
            signature="(logits, z_loss_coeff, padding_mask=None)",
        ),
    )
