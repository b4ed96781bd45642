"""Forward pass that saves only what its recompute needs, and the recompute.

The caller's forward_step_func is called once, in F. R repeats its call of the model
(`repeatable_call`), and only R calls the loss function.

The checkpointed forward runs as in Megatron's own recompute: without gradients, within Transformer
Engine's context for it, with the random states stored for R. Without gradients routers count no
tokens and no auxiliary losses, so R does. Where Megatron checks another condition than whether
gradients are enabled, patches check `checkpointed_forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import random

from megatron_ext.adapter.step.repeatable_call import ModelCall, RepeatableCall


class CheckpointedForward:
    """Whether the model now runs a forward pass that will be recomputed."""

    def __init__(self) -> None:
        self.is_on = False


checkpointed_forward = CheckpointedForward()


@dataclass(frozen=True)
class RecomputeInputs:
    """Call of the model to repeat, and the random states at that call."""

    call: ModelCall
    random_states: tuple[Any, ...]


class CheckpointedCall(RepeatableCall):
    """Repeatable call whose first run is a checkpointed forward."""

    def __init__(self, forward_step_func: Callable[..., Any], is_quantised: bool) -> None:
        super().__init__(forward_step_func, "--pipeline-recompute")
        self._is_quantised = is_quantised
        self._random_states: tuple[Any, ...] = ()

    @property
    def recompute_inputs(self) -> RecomputeInputs:
        """Inputs of the recompute, available after the call."""
        return RecomputeInputs(self.call, self._random_states)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        self._random_states = random._get_all_rng_states()
        checkpointed_forward.is_on = True
        try:
            with torch.no_grad(), _recompute(self._is_quantised, again=False):
                yield
        finally:
            checkpointed_forward.is_on = False


@contextlib.contextmanager
def recomputing(noted: RecomputeInputs, is_quantised: bool) -> Iterator[None]:
    """Context with the random states of ``noted``; the current ones are restored afterwards."""
    with random._fork_rng(), _recompute(is_quantised, again=True):
        random._set_all_rng_states(*noted.random_states)
        yield


def _recompute(is_quantised: bool, *, again: bool) -> AbstractContextManager[None]:
    """Return Transformer Engine's context for a recomputed forward pass: in the first run weights
    are also quantised for the backward pass."""
    if not is_quantised:
        return contextlib.nullcontext()
    return random.activation_recompute_forward(activation_recompute=True, recompute_phase=again)
