"""Durations of single operations on this GPU: kernels, and collectives of a group of ranks.

Estimates of other parallel sizes need to know how fast this machine is at single operations. Each
is timed for long enough that the GPU has reached its sustained clock, and is skipped if the
training leaves too little memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

_TIMED = 0.1  # seconds that each kernel is run, half of them untimed
_ROUNDS = 10  # number of timed collectives


def product_seconds(shape: tuple[float, float, float], *, in_fp8: bool) -> float | None:
    """Return the sustained seconds of a matrix product of ``shape`` (rows, columns, depth).

    None if this GPU has no kernel for the product, or the training leaves too little memory.
    Operands are random, in 8 bits or bf16; the product is in bf16.
    """
    try:
        return _product_seconds(shape, in_fp8)
    # A RuntimeError means that this size cannot be timed: memory is too small
    # (torch.OutOfMemoryError is a RuntimeError), or 8-bit products do not support the shape.
    except RuntimeError:
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


def grouped_seconds(shape: tuple[float, float, float, float]) -> float | None:
    """Return the sustained seconds of a grouped matrix product in bf16, as experts compute it.

    ``shape`` is (rows, columns, depth, number of products). None if this GPU has no kernel or too
    little memory.
    """
    rows, columns, depth, groups = map(int, shape)
    try:
        tokens = torch.randn(groups * rows, depth, device="cuda", dtype=torch.bfloat16)
        matrices = torch.randn(groups, depth, columns, device="cuda", dtype=torch.bfloat16)
        ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * rows
        return sustained_seconds(partial(torch._grouped_mm, tokens, matrices, offs=ends), _TIMED)
    # A kernel is left unmeasured if there is too little memory, if this GPU has no such kernel, or
    # if torch is too old.
    except (RuntimeError, AttributeError):
        return None


def attention_seconds(shape: tuple[int, int, int, int, int]) -> tuple[float, float] | None:
    """Return the sustained seconds of causal attention in bf16, forward and backward.

    None if this GPU has no fused kernel or too little memory. cuDNN's kernel is timed, which
    Transformer Engine takes on Hopper and later.

    Args:
        shape: samples, tokens of a sample, heads, groups of keys and values, width of a head.
    """
    samples, sequence, heads, groups, width = shape
    try:
        query, key, value = (
            torch.randn(
                samples,
                number,
                sequence,
                width,
                device="cuda",
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for number in (heads, groups, groups)
        )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attend = partial(
                scaled_dot_product_attention,
                query,
                key,
                value,
                is_causal=True,
                enable_gqa=heads != groups,
            )
            output = attend()
            gradient = torch.randn_like(output)
            differentiate = partial(
                torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True
            )
            return sustained_seconds(attend, _TIMED), sustained_seconds(differentiate, _TIMED)
    except RuntimeError:
        return None


def sustained_seconds(kernel: Callable[[], object], timed: float) -> float:
    """Return the sustained seconds of one call of ``kernel``.

    The kernel runs for ``timed`` seconds, of which the second half is timed: a GPU whose power is
    limited slows down within a tenth of a second.
    """
    _timed(kernel, 1)  # the first call loads the kernel
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
    """Return the seconds of an all-gather by its size in bytes, for each of ``sizes``.

    A size counts the bytes of all ranks of ``group`` together. Collective over ``group``.
    """

    def gather(gathered: torch.Tensor) -> Callable[[], object]:
        share = gathered[: gathered.numel() // group.size()].clone()
        return lambda: dist.all_gather_into_tensor(gathered, share, group=group)

    return _collective_seconds(group, sizes, gather)


def exchange_seconds(group: dist.ProcessGroup, sizes: Iterable[int]) -> dict[float, float]:
    """Return the seconds of an all-to-all by its size in bytes, for each of ``sizes``.

    A size counts the bytes that each rank of ``group`` sends, in equal parts to all. Collective
    over ``group``.
    """

    def exchange(received: torch.Tensor) -> Callable[[], object]:
        sent = torch.zeros_like(received)
        return lambda: dist.all_to_all_single(received, sent, group=group)

    return _collective_seconds(group, sizes, exchange)


def _collective_seconds(
    group: dist.ProcessGroup,
    sizes: Iterable[int],
    collective_of: Callable[[torch.Tensor], Callable[[], object]],
) -> dict[float, float]:
    """Return the seconds of a collective by its size in bytes, for each of ``sizes``.

    ``collective_of`` makes the collective for a buffer. Sizes are rounded down to a multiple of the
    ranks.
    """
    seconds: dict[float, float] = {}
    for size in sizes:
        size -= size % group.size()
        collective = collective_of(torch.zeros(size, dtype=torch.uint8, device="cuda"))
        # The first calls are not timed: they end once all ranks have arrived, as a rank may still
        # compute.
        _timed(collective, 2)
        seconds[float(size)] = _timed(collective, _ROUNDS)
    return seconds


def machine_versions() -> tuple[str, ...]:
    """Return the versions of torch, CUDA and NCCL on this machine, in words."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"NCCL {nccl}"
