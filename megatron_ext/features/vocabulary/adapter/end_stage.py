"""First and last stage of a model with vocabulary parallelism.

The tokens are needed before the first stage's forward pass, the labels and the loss function after
the last one's, and the caller's forward_step_func provides all three. It is therefore called with a
stand-in for the model, which records the arguments of the model's call. The stage's forward pass
makes that call; the loss function waits until the ranks have computed the losses.

Megatron's own functions process the loss and its gradient, as on a last stage of Megatron's own:
loss masks, token counts, scaling and logging are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_ext.adapter.step.loss import loss_with_gradient
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.repeatable_call import Autocast, ModelCall

_UNTRIED = ("decoder_input", "inference_context", "inference_params")


class StandIn:
    """Stand-in for a model that records calls, to see how a forward_step_func calls the model.

    Attributes are those of the model, or of the modules that it wraps.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.autocasts = False  # whether a call was made within torch's autocast
        self.output = torch.empty(0)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        self.autocasts |= any(Autocast.now().types.values())
        return self.output

    def __getattr__(self, name: str) -> Any:
        model: Any = self._model
        while not hasattr(model, name) and hasattr(model, "module"):
            model = model.module
        return getattr(model, name)


class EndStage(ModelStage):
    """First or last stage under vocabulary parallelism, without embedding, output layer, loss."""

    def __init__(self, *args: Any, has_loss: bool, **more: Any) -> None:
        """Initialise the stage.

        If it has the loss (``has_loss``), the vocabulary passes compute it.
        """
        super().__init__(*args, has_loss=False, **more)
        self.is_last = has_loss
        # Calls of the model whose F has not run yet, by microbatch.
        self._begun: dict[int, ModelCall] = {}
        # Calls of the last stage's model from F until the pass L computes the loss, by microbatch.
        self._awaiting_loss: dict[int, ModelCall] = {}
        keeps_precision = any(isinstance(module, Float16Module) for module in self._model.modules())
        self._more = {"fp32_output": False} if keeps_precision else {}

    def tokens_of(self, microbatch: int) -> Tensor:
        """Return the tokens, int64 [b, s], of a microbatch whose forward step begins now."""
        self._begun[microbatch] = call = self._begin()
        return _argument("input_ids", call)

    def labels_of(self, microbatch: int) -> Tensor:
        """Return the labels, int64 [b, s], of a microbatch after the last stage's forward pass."""
        return _argument("labels", self._awaiting_loss[microbatch])

    def gradient_of_losses(self, microbatch: int, losses: Tensor) -> Tensor | None:
        """Return the gradient of the scaled loss by each of ``losses``.

        ``losses`` are those of the tokens, fp32 [b, s]. The result is None in an evaluation.
        """
        loss_func = self._awaiting_loss.pop(microbatch).loss_func
        call = self._call
        gradient, tokens = loss_with_gradient(
            losses, loss_func, self._model, self._config, call, self.losses
        )
        self.tokens += tokens
        return gradient

    def _forward_step_func(self, microbatch: int) -> Callable[..., Any]:
        call = self._begun.pop(microbatch, None) or self._begin()
        if self.is_last:
            self._awaiting_loss[microbatch] = call

        def run(data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            return model(*call.args, **call.kwargs, **self._more), call.loss_func

        return run

    def _begin(self) -> ModelCall:
        """Call the caller's forward_step_func for the next microbatch.

        Return its call of the model.

        Raises:
            ValueError: the function does not call the model exactly once and return its output, or
                uses the model in a way not known to work.
        """
        stand_in = StandIn(self._model)
        output, loss_func = self._call.forward_step_func(self._data_iterator, stand_in)
        if len(stand_in.calls) != 1 or output is not stand_in.output:
            raise ValueError(
                "--pipeline-vocab-parallel needs a forward_step_func that calls the model once "
                "and returns its output unchanged; this forward_step_func has called the model "
                f"{len(stand_in.calls)} times and returned {type(output).__name__}: change "
                "the output in the loss function, or drop --pipeline-vocab-parallel"
            )
        if stand_in.autocasts:
            raise ValueError(
                "--pipeline-vocab-parallel does not go with a forward_step_func that calls the "
                "model within torch.autocast: passes of the schedule compute the logits outside of "
                "it, in another precision; build the model in bf16, or drop "
                "--pipeline-vocab-parallel"
            )
        ((args, kwargs),) = stand_in.calls
        call = ModelCall(args, kwargs, loss_func)
        given = call.named
        if given.get("output_processor") is not None:
            raise ValueError(
                "--pipeline-vocab-parallel does not go with a custom output head "
                "(output_processor): passes of the schedule compute the logits, without the "
                "model's output layer; drop --pipeline-vocab-parallel"
            )
        for name in _UNTRIED:
            if given.get(name) is not None:
                raise ValueError(
                    f"--pipeline-vocab-parallel does not go with the model's argument {name}: "
                    "this combination is untested; drop --pipeline-vocab-parallel"
                )
        return call


def _argument(name: str, call: ModelCall) -> Tensor:
    tensor = call.named.get(name)
    if tensor is None:
        raise ValueError(
            f"--pipeline-vocab-parallel needs the model to be called with {name} on the stage that "
            f"has {'the embedding' if name == 'input_ids' else 'the loss'}"
        )
    assert isinstance(tensor, Tensor)
    return tensor


@dataclass(frozen=True)
class ModelEnds:
    """First and last stage on this rank, for the vocabulary passes; None for a missing one."""

    first: EndStage | None
    last: EndStage | None

    def tokens(self, microbatch: int) -> Tensor:
        assert self.first is not None
        return self.first.tokens_of(microbatch)

    def labels(self, microbatch: int) -> Tensor:
        assert self.last is not None
        return self.last.labels_of(microbatch)

    def loss(self, microbatch: int, losses: Tensor) -> Tensor | None:
        assert self.last is not None
        return self.last.gradient_of_losses(microbatch, losses)


def ends_of(stages: Iterable[ModelStage]) -> ModelEnds | None:
    """Return the first and last stage among the stages of a rank; None if the rank has neither."""
    ends = {stage.is_last: stage for stage in stages if isinstance(stage, EndStage)}
    return ModelEnds(ends.get(False), ends.get(True)) if ends else None
