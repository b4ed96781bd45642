"""Schedule function that Megatron's training loop calls: ours instead of Megatron's.

Only the choice is patched: `get_forward_backward_func` returns a `PipelineStep` instead of
Megatron's 1F1B or interleaved function. The `PipelineStep` takes the same arguments, uses
Megatron's forward_step and backward_step, and ends as Megatron's functions do: embedding gradients,
finalize_model_grads, timers.

Not patched: Megatron's schedule functions themselves (a caller by name gets them), train,
train_step and evaluate (they call get_forward_backward_func), P2PCommunicator (we have our own
channels over the same pipeline group, or batch our messages on it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from megatron_ext.adapter.step.pipeline_step import PipelineStep
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect, wrap

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that makes Megatron run ``config.schedule``."""
    step = PipelineStep(config)

    def choose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        stock = original(*args, **kwargs)
        if stock is schedules.forward_backward_no_pipelining:
            raise ValueError(
                f"--pipeline-schedule {config.schedule} needs a pipeline, but this model runs on "
                "one pipeline rank: set --pipeline-model-parallel-size, or drop "
                "--pipeline-schedule"
            )
        step.first_step.stock = stock
        return step

    return (
        wrap(
            f"{_SCHEDULES}:get_forward_backward_func",
            choose,
            reason="the training step runs a schedule of megatron_ext",
            signature=(
                "(pp_size=None, vp_size=None)",  # signature in Megatron 0.18
                "(pp_size=None, vp_size=None, schedule_pg_collection=None)",
            ),
        ),
        expect(
            f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving",
            reason="a step of megatron_ext must begin and end as this function's steps do",
            digests={"0.18": "da1b3a98c04e", "0.19": "4495c5d6a879", "0.20": "929b12cf6b81"},
        ),
        expect(
            f"{_SCHEDULES}:forward_step",
            reason="a forward pass of a stage calls this function",
            digests={"0.18, 0.19": "ca082631bab1", "0.20": "256850ea23b1"},
        ),
        expect(
            f"{_SCHEDULES}:forward_step_calc_loss",
            reason="this function takes the loss that the passes of vocabulary parallelism compute",
            digests={"0.18": "ff5e1acdaba2", "0.19, 0.20": "669c1962e226"},
        ),
        expect(
            f"{_SCHEDULES}:backward_step",
            reason="a backward pass of a stage calls this function",
            digests={"0.18, 0.19": "08eb27c7ffab", "0.20": "f076597ff926"},
        ),
        expect(
            f"{_SCHEDULES}:get_tensor_shapes",
            reason="this function gives the shapes of messages between stages",
            signature="(*, seq_length, micro_batch_size, decoder_seq_length, config, "
            "tp_group=None, cp_group=None)",
        ),
        expect(
            f"{_SCHEDULES}:check_first_val_step",
            reason="this function tells whether a forward pass is the step's first",
            signature="(first_val_step, forward_only, cond)",
        ),
        expect(
            f"{_SCHEDULES}:deallocate_output_tensor",
            reason="this function frees an output that has been sent",
            signature="(out, deallocate_pipeline_outputs=False)",
        ),
    )
