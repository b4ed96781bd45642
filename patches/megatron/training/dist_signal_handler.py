"""Signals are looked at when no verdict is pending.

Stock gathers over all ranks, after each iteration, who has got one. A verdict is pending then, but
after the iterations that settle it.

Not patched: the handler, which notes a signal when it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.post_validation.pending import post_validation
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that gathers no signals while a verdict is pending."""
    return (
        wrap(
            "megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
            none_while_pending,
            reason="all ranks wait for one another to learn of signals",
            signature="(self)",
        ),
    )


def none_while_pending(original: Callable[[Any], list[int]], handler: Any) -> list[int]:
    """Whether each rank has got a signal: none, or what ``original`` gathers."""
    return [] if post_validation.is_pending else original(handler)
