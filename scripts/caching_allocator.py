"""A model of PyTorch's caching allocator for CUDA (c10/cuda/CUDACachingAllocator.cpp).

Requests are rounded to 512 bytes and served from blocks of segments, which the driver gives:

    request          pool    segment
    up to 1 MiB      small   2 MiB
    under 10 MiB     large   20 MiB
    from 10 MiB on   large   the request, rounded up to 2 MiB

The smallest free block that is large enough serves a request, and what remains of it becomes a
block if it is worth it. Freed blocks merge with their free neighbours. With `expandable_segments` a
pool has one segment, which grows in steps of 2 or 20 MiB at its end. All work is on one stream, and
the driver always has more memory.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

MIB = 2**20

_ROUNDING = 512
_LARGEST_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_FROM_OWN_SEGMENT = 10 * MIB
_SEGMENT_ROUNDING = 2 * MIB


@dataclass(eq=False)
class _Block:
    pool: _Pool
    segment: int
    address: int
    size: int
    is_used: bool = False
    previous: _Block | None = field(default=None, repr=False)
    next: _Block | None = field(default=None, repr=False)

    @property
    def order(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.address


@dataclass(eq=False)
class _Pool:
    """Free blocks, the smallest first."""

    is_small: bool
    free: list[_Block] = field(default_factory=list)
    tail: _Block | None = None  # the last block of an expandable segment

    def add(self, block: _Block) -> None:
        bisect.insort(self.free, block, key=lambda block: block.order)

    def remove(self, block: _Block) -> None:
        del self.free[bisect.bisect_left(self.free, block.order, key=lambda block: block.order)]

    def best_fit(self, size: int) -> _Block | None:
        at = bisect.bisect_left(self.free, (size, -1, -1), key=lambda block: block.order)
        return self.free[at] if at < len(self.free) else None


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        reserved, max_reserved: bytes of segments, now and at most.
        requested, max_requested: bytes that were requested and not freed, now and at most.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.reserved = self.max_reserved = 0
        self.requested = self.max_requested = 0
        self._is_expandable = expandable_segments
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)
        self._used: dict[int, tuple[_Block, int]] = {}  # by storage: its block, and bytes requested
        self._segments = 0

    def allocate(self, storage: int, size: int) -> None:
        """Serve a request of ``size`` bytes for ``storage``."""
        rounded = max(_ROUNDING, _round_up(size, _ROUNDING))
        pool = self._small if rounded <= _LARGEST_SMALL else self._large
        block = pool.best_fit(rounded)
        if block is None:
            block = self._grow(pool, rounded) if self._is_expandable else self._add(pool, rounded)
        pool.remove(block)
        self._split(block, rounded)
        block.is_used = True
        self._used[storage] = block, size
        self.requested += size
        self.max_requested = max(self.max_requested, self.requested)

    def free(self, storage: int) -> None:
        block, size = self._used.pop(storage)
        self.requested -= size
        block.is_used = False
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.is_used:
                block.pool.remove(neighbour)
                _merge(block, neighbour)
        block.pool.add(block)

    def _split(self, block: _Block, size: int) -> None:
        remaining, pool = block.size - size, block.pool
        if remaining < _ROUNDING or not (pool.is_small or remaining > _LARGEST_SMALL):
            return
        rest = _Block(pool, block.segment, block.address + size, remaining)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        if pool.tail is block:
            pool.tail = rest
        pool.add(rest)

    def _add(self, pool: _Pool, size: int) -> _Block:
        """Return the only block of a new segment."""
        if pool.is_small:
            size = _SMALL_SEGMENT
        elif size < _FROM_OWN_SEGMENT:
            size = _LARGE_SEGMENT
        else:
            size = _round_up(size, _SEGMENT_ROUNDING)
        self._reserve(size)
        self._segments += 1
        block = _Block(pool, self._segments, 0, size)
        pool.add(block)
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Return the last block of the pool's segment, grown to ``size`` at least."""
        tail = pool.tail
        free = tail.size if tail is not None and not tail.is_used else 0
        step = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        more = _round_up(size - free, step)
        self._reserve(more)
        if tail is None or tail.is_used:
            block = _Block(pool, 0, 0 if tail is None else tail.address + tail.size, more)
            block.previous = tail
            if tail is not None:
                tail.next = block
            pool.tail = block
        else:
            block = tail
            pool.remove(block)
            block.size += more
        pool.add(block)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.max_reserved = max(self.max_reserved, self.reserved)


def _merge(block: _Block, neighbour: _Block) -> None:
    """Let ``block`` take in its free ``neighbour``."""
    if neighbour is block.previous:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
        if block.pool.tail is neighbour:
            block.pool.tail = block
    block.size += neighbour.size


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
