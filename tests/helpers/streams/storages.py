"""Accesses of streams to storages, and the memory of these storages.

Two accesses to the same bytes, one of which writes, must be ordered. Freed memory is handed out
again by the allocator of the stream for which it was allocated, at the next allocation there.
Everything that another stream has done with it must be ordered before that allocation, unless
`record_stream` has named the other stream: then the allocator waits for the work that this stream
was given until the memory was freed.

The next allocation counts, whatever its size: a block that no tensor of this run would have got may
be handed out in another run.
"""

from __future__ import annotations

import enum
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.helpers.streams.clocks import Clocks
from tests.helpers.streams.findings import Findings

# Range of a stream's memory: the stream, the first byte, the byte after the last.
_Range = tuple[int, int, int]
_Use = tuple[int, str]  # time, and the name of the operation


class Memory(enum.Enum):
    """Kind of memory in which a storage is."""

    DEVICE = "device memory"
    PINNED = "pinned host memory"
    PAGEABLE = "pageable host memory"


@dataclass(eq=False)
class _State:
    """State of one storage.

    Attributes:
        stream: the stream for which it was allocated.
        recorded: the streams that `record_stream` has named since.
        foreign: the last use by each other stream.
    """

    number: int
    stream: int
    size: int
    memory: Memory
    writes: dict[_Range, _Use] = field(default_factory=dict)
    reads: dict[_Range, _Use] = field(default_factory=dict)
    foreign: dict[int, _Use] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)

    def forget_uses(self) -> None:
        self.writes.clear()
        self.reads.clear()
        self.foreign = {}
        self.recorded = set()


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A reference that has the state of its storage. torch keeps the Python object of a storage as
    long as the storage lives, whatever holds it, so the callback comes when the storage ends."""

    __slots__ = ("key", "state")
    key: int
    state: _State


@dataclass(frozen=True)
class Event:
    """An entry of the allocation trace. ``what`` is ``alloc``, ``free``, ``record`` (of the stream
    that also uses the storage) or ``mark`` (the beginning of a pass, whose name is ``note``)."""

    what: str
    storage: int
    stream: int
    size: int
    note: str = ""


class Storages:
    """All storages of a rank that any operation has accessed. ``trace`` records their
    allocations."""

    def __init__(self, clocks: Clocks, findings: Findings) -> None:
        self._clocks = clocks
        self._findings = findings
        self._references: dict[int, _Reference] = {}
        self._freed: defaultdict[int, list[tuple[int, _Use]]] = defaultdict(list)
        self._count = 0
        self.trace: list[Event] | None = None
        self.place = ""  # action that the rank runs, for reports of findings

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._references

    def access(self, tensor: Tensor, stream: int, time: int, what: str, *, writes: bool) -> None:
        """Record that an operation on ``stream`` reads or writes ``tensor``, and check its
        order."""
        if tensor.numel() == 0:
            return
        state = self._state(tensor.untyped_storage())
        low, high = _bytes_of(tensor)
        self._check(state.writes, stream, low, high, what, "writes")
        if writes:
            self._check(state.reads, stream, low, high, what, "reads")
            _drop_within(state.writes, low, high)
            _drop_within(state.reads, low, high)
        use = time, self._at(what)
        (state.writes if writes else state.reads)[stream, low, high] = use
        if stream != state.stream:
            state.foreign[stream] = use

    def allocate(self, storage: torch.UntypedStorage, stream: int) -> None:
        """Record that ``storage`` is new, and allocated for ``stream``."""
        self._reuse(stream)
        self._add(storage, stream, Memory.DEVICE)

    def place_on_host(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        """Record that ``storage`` is on the host."""
        self._add(storage, 0, memory)

    def memory_of(self, tensor: Tensor) -> Memory:
        """Return the kind of memory of ``tensor``."""
        reference = self._references.get(tensor.untyped_storage()._cdata)
        return Memory.DEVICE if reference is None else reference.state.memory

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Let the allocator keep the memory of ``tensor`` until ``stream`` has finished with it."""
        state = self._state(tensor.untyped_storage())
        if stream != state.stream:
            state.recorded.add(stream)
            self._note("record", state, stream)

    def resize(self, storage: torch.UntypedStorage, size: int, stream: int) -> None:
        """Record that ``storage`` gets another size: its memory is freed, and it may get new
        memory."""
        state = self._state(storage)
        if state.memory is not Memory.DEVICE or size == state.size:
            return
        if state.size:
            self._free(state)
        state.forget_uses()
        state.size = size
        if size:
            self._reuse(stream)
            state.stream = stream
            self._note("alloc", state, stream)

    def mark(self, note: str) -> None:
        """Record in the trace that the rank begins the pass ``note``."""
        self.place = note
        if self.trace is not None:
            self.trace.append(Event("mark", -1, 0, 0, note))

    def _state(self, storage: torch.UntypedStorage) -> _State:
        reference = self._references.get(storage._cdata)
        if reference is not None:
            return reference.state
        return self._add(storage, 0, Memory.DEVICE)  # the storage is older than the emulation

    def _add(self, storage: torch.UntypedStorage, stream: int, memory: Memory) -> _State:
        self._count += 1
        state = _State(self._count, stream, storage.nbytes(), memory)
        reference = _Reference(storage, self._end)
        reference.key, reference.state = storage._cdata, state
        self._references[storage._cdata] = reference
        self._note("alloc", state, stream)
        return state

    def _end(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        """Record that the storage has ended; any thread may call this."""
        assert isinstance(reference, _Reference)
        state = reference.state
        if self._references.get(reference.key) is not reference:
            return
        del self._references[reference.key]
        if state.memory is not Memory.DEVICE:
            self._check_on_host(state)
        elif state.size:
            self._free(state)

    def _free(self, state: _State) -> None:
        """Record freed memory with the uses that the allocator will not wait for, which must be
        ordered before its next allocation."""
        self._note("free", state, state.stream)
        self._freed[state.stream] += (
            (stream, use)
            for stream, use in state.foreign.items()
            if not any(self._clocks.is_ordered(r, stream, use[0]) for r in state.recorded)
        )

    def _check_on_host(self, state: _State) -> None:
        """Check that no copy may still use host memory that is freed, as it returns to the system
        at once."""
        for (stream, _, _), (time, what) in (*state.writes.items(), *state.reads.items()):
            if not self._clocks.has_ended_on_host(stream, time):
                self._findings.add(
                    f"host memory freed in {self.place or 'no pass'}, while {what} on "
                    f"{self._name(stream)} may still run"
                )

    def _reuse(self, stream: int) -> None:
        """Check the order of an allocation for ``stream``, which may get any memory freed there."""
        for other, (time, what) in self._freed.pop(stream, ()):
            if not self._clocks.is_ordered(stream, other, time):
                self._findings.add(
                    f"memory of {self._name(stream)} is allocated again in "
                    f"{self.place or 'no pass'}, while {what} on {self._name(other)} may still run"
                )

    def _check(
        self,
        earlier: dict[_Range, _Use],
        stream: int,
        low: int,
        high: int,
        what: str,
        how: str,
    ) -> None:
        for (other, first, last), (time, did) in earlier.items():
            if other == stream or first >= high or last <= low:
                continue
            names = self._name(other), self._name(stream)
            if self._clocks.is_ordered(stream, other, time):
                self._findings.crossings[names] += 1
            else:
                self._findings.add(
                    f"{self._at(what)} on {names[1]} does not wait for {did}, which {how} the same "
                    f"memory on {names[0]}"
                )

    def _name(self, stream: int) -> str:
        return self._clocks.names[stream]

    def _at(self, what: str) -> str:
        return f"{what} in {self.place}" if self.place else what

    def _note(self, what: str, state: _State, stream: int) -> None:
        if self.trace is not None and state.memory is Memory.DEVICE:
            self.trace.append(Event(what, state.number, stream, state.size))


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes of ``tensor`` in its storage."""
    size = tensor.element_size()
    low = int(tensor.storage_offset())
    last = low + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return low * size, (last + 1) * size


def _drop_within(uses: dict[_Range, _Use], low: int, high: int) -> None:
    """Forget the uses of bytes that a write has just overwritten: an access that is ordered after
    the write is ordered after these uses, too."""
    for key in list(_within(uses, low, high)):
        del uses[key]


def _within(uses: dict[_Range, _Use], low: int, high: int) -> Iterator[_Range]:
    return (key for key in uses if low <= key[1] and key[2] <= high)
