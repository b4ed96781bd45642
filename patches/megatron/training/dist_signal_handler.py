"""Signals, checked only while no optimizer step awaits post-validation.

After each iteration Megatron gathers from all ranks which of them have received a signal. At that
time the optimizer step is still unvalidated, except after commit points.

Not patched: the handler, which records a signal on arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.pending import post_validation
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that gathers no ranks' signals while an optimizer step is unvalidated."""
    return (
        wrap(
            "megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
            none_while_pending,
            reason=(
                "ranks exchange signals in a collective, which must not run while a step is "
                "unvalidated"
            ),
            signature="(self)",
        ),
    )


def none_while_pending(original: Callable[[Any], list[int]], handler: Any) -> list[int]:
    """Return the signals that ranks received; none while an optimizer step is unvalidated."""
    return [] if post_validation.is_pending else original(handler)
