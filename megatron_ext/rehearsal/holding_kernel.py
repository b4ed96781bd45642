"""Kernel that occupies thread blocks until a time of the device's clock, as a posted send or
receive of NCCL's does until its partner comes.

Written in PTX and started by the driver's own library, so that any torch will do and no compiler is
needed. As NCCL's, a block has 640 threads and owns a multiprocessor by its registers, and reads
memory of its own GPU while it waits. A message that is to hold no blocks has one warp of few
registers, next to which other blocks run. This kernel has not been run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from megatron_ext.rehearsal.cuda_driver import load_kernels, start_kernel

THREADS = 640  # number of threads in a block of NCCL's kernels
# Registers of a thread that stay in use while the kernel waits; with the other registers, rounded
# up, there are 96.
_REGISTERS = 84
_WARP = 32

# Arguments of the kernel. began: two numbers on the GPU, the first of which is the device's clock
# in nanoseconds at the start of a step. moved: nanoseconds from that time until the kernel ends.
_HOLD = """
.visible .entry {name}(.param .u64 began, .param .u64 moved)
.reqntid {threads}, 1, 1
{{
    .reg .u64   %began, %moved, %end, %now;
    .reg .u32   %thread, %tick, %held<{held}>;
    .reg .pred  %is_other, %goes_on, %is_used;

    ld.param.u64    %began, [began];
    ld.param.u64    %moved, [moved];
    {fill}
    mov.u32         %thread, %tid.x;
    setp.ne.u32     %is_other, %thread, 0;
@%is_other bra END;
WAIT:
    ld.volatile.global.u64  %end, [%began];
    add.u64         %end, %end, %moved;
    mov.u64         %now, %globaltimer;
    cvt.u32.u64     %tick, %now;
    {use}
    setp.lt.u64     %goes_on, %now, %end;
@%goes_on bra WAIT;
END:
    bar.sync        0;
    {join}
    setp.ne.u32     %is_used, %held0, 0;
@%is_used ret;
    // Or the assembler would drop the registers: written once in 2 ** 32 times, behind the time.
    st.volatile.global.u32  [%began + 8], %held0;
    ret;
}}
"""
_PTX = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry begin_time(.param .u64 began)
{{
    .reg .u64   %began, %now;

    ld.param.u64    %began, [began];
    mov.u64         %now, %globaltimer;
    st.volatile.global.u64  [%began], %now;
    ret;
}}
{holds}
"""
_OWNS, _LEAVES = "hold_multiprocessors", "hold_none"


def kernels() -> str:
    """Return the PTX text of the kernels: one notes the time, two wait for a later time."""
    holds = "".join((_hold(_OWNS, THREADS, _REGISTERS), _hold(_LEAVES, _WARP, 1)))
    return _PTX.format(holds=holds)


def _hold(name: str, threads: int, registers: int) -> str:
    held = range(registers)
    return _HOLD.format(
        name=name,
        threads=threads,
        held=registers,
        fill="\n    ".join(f"mov.u32 %held{i}, %clock;" for i in held),
        use="\n    ".join(f"xor.b32 %held{i}, %held{i}, %tick;" for i in held),
        join="\n    ".join(f"add.u32 %held0, %held0, %held{i};" for i in held[1:]),
    )


@functools.lru_cache
def holding_kernel() -> dict[str, ctypes.c_void_p]:
    """Load the kernels of this module into the current CUDA context, and return them by name."""
    return load_kernels(kernels(), ("begin_time", _OWNS, _LEAVES))


def begin_time(stream: torch.cuda.Stream, began: Tensor) -> None:
    """Write the time of the GPU's clock into ``began`` as soon as ``stream`` gets there.

    Args:
        began: tensor of two int64 numbers on the GPU, the first of which gets the time.
    """
    start_kernel(holding_kernel()["begin_time"], stream, 1, 1, began.data_ptr())


def hold(stream: torch.cuda.Stream, began: Tensor, moved: float, blocks: int) -> None:
    """Occupy ``blocks`` thread blocks of the GPU until ``moved`` seconds after a noted time.

    Each block has a multiprocessor of its own, and ``stream`` waits meanwhile. With 0 blocks only
    ``stream`` waits, and other kernels can use all multiprocessors.

    Args:
        began: tensor whose first number is the noted time, written by `begin_time`.
    """
    name, threads = (_OWNS, THREADS) if blocks else (_LEAVES, _WARP)
    values = began.data_ptr(), nanoseconds(moved)
    start_kernel(holding_kernel()[name], stream, max(1, blocks), threads, *values)


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
