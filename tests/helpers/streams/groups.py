"""Process groups with streams of their own, like NCCL's.

A collective or a message begins after all work that the current stream has been given when it is
called. `Work.wait` makes the stream that is current at the wait wait for it. A group has a stream
for its collectives, and one for the messages with each of its ranks. All work of an aborted group
has ended. Until the wait, the work keeps its tensors alive, as NCCL's does
(`stashed_for_allocator_safety_`); storages that are resized meanwhile are not safe. A work that is
dropped keeps nothing here. NCCL's watchdog would keep it longer, but no program may rely on that. A
call that this module does not know fails.

Groups of hosts have no streams: they are gloo's, created for tensors of the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.helpers.streams.clocks import Clock
from tests.helpers.streams.device import Device
from tests.helpers.streams.findings import caller

# tensors that are read, and tensors that are written
_Uses = tuple[Sequence[Tensor], Sequence[Tensor]]


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]


def _reads(group: Any, tensors: Any, *unused: Any) -> _Uses:
    return _flat(tensors), ()


def _writes(group: Any, tensors: Any, *unused: Any) -> _Uses:
    return (), _flat(tensors)


def _to_and_from(group: Any, outputs: Any, inputs: Any, *unused: Any) -> _Uses:
    return _flat(inputs), _flat(outputs)


def _from_root(group: Any, tensors: Any, options: Any, *unused: Any) -> _Uses:
    root = options if isinstance(options, int) else options.rootRank
    return (_reads if group.rank() == root else _writes)(group, tensors)


# For each method of a process group, the function that tells which arguments it reads and writes. A
# reduction counts as a write on all ranks: if it writes on some ranks only, no program may rely on
# the tensor of the others.
_COLLECTIVES: Mapping[str, Callable[..., _Uses]] = {
    "broadcast": _from_root,
    "allreduce": _writes,
    "allreduce_coalesced": _writes,
    "reduce": _writes,
    **dict.fromkeys(
        (
            "allgather",
            "_allgather_base",
            "all_gather_single",
            "all_gather_single_coalesced",
            "allgather_coalesced",
            "allgather_into_tensor_coalesced",
            "gather",
            "gather_single",
            "gather_into_tensor",
            "scatter",
            "reduce_scatter",
            "_reduce_scatter_base",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
            "alltoall",
            "alltoall_base",
            "all_to_all_single",
        ),
        _to_and_from,
    ),
}
_MESSAGES: Mapping[str, Callable[..., _Uses]] = {"send": _reads, "recv": _writes}

# Methods of a process group at which hosts wait or learn something, without any work on a stream.
_HARMLESS = {
    "BackendType",
    "_add_ephemeral_timeout",
    "_backend_id",
    "_device_types",
    "_enable_collectives_timing",
    "_get_backend",
    "_get_backend_name",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_id",
    "_register_backend",
    "_set_default_backend",
    "_set_group_desc",
    "_set_group_name",
    "_start_coalescing",
    "abort",
    "barrier",
    "bound_device_id",
    "boxed",
    "get_group_store",
    "group_desc",
    "group_name",
    "monitored_barrier",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "supports_abort_hooks",
    "supports_completion_hooks",
    "supports_reconfigure",
    "supports_window",
    "unbox",
}


class EmulatedGroups:
    """The streams of a rank's process groups."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._streams: dict[tuple[str, str], int] = {}
        self._of_hosts: set[str] = set()
        self._threads = threading.local()

    @property
    def is_calling(self) -> bool:
        """Whether this thread is in gloo, whose own operations on tensors do not exist on a GPU."""
        return getattr(self._threads, "is_calling", False)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements for the methods of `ProcessGroup`."""
        stand_ins = {}
        for name in dir(dist.ProcessGroup):
            method = getattr(dist.ProcessGroup, name)
            if name.startswith("__") or name in _HARMLESS or not callable(method):
                continue
            if name in _COLLECTIVES:
                stand_ins[name] = self._known(name, method, _COLLECTIVES[name], _no_peer)
            elif name in _MESSAGES:
                stand_ins[name] = self._known(name, method, _MESSAGES[name], _peer)
            elif not isinstance(method, type):
                stand_ins[name] = _unknown(name)
        return stand_ins

    def made_for_hosts(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function ``make``, which returns a dictionary of groups, changed so that its
        groups are recorded as groups of hosts."""

        def made(*args: Any, **more: Any) -> Any:
            groups = make(*args, **more)
            self._of_hosts |= {group.group_name for group in groups.values()}
            return groups

        return made

    def _known(
        self,
        name: str,
        method: Callable[..., Any],
        uses: Callable[..., _Uses],
        peer: Callable[..., str],
    ) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **more: Any) -> Any:
            if self.is_calling or group.group_name in self._of_hosts:
                return self.call(method, group, *args, **more)
            read, written = uses(group, *args, **more)
            stream = self._stream(group, peer(group, *args, **more))
            self.device.wait_stream(stream, self.device.current)
            time = self.device.clocks.launch(stream)
            what = f"{name} of {caller()}"
            for tensors, writes in ((read, False), (written, True)):
                for tensor in tensors:
                    self.device.storages.access(tensor, stream, time, what, writes=writes)
            work = self.call(method, group, *args, **more)
            end = self.device.clocks.snapshot(stream)
            return EmulatedWork(work, self, end, [*read, *written])

        return call

    def ending(self, abort: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function ``abort``, changed so that all work on the streams of an aborted
        group has ended first."""

        def end(group: Any = None) -> Any:
            for (name, _), stream in list(self._streams.items()):
                if group is None or name == group.group_name:
                    self.device.synchronize(stream)
            return abort(group)

        return end

    def call(self, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        before, self._threads.is_calling = self.is_calling, True
        try:
            return method(*args, **more)
        finally:
            self._threads.is_calling = before

    def _stream(self, group: Any, peer: str) -> int:
        key = group.group_name, peer
        if key not in self._streams:
            name = f"the stream of {group.group_desc or group.group_name}{peer}"
            self._streams[key] = self.device.clocks.add_stream(name)
        return self._streams[key]


def _no_peer(*unused: Any, **more: Any) -> str:
    return ""


def _peer(group: Any, tensors: Any, peer: int, *unused: Any) -> str:
    return f" with rank {peer} of it"


def _unknown(name: str) -> Callable[..., Any]:
    def fail(*unused: Any, **more: Any) -> Any:
        raise AssertionError(
            f"ProcessGroup.{name} is not emulated, so its reads and writes would be missed"
        )

    return fail


class EmulatedWork:
    """A `Work` that may be waited for twice."""

    def __init__(
        self, work: Any, groups: EmulatedGroups, end: Clock, stashed: Sequence[Tensor]
    ) -> None:
        self._work = work
        self._groups = groups
        self._end = end
        self._stashed = stashed
        self._has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *timeout: Any) -> bool:
        """Let the current stream wait for this work."""
        self.end(*timeout)
        self._groups.device.clocks.wait(self._groups.device.current, self._end)
        self._stashed = ()
        return True

    def end(self, *timeout: Any) -> None:
        """Wait until gloo has moved the data. This makes no stream wait."""
        if not self._has_ended:
            self._groups.call(self._work.wait, *timeout)
            self._has_ended = True
