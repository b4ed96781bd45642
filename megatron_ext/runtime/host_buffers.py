"""The host's buffers for what is offloaded, allocated once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.runtime.host_copies import HostCopies, Transfer
from megatron_ext.runtime.host_memory import available_bytes, short_of_memory
from megatron_ext.schedule.kinds import Held

Key = tuple[int, Held]  # a stage, and what it holds


@dataclass
class Slot:
    """A buffer for one microbatch. ``last``: the latest copy that uses it."""

    buffer: Tensor
    last: Transfer | None = None


class HostBuffers:
    """As many slots of each kind as a program's ranks have on the host at once.

    How large they are is known when the first microbatch leaves; then all of its kind are
    allocated. One that must hold more later, as microbatches vary, is exchanged for a larger one.

    Attributes:
        allocations: how many buffers have been allocated so far.
    """

    def __init__(self, copies: HostCopies, rank: int) -> None:
        self._copies = copies
        self._rank = rank
        self._wanted: Mapping[Key, int] = {}
        self._made: dict[Key, int] = defaultdict(int)
        self._free: dict[Key, deque[Slot]] = defaultdict(deque)
        self._has_grown = False
        self.allocations = 0

    def reserve(self, wanted: Mapping[Key, int]) -> None:
        """The slots of each kind that the next step needs."""
        self._wanted = wanted

    def take(self, key: Key, size: int) -> Slot:
        """A free slot of at least ``size`` bytes: the one that was given back first.

        Raises:
            ValueError: the host has no memory for it.
        """
        missing = self._wanted[key] - self._made[key]
        for buffer in self._allocate(max(missing, 0), size):
            self._made[key] += 1
            self._free[key].append(Slot(buffer))
        slot = self._free[key][0]
        if slot.buffer.numel() < size:
            self._grow(slot, size)
        return self._free[key].popleft()

    def give_back(self, key: Key, slot: Slot) -> None:
        self._free[key].append(slot)

    def _allocate(self, count: int, size: int) -> list[Tensor]:
        if not count:
            return []
        available = available_bytes()
        if count * size > available:
            needs = f"pipeline rank {self._rank} needs {count * size / 2**30:.3g}"
            raise ValueError(short_of_memory(needs, available))
        self.allocations += count
        return [self._copies.host_buffer(size) for _ in range(count)]

    def _grow(self, slot: Slot, size: int) -> None:
        """Somewhat more than ``size``, so that it is not soon too small again."""
        if not self._has_grown:
            print(
                f"megatron_ext: pipeline rank {self._rank}: a microbatch needs a larger host "
                f"buffer than the first ({size} bytes, {slot.buffer.numel()} before); buffers grow "
                f"as they must",
                flush=True,
            )
            self._has_grown = True
        if slot.last is not None:
            slot.last.finish()
        self._copies.release(slot.buffer)
        slot.buffer, slot.last = torch.empty(0, dtype=torch.uint8), None
        (slot.buffer,) = self._allocate(1, size + size // 8)
