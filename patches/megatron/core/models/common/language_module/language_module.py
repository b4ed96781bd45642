"""Refusal, when a model is built, of a caller's embedding group that does not fit the schedule.

Megatron's own groups are created where `parallel_state` is patched. A caller's pg_collection may
have an embedding group of the first and the last rank, as Megatron's own: on a V the last rank
would wait in that group for the first, which has no copy. If multi-token prediction has a stage of
its own, a group without that stage's rank would leave that rank's copy of the embedding unequal.

Not patched: the setup; with a group that fits, Megatron does the right thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.tied import check_embedding_group
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that refuses a model whose embedding group does not fit the schedule."""
    resolved = config.resolved_spec

    def check_and_set_up(original: Callable[..., None], model: Any) -> None:
        if model.share_embeddings_and_output_weights or model.config.mtp_num_layers:
            check_embedding_group(model.embd_group, model.pp_group, resolved, model.config)
        original(model)

    return (
        wrap(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            check_and_set_up,
            reason="an embedding group with other ranks would hang the model's construction",
            signature="(self)",
        ),
    )
