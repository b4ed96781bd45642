"""The streams of autograd's engine on a device, by the rules of torch since 2.9 (`Node::stream` in
node.h, `Engine::evaluate_function` and `GraphTask::exec_post_processing` in engine.cpp,
`InputBuffer::add` in input_buffer.cpp):

- A node runs on the stream that was current when it was created. An AccumulateGrad is created when
  its leaf is first used, and lives as long as something refers to it.
- Before a node runs, its stream waits for each gradient: for an event that was recorded where and
  when the gradient was computed. If that is another stream, the gradient's memory is recorded for
  the node's stream.
- Two gradients of one input are added on the stream of the node that takes them, which waits for
  both.
- Gradients that the caller passes count as computed on the stream that is current at the call. At
  the end that stream waits for the streams on which leaves were run.

On the CPU the engine runs nodes on the calling thread, in the same order. Hooks of each node tell
when it begins and ends; operations that are dispatched between two nodes are the additions.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.helpers.streams.clocks import Clock
from tests.helpers.streams.device import Device

# Whether this torch calls a hook when a node of autograd is created, which older versions do not.
TELLS_OF_NODES = hasattr(torch.autograd.graph, "node_creation_hook")


@dataclass(eq=False)
class _Node:
    name: str
    stream: int


_Input = tuple[_Node, int]  # a node, and the number of one of its inputs


@dataclass
class _Ready:
    """A gradient that was computed on ``stream``, before ``event``."""

    stream: int
    event: Clock


@dataclass
class _Task:
    """A call of autograd's engine, and its state while it runs."""

    ready: dict[_Input, _Ready] = field(default_factory=dict)
    leaf_streams: set[int] = field(default_factory=set)
    # streams of the next additions of gradients
    additions: deque[int] = field(default_factory=deque)
    is_between: bool = True  # whether no node is running
    node: str = ""


class Engine:
    """Stand-in for torch's autograd engine, which notes what runs by hooks of the graph's nodes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tasks: list[_Task] = []
        self.is_watching = False
        self._engine: Any = torch.autograd.Variable._execution_engine

    @property
    def running(self) -> str:
        """The name of the node that runs."""
        return self._tasks[-1].node if self._tasks else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Add hooks to nodes that this thread creates, and stand in for torch's engine."""
        torch.autograd.Variable._execution_engine = self  # type: ignore[assignment]
        self.is_watching = True
        try:
            with torch.autograd.graph.node_creation_hook(self._hook):
                yield
        finally:
            torch.autograd.Variable._execution_engine = self._engine
            self.is_watching = False

    def run_backward(
        self, tensors: Sequence[Any], grad_tensors: Sequence[Any], *args: Any, **more: Any
    ) -> Any:
        """Run the engine. Gradients of roots come from the current stream."""
        caller = self._device.current
        task = _Task()
        self._tasks.append(task)
        for root, gradient in zip(tensors, grad_tensors, strict=True):
            node = getattr(root, "grad_fn", None)
            if node is not None:
                self._add(task, (self._known(node), root.output_nr), gradient, caller)
        task.additions.clear()
        try:
            result = self._engine.run_backward(tensors, grad_tensors, *args, **more)
        finally:
            self._tasks.pop()
            self._device.current = caller
        for stream in task.leaf_streams:
            self._device.wait_stream(caller, stream)
        return result

    def stream_of_addition(self) -> int | None:
        """Return the stream of the operation that is dispatched now, if it adds two gradients."""
        task = self._tasks[-1] if self._tasks else None
        if task is None or not task.is_between or not task.additions:
            return None
        return task.additions.popleft()

    def _hook(self, node: Any) -> None:
        made = self._known(node)
        following = [
            None if function is None else (self._known(function), number)
            for function, number in node.next_functions
        ]
        node.register_prehook(lambda gradients: self._begin(made))
        if following:
            node.register_hook(lambda outputs, inputs: self._end(made, following, outputs))

    def _known(self, node: Any) -> _Node:
        """Return the record of ``node``. It is kept in the node's own metadata, which lives as long
        as the node."""
        made = node.metadata.get(_KEY)
        if made is None:
            made = node.metadata[_KEY] = _Node(node.name(), self._device.current)
        return made

    def _begin(self, node: _Node) -> None:
        task = self._tasks[-1]
        self._device.current = node.stream
        for taken in [key for key in task.ready if key[0] is node]:
            ready = task.ready.pop(taken)
            if ready.stream != node.stream:
                self._device.clocks.wait(node.stream, ready.event)
        task.is_between, task.node = False, node.name
        task.additions.clear()
        if node.name.endswith("AccumulateGrad"):
            task.leaf_streams.add(node.stream)

    def _end(
        self, node: _Node, following: Sequence[_Input | None], outputs: Sequence[Tensor | None]
    ) -> None:
        task = self._tasks[-1]
        for taken, output in zip(following, outputs, strict=True):
            if taken is not None and output is not None:
                self._add(task, taken, output, node.stream)
        task.is_between, task.node = True, ""

    def _add(self, task: _Task, taken: _Input, gradient: Tensor | None, producer: int) -> None:
        """Add ``gradient`` to an input of ``task`` on the streams that `InputBuffer::add` uses."""
        consumer, clocks = taken[0].stream, self._device.clocks
        event = clocks.snapshot(producer)
        if consumer != producer and gradient is not None:
            self._device.storages.record_stream(gradient, consumer)
        before = task.ready.get(taken)
        if before is None:
            task.ready[taken] = _Ready(producer, event)
            return
        if consumer != producer:
            clocks.wait(consumer, event)
        if consumer != before.stream:
            clocks.wait(consumer, before.event)
        task.additions.append(consumer)
        # The sum is ready on the consumer's stream, so the consumer need not wait for the event.
        task.ready[taken] = _Ready(consumer, event)


_KEY = "emulated stream"
