"""Bytes of a GPU that a rank takes outside its tensors.

PyTorch's allocator does not count CUDA's context, the libraries' workspaces and NCCL's buffers, yet
a rank runs out of memory if there is no room for them.
"""

from __future__ import annotations

from megatron_ext.cost_model.execution import Execution

# Bytes of CUDA's context of a process with PyTorch and Transformer Engine on an H200
# (docs/estimated-costs.md). CUDA loads kernels into it when they are first used.
CONTEXT = 0.66e9
# cuBLAS' workspaces: on Hopper 32 MiB of PyTorch and 32 MiB of Transformer Engine, on earlier GPUs
# less (getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp, and
# get_cublas_workspace_size_bytes in transformer_engine/pytorch/module/base.py).
WORKSPACES = 64 * 2**20
# Bytes of NCCL's buffers for a channel from one rank to another: 10 MiB at the receiver (LL, LL128
# and Simple: `BUFFER_BYTES`, in pages of 2 MiB) and 2 MiB at the sender. A ring has one such
# connection a channel, and up to 24 channels. All ranks of a node that exchange tokens have 32
# channels each: 3.3 GB of each of eight H100s, measured
# (https://github.com/NVIDIA/nccl/issues/1685).
CHANNEL = 12 * 2**20
RING_CHANNELS, EXCHANGE_CHANNELS = 24, 32
_PEERS = 7  # number of peers of a GPU in a node of eight


def context_bytes(
    execution: Execution, *, pipeline: int, data_parallel: int, expert_data_parallel: int
) -> float:
    """Return the bytes that a rank takes outside its tensors: CUDA's context and NCCL's buffers.

    ``pipeline`` is the number of pipeline ranks. Each group of several ranks has a communicator
    with rings of its own (NCCL shares none unless it is told to:
    https://github.com/NVIDIA/nccl/issues/986). Communicators that a schedule adds are not counted;
    `doctor` names them.
    """
    groups = [execution.tensor_parallel, execution.context_parallel, pipeline, data_parallel]
    peers = min(execution.expert_parallel - 1, _PEERS)
    if execution.expert_parallel > 1:
        groups.append(expert_data_parallel)
    rings = sum(size > 1 for size in groups)
    channels = rings * RING_CHANNELS + peers * EXCHANGE_CHANNELS
    return CONTEXT + WORKSPACES + channels * CHANNEL
