"""Reductions of gradients: a running one is not started again at the end of the step.

Our schedules start a chunk's reduction after its last W, and Megatron's finish_grad_sync waits for
it. Megatron recognizes a running reduction by the bucket group's handle. With several instances of
the distributed optimizer there is no handle (a stream orders the reduction), so without this patch
finish_grad_sync would reduce the gradients a second time.

A step that fails may leave a reduction running. Under our schedules every step is a bucket group's
first batch for Megatron, so the next step would take that reduction for its own and reduce nothing.

Not patched: the reduction itself, and Megatron's hooks, which recognize their own reductions by the
counts of ready gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_SIGNATURE = "(self, force_all_reduce=False)"

# Bucket groups whose reduction has started without a handle.
_started: weakref.WeakSet[Any] = weakref.WeakSet()


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that remember a gradient reduction from its start to its finish."""
    return (
        wrap(
            f"{_GROUP}.start_grad_sync",
            start_once,
            reason="a running gradient reduction without a handle must not be started twice",
            signature=_SIGNATURE,
        ),
        wrap(
            f"{_GROUP}.finish_grad_sync",
            finish,
            reason="a finished gradient reduction permits the next step to start one",
            signature=_SIGNATURE,
        ),
        wrap(
            "megatron.core.distributed.distributed_data_parallel:"
            "DistributedDataParallel.zero_grad_buffer",
            zero_after_reductions,
            reason="a reduction that a failed step started must not count as the next step's",
            signature="(self)",
        ),
    )


def start_once(original: Callable[..., None], group: Any, *args: Any, **kwargs: Any) -> None:
    """Start the gradient reduction of the bucket group ``group``, unless it is running already."""
    if group in _started:
        return
    original(group, *args, **kwargs)
    if group.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None:
        _started.add(group)


def finish(original: Callable[..., None], group: Any, *args: Any, **kwargs: Any) -> None:
    """Finish the gradient reduction of the bucket group ``group``.

    Megatron's ``original`` starts the reduction first if it has not started.
    """
    original(group, *args, **kwargs)
    _started.discard(group)


def zero_after_reductions(original: Callable[..., None], chunk: Any) -> None:
    """Zero the gradients of the model chunk ``chunk``.

    A reduction that a failed step has left running writes to the gradients, so it is finished
    first.
    """
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
        elif group in _started:
            torch.cuda.current_stream().wait_stream(group.communication_stream)
        _started.discard(group)
    original(chunk)
