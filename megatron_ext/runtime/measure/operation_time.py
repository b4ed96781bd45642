"""Durations of single operations on this GPU: matrix products, and gathers of a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

_TIMED = 0.1  # seconds of each product
_ROUNDS = 10  # gathers that are timed


def product_seconds(shape: tuple[float, float, float], *, in_fp8: bool) -> float | None:
    """Return the seconds of a matrix product of ``shape`` (rows, columns, depth), sustained; None
    if the training leaves too little memory for its operands.

    Operands are random, in 8 bits or bf16; the product is in bf16.
    """
    try:
        return _product_seconds(shape, in_fp8)
    except torch.OutOfMemoryError:
        return None


def _product_seconds(shape: tuple[float, float, float], in_fp8: bool) -> float:
    rows, columns, depth = map(int, shape)
    left = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
    if not in_fp8:
        return sustained_seconds(lambda: left @ right.t(), _TIMED)
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return sustained_seconds(
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16), _TIMED
    )


def sustained_seconds(kernel: Callable[[], object], timed: float) -> float:
    """Return the seconds of one call of ``kernel``, which runs for ``timed`` seconds.

    The second half of these is timed: a GPU whose power is limited slows down within a tenth of a
    second.
    """
    _timed(kernel, 1)  # the first call loads it
    once = _timed(kernel, 3)
    repetitions = max(3, int(timed / 2 / once))
    _timed(kernel, repetitions)
    return _timed(kernel, repetitions)


def _timed(kernel: Callable[[], object], repetitions: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    begin.record()
    for _ in range(repetitions):
        kernel()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repetitions


def gather_seconds(group: dist.ProcessGroup, sizes: Iterable[int]) -> dict[float, float]:
    """Return the seconds of a gather of each of ``sizes``, in bytes of all ranks together.
    Collective over ``group``."""
    seconds: dict[float, float] = {}
    for size in sizes:
        share = torch.zeros(size // group.size(), dtype=torch.uint8, device="cuda")
        whole = torch.empty(share.numel() * group.size(), dtype=torch.uint8, device="cuda")

        def gather(whole: torch.Tensor = whole, share: torch.Tensor = share) -> None:
            dist.all_gather_into_tensor(whole, share, group=group)

        _timed(gather, 2)  # a rank may wait for a peer that still computes
        seconds[float(size)] = _timed(gather, _ROUNDS)
    return seconds


def machine_versions() -> tuple[str, ...]:
    """Return the versions of what computes and communicates here, in words."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"NCCL {nccl}"
