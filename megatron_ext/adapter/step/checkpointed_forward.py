"""Forward pass that saves only what its recompute needs, and the recompute.

A stage whose activations are recomputed runs its forward pass twice, and must train as if it ran
once. The caller's forward_step_func is called once, in F. R repeats its call of the model
(`repeatable_call`), and only R calls the loss function. Both run as in Megatron's own recompute: F
without gradients and with the random states stored for R (`checkpointing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.nn.modules import module as module_hooks

from megatron_ext.adapter.step.repeatable_call import ModelCall, RepeatableCall
from megatron_ext.runtime.parameter_hooks import Hook, HooksByNumber, without_hooks


class CheckpointedForward:
    """Flag: whether the model is now running a forward pass that will be recomputed."""

    def __init__(self) -> None:
        self.is_on = False


checkpointed_forward = CheckpointedForward()


RandomStates = tuple[Any, ...]


@dataclass(frozen=True)
class RecomputeInputs:
    """Inputs of a recompute: the model call to repeat, and the random states at that call."""

    call: ModelCall
    random_states: RandomStates


@contextlib.contextmanager
def checkpointing(is_quantised: bool) -> Iterator[RandomStates]:
    """Context of a forward pass that will be recomputed; yields the random states at its beginning.

    As in Megatron's own recompute the pass has no gradients, and runs in Transformer Engine's
    context for recompute. Without gradients routers count no tokens and compute no auxiliary
    losses; the recompute (R) does. Where Megatron does not check whether gradients are enabled,
    patches check `checkpointed_forward`.
    """
    checkpointed_forward.is_on = True
    try:
        with torch.no_grad(), _recompute(is_quantised, is_recompute=False):
            yield random._get_all_rng_states()
    finally:
        checkpointed_forward.is_on = False


class CheckpointedCall(RepeatableCall):
    """Model call that is run without gradients in the forward pass (F), and repeated in R.

    The recompute pass (R) has gradients. Megatron recomputes layers, and the caller's hooks on the
    modules around them run once, with gradients. Here the whole stage runs twice. On the stage with
    the loss (``has_loss``) nothing needs the result of F, so these hooks run in R alone. On other
    stages the output of F depends on them, and a stage with such hooks runs once, in F, except for
    its decoder (`recomputed_decoder`).
    """

    def __init__(
        self, forward_step_func: Callable[..., Any], is_quantised: bool, *, has_loss: bool
    ) -> None:
        super().__init__(forward_step_func, "--pipeline-recompute")
        self._is_quantised = is_quantised
        self._has_loss = has_loss
        self._random_states: RandomStates = ()

    def __call__(self, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        if not self._has_loss:
            return super().__call__(data_iterator, model)
        tables = [table for _, table in _around_layers(model)]
        with without_hooks(tables, lambda hook: not _is_callers(hook)):
            return super().__call__(data_iterator, model)

    @property
    def recompute_inputs(self) -> RecomputeInputs:
        """Inputs that the recompute needs, available after the model's call."""
        return RecomputeInputs(self.call, self._random_states)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with checkpointing(self._is_quantised) as self._random_states:
            yield


def hooked_around_layers(model: torch.nn.Module) -> list[str]:
    """Return names of modules around the layers of ``model`` that have a caller's forward hooks."""
    around = _around_layers(model)
    hooked = {name: None for name, table in around if any(map(_is_callers, table.values()))}
    return list(hooked)


def _around_layers(model: torch.nn.Module) -> Iterator[tuple[str, HooksByNumber]]:
    """Yield the forward hooks of each module outside the layers, with the module's name.

    Megatron's own recompute does not include these modules. Hooks on all modules come first.
    """
    yield "all modules", module_hooks._global_forward_pre_hooks
    yield "all modules", module_hooks._global_forward_hooks
    yield from _around_layers_of(type(model).__name__, model)


def _around_layers_of(name: str, module: torch.nn.Module) -> Iterator[tuple[str, HooksByNumber]]:
    yield name, module._forward_pre_hooks
    yield name, module._forward_hooks
    for child, within in module.named_children():
        if child != "layers":
            yield from _around_layers_of(f"{name}.{child}", within)


# Packages whose hooks on modules take part in the passes themselves. Hooks of megatron.training,
# such as one that records a teacher's logits, count as a caller's.
_OF_PASSES = ("megatron.core", "megatron_ext", "transformer_engine", "torch")


def _is_callers(hook: Hook) -> bool:
    module = f"{getattr(hook, '__module__', '')}."
    return not any(module.startswith(f"{package}.") for package in _OF_PASSES)


@contextlib.contextmanager
def recomputing(random_states: RandomStates, is_quantised: bool) -> Iterator[None]:
    """Run the enclosed recompute with ``random_states``; restore the present states afterwards."""
    with random._fork_rng(), _recompute(is_quantised, is_recompute=True):
        random._set_all_rng_states(*random_states)
        yield


def _recompute(is_quantised: bool, *, is_recompute: bool) -> AbstractContextManager[None]:
    """Return Transformer Engine's context for a forward pass that is, or will be, recomputed.

    In the first run weights are also quantised for the backward pass.
    """
    if not is_quantised:
        return contextlib.nullcontext()
    return random.activation_recompute_forward(
        activation_recompute=True, recompute_phase=is_recompute
    )
