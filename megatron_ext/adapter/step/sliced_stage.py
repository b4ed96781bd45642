"""Stage that runs a microbatch slice by slice.

The caller's forward_step_func is called once per microbatch, with the first slice, and the model
once per slice, each time with the whole batch (`adapter.slices`). The loss is computed once, after
the last slice: the caller's loss function gets the concatenated outputs of all slices, as for a
whole microbatch, and each slice's backward pass begins with its part of the gradient. Hooks of the
caller's on parameters run once per microbatch, on the sum of the slices' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_ext.adapter.step.loss import loss_with_gradient
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.repeatable_call import ModelCall, RepeatableCall
from megatron_ext.runtime.parameter_hooks import SummedGradients
from megatron_ext.runtime.slices.running_slice import Span, running_slice
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Slice, slices_of


class SlicedStage(ModelStage):
    """Model chunk during one step whose microbatches run slice by slice of their sequences."""

    _takes_slices = True

    def __init__(
        self,
        *args: Any,
        spans: Sequence[Span],
        hooked: Collection[Tensor],
        joins_weights: bool,
        has_loss: bool,
        **more: Any,
    ) -> None:
        """Initialise the stage for one step.

        ``spans`` are the slices of a whole sequence, ``hooked`` the parameters of this rank with
        hooks of the caller's. ``joins_weights``: the W passes of a microbatch's slices follow each
        other, and the first slice's comes last.
        """
        super().__init__(*args, has_loss=False, **more)
        self._spans = spans
        self._joins_weights = joins_weights
        self._is_last = has_loss
        # Recorders of model calls, by microbatch. An entry exists only while the first slice of its
        # microbatch runs; the later slices repeat the recorded call.
        self._noted: dict[int, RepeatableCall] = {}
        # Recorded model calls, by microbatch. An entry exists until the last slice has run.
        self._calls: dict[int, ModelCall] = {}
        # Outputs of the last stage for each slice, by microbatch.
        self._outputs: dict[int, list[Tensor]] = {}
        # Gradients of whole microbatches' outputs, by microbatch.
        self._gradients: dict[int, Tensor] = {}
        self._summed = SummedGradients(p for p in self._model.parameters() if p in hooked)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        piece = _slice(microbatch)
        output = super().forward(piece, x)
        if piece.is_first:
            self._calls[piece.microbatch] = self._noted.pop(piece.microbatch).call
        if self._is_last:
            self._outputs.setdefault(piece.microbatch, []).append(output.detach())
            self._free(output)
        if piece.is_last:
            call = self._calls.pop(piece.microbatch)
            if self._is_last:
                self._make_loss(piece.microbatch, call)
            if not self._has_backward:
                running_slice.drop(self._number, piece.microbatch)
        return output

    def forget(self) -> None:
        super().forget()
        for kept in (self._noted, self._calls, self._outputs, self._gradients):
            kept.clear()
        self._summed.clear()
        running_slice.clear()

    def _make_loss(self, microbatch: int, call: ModelCall) -> None:
        # The model's output is losses per token of shape [b, s], or logits of shape [b, s, v].
        output = torch.cat(self._outputs.pop(microbatch), dim=1)
        gradient, tokens = loss_with_gradient(
            output, call.loss_func, self._model, self._config, self._call, self.losses
        )
        self.tokens += tokens
        if gradient is not None:
            self._gradients[microbatch] = gradient

    def _forward_step_func(self, microbatch: int) -> Callable[..., Any]:
        piece = _slice(microbatch)
        if not piece.is_first:
            return self._calls[piece.microbatch].repeat
        noted = RepeatableCall(self._call.forward_step_func, "--pipeline-slices")
        self._noted[piece.microbatch] = noted
        return noted

    def _run(
        self,
        forward_step_func: Callable[..., Any],
        microbatch: int,
        *args: Any,
        is_first: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        piece = _slice(microbatch)
        if is_first and not self._is_quantised:
            _add_all_gradients(self._model)
            is_first = False
        with running_slice.running(self._number, piece.microbatch, self._spans[piece.slice]):
            output, tokens = super()._run(
                forward_step_func, piece.microbatch, *args, is_first=is_first, **more
            )
        # A slice's losses may be a view of a larger tensor, which would stay in memory.
        if self._is_last:
            output = make_viewless_tensor(output, output.requires_grad, keep_graph=True)
        return output, tokens

    def _backward_input(
        self, microbatch: int, dy: Tensor | None, *, w_is_next: bool
    ) -> Tensor | None:
        piece = _slice(microbatch)
        span = self._spans[piece.slice]
        if self._is_last:
            dy = self._gradients[piece.microbatch][:, span.here]
        running = running_slice.running(self._number, piece.microbatch, span, is_backward=True)
        with running, self._summed.adding(piece.microbatch):
            dx = super()._backward_input(piece, dy, w_is_next=w_is_next)
        if piece.is_first:
            self._summed.hand_over(piece.microbatch)
            self._gradients.pop(piece.microbatch, None)
            running_slice.drop(self._number, piece.microbatch)
        return dx

    def backward_weight(self, microbatch: int) -> None:
        piece = _slice(microbatch)
        if not self._joins_weights or piece.is_first:
            super().backward_weight(microbatch)

    def _run_weight_gradients(self, microbatch: int) -> None:
        if not self._joins_weights:
            super()._run_weight_gradients(microbatch)
            return
        piece = _slice(microbatch)
        queue.run_joined(self._number, slices_of(piece.microbatch, piece.ends))


def _add_all_gradients(model: torch.nn.Module) -> None:
    """Make Transformer Engine add all weight gradients of this step to ``main_grad``.

    Otherwise Transformer Engine would overwrite ``main_grad`` with the gradient of the step's first
    forward pass, which with slices is not the first gradient. Not called for quantised weights,
    which must know the first forward pass.
    """
    for module in model.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False  # type: ignore[assignment]


def _slice(microbatch: int) -> Slice:
    assert isinstance(microbatch, Slice), f"{microbatch} is a whole microbatch"
    return microbatch
