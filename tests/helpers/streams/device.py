"""An emulated device: streams, events and the current stream of each thread.

`cuda_names` are the replacements for names of torch.cuda. Everything runs at once on the CPU, in
the host's order; the device only records which stream waits for which.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.helpers.streams.clocks import Clock, Clocks
from tests.helpers.streams.findings import Findings
from tests.helpers.streams.storages import Storages

MAIN = 0  # number of the default stream


class Device:
    """The device of one rank."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.findings = Findings()
        self.storages = Storages(self.clocks, self.findings)
        self.clocks.add_stream("the main stream")
        self._threads = threading.local()

    @property
    def current(self) -> int:
        """The current stream of this thread."""
        stream: int = getattr(self._threads, "current", MAIN)
        return stream

    @current.setter
    def current(self, stream: int) -> None:
        self._threads.current = stream

    def on(self, stream: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ``stream`` is the current one; it may be entered several
        times."""
        return _Current(self, stream)

    def wait_stream(self, stream: int, other: int) -> None:
        """Let ``stream`` wait for all work that ``other`` has been given so far."""
        if stream != other:
            self.clocks.wait(stream, self.clocks.snapshot(other))

    def synchronize(self, stream: int) -> None:
        """Let the host wait for ``stream``."""
        self.clocks.wait_on_host(self.clocks.snapshot(stream))

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Stand in for `Tensor.record_stream`."""
        self.storages.record_stream(tensor, self.number_of(stream))

    def number_of(self, stream: Any) -> int:
        """Return the number of ``stream``; fail if the stream does not belong to this device.

        A class may keep a stream of an earlier device, or a mocked one, and its waits would be lost
        silently.
        """
        assert isinstance(stream, EmulatedStream) and stream.device is self, (
            f"{stream!r} is not a stream of this emulated device"
        )
        return stream.number


class EmulatedStream:
    """`torch.cuda.Stream` of ``device``: a new stream, or the one with a given number."""

    device: ClassVar[Device]
    event_type: ClassVar[type[EmulatedEvent]]

    def __init__(self, *unused: object, number: int | None = None, **more: object) -> None:
        clocks = self.device.clocks
        self.number = clocks.add_stream(f"stream {len(clocks.names)}") if number is None else number

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    @property
    def cuda_stream(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmulatedStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def wait_stream(self, other: EmulatedStream) -> None:
        self.device.wait_stream(self.number, self.device.number_of(other))

    def wait_event(self, event: EmulatedEvent) -> None:
        event.wait(self)

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        event = event or self.event_type()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.synchronize(self.number)

    def query(self) -> bool:
        """Return True, after the host has waited for the stream: all its work has ended then."""
        self.synchronize()
        return True


class EmulatedEvent:
    """`torch.cuda.Event` of ``device``."""

    device: ClassVar[Device]

    def __init__(self, **unused: object) -> None:
        self._behind: Clock | None = None

    def record(self, stream: EmulatedStream | None = None) -> None:
        self._behind = self.device.clocks.snapshot(self._number(stream))

    def wait(self, stream: EmulatedStream | None = None) -> None:
        if self._behind is None:
            place = self.device.storages.place or "no pass"
            self.device.findings.add(f"an event is waited for before it is recorded, in {place}")
        else:
            self.device.clocks.wait(self._number(stream), self._behind)

    def synchronize(self) -> None:
        if self._behind is not None:
            self.device.clocks.wait_on_host(self._behind)

    def query(self) -> bool:
        """Return True, after the host has waited for the event: all work before it has ended
        then."""
        self.synchronize()
        return True

    def elapsed_time(self, other: EmulatedEvent) -> float:
        return 0.0

    def _number(self, stream: EmulatedStream | None) -> int:
        return self.device.current if stream is None else self.device.number_of(stream)


class _Current(contextlib.AbstractContextManager[None]):
    """A context in which a stream is the current one."""

    def __init__(self, device: Device, stream: int) -> None:
        self._device, self._stream = device, stream
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(self._device.current)
        self._device.current = self._stream

    def __exit__(self, *exception: object) -> None:
        self._device.current = self._before.pop()


def cuda_names(device: Device) -> dict[str, Any]:
    """Return names of torch.cuda with their replacements on ``device``."""
    event_type = type("Event", (EmulatedEvent,), {"device": device})
    own = {"device": device, "event_type": event_type}
    stream_type: Any = type("Stream", (EmulatedStream,), own)

    def stream(chosen: EmulatedStream | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if chosen is None else device.on(device.number_of(chosen))

    def set_stream(chosen: EmulatedStream) -> None:
        device.current = device.number_of(chosen)

    return {
        "Stream": stream_type,
        "Event": event_type,
        "stream": stream,
        "current_stream": lambda unused=None: stream_type(number=device.current),
        "default_stream": lambda unused=None: stream_type(number=MAIN),
        "set_stream": set_stream,
        "synchronize": lambda unused=None: device.clocks.wait_for_all_on_host(),
    }


def watch_resizes(device: Device) -> Callable[..., Any]:
    """Return a `torch.UntypedStorage.resize_` that also reports each resize to ``device``."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type == "cpu":
            device.storages.resize(storage, int(size), device.current)
        return resize(storage, size)

    return watched
