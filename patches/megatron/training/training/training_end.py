"""End of the training: measured steps are compared with the prediction, and missing iterations of a
trace are reported.

Megatron's loop decides after each iteration, in megatron/training/training.py, whether to go on; it
also ends after its last iteration. When it decides, Megatron's TensorBoard and W&B writers are
still open.

Not patched: train, which ends in one of several ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import pipeline_parallel
from megatron.training.global_vars import get_args

from megatron_ext.adapter.step.pipeline_step import PipelineStep
from megatron_ext.adapter.stock.stock_step import StockStep
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that lets observers, such as traces, finish when a training ends."""
    return (
        wrap(
            "megatron.training.training:checkpoint_and_decide_exit",
            tell_of_the_end,
            reason="observers report what they have measured when a training ends",
            signature="(model, optimizer, opt_param_scheduler, iteration, "
            "num_floating_point_operations_so_far, checkpointing_context, train_data_iterator)",
        ),
    )


def tell_of_the_end(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Return whether the training ends now; if it ends, finish our observers."""
    ends = original(*args, **kwargs)
    iteration = kwargs["iteration"] if "iteration" in kwargs else args[3]
    if ends or iteration >= get_args().train_iters:
        step = pipeline_parallel.get_forward_backward_func()
        if isinstance(step, PipelineStep | StockStep):
            step.finish(iteration)
    return ends
