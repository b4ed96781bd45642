"""Packed tokens, counted once for any number of chunks on a rank.

Each forward step of a packed microbatch adds its sequences' lengths, and every chunk of a rank does
so. Megatron divides the sum over all ranks by the number of ranks but not by the number of chunks a
rank, so its TFLOP/s would be too large by the latter factor.

Not patched: what a forward step adds, and the use of the sums.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.core import parallel_state

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

# Sum of the lengths of sequences, and sum of their squares.
Sums = tuple[float | None, float | None]


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that divides the sums of packed lengths by the chunks of a rank."""
    return (
        wrap(
            "megatron.training.training:consume_seqlen_stats_in_iteration",
            counted_once,
            reason="every chunk of a rank adds the lengths of packed sequences: count them once",
            digests={"0.18, 0.19, 0.20": "48477bddbb1f"},
        ),
    )


def counted_once(original: Callable[[], Sums]) -> Sums:
    lengths, squares = original()
    if lengths is None or squares is None:
        return None, None
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return lengths / chunks, squares / chunks
