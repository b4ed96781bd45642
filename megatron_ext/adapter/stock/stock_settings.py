"""Settings of Megatron's pipeline functions that decide when a rank waits for a message.

Predictions of Megatron's own step depend on them; they are read here from its arguments or from the
config of a model.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.schedule.stock_executor import StockExecutor


def stock_executor(settings: Any) -> StockExecutor:
    """Return how Megatron's own pipeline functions overlap messages under ``settings``.

    ``settings`` are parsed arguments, or the config of a model.
    """
    return StockExecutor(
        overlaps=settings.overlap_p2p_comm is True,
        overlaps_ends=settings.overlap_p2p_comm_warmup_flush is True,
    )
