"""Megatron's own pipeline functions, observed where they compute.

Patched are the choice, replaced by a `StockStep` that calls the chosen function with the same
arguments, and forward_step and backward_step, which these functions call by name. The arguments of
a call show which pass it is, and the recorded step shows whether the passes ran in the expected
order.

Not patched: the pipeline functions themselves, P2PCommunicator, layers, train_step and evaluate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.stock.stock_passes import watched_backward, watched_forward
from megatron_ext.adapter.stock.stock_step import WatchedStock
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that let observers see each step of Megatron's own schedules."""
    stock = WatchedStock(config)

    def choose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return stock.step(original(*args, **kwargs))

    return (
        wrap(
            f"{_SCHEDULES}:get_forward_backward_func",
            choose,
            reason="observers see each step of Megatron's own schedule",
            signature=(
                "(pp_size=None, vp_size=None)",  # signature in Megatron 0.18
                "(pp_size=None, vp_size=None, schedule_pg_collection=None)",
            ),
        ),
        wrap(
            f"{_SCHEDULES}:forward_step",
            watched_forward,
            reason="Megatron's own schedule runs a forward pass by this function",
            signature="(forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
            "forward_data_store, config, cp_group_size, collect_non_loss_data=False, "
            "checkpoint_activations_microbatch=None, is_first_microbatch=False, "
            "current_microbatch=None, vp_stage=None, is_last_stage=True)",
        ),
        wrap(
            f"{_SCHEDULES}:backward_step",
            watched_backward,
            reason="Megatron's own schedule runs a backward pass by this function",
            signature="(input_tensor, output_tensor, output_tensor_grad, config)",
        ),
    )
