"""Trainings on emulated clocks, of a GPT whose layers and output layer take the times that a test
gives.

Everything else is Megatron's own loop and, under one of this project's schedules, the runtime. The
clock of a rank advances only by its passes and by the messages that they wait for, so a busy
machine does not matter. Messages of Megatron's own pipeline functions end when NCCL's would, and
block a rank that waits for them. Under one of this project's schedules, the time that a rank is
blocked in a send is not emulated.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor

from megatron_ext.adapter.model_parts import language_model
from megatron_ext.features.trace.adapter import step_trace
from megatron_ext.runtime.measure.clocks import Offset
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import HostClock
from megatron_ext.runtime.weight_gradients import WeightGradients, queue
from megatron_ext.schedule.action import Action, Kind
from scripts.pretrain_gpt import model_provider

PassTriple = tuple[float, float, float]  # seconds of F, I and W
# Sending and receiving rank; messages between the two run one after the other.
_Queue = tuple[int, int]

_SIZE = 64  # largest number of stages, and of microbatches
_STEP = 1e3  # seconds that are longer than any step
# largest number of ranks of a pipeline, and of messages between two ranks
_RANKS, _MESSAGES = 4, 1024
_OF_W = "seconds_of_w"  # attribute of a weight with the seconds of its W


@dataclass(frozen=True)
class PartTimes:
    """Seconds of a layer, of the output layer with its loss, and of a message."""

    layer: PassTriple
    output_layer: PassTriple
    message: float = 0.0


class _RankClock:
    """The clock of this process, and the times at which passes of all processes ended by their
    clocks."""

    def __init__(self, message: float) -> None:
        self.now, self._steps, self._message = 0.0, 0, message
        shared = mmap.mmap(-1, 2 * _SIZE * _SIZE * np.dtype(np.float64).itemsize)
        self._ends = np.frombuffer(shared, np.float64).reshape(2, _SIZE, _SIZE)

    def begin_step(self) -> None:
        self._steps += 1
        self.now = self._steps * _STEP

    @contextlib.contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Run a pass in the block, after its message has arrived."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        is_backward = int(kind is not Kind.FORWARD)
        if kind is not Kind.BACKWARD_WEIGHT:
            sender = stage + 1 if is_backward else stage - 1
            made = self._ends[is_backward, sender, microbatch]
            if sender >= 0 and made > self._steps * _STEP:
                self.now = max(self.now, made + self._message)
        yield
        if kind is not Kind.BACKWARD_WEIGHT:
            self._ends[is_backward, stage, microbatch] = self.now


class _StockMessages:
    """Messages of Megatron's own pipeline functions, which Megatron posts and waits for.

    A message moves when both its ranks have posted it. Messages that are not batched follow one
    another: NCCL has a communicator for each two ranks, and Megatron has one for each direction
    only if the pipeline has two ranks.
    """

    def __init__(self, clock: _RankClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        # number of messages that this rank has posted in each queue
        self._numbers: dict[_Queue, int] = defaultdict(int)
        self._ends: dict[_Queue, list[float]] = defaultdict(list)
        shape = _RANKS, _RANKS, 2, _MESSAGES
        shared = mmap.mmap(-1, int(np.prod(shape)) * np.dtype(np.float64).itemsize)
        # Times when messages were posted, by queue, side of the queue and number.
        self._posts = np.frombuffer(shared, np.float64).reshape(shape)
        self._posts[:] = np.nan

    def posted_alone(self, original: Callable[..., Any], **call: Any) -> dict[str, Any]:
        """Stand in for `_p2p_ops`, whose works are in the order of their posts."""
        return {
            name: _Work(self._clock, [work], [self._post(name, call, is_alone=True)])
            for name, work in original(**call).items()
        }

    def posted_together(self, original: Callable[..., Any], **call: Any) -> list[Any]:
        """Stand in for `_batched_p2p_ops`."""
        ends = [
            self._post(name, call, is_alone=False)
            for name in ("send_prev", "recv_prev", "send_next", "recv_next")
            if call[f"tensor_{name}"] is not None
        ]
        works = original(**call)
        return [_Work(self._clock, works, ends)] if ends else []

    def _post(self, name: str, call: dict[str, Any], *, is_alone: bool) -> Callable[[], float]:
        """Record that this rank posts a message now, and return a function that returns the time at
        which the message ends."""
        end, side = name.split("_")
        own, other = dist.get_rank(), call[f"{side}_pipeline_rank"]
        queue = (own, other) if end == "send" else (other, own)
        if is_alone and call["group"].size() > 2:
            queue = min(queue), max(queue)
        number = self._numbers[queue]
        self._numbers[queue] += 1
        self._posts[(*queue, queue.index(own), number)] = self._clock.now
        return lambda: self._end(queue, number, is_alone=is_alone)

    def _end(self, queue: _Queue, number: int, *, is_alone: bool) -> float:
        ends = self._ends[queue]
        while len(ends) <= number:
            posts = self._posts[(*queue, slice(None), len(ends))]
            while np.isnan(posts).any():  # gloo may send a message before the receive is posted
                time.sleep(1e-4)
            begins = [*posts.tolist(), *(ends[-1:] if is_alone else [])]
            ends.append(max(begins) + self._seconds)
        return ends[number]


@dataclass(frozen=True)
class _Work:
    """Handle of messages that were posted at once."""

    clock: _RankClock
    works: Sequence[Any]
    ends: Sequence[Callable[[], float]]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.clock.now = max(self.clock.now, *(end() for end in self.ends))


class _Pass(torch.autograd.Function):
    """A pass on the emulated clock: its forward takes the seconds of F. Its backward takes the
    seconds of I, and those of W unless W is deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: _RankClock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.backward_seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.now += ctx.backward_seconds
        return dy, None, None, None


