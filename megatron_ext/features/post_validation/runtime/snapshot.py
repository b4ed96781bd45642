"""Copy of a state that is about to be overwritten, from which it can be restored bit for bit.

Computing the old state back from an optimizer's update would not be exact, so the state is copied.
Copies are made into buffers that are allocated once: on the device if it has enough memory, else in
pinned host memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from megatron_ext.base.words import bytes_text
from megatron_ext.runtime.host.copies import copies_on
from megatron_ext.runtime.host.host_memory import available_bytes

_ALIGNMENT = 512  # alignment in bytes, as torch's own allocator aligns tensors
# Share of a device's memory that stays free, for fragmentation and later allocations.
_MARGIN = 0.05

CPU = torch.device("cpu")


def choose_place(size: int, device: torch.device) -> torch.device:
    """Return the device on which ``size`` bytes of copies of ``device``'s tensors are stored.

    That is ``device`` itself if its memory suffices: its free memory, plus what torch has reserved
    beyond the peak of active memory so far, less 5 % of its total memory. Otherwise it is the host.
    (Active memory exceeds allocated memory: it includes freed memory that another stream may still
    read.)
    """
    if device.type != "cuda":
        return device
    free, total = torch.cuda.mem_get_info(device)
    most = torch.cuda.memory_stats(device)["active_bytes.all.peak"]
    unused = torch.cuda.memory_reserved(device) - most
    return device if size <= free + unused - _MARGIN * total else CPU


class Snapshot:
    """Copy of the contents of tensors and mappings, from which they are restored bit for bit.

    For a mapping its keys, their objects, and the contents of those that are tensors are restored;
    a value of another type must be replaced by the mapping's user, not modified. Copies to and from
    the host are ordered by the current stream, and nothing waits for them: call `keep` and
    `restore` on the stream that writes the tensors.
    """

    def __init__(self) -> None:
        self._mappings: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        self._originals: dict[torch.device, list[Tensor]] = {}
        self._copies: dict[torch.device, _Copies] = {}

    def keep(
        self, tensors: Iterable[Tensor], mappings: Iterable[MutableMapping[Any, Any]] = ()
    ) -> None:
        """Copy the contents of ``tensors`` and ``mappings``, in place of the previous copies.

        Raises:
            ValueError: neither the device nor the host has enough memory.
        """
        self._mappings = [(mapping, dict(mapping)) for mapping in mappings]
        values = (value for _, entries in self._mappings for value in entries.values())
        held = [value for value in values if isinstance(value, Tensor)]
        originals: dict[torch.device, list[Tensor]] = defaultdict(list)
        for tensor in {id(tensor): tensor for tensor in [*tensors, *held]}.values():
            originals[tensor.device].append(tensor.detach())
        self._originals = originals
        for device, of_device in originals.items():
            copies = self._copies.get(device)
            if copies is None or not copies.fit(of_device):
                if copies is not None:
                    self._copies.pop(device).release()
                copies = self._copies[device] = _Copies(of_device, device)
            torch._foreach_copy_(copies.tensors, of_device, non_blocking=True)

    def restore(self) -> None:
        """Restore the tensors and mappings of the last snapshot. The call can be repeated."""
        for mapping, entries in self._mappings:
            mapping.clear()
            mapping.update(entries)
        for device, of_device in self._originals.items():
            torch._foreach_copy_(of_device, self._copies[device].tensors, non_blocking=True)

    @property
    def size(self) -> int:
        """Bytes of the snapshot's buffers; 0 before the first `keep`."""
        return sum(copies.size for copies in self._copies.values())

    def __str__(self) -> str:
        """Return sizes and places of the snapshot's copies, in words."""
        places = [
            f"{bytes_text(copies.size)} of {copies.place_name}" for copies in self._copies.values()
        ]
        return " and ".join(places) or "nothing"


class _Copies:
    """Copies of one device's tensors, with their shapes and types, cut from one buffer."""

    def __init__(self, originals: list[Tensor], device: torch.device) -> None:
        sizes = [_aligned(tensor.nbytes) for tensor in originals]
        self.size = sum(sizes)
        self._device = device
        self._place = choose_place(self.size, device)
        self._buffer = self._allocate()
        self.tensors = [
            piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for piece, tensor in zip(self._buffer.split(sizes), originals, strict=True)
        ]

    @property
    def place_name(self) -> str:
        if self._place.type != "cpu":
            return "the device's memory"
        return "host memory" if self._device.type == "cpu" else "pinned host memory"

    def fit(self, originals: list[Tensor]) -> bool:
        """Return whether ``originals`` have the shapes and types of these copies."""
        return [(t.shape, t.dtype) for t in originals] == [(t.shape, t.dtype) for t in self.tensors]

    def release(self) -> None:
        if self._place != self._device:
            torch.cuda.synchronize(self._device)  # waits for copies that are still running
            copies_on(self._device).release(self._buffer)

    def _allocate(self) -> Tensor:
        if self._place.type != "cpu":
            return torch.empty(self.size, dtype=torch.uint8, device=self._place)
        if self.size > (available := available_bytes()):
            raise ValueError(self._short_of_memory(f"only {bytes_text(available)} are available"))
        try:
            return copies_on(self._device).host_buffer(self.size)
        except ValueError as error:
            raise ValueError(self._short_of_memory("the memory cannot be pinned")) from error

    def _short_of_memory(self, fact: str) -> str:
        return (
            f"the state that a step overwrites takes {bytes_text(self.size)} of host memory, as "
            f"{self._device} has no room for it, but {fact}: drop --pipeline-post-validation, or "
            f"write --use-distributed-optimizer, which divides it"
        )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
