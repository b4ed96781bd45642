"""Digests of tensors that add up: those of pieces to that of the whole, however it is divided.

Each element's bits are mixed with its place in the whole tensor, and the results added modulo
2**64, so that neither the order nor the division matters. Computed where the tensor is; nothing but
the sum is copied.
"""

from __future__ import annotations

import torch

from megatron_ext.parity.records.piece import STORED_AS, Piece

_BLOCK = 1 << 22  # elements at a time: what it takes is 64 MiB
_BITS = {"i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64}
# Odd, and with bits all over, as signed 64-bit integers (those of splitmix64).
_PLACE, _MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, flat, as the integers that its bits are; no copy where it is contiguous."""
    return tensor.detach().reshape(-1).view(_BITS[STORED_AS[dtype_of(tensor)]])


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def digest(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The share of ``piece``, whose elements ``tensor`` has: an int64 on the tensor's device."""
    bits = bits_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK]
        first = piece.start + start
        mixed = _places(piece, first, first + block.numel(), bits.device).mul_(_PLACE).add_(block)
        mixed.bitwise_xor_(mixed >> 32).mul_(_MIX)
        mixed.bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return total


def _places(piece: Piece, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Where elements ``start`` to ``stop`` of the flattened shard are in the flattened tensor."""
    inside = torch.arange(start, stop, dtype=torch.int64, device=device)
    if piece.shape == piece.whole:
        return inside
    places = torch.zeros_like(inside)
    stride = 1
    for size, whole, offset in zip(
        reversed(piece.shape), reversed(piece.whole), reversed(piece.offset), strict=True
    ):
        places += (inside % size + offset) * stride
        inside = inside // size
        stride *= whole
    return places
