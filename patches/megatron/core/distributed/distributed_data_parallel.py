"""Parameters without a gradient from autograd, because it comes in W or was added already.

Weights of local layers with a split backward pass are not in the graph, so their hooks do not fire.
Transformer Engine's weights are in the graph. There, a fused kernel adds the weight's gradient to
main_grad, marks the weight and gives autograd a placeholder. If activations are offloaded, however,
autograd's saved weight comes back as another object (torch creates one from whatever its hooks
return) without that mark, and there is no placeholder. In both cases Megatron's hook, with the
reduction overlapped, asserts that there is a gradient.

Not patched: the hook's work if there is a gradient (a norm's weight, a placeholder).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

GradientHook = Callable[..., None]


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which Megatron's data-parallel hook accepts a missing gradient."""
    return (
        wrap(
            "megatron.core.distributed.distributed_data_parallel:"
            "DistributedDataParallel._make_backward_post_hook",
            hook_where_there_is_a_gradient,
            reason="a backward pass need not leave a weight's gradient, which W computes later",
            signature="(self, param)",
        ),
    )


def hook_where_there_is_a_gradient(
    original: Callable[..., GradientHook], model: Any, parameter: Tensor
) -> GradientHook:
    """Return Megatron's gradient hook for ``parameter``, made to ignore a missing gradient.

    The hook is skipped if ``parameter`` has no gradient and Megatron holds back gradient
    reductions, as it does during all passes of a megatron_ext schedule.
    """
    hook = original(model, parameter)

    @functools.wraps(hook)  # the hook keeps the name of the wrapper's hook
    def unless_none_is_missed(*unused: Any) -> None:
        held_back = not model.param_to_bucket_group[parameter].is_last_microbatch
        if parameter.grad is not None or not held_back:
            hook(*unused)

    return unless_none_is_missed
