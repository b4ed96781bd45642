"""Parameters whose gradient autograd does not bring, because it comes in W or has come already.

Weights of local layers whose backward is split are not in the graph, so no hook of theirs fires.
Transformer Engine's are. And a fused kernel adds its weight's gradient to main_grad, marks the
weight and gives autograd a placeholder; but where activations leave for the host, what autograd has
saved comes back as another object than the weight (torch makes one of whatever its hooks return),
which bears no mark, and there is no placeholder. In both cases stock's hook, with the reduction
overlapped, insists on a gradient.

Not patched: what the hook does when a gradient is there (a norm's weight, a placeholder).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

Hook = Callable[..., None]


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that lets a gradient be missing."""
    return (
        wrap(
            "megatron.core.distributed.distributed_data_parallel:"
            "DistributedDataParallel._make_backward_post_hook",
            hook_where_there_is_a_gradient,
            reason="a gradient that comes in W, or is in main_grad already, is missing in a "
            "backward pass, and that is no mistake",
            signature="(self, param)",
        ),
    )


def hook_where_there_is_a_gradient(
    original: Callable[..., Hook], model: Any, parameter: Tensor
) -> Hook:
    """Stock's hook for ``parameter``, which has nothing to do in a pass that brought no gradient,
    while reductions are held back: as they are in all passes of our steps."""
    hook = original(model, parameter)

    def unless_none_is_missed(*unused: Any) -> None:
        held_back = not model.param_to_bucket_group[parameter].is_last_microbatch
        if parameter.grad is not None or not held_back:
            hook(*unused)

    return unless_none_is_missed
