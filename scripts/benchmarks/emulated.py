"""Passes that take the time they cost and compute next to nothing: schedules on emulated clocks.

What is measured then is the executor, the transport and autograd, and not the machine's arithmetic:
a rank that sleeps needs no core, so a pipeline of eight runs on two.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs

SHAPE = (1, 1, 8)  # of what passes between stages
DTYPE = torch.float32


WAKES_LATE = 0.0003  # seconds, about, that a system lets a sleeper oversleep


def take(seconds: float) -> None:
    """Let a pass last ``seconds``: asleep, but for the last moment, so that it ends on time."""
    if not _clock.runs:
        return
    end = time.monotonic() + seconds
    if seconds > WAKES_LATE:
        time.sleep(seconds - WAKES_LATE)
    while time.monotonic() < end:
        pass


@dataclass
class _Clock:
    """Emulated clock of a rank. ``runs``: passes last as long as they cost, else no time."""

    runs: bool = True


_clock = _Clock()


@contextlib.contextmanager
def as_one(seconds: float) -> Iterator[None]:
    """Context whose passes take ``seconds`` together."""
    _clock.runs = False
    try:
        yield
    finally:
        _clock.runs = True
    take(seconds)


class _Activations(torch.autograd.Function):
    """Forward takes F, backward takes I."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        take(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        take(ctx.backward_seconds)
        return dy.clone(), None, None


class _Weight(torch.autograd.Function):
    """Backward takes W, at once or, while W passes are split off, in its own pass."""

    @staticmethod
    def forward(ctx: Any, weight: torch.nn.Parameter, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        return weight.detach() * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        gradient = dy.sum().reshape(1)

        def compute() -> Tensor:
            take(ctx.seconds)
            return gradient

        if queue.splitting:
            queue.put(ctx.weight, compute, [gradient])
            return None, None
        return compute(), None


_PASSES = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class EmulatedChunk(torch.nn.Module):
    """A stage of the model whose passes take what ``costs`` say."""

    def __init__(self, stage: int, costs: Costs) -> None:
        super().__init__()
        self.costs = costs
        self.seconds = {kind: costs.of(Action(stage, kind, 0)) for kind in _PASSES}
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, kind: Kind = Kind.FORWARD) -> Tensor:
        """Run the module as F, or as R if ``kind`` says so."""
        seconds = self.seconds
        y: Tensor = _Activations.apply(x, seconds[kind], seconds[Kind.BACKWARD_INPUT])
        return y + _Weight.apply(self.weight, seconds[Kind.BACKWARD_WEIGHT])


@dataclass(frozen=True)
class Contender:
    """A way to run a step, on this rank.

    Attributes:
        name: ``megatron-ext zb-v``, ``megatron 1f1b``, ...
        ideal: seconds that the schedule takes with free messages and no overhead.
        passes: passes of this rank in a step.
        step: runs one step.
        commit_or_rollback: with post-validation, waits for the verdict on the last step; else None.
        ideal_after_bad: with post-validation, as ``ideal``, of a step that follows a bad verdict.
    """

    name: str
    ideal: float
    passes: int
    step: Callable[[], None]
    commit_or_rollback: Callable[[], None] | None = None
    ideal_after_bad: float | None = None


def data() -> Tensor:
    """Return the input tensor of the first stage. It requires a gradient: without it autograd skips
    I."""
    return torch.ones(SHAPE, dtype=DTYPE, requires_grad=True)
