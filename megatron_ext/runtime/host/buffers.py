"""The host's buffers for what is offloaded, registered with the driver between steps.

To register memory can wait for the device, and takes a second for some GiB. So it is done before a
step posts anything: as many buffers as the step needs, each as large as any microbatch has needed
so far, and before that as large as the costs say.

What does not fit goes to plain pages for the rest of the step: of the first one, where costs have
no bytes or too few, and of one in which a microbatch has grown. A copy between these and a GPU
keeps the host until the device has come to it. It is slow, but it cannot hang: such a copy waits
for the passes before it, and those end without anything that this rank does later, which is what
`prove` shows of every action.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.logger import logger
from megatron_ext.runtime.host.copies import HostCopies, Transfer
from megatron_ext.runtime.host.memory import available_bytes, short_of_memory
from megatron_ext.runtime.host.pages import whole_pages
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.words import bytes_text

Key = tuple[int, Held]  # a stage, and what it holds


@dataclass(eq=False)
class Slot:
    """A buffer for one microbatch. ``last``: the latest copy that uses it."""

    buffer: Tensor
    is_registered: bool
    last: Transfer | None = None


class HostBuffers:
    """As many slots of each kind as a program's ranks have on the host at once.

    Attributes:
        expected: bytes of a microbatch, by kind, before any has shown them; none if nobody knows.
        registered: how many buffers have been registered so far.
        plain: how many have been plain pages.
    """

    def __init__(self, copies: HostCopies, rank: int) -> None:
        self._copies = copies
        self._rank = rank
        self._needed: dict[Key, int] = {}
        self._free: dict[Key, deque[Slot]] = defaultdict(deque)
        self._has_grown = False
        self.expected: Mapping[Key, int] = {}
        self.registered = 0
        self.plain = 0

    def reserve(self, wanted: Mapping[Key, int]) -> None:
        """Before a step: have the slots of each kind that it needs.

        Raises:
            ValueError: the host has no memory for them, or the driver refuses to register it.
        """
        for key in wanted:
            size = self._size(key)
            for slot in [slot for slot in self._free[key] if not _fits(slot, size)]:
                self._free[key].remove(slot)
                self._give_up(slot)
        for key, count in wanted.items():
            size, missing = self._size(key), count - len(self._free[key])
            if size and missing > 0:
                self._check(missing * size)
                for _ in range(missing):
                    slot = Slot(self._copies.host_buffer(size), is_registered=True)
                    self._free[key].append(slot)
                    self.registered += 1

    def take(self, key: Key, size: int) -> Slot:
        """A free slot of at least ``size`` bytes: the one that was given back first.

        Raises:
            ValueError: the host has no memory for it.
        """
        self._note(key, size)
        for slot in self._free[key]:
            if slot.buffer.numel() >= size:
                self._free[key].remove(slot)
                return slot
        self._check(size)
        self.plain += 1
        return Slot(whole_pages(size), is_registered=False)

    def give_back(self, key: Key, slot: Slot) -> None:
        self._free[key].append(slot)

    def _size(self, key: Key) -> int:
        return self._needed.get(key, self.expected.get(key, 0))

    def _note(self, key: Key, size: int) -> None:
        """If one has grown, allow for somewhat more, so that it is not soon too small again."""
        known = self._needed.get(key)
        if known is None:
            self._needed[key] = size
        elif size > known:
            self._needed[key] = size + size // 8
            if not self._has_grown:
                logger.warning(
                    f"pipeline rank {self._rank}: a microbatch needs a larger host buffer than "
                    f"those before ({size} bytes, {known} before); buffers grow after a step, and "
                    f"within it copies are slow"
                )
                self._has_grown = True

    def _check(self, size: int) -> None:
        available = available_bytes()
        if size > available:
            needs = f"pipeline rank {self._rank} needs {bytes_text(size)}"
            raise ValueError(short_of_memory(needs, available))

    def _give_up(self, slot: Slot) -> None:
        if slot.last is not None:
            slot.last.finish()
        if slot.is_registered:
            self._copies.release(slot.buffer)


def _fits(slot: Slot, size: int) -> bool:
    return slot.is_registered and slot.buffer.numel() == size
