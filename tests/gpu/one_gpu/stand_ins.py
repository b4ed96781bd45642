"""Stand-ins for CUDA, with which the probe is rehearsed on the CPU.

The spinning kernel is a thread, and `torch.cuda.synchronize` waits for it. So the probe has one
call to find that waits, and calls that pass.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.gpu.one_gpu import spinning

_kernels: list[threading.Thread] = []


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other._time - self._time) * 1e3


class _Stream:
    def synchronize(self) -> None:
        _synchronize()


def _synchronize() -> None:
    while _kernels:
        _kernels.pop().join()


def _launch(stream: object, flags: Tensor, blocks: int, limit: float) -> None:
    def spin() -> None:
        flags[1 : 1 + blocks] = 1
        end = time.monotonic() + limit
        while not flags[0] and time.monotonic() < end:
            time.sleep(0.001)
        flags[1 : 1 + blocks] = 2

    _kernels.append(threading.Thread(target=spin))
    _kernels[-1].start()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def rehearse() -> None:
    """Replace CUDA by the stand-ins, in a process that does nothing else."""
    properties = SimpleNamespace(multi_processor_count=132, total_memory=2**36)
    for name, meaning in {
        "Event": _Event,
        "Stream": _Stream,
        "synchronize": _synchronize,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0),
        "get_device_properties": lambda device: properties,
        "memory_reserved": lambda: 0,
        "set_per_process_memory_fraction": lambda fraction: None,
    }.items():
        setattr(torch.cuda, name, meaning)
    setattr(Tensor, "pin_memory", _itself)  # noqa: B010  # mypy forbids the plain assignment
    spinning.launch = _launch
