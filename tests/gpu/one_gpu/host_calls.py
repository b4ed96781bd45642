"""Calls of the host that block behind a kernel that spins on a stream of its own, as a receive
does.

python -m tests.gpu.one_gpu.host_calls cuda|cpu CALL|gemm|queue

A call of the host that returns while the kernel still spins passes. A call that returns only when
the kernel ends would hang a rank whose receive needs something that this rank does later.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.one_gpu import spinning
from tests.gpu.one_gpu.rows import run_case, tell
from tests.gpu.one_gpu.spinning import Spinning

BLOCKS = 8  # number of thread blocks: as many as a channel between two ranks may take
SPINS = 3.0  # seconds that the kernel spins; a call that does not wait takes far less
COMPILE_SPINS = 100.0
MIB = 2**20

Call = Callable[[], object]


def synchronize(device: torch.device) -> Call:
    return torch.cuda.synchronize


def event(device: torch.device) -> Call:
    recorded = torch.cuda.Event()
    recorded.record()
    return recorded.synchronize


def item(device: torch.device) -> Call:
    return torch.ones(1, device=device).item


def first_compiled(device: torch.device) -> Call:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=os.environ.get("ONE_GPU_FOLDER"))
    compiled = torch.compile(swiglu)
    x = torch.randn(1024, 2048, device=device, requires_grad=True)
    return lambda: compiled(x).sum().backward()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = torch.chunk(x, 2, -1)
    return torch.nn.functional.silu(gate) * up


def large_empty(device: torch.device) -> Call:
    return lambda: torch.empty(1024 * MIB, dtype=torch.uint8, device=device)


def never_used(device: torch.device) -> Call:
    x = torch.rand(1024, device=device)
    return lambda: torch.erfinv(x)


def first_matmul(device: torch.device) -> Call:
    x = torch.rand(256, 256, device=device)
    return lambda: x @ x


def host_register(device: torch.device) -> Call:
    buffer = torch.zeros(64 * MIB, dtype=torch.uint8)
    register = torch.cuda.cudart().cudaHostRegister

    def call() -> None:
        code = int(register(buffer.data_ptr(), buffer.numel(), 0))
        assert code == 0, f"cudaHostRegister says {code}"

    return call


def pin_memory(device: torch.device) -> Call:
    buffer = torch.zeros(64 * MIB, dtype=torch.uint8)
    return buffer.pin_memory


def from_pageable(device: torch.device) -> Call:
    buffer = torch.zeros(64 * MIB, dtype=torch.uint8)
    # Memory is allocated and freed at once, so that the copy finds free memory in torch's cache.
    torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    return lambda: buffer.to(device, copy=True)


def empty_cache(device: torch.device) -> Call:
    # Memory is allocated and freed at once, and stays in torch's cache, which empty_cache then
    # empties.
    torch.empty(1024 * MIB, dtype=torch.uint8, device=device)
    return torch.cuda.empty_cache


def allocator_retry(device: torch.device) -> Call:
    """Return an allocation that fits only after cached blocks are freed."""
    torch.empty(1024 * MIB, dtype=torch.uint8, device=device)
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.memory_reserved() + 512 * MIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
    return lambda: torch.empty(1280 * MIB, dtype=torch.uint8, device=device)


CALLS: dict[str, tuple[str, Callable[[torch.device], Call]]] = {
    "synchronize": ("torch.cuda.synchronize (must wait)", synchronize),
    "event": ("the event of another stream, synchronized (must pass)", event),
    "item": (".item() of another stream (must pass)", item),
    "first_compiled": ("the first call of a torch.compile'd swiglu", first_compiled),
    "large_empty": ("torch.empty of 1 GiB: cudaMalloc", large_empty),
    "allocator_retry": ("torch.empty that must free cached blocks first", allocator_retry),
    "empty_cache": ("torch.cuda.empty_cache", empty_cache),
    "never_used": ("an operator never used before", never_used),
    "first_matmul": ("the first matmul: cuBLAS is set up", first_matmul),
    "host_register": ("cudaHostRegister of 64 MiB", host_register),
    "pin_memory": ("pin_memory of 64 MiB: cudaHostAlloc", pin_memory),
    "from_pageable": ("a copy from 64 MiB of pageable memory", from_pageable),
}
# Calls that must wait for the kernel, and calls that must not; otherwise the probe itself is wrong.
MUST_WAIT, MUST_PASS = {"synchronize"}, {"event", "item"}


def probe(name: str, device: torch.device) -> None:
    words, prepare = CALLS[name]
    call = prepare(device)
    torch.cuda.synchronize()
    limit = COMPILE_SPINS if name == "first_compiled" else SPINS
    with Spinning(torch.cuda.Stream(), BLOCKS, limit) as kernel:
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        waited = kernel.has_ended()
    how = "**waits** for it" if waited else "passes"
    is_good = not (waited and name in MUST_PASS) and (waited or name not in MUST_WAIT)
    tell(f"behind a spinning kernel: {words}", f"{how}, {took * 1e3:.1f} ms", is_good)


def gemm(device: torch.device) -> None:
    """Time a product of two large matrices in parallel to kernels that each occupy some SMs."""
    size, products = (4096 if device.type == "cuda" else 256), 20
    matrix = torch.randn(size, size, device=device).bfloat16()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    alone = 0.0
    for blocks in (0, 8, 16, 32, 64, 128):
        if blocks > multiprocessors - 4:
            continue
        for _ in range(3):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in "12")

        def multiply(began: Any = began, ended: Any = ended) -> float:
            began.record()
            for _ in range(products):
                torch.mm(matrix, matrix)
            ended.record()
            ended.synchronize()
            return float(began.elapsed_time(ended)) / products

        if not blocks:
            alone = took = multiply()
        else:
            with Spinning(torch.cuda.Stream(), blocks, 20.0) as kernel:
                took = multiply()
                assert not kernel.has_ended(), "the product waited for the spinning kernel"
        words = f"{took:.3f} ms" + (f", {took / alone:.2f} times as long" if blocks else "")
        tell(f"{size}^3 bf16 product beside {blocks} spinning blocks, one an SM", words)


def queue(device: torch.device) -> None:
    """Print whether later work on another stream runs while a receive waits, also if a send that
    must come after that receive was issued in between."""
    connections = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    x = torch.rand(256, 256, device=device)
    torch.mm(x, x)
    flags = torch.zeros(2, dtype=torch.int32).pin_memory()
    for send_waits in (False, True):
        torch.cuda.synchronize()
        side, done = torch.cuda.Stream(), torch.cuda.Event()
        with Spinning(side, BLOCKS, SPINS) as kernel:
            if send_waits:
                spinning.launch(side, flags, 1, 0.0)
            torch.mm(x, x)
            done.record()
            while not done.query() and not kernel.has_ended():
                time.sleep(0.001)
            waited = kernel.has_ended()
        before = "a receive, and a send behind it on its stream" if send_waits else "a receive"
        tell(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: a matmul issued after {before}",
            "**waits** for the receive" if waited else "passes",
        )


OTHERS = {"gemm": gemm, "queue": queue}


def main(kind: str, name: str) -> None:
    if kind == "cpu":
        from tests.gpu.one_gpu.stand_ins import rehearse

        rehearse()
    show = OTHERS.get(name) or functools.partial(probe, name)
    run_case(f"host calls {name}", lambda: show(torch.device(kind)))


if __name__ == "__main__":
    main(*sys.argv[1:])
