"""Checkpoints of steps that post-validation has committed or redone.

In an iteration that saves, the optimizer step has usually been committed or rolled back before,
when the iteration was logged. To be sure, every save first commits or rolls back a pending step,
and writes nothing if that fails.

Not patched: what is saved, and how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.pending import post_validation
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that commit or roll back a pending step before a checkpoint is saved."""
    return (
        wrap(
            "megatron.training.checkpointing:save_checkpoint",
            commit_or_rollback_first,
            reason="a checkpoint is saved only after its step is post-validated",
        ),
        wrap(
            "megatron.training.training:save_checkpoint_and_time",
            commit_or_rollback_first,
            reason="parameters are synchronised and saved only after post-validation",
        ),
    )


def commit_or_rollback_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Commit or roll back a pending optimizer step, then run ``original``, which saves."""
    post_validation.commit_or_rollback()
    return original(*args, **kwargs)
