"""The local linear layers' backward, split into I and W.

Every local linear (column, row, the output layer under any spec) ends in one autograd function. Its
``apply`` is wrapped: while a schedule splits the backward, the weight goes in cut off from the
graph, the function's own backward makes the input's gradient, and the weight's waits in the queue
of `weight_gradients` for W. Nothing is cloned: the queue holds the layer's input and its output's
gradient.

Since the weight is not in the graph, data-parallel hooks on it do not fire in I; W adds to
``main_grad`` itself, by Megatron's fused kernel where Megatron would, and the reduction starts
after the chunk's last W.

Not patched, and not split: embeddings, norms, biases and routers (their gradients are cheap and
come with I), grouped GEMM, and the output layer where there is no room for its logits' gradient
(`schedule.build.output_layer`). Transformer Engine's layers have patches of their own. Stock's
function runs as it is where there is nothing to put off: a frozen weight, an input that needs no
gradient (its node would vanish from the graph, and W with it), evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect, wrap
from megatron_ext.runtime.weight_gradients import queue

_FUNCTION = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"

_ARGUMENTS = (
    "(ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
    "grad_output_buffer, wgrad_deferral_limit, tp_group"
)


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that splits the local linears' backward."""
    return (
        wrap(
            f"{_FUNCTION}.apply",
            split_apply,
            reason="put weight gradients off to their W pass",
        ),
        expect(
            f"{_FUNCTION}.forward",
            reason="its arguments are taken apart and put together again",
            signature=(
                f"{_ARGUMENTS})",  # 0.18
                f"{_ARGUMENTS}, gtp_remat_size)",  # 0.19
                f"{_ARGUMENTS}, gtp_remat_size, output_dtype)",  # 0.20
            ),
        ),
        expect(
            _FUNCTION,
            reason="its forward and backward run inside ours, without the weight's gradient",
            digests={
                "0.18": "fda90bfaf38e",
                "0.19": "4ee6a48b6915",
                "0.20": "ee066d241a08",
                "0.20@2a75ac1": "d0bc09bc7535",
            },
        ),
    )


@dataclass(frozen=True)
class _Linear:
    """A layer's weight, kept from autograd, and how its weight gradient is computed."""

    weight: Tensor
    fused: bool
    sequence_parallel: bool
    tensor_parallel_group: Any
    newer: tuple[Any, ...]  # what newer versions of Megatron take: gtp_remat_size, output_dtype

    def gradient(self, x: Tensor, dy: Tensor) -> Tensor | None:
        """The weight's gradient; None when ``fused``, as it is in ``main_grad`` then.

        Under sequence parallelism x is gathered again first.
        """
        if self.sequence_parallel:
            sizes = list(x.size())
            sizes[0] *= self.tensor_parallel_group.size()
            total = torch.empty(sizes, dtype=x.dtype, device=x.device)
            layers.dist_all_gather_func(total, x, group=self.tensor_parallel_group)
            x = total
        dy, x = prepare_input_tensors_for_wgrad_compute(dy, x)
        if not self.fused:
            return dy.t().matmul(x)
        main_grad: Tensor = self.weight.main_grad  # type: ignore[attr-defined]  # Megatron's
        kernels = layers.fused_weight_gradient_mlp_cuda
        in_fp32 = main_grad.dtype == torch.float32
        add = kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16
        add(x, dy, main_grad)
        return None


def split_apply(original: Callable[..., Tensor], *args: Any) -> Tensor:
    """``original``'s result, with a backward that puts the weight's gradient off."""
    x, weight, bias, fused, allreduce_dgrad, sequence_parallel, deferred, _, group, *newer = args
    if not (queue.splits(weight) and weight.requires_grad and x.requires_grad):
        return original(*args)
    assert deferred is None and newer[:1] in ([], [1])  # gtp_remat_size
    linear = _Linear(weight, fused, sequence_parallel, group, (*newer,))
    output: Tensor = _SplitLinear.apply(x, linear, allreduce_dgrad)
    return output if bias is None else output + bias


class _SplitLinear(torch.autograd.Function):
    """Stock's function, told that its weight gradient goes to a buffer: then it skips it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: _Linear, allreduce_dgrad: bool) -> Tensor:
        ctx.linear = linear
        stock = layers.LinearWithGradAccumulationAndAsyncCommunication
        output: Tensor = stock.forward(
            ctx,
            x,
            linear.weight.detach(),
            None,  # bias: added by the caller, so that autograd sums its gradient as ever
            True,  # gradient_accumulation_fusion, with a buffer: no weight gradient is computed
            allreduce_dgrad,
            linear.sequence_parallel,
            [],  # grad_output_buffer
            0,  # wgrad_deferral_limit: none
            linear.tensor_parallel_group,
            *linear.newer,
        )
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        stock = layers.LinearWithGradAccumulationAndAsyncCommunication
        dx = stock.backward(ctx, dy)[0]
        # The same memory, cut off from the graph, which holds the stage's input and its gradient.
        # (dy can have one too: the loss overwrites the logits with their gradient. This node and
        # the dy in its buffer would then keep each other.)
        ctx.grad_output_buffer = None
        x, dy = x.detach(), dy.detach().to(x.dtype)  # another one where output_dtype is
        x, dy = queue.keep(x), queue.keep(dy)
        queue.put(ctx.linear.weight, partial(ctx.linear.gradient, x, dy), (x, dy))
        return dx, None, None
