"""Initialisation of the last stage's copy of a tied embedding, for the rehearsal of a rank alone.

Megatron fills the copy with zeros, to which an all-reduce with the first stage adds the embedding.
Under torch's fake backend it stays zero: all logits are zero, and products take less time.

Not patched: ranks that have both copies, which our schedules make equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.patches.engine import Patch, wrap


def patches() -> tuple[Patch, ...]:
    """Return the patch that initialises a tied embedding's copy on the last stage."""
    return (
        wrap(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            initialise_copy,
            reason="in a rehearsal no first stage sends the last stage's copy of the embedding",
            signature="(self)",
        ),
    )


def initialise_copy(original: Callable[..., None], model: Any) -> None:
    """Set up the embeddings of ``model``, and initialise its copy of another rank's embedding."""
    original(model)
    has_copy = model.share_embeddings_and_output_weights and model.post_process
    if (has_copy or getattr(model, "mtp_process", False)) and not model.pre_process:
        weight = model.shared_embedding_or_output_weight()
        if not weight.is_meta:
            model.config.embedding_init_method(weight.data)
