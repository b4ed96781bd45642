"""Stage whose passes are Megatron's schedule plans, so that two of them can overlap.

A plan has a layer's attention, dispatch, experts and combine as separate nodes, with the all-to-all
on its own stream. In overlapped passes, layer i of the forward pass runs alongside layer n-1-i of
the backward pass, node by node, so that one's all-to-all hides behind the other's products.
Megatron's own function runs both, and also runs a single pass: the results are bitwise stock's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.combined_1f1b import combined_forward_backward_step
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.runtime.stage import Backward
from megatron_ext.runtime.weight_gradients import queue

# Arguments of Megatron's function that runs a forward and a backward pass.
_Arguments = dict[str, Any]

_NO_FORWARD: _Arguments = {
    "forward_step_func": None,
    "data_iterator": None,
    "f_model": None,
    "num_microbatches": None,
    "input_tensor": None,
    "forward_data_store": None,
}
_NO_BACKWARD: _Arguments = {
    "b_model": None,
    "b_input_tensor": None,
    "b_output_tensor": None,
    "b_output_tensor_grad": None,
}


class PlannedStage(ModelStage):
    """Model chunk during one step, which runs Megatron's schedule plans so that passes overlap.

    Plain passes run in an evaluation, and in a chunk without layers, whose plan would return its
    input as its output.

    The plan and the loss function's node are attributes of the output from F to its backward pass.
    Weight gradients wait in our queue: the nodes' own backward_dw does nothing, since the layers
    are built without delay_wgrad_compute. While both passes run, the queue stores weight gradients
    under the stage and microbatch of the backward pass; the forward pass puts nothing into the
    queue.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        model: Any = get_attr_wrapped_model(self._model, "decoder", return_model_obj=True)
        predicting = getattr(getattr(model, "mtp", None), "layers", ())
        layers = len(model.decoder.layers) + len(predicting)
        self._is_planned = self._has_backward and layers > 0
        set_streams(high_priority=self._config.high_priority_a2a_comm_stream)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        if not self._is_planned:
            return super().forward(microbatch, x)
        output, tokens, _ = self._step(self._forward_of(microbatch, x), _NO_BACKWARD)
        return self._end_forward(microbatch, x, output, tokens)

    def overlapped_forward(
        self, microbatch: int, x: Tensor | None, backward: Backward
    ) -> tuple[Tensor, Tensor | None]:
        other, behind = backward.stage, backward.microbatch
        assert isinstance(other, PlannedStage)
        if not (self._is_planned and other._is_planned):
            return super().overlapped_forward(microbatch, x, backward)
        if backward.is_full:
            other._compute_weights_within(behind)
        with queue.collecting(other._number, behind):
            output, tokens, dx = self._step(
                self._forward_of(microbatch, x), other._backward_of(behind, backward.dy)
            )
        self._end_forward(microbatch, x, output, tokens)
        dx = other._end_backward(behind, dx)
        if backward.is_full:
            other.backward_weight(behind)
        return output, dx

    def _backward_input(
        self, microbatch: int, dy: Tensor | None, *, w_is_next: bool
    ) -> Tensor | None:
        if not self._is_planned:
            return super()._backward_input(microbatch, dy, w_is_next=w_is_next)
        # `compute_meanwhile` is not used here, even if W comes next: the operands of a
        # weight-gradient product would be freed before they are marked as in use by this stream
        # (`_used_here`).
        with queue.collecting(self._number, microbatch):
            *_, dx = self._step(_NO_FORWARD, self._backward_of(microbatch, dy))
        return self._end_backward(microbatch, dx)

    def _compute_weights_within(self, microbatch: int) -> None:
        """Let an overlapped full backward pass (B) compute weight gradients between its layers.

        The pass runs by Megatron's plan. The order is Megatron's with delay_wgrad_compute: experts'
        weight gradients during the forward pass's dispatch, all others after their layer.
        """
        _, output = self._between[microbatch]
        plan: Any = output.schedule_plan  # type: ignore[attr-defined]  # Megatron's
        for layer in map(plan.get_layer, range(plan.num_layers())):
            for node in vars(layer).values():
                if getattr(node, "bwd_dw_callables", None):
                    node.delay_wgrad_compute = True
                    node.bwd_dw_callables = [_WeightsSoFar(self._number, microbatch)]

    def _step(self, forward: _Arguments, backward: _Arguments) -> tuple[Any, Any, Tensor | None]:
        """Run a forward or a backward pass, or an overlapped pair of passes.

        Returns:
            The output of the forward pass, its number of tokens, and the gradient of the backward
                pass's input; None for a pass that does not run.
        """
        return combined_forward_backward_step(**forward, **backward, config=self._config)

    def _forward_of(self, microbatch: int, x: Tensor | None) -> _Arguments:
        is_first = self._begin_forward(x)
        if x is not None:  # Megatron's overlapped plan requires a gradient of each input
            x.requires_grad_()
        call = self._call
        return {
            "forward_step_func": self._forward_step_func(microbatch),
            "data_iterator": self._data_iterator,
            "f_model": self._model,
            "num_microbatches": call.num_microbatches,
            "input_tensor": x,
            "forward_data_store": self.losses,
            "f_model_chunk_id": get_attr_wrapped_model(self._model, "vp_stage"),
            "collect_non_loss_data": call.collect_non_loss_data,
            "is_first_microbatch": schedules.check_first_val_step(
                call.first_val_step, call.forward_only, is_first
            ),
            "current_microbatch": microbatch,
        }

    def _end_forward(
        self, microbatch: int, x: Tensor | None, output: Tensor, tokens: Tensor
    ) -> Tensor:
        self._forget_input()
        _used_here([output])
        self.tokens += tokens
        self._between[microbatch] = (x, output)
        return output

    def _backward_of(self, microbatch: int, dy: Tensor | None) -> _Arguments:
        x, output = self._between.pop(microbatch)
        return {
            "b_model": self._model,
            "b_input_tensor": x,
            "b_output_tensor": output,
            "b_output_tensor_grad": dy,
        }

    def _end_backward(self, microbatch: int, dx: Tensor | None) -> Tensor | None:
        _used_here(queue.tensors(self._number, microbatch))
        return None if dx is None else queue.keep(dx)


class _WeightsSoFar:
    """Callable of a plan's node that computes deferred weight gradients of its modules."""

    def __init__(self, stage: int, microbatch: int) -> None:
        self._key = stage, microbatch

    def backward_dw(self) -> None:
        _used_here(queue.tensors(*self._key))
        queue.run_so_far(*self._key)

    def parameters(self) -> tuple[()]:
        """Return no parameters, so that the node calls no gradient hooks.

        Our queue adds the weight gradients itself.
        """
        return ()


def _used_here(tensors: Iterable[Tensor]) -> None:
    """Tell torch's allocator that the current stream uses ``tensors``.

    Some were allocated on the all-to-all's stream, and this stream sends them or computes W from
    them.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())
