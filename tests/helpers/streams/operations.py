"""Operations of torch, each on the current stream of its thread.

The schema of an operation says what it reads and writes, as for `torch.cuda._sanitizer`. Views
access no memory. Some operations make the host wait for the stream: reading a number, and copying
to or from host memory that is not pinned.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.streams.device import Device
from tests.helpers.streams.engine import Engine
from tests.helpers.streams.groups import EmulatedGroups
from tests.helpers.streams.storages import Memory

# Pattern of operations that create a tensor and read only the sizes of their tensor argument.
_FACTORY = re.compile(r"aten::(new_.*|.*_like)")

# Operations whose result the host needs as a number.
_WAITED_FOR = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
}

# Operations at which hosts wait for one another, and no stream does.
_OF_HOSTS = {"c10d::barrier", "c10d::monitored_barrier_"}


class Operations(TorchDispatchMode):
    """Dispatch mode that reports each operation of torch to the emulated device."""

    def __init__(self, device: Device, engine: Engine, groups: EmulatedGroups) -> None:
        super().__init__()
        self._device = device
        self._engine = engine
        self._groups = groups

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._groups.is_calling:
            return operation(*args, **kwargs)
        name, read, written = _uses_of(operation)
        is_known = not name.startswith(("c10d::", "_c10d_functional::")) or name in _OF_HOSTS
        assert is_known, f"{name} is not emulated, so its reads and writes would be missed"
        outputs = operation(*args, **kwargs)
        given = {argument.name: value for argument, value in _named(operation, args, kwargs)}
        reads = [t for argument in read for t in _tensors(given.get(argument))]
        writes = [t for argument in written for t in _tensors(given.get(argument))]
        self._note(name, reads, writes, list(_tensors(outputs)))
        return outputs

    def _note(
        self, name: str, reads: list[Tensor], writes: list[Tensor], made: list[Tensor]
    ) -> None:
        device = self._device
        storages = device.storages
        new = [t for t in made if t.untyped_storage() not in storages]
        if not (reads or writes or new):
            return  # the operation makes a view
        stream = self._engine.stream_of_addition()
        if stream is None:
            stream = device.current
        node = self._engine.running
        what = f"{name} of {node}" if node else name
        time = device.clocks.launch(stream)
        for tensor in new:
            if tensor.untyped_storage() not in storages:
                storages.allocate(tensor.untyped_storage(), stream)
        for tensor in reads:
            storages.access(tensor, stream, time, what, writes=False)
        for tensor in (*writes, *new):
            storages.access(tensor, stream, time, what, writes=True)
        where = {storages.memory_of(tensor) for tensor in (*reads, *writes)}
        if name in _WAITED_FOR or Memory.PAGEABLE in where:
            device.synchronize(stream)


@functools.cache
def _uses_of(operation: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the name of ``operation``, and the arguments that it reads and writes."""
    schema = operation._schema
    read, written = [], []
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            written.append(argument.name)
        elif alias is None and not _FACTORY.fullmatch(schema.name):
            read.append(argument.name)
    return schema.name, tuple(read), tuple(written)


def _named(operation: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    arguments = operation._schema.arguments
    yield from zip(arguments, args, strict=False)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield tensors with memory in ``value``, which may be nested."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
