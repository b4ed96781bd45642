"""Asynchronous checkpoint saves, finalized only while no optimizer step awaits post-validation.

Before each iteration Megatron checks with all ranks whether they have written their parts.

Not patched: the saving itself; the wait for all ranks before another save and at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.pending import post_validation
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that checks no asynchronous saves while a step is unvalidated."""
    return (
        wrap(
            "megatron.training.async_utils:maybe_finalize_async_save",
            unless_pending,
            reason="all ranks compare their saves, which must wait for a step's post-validation",
            signature="(blocking=False, terminate=False)",
        ),
    )


def unless_pending(
    original: Callable[..., None], blocking: bool = False, terminate: bool = False
) -> None:
    """Run ``original``, which finalizes asynchronous checkpoint saves.

    A call that would only check whether saves are written is skipped while post-validation has an
    optimizer step pending.
    """
    if blocking or terminate or not post_validation.is_pending:
        original(blocking, terminate)
