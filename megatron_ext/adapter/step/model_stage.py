"""Megatron model chunk as a `RunnableStage` that calls Megatron's forward_step and backward_step.

These two functions apply loss scaling, token counts, timers, autocast and auxiliary losses, so that
a stage's results are bitwise those of stock Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.adapter.model_parts import may_lose_gradients
from megatron_ext.adapter.step.checkpointed_forward import (
    CheckpointedCall,
    RecomputeInputs,
    recomputing,
)
from megatron_ext.adapter.step.parameter_gathers import ParameterGathers
from megatron_ext.adapter.step.recomputed_decoder import RecomputedDecoder, decoder_to_recompute
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import RecordedReduction
from megatron_ext.runtime.stage import Backward
from megatron_ext.runtime.weight_gradients import queue


@dataclass(frozen=True)
class StepCall:
    """Values of a step's call of Megatron's schedule function that stages need."""

    forward_step_func: Callable[..., Any]
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool | None
    context_parallel_size: int


class ModelStage:
    """Model chunk during one step, which runs its passes by Megatron's forward and backward steps.

    ``w_is_next``: microbatches whose weight-gradient pass (W) the rank runs directly after their
    input-gradient pass (I). ``recomputed``: microbatches whose activations are recomputed by a pass
    R.
    """

    _takes_slices = False

    def __init__(
        self,
        number: int,
        model: torch.nn.Module,
        config: Any,
        data_iterator: Any,
        call: StepCall,
        recorder: Recorder,
        gathers: ParameterGathers,
        w_is_next: Collection[int] = (),
        recomputed: Collection[int] = (),
        *,
        has_loss: bool,
        first_trained_stage: int = 0,
    ) -> None:
        """Initialise the stage for one step.

        ``first_trained_stage`` is the first stage that is not frozen; earlier stages have no
        backward pass.
        """
        self._number = number
        self._model = model
        self._config = config
        self._data_iterator = data_iterator
        self._call = call
        self._recorder = recorder
        self._gathers = gathers
        self._w_is_next = w_is_next
        self._recomputed = recomputed
        self._has_loss = has_loss
        self._has_backward = not call.forward_only and number >= first_trained_stage
        # The first trained stage gets an input that requires no gradient. With Megatron's recompute
        # its weights would then get no gradients, so the stage makes its input require one.
        self._asks_gradient = number == first_trained_stage and may_lose_gradients(model)
        self._is_quantised = any(getattr(config, name, None) for name in ("fp8", "fp4"))
        # For each microbatch, the input and output of F, or of R, until its backward pass.
        self._between: dict[int, tuple[Tensor | None, Tensor]] = {}
        # For each microbatch between F and R: the input, the inputs of the recompute, and the index
        # of its loss in `losses`.
        self._checkpointed: dict[int, tuple[Tensor | None, RecomputeInputs, int]] = {}
        self._decoder: Any = None  # decoder of the model, if R recomputes only the decoder
        if recomputed and not has_loss:
            takes_slices = self._takes_slices
            self._decoder = decoder_to_recompute(number, model, config, takes_slices=takes_slices)
        # Decoders of microbatches between their F and their R.
        self._decoders: dict[int, RecomputedDecoder] = {}
        self._has_begun = False  # whether a forward pass of this step has run
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        is_first = self._begin_forward(x)
        run = self._forward_step_func(microbatch)
        if microbatch in self._recomputed and self._decoder is not None:
            return self._forward_but_decoder(run, microbatch, x, is_first)
        if microbatch in self._recomputed:
            first = CheckpointedCall(run, self._is_quantised, has_loss=self._has_loss)
            output, _ = self._run(first, microbatch, x, [], is_first=is_first, has_loss=False)
            self._checkpointed[microbatch] = x, first.recompute_inputs, len(self.losses)
            if self._has_loss:
                self.losses.append(None)  # R computes the loss and replaces this entry
            return output
        output, tokens = self._run(
            run, microbatch, x, self.losses, is_first=is_first, has_loss=self._has_loss
        )
        self.tokens += tokens
        if self._has_backward:
            self._between[microbatch] = (x, output)
        return output

    def _forward_but_decoder(
        self, run: Callable[..., Any], microbatch: int, x: Tensor | None, is_first: bool
    ) -> Tensor:
        """Run a forward pass with gradients, except for the decoder, which is recomputed later."""
        decoder = RecomputedDecoder(self._decoder, self._is_quantised)
        with decoder.checkpointed():
            output, tokens = self._run(
                run, microbatch, x, self.losses, is_first=is_first, has_loss=False
            )
        self.tokens += tokens
        self._decoders[microbatch] = decoder
        self._between[microbatch] = (x, output)
        return output

    def overlapped_forward(
        self, microbatch: int, x: Tensor | None, backward: Backward
    ) -> tuple[Tensor, Tensor | None]:
        return self.forward(microbatch, x), backward.run()

    def recompute(self, microbatch: int) -> None:
        if microbatch in self._decoders:
            self._decoders.pop(microbatch).recompute()
            return
        x, noted, place = self._checkpointed.pop(microbatch)
        losses: list[Any] = []
        with recomputing(noted.random_states, self._is_quantised):
            output, tokens = self._run(
                noted.call.repeat, microbatch, x, losses, has_loss=self._has_loss
            )
        self.tokens += tokens
        if self._has_loss:
            if not output.requires_grad:
                raise ValueError(
                    "the loss function returned a loss that does not depend on the output it was "
                    "given, as if forward_step_func had computed it: with --pipeline-recompute the "
                    "forward pass of forward_step_func has no gradients, and the loss function "
                    "gets the recomputed output; compute the loss from its argument, or drop "
                    "--pipeline-recompute"
                )
            (self.losses[place],) = losses
        else:
            self._free(output)  # the output of R is not needed, as the equal output of F was sent
        self._between[microbatch] = (x, output)

    def _begin_forward(self, x: Tensor | None) -> bool:
        """Begin F on the input ``x``; return whether it is the stage's first F of the step.

        Values derived from the weights once per step, such as FP8 copies, are computed in the first
        F, whatever microbatch a schedule begins with.
        """
        is_first, self._has_begun = not self._has_begun, True
        if x is not None and self._asks_gradient:
            x.requires_grad_()
        if is_first:
            self._gathers.stage_begins(self._number)
        return is_first

    def _run(
        self,
        forward_step_func: Callable[..., Any],
        microbatch: int,
        x: Tensor | None,
        losses: list[Any],
        *,
        is_first: bool = False,
        has_loss: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run Megatron's forward_step, and return the output and the number of tokens.

        The reported loss is appended to ``losses``.
        """
        call = self._call
        output, tokens = schedules.forward_step(
            forward_step_func,
            self._data_iterator,
            self._model,
            call.num_microbatches,
            x,
            losses,
            self._config,
            cp_group_size=call.context_parallel_size,
            collect_non_loss_data=call.collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(
                call.first_val_step, call.forward_only, is_first
            ),
            current_microbatch=microbatch,
            is_last_stage=has_loss,
        )
        self._forget_input()
        # In an evaluation ``output`` is whatever the caller's loss function returns.
        if not (self._has_backward or call.forward_only) and output.requires_grad:
            raise ValueError(
                f"neither stage {self._number} nor an earlier stage has trained parameters, so no "
                "backward pass runs there; but its model was given a tensor that requires a "
                "gradient, which would be lost: make that tensor within the model, or let some "
                "parameter of stage 0 require a gradient"
            )
        return output, tokens

    def _forget_input(self) -> None:
        """Reset the model's input, so that it and its gradient are freed before the next F."""
        get_attr_wrapped_model(self._model, "set_input_tensor")([None])

    def output_sent(self, microbatch: int) -> None:
        if microbatch in self._between:
            self._free(self._between[microbatch][1])

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        dx = self._backward_input(microbatch, dy, w_is_next=True)
        self.backward_weight(microbatch)
        return dx

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        return self._backward_input(microbatch, dy, w_is_next=microbatch in self._w_is_next)

    def _backward_input(
        self, microbatch: int, dy: Tensor | None, *, w_is_next: bool
    ) -> Tensor | None:
        x, output = self._between.pop(microbatch)
        if self._has_loss:
            self._free(output)
        with queue.collecting(self._number, microbatch, w_is_next=w_is_next):
            # Megatron's backward_step calls retain_grad on its input, which fails if the input
            # requires no gradient.
            given = None if x is None or not x.requires_grad else x
            dx = schedules.backward_step(given, output, dy, self._config)
        return None if dx is None else queue.keep(dx)

    def backward_weight(self, microbatch: int) -> None:
        timers = self._config.timers
        if timers is not None:  # Megatron's backward_step runs this timer for its backward passes
            timers("backward-compute", log_level=2).start()
        self._run_weight_gradients(microbatch)
        if timers is not None:
            timers("backward-compute").stop()

    def _run_weight_gradients(self, microbatch: int) -> None:
        queue.run(self._number, microbatch)

    def forget(self) -> None:
        """Discard the losses, token counts and tensors that this stage has stored in the step."""
        self._between.clear()
        self._checkpointed.clear()
        self._decoders.clear()
        self._has_begun = False
        self.losses.clear()
        self.tokens.zero_()

    def gradients_complete(self) -> None:
        """Start the chunk's data-parallel reduction, if Megatron overlaps it with passes.

        With ``force_all_reduce``, finalize_model_grads of Megatron reduces instead.
        """
        if self._call.force_all_reduce or not overlaps_reduction(self._model):
            return
        reduction = self._recorder.reducing(self._number)
        self._model.start_grad_sync()  # type: ignore[operator]  # DistributedDataParallel's
        if reduction is not None:
            _watch_reduction(self._model, reduction)

    def _forward_step_func(self, microbatch: int) -> Callable[..., Any]:
        return self._call.forward_step_func

    def _free(self, output: Tensor) -> None:
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)


def overlaps_reduction(model: Any) -> bool:
    """Return whether Megatron overlaps the reduction of ``model`` with later passes.

    The reduction is the data-parallel one.
    """
    return getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False)


def _watch_reduction(model: Any, reduction: RecordedReduction) -> None:
    """Record in ``reduction`` when the gradient reduction that was just started completes.

    If a work does not signal completion, the time is when Megatron's wait for it returns. With
    several optimizer instances Megatron stores no handle, and the time stays unknown.
    """
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        handle = group.grad_reduce_handle
        if handle is None:
            continue
        works = getattr(handle, "works", [handle])
        if not all(reduction.ends_with(work) for work in works):
            group.grad_reduce_handle = _Awaited(handle, reduction)


class _Awaited:
    """Wrapper of a handle that Megatron waits for, which records when the wait has returned."""

    def __init__(self, handle: Any, reduction: RecordedReduction) -> None:
        self._handle = handle
        self._reduction = reduction

    def wait(self) -> None:
        self._handle.wait()
        self._reduction.was_awaited()
