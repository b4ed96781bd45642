"""Host memory in whole pages, since drivers register pages: a buffer shares none with any other
memory."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def whole_pages(size: int) -> Tensor:
    """Return ``size`` bytes (at least 1) of host memory that share no page with other memory.

    A driver registers memory by pages: of two buffers on one page the second would be refused, or
    unregistered together with the first. Forked processes, such as a data loader's workers, do not
    inherit the pages: otherwise the next write to a page would give the writer, possibly this
    process, a copy of it, while the device uses the original. The pages lie on the NUMA node of the
    thread that first writes to them or registers them.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)
