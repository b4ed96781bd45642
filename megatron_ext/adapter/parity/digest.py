"""Digests of tensors that are additive: the digests of all pieces of a tensor add up to its digest.

Each element's bits are mixed with its index in the whole tensor, and the results are added modulo
2**64, so that neither the order nor the partition matters. The digest is computed on the tensor's
device; only the sum is copied.
"""

from __future__ import annotations

import torch

from megatron_ext.recordings.piece import STORED_AS, Piece

_BLOCK = 1 << 22  # elements that are hashed together; their temporary arrays take 64 MiB
_BITS = {"i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64}
# The odd multipliers of the hash function splitmix64, as signed 64-bit integers.
_PLACE, _MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``tensor``, flattened, as integers; no copy if it is contiguous."""
    return tensor.detach().reshape(-1).view(_BITS[STORED_AS[dtype_of(tensor)]])


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def digest(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the digest of ``piece``, part of a tensor, as an int64 on the device of ``tensor``.

    ``tensor`` has the elements of the piece. Digests of all pieces of a tensor add up to its
    digest.
    """
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
    """Return the index in the whole flattened tensor of each of some elements of a shard.

    ``piece`` is the shard. The elements are numbers ``start`` up to ``stop`` (exclusive) of the
    flattened shard.
    """
    inside = torch.arange(start, stop, dtype=torch.int64, device=device)
    if piece.shape == piece.global_shape:
        return inside
    places = torch.zeros_like(inside)
    stride = 1
    for size, global_size, offset in zip(
        reversed(piece.shape), reversed(piece.global_shape), reversed(piece.offset), strict=True
    ):
        places += (inside % size + offset) * stride
        inside = inside // size
        stride *= global_size
    return places
