"""Parameters whose gradient autograd does not bring in I, because it comes in W.

Weights of local layers are not in the graph, so no hook of theirs fires. Transformer Engine's are,
and with the reduction overlapped stock's hook insists on a gradient.

Not patched: what the hook does when a gradient is there (a norm's weight, the placeholder of a
weight whose gradient is added to main_grad by the kernel itself).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.runtime.weight_gradients import queue

Hook = Callable[..., None]


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that lets a gradient come later."""
    return (
        wrap(
            "megatron.core.distributed.distributed_data_parallel:"
            "DistributedDataParallel._make_backward_post_hook",
            hook_where_there_is_a_gradient,
            reason="a gradient that comes in W is missing in I, and that is no mistake",
            signature="(self, param)",
        ),
    )


def hook_where_there_is_a_gradient(
    original: Callable[..., Hook], model: Any, parameter: Tensor
) -> Hook:
    """Stock's hook for ``parameter``, which does nothing in an I pass that brought no gradient."""
    hook = original(model, parameter)

    def unless_it_comes_in_w(*unused: Any) -> None:
        if parameter.grad is not None or not queue.splitting:
            hook(*unused)

    return unless_it_comes_in_w
