"""A kernel that spins until the host ends it, like a posted NCCL receive until its partner sends.

It is written in PTX and started by the driver's own library, so that any torch will do and no
compiler is needed. Like NCCL's kernels it has 640 threads a block with 96 registers each, so a
block occupies its SM. It reads the host's memory once in a millisecond; more often would slow down
other kernels.
"""

from __future__ import annotations

import ctypes
import functools
import time

import torch
from torch import Tensor

from megatron_ext.rehearsal.cuda_driver import load_kernels, start_kernel

THREADS = 640
MOST_BLOCKS = 256

# Registers of a thread that are in use while the kernel spins. With its other registers, rounded
# up, a thread has 96.
_HELD = 84

# Arguments of the kernel. flags[0]: the host sets this flag to end the kernel. flags[1 + block]: 1
# while the block spins, 2 once the block has ended. limit: nanoseconds after which the kernel ends
# by itself.
_BODY = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 flags, .param .u64 limit)
.reqntid {threads}, 1, 1
{{
    .reg .u64   %flags, %mine, %limit, %begin, %now;
    .reg .u32   %thread, %block, %stop, %tick, %held<{held}>;
    .reg .pred  %is_other, %is_over;

    ld.param.u64    %flags, [flags];
    ld.param.u64    %limit, [limit];
    mov.u32         %block, %ctaid.x;
    mad.wide.u32    %mine, %block, 4, %flags;
    mov.u64         %begin, %globaltimer;
    {fill}
    mov.u32         %thread, %tid.x;
    setp.ne.u32     %is_other, %thread, 0;
@%is_other bra WAIT;
    st.volatile.global.u32  [%mine + 4], 1;
SPIN:
    ld.volatile.global.u32  %stop, [%flags];
    setp.ne.u32     %is_over, %stop, 0;
@%is_over bra WAIT;
    mov.u64         %now, %globaltimer;
    cvt.u32.u64     %tick, %now;
    {use}
    sub.u64         %now, %now, %begin;
    setp.gt.u64     %is_over, %now, %limit;
@%is_over bra WAIT;
    nanosleep.u32   1000000;
    bra             SPIN;
WAIT:
    bar.sync        0;
    {join}
    setp.eq.u32     %is_over, %held0, 0;
@%is_over st.volatile.global.u32 [%mine + 4], 3;
@%is_other ret;
    st.volatile.global.u32  [%mine + 4], 2;
    ret;
}}
"""


def kernel() -> str:
    """Return the PTX of ``spin``."""
    held = range(_HELD)
    return _BODY.format(
        threads=THREADS,
        held=_HELD,
        fill="\n    ".join(f"mov.u32 %held{i}, %clock;" for i in held),
        use="\n    ".join(f"xor.b32 %held{i}, %held{i}, %tick;" for i in held),
        join="\n    ".join(f"add.u32 %held0, %held0, %held{i};" for i in held[1:]),
    )


@functools.lru_cache
def _function() -> ctypes.c_void_p:
    """Return the loaded kernel."""
    return load_kernels(kernel(), ["spin"])["spin"]


def launch(stream: torch.cuda.Stream, flags: Tensor, blocks: int, limit: float) -> None:
    """Start the kernel on ``stream``. ``flags`` are in pinned memory, and ``limit`` is in
    seconds."""
    values = flags.data_ptr(), int(limit * 1e9)
    start_kernel(_function(), stream, blocks, THREADS, *values)


class Spinning:
    """A context in which the kernel spins on ``stream``, for at most ``limit`` seconds."""

    def __init__(self, stream: torch.cuda.Stream, blocks: int, limit: float) -> None:
        self.blocks = blocks
        self._stream = stream
        self._limit = limit
        self._flags = torch.zeros(1 + MOST_BLOCKS, dtype=torch.int32).pin_memory()

    def __enter__(self) -> Spinning:
        launch(self._stream, self._flags, self.blocks, self._limit)
        end = time.monotonic() + 10
        while not bool(self._states().all()):
            if time.monotonic() > end:
                self._flags[0] = 1
                raise RuntimeError(f"{self.blocks} spinning blocks did not begin in 10 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._flags[0] = 1
        self._stream.synchronize()

    def has_ended(self) -> bool:
        return bool((self._states() >= 2).any())

    def _states(self) -> Tensor:
        return self._flags[1 : 1 + self.blocks]
