"""Host memory, and copies to and from it on streams of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.runtime.host.copies import CudaCopies
from megatron_ext.runtime.host.pages import whole_pages
from tests.helpers.streams.device import Device
from tests.helpers.streams.storages import Memory


class EmulatedCopies(CudaCopies):
    """The copies of a GPU, on emulated streams."""

    def __init__(self, device: Device, of: torch.device) -> None:
        super().__init__(of)
        self._device = device
        for lane, stream in self._streams.items():
            number: Any = stream
            device.clocks.names[number.number] = f"the stream of copies {lane.name}"

    def host_buffer(self, size: int) -> Tensor:
        buffer = whole_pages(size)
        self._device.storages.place_on_host(buffer.untyped_storage(), Memory.PINNED)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Do nothing. The driver does not wait when it unregisters memory, and the emulation
        already checks that no copy uses the buffer when its memory is freed."""


def pageable(device: Device, size: int) -> Tensor:
    """Return a buffer made by `whole_pages`, and record its memory as not pinned."""
    buffer = whole_pages(size)
    device.storages.place_on_host(buffer.untyped_storage(), Memory.PAGEABLE)
    return buffer
