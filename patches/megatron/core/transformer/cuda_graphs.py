"""Order in which Transformer Engine captures per-layer CUDA graphs for Megatron: our schedule's.

Only the function whose result becomes Transformer Engine's ``_order`` is patched. Megatron computes
it from the table of its own interleaved schedule; a rank's row replaces it, without its W passes:
captured modules compute their weight gradients with their input's (`layer_graphs`).

Not patched: `TECudaGraphHelper`, which makes samples, buffers and graphs by that order;
`set_current_microbatch`, by which a layer finds its graph (Megatron's forward_step calls it for our
stages, too); ``get_schedule_table`` and ``get_pp_rank_microbatches``, whose results are not used;
local and full-iteration graphs, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ext.adapter.transformer_engine.layer_graphs import layer_graphs
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect, wrap

_GRAPHS = "megatron.core.transformer.cuda_graphs"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which layers' CUDA graphs are captured in the schedule's order."""
    return (
        wrap(
            f"{_GRAPHS}:convert_schedule_table_to_order",
            order_of_the_row,
            reason="per-layer CUDA graphs are captured in the order of the schedule",
            signature="(num_warmup_microbatches, num_model_chunks, schedule_table)",
        ),
        expect(
            f"{_GRAPHS}:set_current_microbatch",
            reason="each layer replays the CUDA graph of the microbatch that this function sets",
            signature="(model, microbatch_id)",
        ),
    )


def order_of_the_row(
    original: Callable[..., list[int]],
    num_warmup_microbatches: int,
    num_model_chunks: int,
    schedule_table: Sequence[Any],
) -> list[int]:
    """Return the order of CUDA graph captures from this rank's row of the schedule.

    Raises ValueError as `LayerGraphs.order` does.
    """
    return layer_graphs.order(num_model_chunks, len(schedule_table) // num_model_chunks)
