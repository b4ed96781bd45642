"""Checkpoints saved in the background are finished when no verdict is pending.

Stock asks all ranks, before each iteration, whether they have written their parts.

Not patched: how one is saved; the waiting for all of them, before another save and at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.adapter.post_validation.pending import post_validation
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that asks nobody while a verdict is pending."""
    return (
        wrap(
            "megatron.training.async_utils:maybe_finalize_async_save",
            unless_pending,
            reason="all ranks wait for one another to learn what is written",
            signature="(blocking=False, terminate=False)",
        ),
    )


def unless_pending(
    original: Callable[..., None], blocking: bool = False, terminate: bool = False
) -> None:
    """``original``, or nothing where it would only look."""
    if blocking or terminate or not post_validation.is_pending:
        original(blocking, terminate)
