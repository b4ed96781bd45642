"""CUDA graphs of whole iterations without a GPU: stand-ins for `torch.cuda.graph` and its graph.

A capture runs the step and records each operation of torch, each message and each wait for one.
Then it restores the memory that the step has written, and overwrites the memory that the step has
allocated. A replay gives torch just the recorded operations again, on the same memory: whatever
else the host has done in the step is not done again, as on a GPU. What a graph cannot contain
fails, and the error names its line: a number or an array made of a tensor, a tensor made of numbers
on a device, a wait for the device or a query of it, a time, torch's store, a barrier. A query of an
event that was recorded in a capture fails, too, at any time and in any thread.

The emulation misses: copies of memory that is not pinned, draws of random numbers, the memory that
tensors of a graph share, streams that do not join again, communicators that are not connected, and
libraries' own kernels.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_ext.adapter import compatibility
from megatron_ext.adapter.handled_settings.refused_setting import RefusalGroup
from megatron_ext.patches import cpu
from megatron_ext.runtime.device_progress import DeviceProgress
from megatron_ext.runtime.recording import HostClock
from tests.helpers.streams.groups import _COLLECTIVES, _MESSAGES
from tests.helpers.streams.operations import _WAITED_FOR, _named, _uses_of

REPLAYED = "emulated: a graph is replayed"  # text that each replay prints
_READS = {"tolist", "numpy", "cpu", "__array__"}
_MADE_OF_NUMBERS = {"tensor", "as_tensor"}
_BARRIERS = {"barrier", "monitored_barrier"}
_OF_STORES = ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "multi_get")
_QUESTIONS = {"is_completed", "is_success", "synchronize"}


Set = Callable[[Any, str, Any], None]  # the function `setattr`, or that of a MonkeyPatch


class HostDecision(AssertionError):
    """Raised if the host decides something in a step that is captured as a CUDA graph."""


def _fail(what: str) -> None:
    frame = sys._getframe(1)
    while not frame.f_globals.get("__name__", "").startswith("meg") and frame.f_back is not None:
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
    Graph.findings.append(f"{what} in a captured step, by {where}")
    raise HostDecision(Graph.findings[-1])


def _aliases(value: Any) -> Any:
    """Return ``value`` with each tensor replaced by another tensor of the same memory, because
    `.data` of the original may be set later."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> Tensor:
    """Return the bytes of all memory of ``tensor``, as a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _written(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    _, _, names = _uses_of(operation)
    return [value for argument, value in _named(operation, args, kwargs) if argument.name in names]


class Graph:
    """`torch.cuda.CUDAGraph`.

    Attributes:
        entries: what a replay does, in order.
        findings: the operations in captures of this process that a graph cannot contain.
    """

    findings: ClassVar[list[str]] = []
    capturing: ClassVar[Graph | None] = None

    def __init__(self) -> None:
        self.entries: list[Callable[[], None]] = []
        self.thread = threading.get_ident()
        self.calls = 0  # number of calls of process groups
        self.works: dict[int, Any] = {}
        self._own: dict[int, Tensor] = {}  # memory that the capture has made, by address
        # other memory that the capture has written to, with a copy from before
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        Graph.capturing = self

    def capture_end(self) -> None:
        """End the capture: restore the memory that it has written, and spoil the memory that it has
        made. On a GPU a captured step has not run yet."""
        Graph.capturing = None
        for memory, copied in self._before.values():
            memory.copy_(copied)
        for memory in self._own.values():
            memory.fill_(0x7F)  # the bytes then read as NaN, or as a large number
        self._before.clear()

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None:
        assert not Graph.findings, Graph.findings
        print(REPLAYED, flush=True)
        with torch.no_grad():
            for entry in self.entries:
                entry()
        assert not self.works, "a graph has works that nothing waits for"

    def will_write(self, tensors: Any) -> None:
        """Remember the memory of ``tensors`` if it was not made in this capture."""
        for memory in map(_memory, _tensors(tensors)):
            address = memory.data_ptr()
            if address not in self._own and address not in self._before:
                self._before[address] = memory, memory.clone()

    def add_operation(self, operation: Any, given: Any, made: Any) -> None:
        args, kwargs = given
        inputs = {_memory(tensor).data_ptr() for tensor in _tensors(given)}
        for memory in map(_memory, _tensors(made)):
            if memory.data_ptr() not in inputs:
                self._own[memory.data_ptr()] = memory
        kept = _tensors(_aliases(made))

        def run() -> None:
            results = _tensors(operation(*args, **kwargs))
            for tensor, result in zip(kept, results, strict=True):
                if tensor.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():
                    tensor.copy_(result)

        self.entries.append(run)

    def add_call(self, method: Callable[..., Any], group: Any, args: Any, more: Any) -> int:
        self.calls += 1
        number = self.calls

        def run() -> None:
            self.works[number] = method(group, *args, **more)

        self.entries.append(run)
        return number

    def add_wait(self, number: int) -> None:
        self.entries.append(lambda: self.works.pop(number).wait())


def _graph_of_this_thread() -> Graph | None:
    graph = Graph.capturing
    return graph if graph is not None and graph.thread == threading.get_ident() else None


def _refuse(what: str) -> None:
    if _graph_of_this_thread() is not None:
        _fail(what)


class _Operations(TorchDispatchMode):
    def __init__(self, graph: Graph, groups: Groups) -> None:
        super().__init__()
        self._graph, self._groups = graph, groups

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._groups.is_calling:
            return operation(*args, **kwargs)
        if operation._schema.name in _WAITED_FOR:
            _fail(f"{operation._schema.name} makes the host wait")
        given = _aliases((args, kwargs))
        self._graph.will_write(_written(operation, *given))
        made = operation(*args, **kwargs)
        self._graph.add_operation(operation, given, made)
        return made


class _HostReads(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _READS:
            _fail(f"Tensor.{name} makes the host wait")
        if name in _MADE_OF_NUMBERS and kwargs.get("device") is not None:
            _fail(f"torch.{name} copies numbers to a device")
        return function(*args, **kwargs)


class Groups:
    """Calls of process groups, which a replay repeats."""

    def __init__(self) -> None:
        self.is_calling = False

    def methods(self) -> dict[str, Callable[..., Any]]:
        names = (*_COLLECTIVES, *_MESSAGES)
        made = {
            name: self.noted(getattr(dist.ProcessGroup, name))
            for name in names
            if hasattr(dist.ProcessGroup, name)
        }
        return made | {name: self._refused(name) for name in _BARRIERS}

    def noted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **more: Any) -> Any:
            graph = _graph_of_this_thread()
            if graph is None or self.is_calling:
                return method(group, *args, **more)
            self.is_calling = True
            try:
                args, more = _aliases((args, more))
                graph.will_write((args, more))
                work = method(group, *args, **more)
            finally:
                self.is_calling = False
            return _Work(work, self, graph, graph.add_call(method, group, args, more))

        return call

    def _refused(self, name: str) -> Callable[..., Any]:
        method = getattr(dist.ProcessGroup, name)

        def call(group: Any, *args: Any, **more: Any) -> Any:
            _refuse(f"{name} of a process group")
            return method(group, *args, **more)

        return call


class _Work:
    """Work of a group; a wait for it in a capture is one in each replay.

    Gloo's wait for a reduce-scatter copies the results from memory of its call. A replay calls
    again, so these copies are not noted as operations of the step.
    """

    def __init__(self, work: Any, groups: Groups, graph: Graph, number: int) -> None:
        self._work, self._groups, self._graph, self._number = work, groups, graph, number
        self._was_awaited = False

    def __getattr__(self, name: str) -> Any:
        if name in _QUESTIONS:
            _refuse(f"Work.{name}")
        return getattr(self._work, name)

    def wait(self, *timeout: Any) -> Any:
        if not self._was_awaited and _graph_of_this_thread() is self._graph:
            self._graph.add_wait(self._number)
        self._was_awaited = True
        self._groups.is_calling = True
        try:
            return self._work.wait(*timeout)
        finally:
            self._groups.is_calling = False


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, **unused: object) -> None:
        self._is_captured = False

    def record(self, stream: Any = None) -> None:
        self._is_captured = _graph_of_this_thread() is not None

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        self._refuse("query")
        return True

    def synchronize(self) -> None:
        self._refuse("synchronize")

    def elapsed_time(self, other: Event) -> float:
        self._refuse("elapsed_time")
        return 0.0

    def _refuse(self, name: str) -> None:
        if self._is_captured:
            _fail(f"Event.{name} of an event recorded")
        _refuse(f"Event.{name}")


def recorded_event() -> Event:
    """Stand in for `device_progress.record_event` where there is a GPU."""
    event = Event()
    event.record()
    return event


class _Tracker(random.CudaRNGStatesTracker):
    """Tracker of random generators. It does nothing in a captured step, in which no random number
    is drawn."""

    def __init__(self, **unused: object) -> None:
        super().__init__()

    def fork(self, *name: str) -> contextlib.AbstractContextManager[None]:
        graph = _graph_of_this_thread()
        return super().fork(*name) if graph is None else contextlib.nullcontext()


@contextlib.contextmanager
def capturing(groups: Groups, graph: Graph, *unused: Any, **more: Any) -> Iterator[None]:
    """Stand in for `torch.cuda.graph`."""
    graph.capture_begin()
    try:
        with _Operations(graph, groups), _HostReads():
            yield
    finally:
        graph.capture_end()
    assert not Graph.findings, Graph.findings


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        _refuse(name)
        return function(*args, **more)

    return call


def captured_on_the_cpu(set_attribute: Set) -> None:
    """Have this process, and ranks that are forked from it, capture graphs without a GPU."""
    groups = Groups()
    names_of_cpu, refused = cpu._cuda_names, dict(cpu._REFUSED)
    del refused["--cuda-graph-impl"]
    names = {
        "CUDAGraph": Graph,
        "Event": Event,
        "graph": lambda *args, **more: capturing(groups, *args, **more),
        "graph_pool_handle": lambda: None,
        "synchronize": lambda device=None: _refuse("torch.cuda.synchronize"),
    }
    set_attribute(cpu, "_cuda_names", lambda: names_of_cpu() | names)
    set_attribute(cpu, "_REFUSED", refused)
    set_attribute(random, "CudaRNGStatesTracker", _Tracker)
    set_attribute(DeviceProgress.__init__, "__defaults__", (recorded_event,))
    set_attribute(HostClock, "record_event", _refusing("a time", HostClock.record_event))
    for name, method in groups.methods().items():
        set_attribute(dist.ProcessGroup, name, method)
    for name in _OF_STORES:
        method = getattr(dist.Store, name)
        set_attribute(dist.Store, name, _refusing(f"Store.{name}", method))


def without_the_refusal(set_attribute: Set) -> None:
    """Have our schedules take graphs of whole iterations, which they refuse until a GPU has run
    them."""
    set_attribute(compatibility, "REFUSALS", tuple(map(_without, compatibility.REFUSALS)))


def _without(group: RefusalGroup) -> RefusalGroup:
    kept = (
        one
        for one in group.refusals
        if not (one.setting == "cuda_graph_impl" and one.unsupported("full_iteration"))
    )
    return replace(group, refusals=tuple(kept))
