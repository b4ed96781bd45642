"""Settings of Megatron's pipeline functions in Megatron's terms."""

from __future__ import annotations

from typing import Any

from megatron_ext.schedule.stock_executor import StockExecutor


def stock_executor(settings: Any) -> StockExecutor:
    """Return how Megatron's own pipeline functions send messages with ``settings``: parsed
    arguments, or the config of a model."""
    return StockExecutor(
        overlaps=settings.overlap_p2p_comm is True,
        overlaps_ends=settings.overlap_p2p_comm_warmup_flush is True,
    )
