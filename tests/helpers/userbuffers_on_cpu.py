"""A stand-in on gloo for Transformer Engine's Userbuffers: communication that overlaps with a GEMM.

As in the original, operands are in one buffer for each name, which every layer of that name writes
to.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator:
    """Stands in for ``CommOverlap``, with a buffer of ``rows`` on all ranks together."""

    def __init__(self, rows: int, width: int) -> None:
        self._buffer = torch.zeros(rows, width)

    def is_fp8_ubuf(self) -> bool:
        return False

    def with_cublasmp(self) -> bool:
        return False

    def copy_into_buffer(self, tensor: Tensor, local_chunk: bool = False) -> None:
        self.get_buffer(local_chunk).copy_(tensor)

    def get_buffer(self, local_chunk: bool = False, shape: Any = None) -> Tensor:
        # Each call returns another tensor object, as the original does, since layers free tensors
        # that they have used.
        return self._chunks()[dist.get_rank()] if local_chunk else self._buffer.detach()

    def gather(self) -> None:
        own = self.get_buffer(local_chunk=True).clone()
        dist.all_gather(list(self._chunks()), own)

    def scatter(self, whole: Tensor, into: Tensor) -> None:
        dist.reduce_scatter_tensor(into, whole.contiguous())

    def _chunks(self) -> tuple[Tensor, ...]:
        return self._buffer.chunk(dist.get_world_size())


def initialize(rows: int, widths: dict[str, int]) -> None:
    """Create the communicators of ``initialize_ub``, by the name of a layer, for its F, dgrad and
    wgrad."""
    base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    none = base.UserBufferQuantizationMode.NONE
    base._ub_communicators = {
        (f"{name}_{product}", none): Communicator(rows, width)
        for name, width in widths.items()
        for product in ("fprop", "dgrad", "wgrad")
    }
    base._ub_initialized = True


def multiply_and_communicate(
    multiply: Any, comm: Communicator, kind: int, extra: Tensor | None, bulk: bool
) -> Tensor:
    """Return the product that ``multiply`` computes. Also communicate its operand, the product or,
    with ``bulk``, another tensor in the buffer."""
    types: Any = sys.modules["transformer_engine_torch"].CommOverlapType
    if kind == types.AG:
        comm.gather()
        made: Tensor = multiply()
        return made
    made = multiply()
    if bulk:
        whole = comm.get_buffer().clone()
        comm.scatter(whole, comm.get_buffer(local_chunk=True))
    else:
        assert extra is not None
        comm.scatter(made, extra)
    return made
