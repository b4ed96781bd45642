"""Packed tokens are counted once, however many chunks a rank has.

Each forward step of a packed microbatch adds its sequences' lengths, and so does each chunk of a
rank. Megatron divides the sum over all ranks by their number and not by that of the chunks: its
TFLOP/s would be too large by as much.

Not patched: what a forward step adds, and what becomes of the sums.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.core import parallel_state

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

Sums = tuple[float | None, float | None]  # of the lengths, and of their squares


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that divides by the chunks of a rank."""
    return (
        wrap(
            "megatron.training.training:consume_seqlen_stats_in_iteration",
            counted_once,
            reason="the lengths of packed sequences are added by each chunk of a rank",
            digests={"0.18, 0.19, 0.20": "48477bddbb1f"},
        ),
    )


def counted_once(original: Callable[[], Sums]) -> Sums:
    lengths, squares = original()
    if lengths is None or squares is None:
        return None, None
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return lengths / chunks, squares / chunks
