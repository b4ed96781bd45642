"""Host buffers for offloaded activations, registered (pinned) with the driver between steps.

Registering memory can wait for the device, and takes about a second for some GiB. It is therefore
done before a step posts any message: as many buffers as the step needs, each as large as the
largest microbatch so far, or in the first step as large as the costs predict. A microbatch that
does not fit is copied to pageable memory for the rest of that step (`HostBuffers.take`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.base.logger import logger
from megatron_ext.base.words import bytes_text
from megatron_ext.runtime.host.copies import HostCopies, Transfer
from megatron_ext.runtime.host.host_memory import available_bytes, short_of_memory
from megatron_ext.runtime.host.pages import whole_pages
from megatron_ext.schedule.kinds import Held

_LESS = "--pipeline-activation-offload half"
LESS_MEMORY = (
    f"offload less ({_LESS}, or fit with a --pipeline-memory-limit), recompute some modules, or "
    f"give the job more memory"
)

BufferKey = tuple[int, Held]  # a stage, and the kind of memory that its buffer holds


@dataclass(eq=False)
class Slot:
    """Part of host memory for the offloaded tensors of one microbatch.

    ``last`` is the latest copy that uses this slot.
    """

    buffer: Tensor
    is_registered: bool
    last: Transfer | None = None


class HostBuffers:
    """Pool of host buffers for offloaded activations, a slot for each microbatch on the host.

    Attributes:
        expected: predicted bytes of a microbatch, by stage and kind of memory; empty if the costs
            have no bytes.
        registered: number of buffers registered (pinned) so far.
        plain: number of buffers so far that were pageable memory.
    """

    def __init__(self, copies: HostCopies, rank: int) -> None:
        self._copies = copies
        self._rank = rank
        self._needed: dict[BufferKey, int] = {}
        self._free: dict[BufferKey, deque[Slot]] = defaultdict(deque)
        self._has_grown = False
        self.expected: Mapping[BufferKey, int] = {}
        self.registered = 0
        self.plain = 0

    def reserve(self, wanted: Mapping[BufferKey, int]) -> None:
        """Allocate the missing host buffers before a step.

        ``wanted`` is the number of buffers that the step needs, by stage and kind of memory.

        Raises:
            ValueError: the host has too little memory, or the driver refuses to register it.
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
                    slot = Slot(self._host_buffer(size), is_registered=True)
                    self._free[key].append(slot)
                    self.registered += 1

    def take(self, key: BufferKey, size: int) -> Slot:
        """Return a free host buffer of at least ``size`` bytes: the one freed first.

        If there is none, the new one is pageable memory. A new one is needed in the first step if
        the costs have no bytes or too few, and in a step in which a microbatch has grown. A copy to
        pageable memory blocks the host until the device has reached the copy. The copy is slow but
        cannot deadlock: it waits for earlier passes only, and `prove` shows that these finish
        without any later action of this rank.

        Raises:
            ValueError: the host has too little memory for a new buffer.
        """
        self._note(key, size)
        for slot in self._free[key]:
            if slot.buffer.numel() >= size:
                self._free[key].remove(slot)
                return slot
        self._check(size)
        self.plain += 1
        return Slot(whole_pages(size), is_registered=False)

    def give_back(self, key: BufferKey, slot: Slot) -> None:
        self._free[key].append(slot)

    def _size(self, key: BufferKey) -> int:
        return self._needed.get(key, self.expected.get(key, 0))

    def _note(self, key: BufferKey, size: int) -> None:
        """Record the bytes of a microbatch, for the buffers of the next step.

        If microbatches have grown, 1/8 more is reserved, so that buffers are not soon too small.
        """
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
            raise ValueError(f"{short_of_memory(needs, available)}: {LESS_MEMORY}")

    def _host_buffer(self, size: int) -> Tensor:
        try:
            return self._copies.host_buffer(size)
        except ValueError as error:
            raise ValueError(f"{error}, or offload less ({_LESS}) or nothing") from error

    def _give_up(self, slot: Slot) -> None:
        if slot.last is not None:
            slot.last.finish()
        if slot.is_registered:
            self._copies.release(slot.buffer)


def _fits(slot: Slot, size: int) -> bool:
    return slot.is_registered and slot.buffer.numel() == size
