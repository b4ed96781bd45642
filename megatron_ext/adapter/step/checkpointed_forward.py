"""A forward pass of which nothing is kept but what it takes to run it again, and the second run.

The caller's forward_step_func is called once, in F, and R calls the model with what it has called
it with (`repeatable_call`). Its loss function is called in R alone.

The first run is what Megatron's own recompute makes of a forward pass: without gradients, within
Transformer Engine's context for it, with the random states noted that R starts from. Without
gradients routers count no tokens and no auxiliary losses, so R does. Where Megatron asks something
else than whether there are gradients, patches ask `checkpointed_forward`.
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
    """Whether a model runs now that will run again on the same input."""

    def __init__(self) -> None:
        self.is_on = False


checkpointed_forward = CheckpointedForward()


@dataclass(frozen=True)
class RecomputeInputs:
    """The model's call, and the random states then."""

    call: ModelCall
    random_states: tuple[Any, ...]


class CheckpointedCall(RepeatableCall):
    """A noted call that is a first run."""

    def __init__(self, forward_step_func: Callable[..., Any], is_quantised: bool) -> None:
        super().__init__(forward_step_func, "--pipeline-recompute")
        self._is_quantised = is_quantised
        self._random_states: tuple[Any, ...] = ()

    @property
    def recompute_inputs(self) -> RecomputeInputs:
        """After it was called."""
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
    """Within, random numbers are those of ``noted``; after it, those that they were."""
    with random._fork_rng(), _recompute(is_quantised, again=True):
        random._set_all_rng_states(*noted.random_states)
        yield


def _recompute(is_quantised: bool, *, again: bool) -> AbstractContextManager[None]:
    """Transformer Engine's context for a forward pass that is recomputed: in the first run weights
    are quantised for the backward pass too."""
    if not is_quantised:
        return contextlib.nullcontext()
    context: AbstractContextManager[None] = random.activation_recompute_forward(
        activation_recompute=True, recompute_phase=again
    )
    return context