def timed_models(times: PartTimes, patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a model provider for one call of `train`. On the emulated clock, which is also the
    clock of traces, the model's parts take ``times``. Replacements in ``patch`` last as long as the
    training."""
    clock = _RankClock(times.message)
    put, record, computing = WeightGradients.put, Recorder.record, Recorder.computing

    def put_timed(
        self: WeightGradients, weight: Tensor, compute: Callable[[], Any], *rest: Any
    ) -> None:
        def computed() -> Any:
            clock.now += getattr(weight, _OF_W, 0.0)
            return compute()

        put(self, weight, computed, *rest)

    def record_timed(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if self._recording is None:
            clock.begin_step()
        return record(self, *args, **kwargs)

    @contextlib.contextmanager
    def computing_timed(self: Recorder, action: Action) -> Iterator[None]:
        with clock.running(action), computing(self, action):
            yield

    patch.setattr(WeightGradients, "put", put_timed)
    patch.setattr(Recorder, "record", record_timed)
    patch.setattr(Recorder, "computing", computing_timed)
    patch.setattr(HostClock, "record_event", lambda self: clock.now)
    patch.setattr(
        step_trace, "clock_offsets", lambda group, device: [Offset(0.0, 0.0)] * group.size()
    )
    messages = _StockMessages(clock, times.message)
    for name, posted in (
        ("_p2p_ops", messages.posted_alone),
        ("_batched_p2p_ops", messages.posted_together),
    ):
        original = getattr(p2p_communication, name)
        patch.setattr(p2p_communication, name, functools.partial(posted, original))
    return functools.partial(_provided, clock, times)


def _provided(clock: _RankClock, times: PartTimes, *args: Any, **kwargs: Any) -> Any:
    model = model_provider(*args, **kwargs)
    language: Any = language_model(model)
    for layer in language.decoder.layers:
        weight = layer.mlp.linear_fc2.weight
        setattr(weight, _OF_W, times.layer[2])
        layer.register_forward_hook(functools.partial(_behind, clock, weight, times.layer))
    output = getattr(language, "output_layer", None)
    if output is not None:
        setattr(output.weight, _OF_W, times.output_layer[2])
        output.register_forward_hook(
            functools.partial(_behind, clock, output.weight, times.output_layer)
        )
    return model


def _behind(
    clock: _RankClock,
    weight: Tensor,
    seconds: PassTriple,
    module: Any,
    args: Any,
    made: tuple[Any, ...],
) -> tuple[Any, ...]:
    forward, input_gradient, weight_gradient = seconds
    at_once = 0.0 if queue.splits(weight) else weight_gradient
    return _Pass.apply(made[0], clock, forward, input_gradient + at_once), *made[1:]
