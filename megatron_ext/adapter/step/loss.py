"""Loss of a microbatch whose output was not computed in one forward pass of the last stage.

With slices or a partitioned vocabulary the last stage's output exists only after several passes,
while Megatron computes the loss at the end of one. Here Megatron's own function gets the complete
output, and returns the gradient by which the backward passes begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megatron_ext.adapter.step.model_stage import StepCall


def loss_with_gradient(
    output: Tensor,
    loss_func: Callable[..., Any],
    model: torch.nn.Module,
    config: Any,
    call: StepCall,
    losses: list[Any],
) -> tuple[Tensor | None, Tensor]:
    """Compute the loss of a microbatch as Megatron does, and its gradient by ``output``.

    Loss masks, token counts, scaling and logging are Megatron's own.

    Args:
        output: output of the last stage for the whole microbatch.
        loss_func: the caller's loss function for this microbatch.
        losses: list to which the reported loss is appended.

    Returns:
        The gradient of the scaled loss by ``output`` (None in an evaluation), and the number of
        tokens.

    Raises:
        ValueError: the loss was computed from another tensor than the output.
    """
    # The timer forward-compute is started, since Megatron's forward_step_calc_loss stops it.
    if config.timers is not None:
        config.timers("forward-compute", log_level=2).start()
    leaf = output.detach().requires_grad_(not call.forward_only)
    loss, tokens = schedules.forward_step_calc_loss(
        model,
        leaf.clone(),  # a copy, since loss functions may write to their input
        loss_func,
        config,
        None,
        call.collect_non_loss_data,
        call.num_microbatches,
        losses,
        call.context_parallel_size,
        True,
    )
    if call.forward_only:
        return None, tokens
    schedules.deallocate_output_tensor(loss, config.deallocate_pipeline_outputs)
    gradient = schedules.backward_step(leaf, loss, None, config)
    if gradient is None:
        raise ValueError(
            "the loss function returned a loss that does not depend on the output it was given, as "
            "if forward_step_func had computed it: with --pipeline-slices and "
            "--pipeline-vocab-parallel the output of a whole microbatch exists only when the loss "
            "function is called; compute the loss from its argument, or drop these flags"
        )
    return gradient, tokens
