"""Kernels written in PTX, loaded and started by the CUDA driver's own library.

This way a kernel that has to run next to others at a given time needs neither a compiler nor a
particular version of torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch


def load_kernels(text: str, names: Iterable[str]) -> dict[str, ctypes.c_void_p]:
    """Load the kernels in the PTX ``text`` into the current CUDA context. Return them by name."""
    torch.zeros(1, device="cuda")  # a first use of the device makes its CUDA context current
    module = ctypes.c_void_p()
    driver_call("cuModuleLoadData", ctypes.byref(module), text.encode())
    loaded = {}
    for name in names:
        loaded[name] = ctypes.c_void_p()
        driver_call("cuModuleGetFunction", ctypes.byref(loaded[name]), module, name.encode())
    return loaded


def start_kernel(
    kernel: ctypes.c_void_p, stream: torch.cuda.Stream, blocks: int, threads: int, *values: int
) -> None:
    """Start ``kernel`` on ``stream``, with ``blocks`` thread blocks of ``threads`` threads each.

    Args:
        values: the kernel's arguments, numbers of 64 bits.
    """
    held = [ctypes.c_uint64(value) for value in values]
    arguments = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    shape = (ctypes.c_uint(n) for n in (blocks, 1, 1, threads, 1, 1, 0))
    handle = ctypes.c_void_p(stream.cuda_stream)
    driver_call("cuLaunchKernel", kernel, *shape, handle, arguments, None)


def driver_call(function: str, *arguments: object) -> None:
    """Call ``function`` of the CUDA driver.

    Raises:
        RuntimeError: the driver returns an error; the message has its number.
    """
    code = getattr(_driver(), function)(*arguments)
    if code:
        raise RuntimeError(f"the CUDA driver's function {function} failed with error {code}")


@functools.lru_cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
