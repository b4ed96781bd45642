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
    """Whether the model is now running a forward pass that will be recomputed."""

    def __init__(self) -> None:
        self.is_on = False


checkpointed_forward = CheckpointedForward()


RandomStates = tuple[Any, ...]


@dataclass(frozen=True)
class RecomputeInputs:
    """Inputs of a recompute: the call of the model to repeat, and the random states at that
    call."""

    call: ModelCall
    random_states: RandomStates


@contextlib.contextmanager
def checkpointing(is_quantised: bool) -> Iterator[RandomStates]:
    """Context of a forward pass that will be recomputed; yields the random states at its beginning.

    As in Megatron's own recompute it has no gradients, and Transformer Engine's context for it.
    Without gradients routers count no tokens and no auxiliary losses, so R does. Where Megatron
    checks another condition than whether gradients are enabled, patches check
    `checkpointed_forward`.
    """
    checkpointed_forward.is_on = True
    try:
        with torch.no_grad(), _recompute(is_quantised, is_recompute=False):
            yield random._get_all_rng_states()
    finally:
        checkpointed_forward.is_on = False


class CheckpointedCall(RepeatableCall):
    """Repeatable call whose first run is a checkpointed forward.

    Megatron recomputes layers, and hooks of the caller's on the modules around them run once, with
    gradients. Here the whole stage runs twice. Nothing needs what the stage with the loss computes
    in F (``has_loss``), so these hooks run in R alone there. Elsewhere F's output depends on them,
    and a stage that has such hooks runs once, in F, except its decoder (`recomputed_decoder`).
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
        """Inputs of the recompute, available after the model's call."""
        return RecomputeInputs(self.call, self._random_states)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with checkpointing(self._is_quantised) as self._random_states:
            yield


def hooked_around_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules around the layers of ``model`` whose forward pass has hooks
    of the caller's."""
    around = _around_layers(model)
    hooked = {name: None for name, table in around if any(map(_is_callers, table.values()))}
    return list(hooked)


def _around_layers(model: torch.nn.Module) -> Iterator[tuple[str, HooksByNumber]]:
    """Yield the hooks on the forward pass of each module that Megatron's own recompute does not
    include, with the module's name, and the hooks of all modules."""
    yield "all modules", module_hooks._global_forward_pre_hooks
    yield "all modules", module_hooks._global_forward_hooks
    yield from _around_layers_of(type(model).__name__, model)


def _around_layers_of(name: str, module: torch.nn.Module) -> Iterator[tuple[str, HooksByNumber]]:
    yield name, module._forward_pre_hooks
    yield name, module._forward_hooks
    for child, within in module.named_children():
        if child != "layers":
            yield from _around_layers_of(f"{name}.{child}", within)


# Packages whose hooks take part in the passes themselves. Those of megatron.training, such as a
# teacher's recorder of logits, are a caller's.
_OF_PASSES = ("megatron.core", "megatron_ext", "transformer_engine", "torch")


def _is_callers(hook: Hook) -> bool:
    module = f"{getattr(hook, '__module__', '')}."
    return not any(module.startswith(f"{package}.") for package in _OF_PASSES)


@contextlib.contextmanager
def recomputing(random_states: RandomStates, is_quantised: bool) -> Iterator[None]:
    """Run the enclosed block with ``random_states``; the current ones are restored afterwards."""
    with random._fork_rng(), _recompute(is_quantised, is_recompute=True):
        random._set_all_rng_states(*random_states)
        yield


def _recompute(is_quantised: bool, *, is_recompute: bool) -> AbstractContextManager[None]:
    """Return Transformer Engine's context for a recomputed forward pass: in the first run weights
    are also quantised for the backward pass."""
    if not is_quantised:
        return contextlib.nullcontext()
    return random.activation_recompute_forward(
        activation_recompute=True, recompute_phase=is_recompute
    )
