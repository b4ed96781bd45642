"""No checkpoint is saved of a step that is not validated.

The iterations that save settle already, when they log. This is the net below them: whoever saves
settles first, and a failure there is raised before anything is written.

Not patched: what is saved, and how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.post_validation.pending import post_validation
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patches that settle before a save."""
    return (
        wrap(
            "megatron.training.checkpointing:save_checkpoint",
            commit_or_rollback_first,
            reason="what is saved is validated",
        ),
        wrap(
            "megatron.training.training:save_checkpoint_and_time",
            commit_or_rollback_first,
            reason="what is synchronised and saved is validated",
        ),
    )


def commit_or_rollback_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``original``, with nothing pending."""
    post_validation.commit_or_rollback()
    return original(*args, **kwargs)
