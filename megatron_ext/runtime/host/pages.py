"""Memory of the host in whole pages of its own."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def whole_pages(size: int) -> Tensor:
    """``size`` bytes, at least 1, that share no page with anything else.

    What a driver registers it registers by pages: of two buffers that shared one, the second would
    be refused, or the page unlocked with the first. And a process that is forked, such as a data
    loader's worker, does not get them: else the next one to write to a page, which may be this
    process, would get a copy of it, and the device go on with the other.

    The pages lie on the NUMA node of the thread that first writes to them or registers them.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)
