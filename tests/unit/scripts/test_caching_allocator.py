"""The model of PyTorch's caching allocator, by cases that are worked out by hand."""

from __future__ import annotations

import pytest

from scripts.caching_allocator import MIB, CachingAllocator


def test_small_requests_share_a_segment() -> None:
    """A request takes 512 bytes at least, and 4,096 of these fill a segment of 2 MiB."""
    allocator = CachingAllocator()
    for storage in range(4096):
        allocator.allocate(storage, 1)
    assert allocator.reserved == 2 * MIB and allocator.requested == 4096
    allocator.allocate(4096, 1)
    assert allocator.reserved == 4 * MIB


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_by_size(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, size)
    assert allocator.reserved == reserved


def test_a_remainder_of_a_large_block_is_used_if_it_is_above_1_mib() -> None:
    """Requests of 9 and 9 MiB leave 2 of 20 MiB, which serve another request. One of 11 MiB leaves
    1 of 12 MiB, which stays with its block."""
    allocator = CachingAllocator()
    allocator.allocate(0, 9 * MIB)
    allocator.allocate(1, 9 * MIB)
    allocator.allocate(2, 2 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(3, 12 * MIB)
    allocator.free(3)
    allocator.allocate(4, 11 * MIB)
    allocator.allocate(5, MIB + 512)
    assert allocator.reserved == (20 + 12 + 20) * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    """Were the block of 40 MiB split for the 20, the next 40 would need a segment of their own."""
    allocator = CachingAllocator()
    allocator.allocate(0, 40 * MIB)
    allocator.allocate(1, 20 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 20 * MIB)
    allocator.allocate(3, 40 * MIB)
    assert allocator.reserved == 60 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_free_neighbours_merge(order: tuple[int, ...]) -> None:
    """Three parts of one segment are one block again, in whatever order they are freed."""
    allocator = CachingAllocator()
    allocator.allocate(9, 30 * MIB)
    allocator.free(9)
    for storage in range(3):
        allocator.allocate(storage, 10 * MIB)
    for storage in order:
        allocator.free(storage)
    allocator.allocate(3, 30 * MIB)
    assert allocator.reserved == 30 * MIB


def test_a_hole_is_no_use_to_a_larger_request() -> None:
    """20 MiB are free in two parts, with a used block between them: 20 more are reserved for a
    request of 20, and requested were 40 at most."""
    allocator = CachingAllocator()
    allocator.allocate(9, 30 * MIB)
    allocator.free(9)
    for storage in range(3):
        allocator.allocate(storage, 10 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(3, 20 * MIB)
    assert allocator.max_reserved == 50 * MIB and allocator.max_requested == 30 * MIB


def test_expandable_segments_grow_at_their_end() -> None:
    """Steps of 20 MiB; a free end counts, and a hole too if it is large enough."""
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(0, 30 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(1, 30 * MIB)  # 10 of it are there
    assert allocator.reserved == 60 * MIB
    allocator.free(0)
    allocator.allocate(2, 31 * MIB)  # the hole has 30
    assert allocator.reserved == 100 * MIB
    allocator.allocate(3, 30 * MIB)
    assert allocator.reserved == 100 * MIB
    for storage in (1, 2, 3):
        allocator.free(storage)
    allocator.allocate(4, 100 * MIB)
    assert allocator.reserved == 100 * MIB
