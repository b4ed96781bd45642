"""How Megatron's own pipeline functions send the messages of a step.

They wait for messages in other places than our executor, which is why the same order of passes
takes another time.
"""

from __future__ import annotations

from dataclasses import dataclass

STOCK = ("1f1b", "interleaved")  # families that Megatron has itself


@dataclass(frozen=True)
class StockExecutor:
    """Settings of Megatron's pipeline functions that decide when a rank waits for its messages.

    Megatron-core 0.18, 0.19 and 0.20 are alike (core/pipeline_parallel/schedules.py). Without
    virtual stages no setting matters: each message is waited for right where it is posted.

    Attributes:
        overlaps: ``overlap_p2p_comm``: between warm-up and flush, messages overlap passes. A rank
            still waits for the send of each output, to free the output
            (``deallocate_pipeline_outputs``, which Megatron's scripts always set).
        overlaps_ends: ``overlap_p2p_comm_warmup_flush``: messages overlap passes in warm-up and
            flush as well.
    """

    overlaps: bool = True
    overlaps_ends: bool = False


STOCK_EXECUTOR = StockExecutor()  # Megatron's executor with the default settings of its scripts
