"""A forward pass of which nothing is kept but what it takes to run it again, and the second run.

The caller's forward_step_func takes a batch from its data iterator, so it is called once, in F.
What it calls the model with is noted, and R calls the model with that again. The loss function
that it returns is called in R alone: what it counts and reports, it does once.

The first run is what Megatron's own recompute makes of a forward pass: without gradients, within
Transformer Engine's context for it, with the random states noted that R starts from. Without
gradients routers count no tokens and no auxiliary losses, so R does. Where Megatron asks something
else than whether there are gradients, patches ask `first_run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor


class FirstRun:
    """Whether a model runs now that will run again on the same input."""

    def __init__(self) -> None:
        self.is_on = False


first_run = FirstRun()


@dataclass(frozen=True)
class Call:
    """What a forward_step_func has called the model with, the random states then, and the loss
    function it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_states: tuple[Any, ...]
    loss_func: Callable[..., Any]

    def again(self, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        """A forward_step_func that makes this call."""
        return model(*self.args, **self.kwargs), self.loss_func


class NotedCall:
    """A forward_step_func that calls another one, in which it notes the model's call and runs it
    as a first run."""

    def __init__(self, forward_step_func: Callable[..., Any], is_quantised: bool) -> None:
        self._forward_step_func = forward_step_func
        self._is_quantised = is_quantised
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = []
        self._outputs: list[Any] = []
        self._loss_func: Any = None

    def __call__(self, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        """Raises ValueError if the other one does not call the model once and return what comes of
        it: R could not do what it does."""
        with ExitStack() as hooks, ExitStack() as within:

            def begin(model: torch.nn.Module, args: Any, kwargs: Any) -> None:
                _refuse_gradients((*args, *kwargs.values()))
                self._calls.append((args, kwargs, random._get_all_rng_states()))
                within.enter_context(_giving_up(self._is_quantised))

            def end(model: torch.nn.Module, args: Any, output: Any) -> None:
                within.close()
                self._outputs.append(output)

            begins = model.register_forward_pre_hook(begin, with_kwargs=True)
            hooks.callback(begins.remove)
            hooks.callback(model.register_forward_hook(end).remove)
            output, self._loss_func = self._forward_step_func(data_iterator, model)
        if len(self._outputs) != 1 or output is not self._outputs[0]:
            raise ValueError(
                f"recompute needs a forward_step_func that calls the model once and returns its "
                f"output as it is; this one has called it {len(self._outputs)} times and returned "
                f"{type(output).__name__}: work on the output in the loss function, or drop "
                f"--pipeline-recompute"
            )
        return output, self._loss_func

    @property
    def call(self) -> Call:
        """After it was called."""
        ((args, kwargs, random_states),) = self._calls
        return Call(args, kwargs, random_states, self._loss_func)


@contextlib.contextmanager
def running_again(call: Call, is_quantised: bool) -> Iterator[None]:
    """Within, random numbers are those of ``call``; after it, those that they were."""
    with random._fork_rng(), _recompute(is_quantised, again=True):
        random._set_all_rng_states(*call.random_states)
        yield


@contextlib.contextmanager
def _giving_up(is_quantised: bool) -> Iterator[None]:
    first_run.is_on = True
    try:
        with torch.no_grad(), _recompute(is_quantised, again=False):
            yield
    finally:
        first_run.is_on = False


def _recompute(is_quantised: bool, *, again: bool) -> AbstractContextManager[None]:
    """Transformer Engine's context for a forward pass that is recomputed: in the first run weights
    are quantised for the backward pass too."""
    if not is_quantised:
        return contextlib.nullcontext()
    context: AbstractContextManager[None] = random.activation_recompute_forward(
        activation_recompute=True, recompute_phase=again
    )
    return context


def _refuse_gradients(given: tuple[Any, ...]) -> None:
    if any(isinstance(value, Tensor) and value.requires_grad for value in given):
        raise ValueError(
            "recompute needs a forward_step_func that gives the model no tensor that has a "
            "gradient: what made it would get none; make it within the model, or drop "
            "--pipeline-recompute"
        )
