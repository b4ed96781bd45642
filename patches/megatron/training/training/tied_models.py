"""Equal initial copies of the embedding in models from a model provider, as from a model builder.

Scripts written for Megatron before 0.19 pass pretrain() a model provider; `get_model` builds these.

Not patched: how a chunk is built, wrapped and moved; train and what it calls.
"""

from __future__ import annotations

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.patches.megatron.training.models.dist_utils import copy_tied_weight


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that makes a tied embedding's two copies on one rank start equal."""
    return (
        wrap(
            "megatron.training.training:get_model",
            copy_tied_weight,
            reason="a V has both copies of the embedding on one rank: they start equal",
        ),
    )
