"""Backward pass of the local linear layers, split into I and W.

Every local linear layer (column, row, the output layer under any spec) ends in one autograd
function, whose backward pass computes the gradients of input and weight together. Its ``apply`` is
wrapped: while a schedule splits the backward pass, the weight is passed detached, the function's
own backward computes the input's gradient, and the weight's gradient waits in the queue of
`weight_gradients` for W. The queue stores the layer's input and its output's gradient, uncopied.

Not patched, and not split: embeddings, norms, biases and routers (their gradients are cheap and are
computed in I), grouped GEMM, and the output layer if there is too little memory for its logits'
gradient (`compile.output_layer`). Transformer Engine's layers have patches of their own. Megatron's
function runs unchanged if nothing can be deferred: a frozen weight, an input without a gradient
(its node would vanish from the graph, and W with it), evaluation.
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
from megatron_ext.runtime.weight_gradients import RowProduct, queue, refuse_second_derivatives

_FUNCTION = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"

_ARGUMENTS = (
    "(ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
    "grad_output_buffer, wgrad_deferral_limit, tp_group"
)


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that splits the local linear layers' backward pass."""
    return (
        wrap(
            f"{_FUNCTION}.apply",
            split_apply,
            reason="a linear layer defers its weight gradient to the W pass",
        ),
        expect(
            f"{_FUNCTION}.forward",
            reason="the patch of linear layers calls this function with all its arguments",
            signature=(
                f"{_ARGUMENTS})",  # Megatron 0.18
                f"{_ARGUMENTS}, gtp_remat_size)",  # Megatron 0.19
                f"{_ARGUMENTS}, gtp_remat_size, output_dtype)",  # Megatron 0.20
            ),
        ),
        expect(
            _FUNCTION,
            reason="Megatron's backward pass runs without the weight gradient, which is deferred",
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
    """Weight of a linear layer, hidden from autograd, with settings of its backward pass."""

    weight: Tensor
    fused: bool
    allreduces: bool
    sequence_parallel: bool
    group: Any  # process group of the tensor-parallel ranks
    # Arguments that newer versions of Megatron add: gtp_remat_size, output_dtype.
    newer: tuple[Any, ...]

    def reduce(self, dx: Tensor, x: Tensor) -> Tensor:
        """Return ``dx``, the gradient of the input ``x``, summed over tensor-parallel ranks.

        A whole backward pass hides this communication behind the products of input and weight
        gradient. A split one starts the reduction here, and the queue of weight gradients computes
        an earlier layer's gradient meanwhile if W follows directly.
        """
        if self.sequence_parallel:
            total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            scatter = layers.dist_reduce_scatter_func
            handle = scatter(total, dx, group=self.group, async_op=True)
        elif self.allreduces:
            total = dx
            handle = torch.distributed.all_reduce(total, group=self.group, async_op=True)
        else:
            return dx
        queue.compute_meanwhile()
        handle.wait()
        return total


class _WeightGradient:
    """Gradient of a layer's weight, computed later from its input and its output's gradient.

    With sequence parallelism only this rank's part of the input is stored, and the weight-gradient
    pass (W) gathers the whole input during the previous product. Since the weight is not in the
    graph, data-parallel hooks on it do not fire in the input-gradient pass; W adds to ``main_grad``
    itself, with Megatron's fused kernel if Megatron would use it, and the reduction starts after
    the chunk's last W.
    """

    def __init__(self, linear: _Linear, x: Tensor, dy: Tensor) -> None:
        self._linear = linear
        self._x, self._dy = x, dy
        self._gathering: Any = None

    def gather(self) -> None:
        """Start to all-gather the layer's input, of which this rank stores its sequence part."""
        part, group = self._x, self._linear.group
        sizes = part.size(0) * group.size(), *part.shape[1:]
        self._x = torch.empty(sizes, dtype=part.dtype, device=part.device)
        gather = layers.dist_all_gather_func
        self._gathering = gather(self._x, part, group=group, async_op=True)

    def operands(self) -> tuple[Tensor, Tensor]:
        """Return the operands of the weight's gradient, [tokens, features].

        They are the output's gradient and the input.
        """
        if self._gathering is not None:
            self._gathering.wait()
        dy, x = prepare_input_tensors_for_wgrad_compute(self._dy, self._x)
        return dy, x

    def product(self, dy: Tensor, x: Tensor) -> Tensor | None:
        """Return the weight's gradient; None if Megatron's kernel has added it to ``main_grad``."""
        if not self._linear.fused:
            return dy.t().matmul(x)
        main_grad: Tensor = self._linear.weight.main_grad  # type: ignore[attr-defined]  # Megatron's
        kernels = layers.fused_weight_gradient_mlp_cuda
        in_fp32 = main_grad.dtype == torch.float32
        add = kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16
        add(x, dy, main_grad)
        return None


def split_apply(original: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return a linear layer's output, with a backward pass that defers the weight gradient."""
    if isinstance(args[0], type):  # before torch 2.14 ``apply`` is a class method written in Python
        original, args = partial(original, args[0]), args[1:]
    x, weight, bias, fused, allreduce_dgrad, sequence_parallel, deferred, _, group, *newer = args
    if not (queue.splits(weight) and weight.requires_grad and x.requires_grad):
        return original(*args)
    assert deferred is None and newer[:1] in ([], [1])  # gtp_remat_size is 1
    linear = _Linear(weight, fused, allreduce_dgrad, sequence_parallel, group, (*newer,))
    output: Tensor = _SplitLinear.apply(x, linear, _LEAF)
    return output if bias is None else output + bias


class _Saved:
    """Context of an autograd function for Megatron's backward, with saved tensors read once.

    `torch.utils.checkpoint`, which recomputes saved tensors, would refuse a second read. The weight
    is the parameter's current value, as in Megatron's own function: a caller's hooks may have
    replaced its data for the forward pass alone.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        x, _ = context.saved_tensors
        # The detached weight lacks the attributes with which Megatron notes that a gradient was
        # added. The weight requires a gradient, since torch chooses its kernels by that.
        self.saved_tensors = x, context.linear.weight.detach().requires_grad_()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


# A leaf of the autograd graph that stands for all weights, which autograd does not see. The leaf
# gets no gradient: whether its node is executed tells whether a backward pass goes to the leaves,
# or to given inputs only.
_LEAF = torch.zeros((), requires_grad=True)


class _SplitLinear(torch.autograd.Function):
    """Linear function of Megatron whose backward pass computes no weight gradient.

    Megatron's function skips the weight gradient because it is told that the gradient goes to a
    buffer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: _Linear, leaf: Tensor) -> Tensor:
        ctx.linear = linear
        stock = layers.LinearWithGradAccumulationAndAsyncCommunication
        return stock.forward(
            ctx,
            x,
            linear.weight,
            None,  # no bias, as the caller adds it, so that autograd sums its gradient as before
            True,  # gradient_accumulation_fusion, which with a buffer computes no weight gradient
            linear.allreduces,
            linear.sequence_parallel,
            [],  # grad_output_buffer
            0,  # wgrad_deferral_limit: none
            linear.group,
            *linear.newer,
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        saved = _Saved(ctx)
        x, _ = saved.saved_tensors
        linear: _Linear = ctx.linear
        stock = layers.LinearWithGradAccumulationAndAsyncCommunication
        # Megatron's function would wait for this reduction of the input's gradient.
        ctx.allreduce_dgrad = ctx.sequence_parallel = False
        dx = linear.reduce(stock.backward(saved, dy)[0], x)
        # x and dy are detached from the graph and share its memory, since the graph refers to the
        # stage's input and its gradient. (dy may have a graph, too: the loss overwrites the logits
        # with their gradient. This node and the dy in its buffer would then keep each other alive.)
        # A caller may run this backward pass more than once.
        ctx.grad_output_buffer = []
        # Dy has another type if the layer has an output_dtype.
        x, dy = x.detach(), dy.detach().to(x.dtype)
        x, dy = queue.keep(x), queue.keep(dy)
        gradient = _WeightGradient(linear, x, dy)
        gather = gradient.gather if linear.sequence_parallel else None
        if queue.is_in_pass or linear.fused or _reaches_leaves(ctx):
            rows = RowProduct(gradient.operands, gradient.product)
            queue.put(linear.weight, rows, (x, dy), gather)
        return dx, None, None


def _reaches_leaves(node: Any) -> bool:
    """Return whether the running backward pass computes gradients of leaves, such as weights.

    `torch.autograd.grad` of other inputs does not, and a weight's gradient then stays as it is,
    unless Megatron's fused kernel adds to it by itself.
    """
    leaf, _ = node.next_functions[-1]
    is_reached: bool = torch._C._will_engine_execute_node(leaf)
    return is_reached
