"""Quantisation on the CPU, in place of Transformer Engine's kernels.

Recipes, scales, amax histories, cached copies of weights and the classes of quantised tensors are
Transformer Engine's own Python. A quantised tensor here holds, in place of its bytes, the values
that they stand for: rounded by the recipe's number format and scales, block by block along rows or
columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Quantizer = Any  # a quantizer of Transformer Engine
Quantized = Any

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

# functions that are called at each quantisation
watchers: list[Callable[[Quantizer, Tensor], None]] = []


def quantize(
    tensor: Tensor, quantizer: Quantizer, output: Quantized = None, noop: Any = None
) -> Quantized:
    """Return ``tensor`` quantised by ``quantizer``, written to ``output`` if that is given."""
    assert noop is None
    for watch in watchers:
        watch(quantizer, tensor)
    rows, columns = _ROUNDED[type(quantizer).__name__](quantizer, tensor.detach())
    made = _empty(quantizer, tensor) if output is None else output
    in_place = output is not None
    if hasattr(made, "_transpose"):
        _fill(made, "_data", rows, in_place)
        if made._transpose is not None:
            _fill(made, "_transpose", fp8_transpose(rows, None), in_place)
            made._transpose_invalid = False
        return made
    if made._rowwise_data is not None:
        _fill(made, "_rowwise_data", rows, in_place)
    if made._columnwise_data is not None:
        _fill(made, "_columnwise_data", columns, in_place)
    return made


def _fill(made: Quantized, name: str, values: Tensor, in_place: bool) -> None:
    """Set the values of ``made``. A cached copy of a weight is overwritten in place."""
    if in_place:
        getattr(made, name).copy_(values)
    else:
        setattr(made, name, values)


def _empty(quantizer: Quantizer, like: Tensor) -> Quantized:
    if type(quantizer).__name__ == "Float8Quantizer":
        data = torch.zeros(like.shape, dtype=torch.uint8)
        made = quantizer.create_tensor_from_data(
            data, fake_dtype=like.dtype, internal=quantizer.internal
        )
        if quantizer.columnwise_usage and not _reads_columns_of_rows():
            made._transpose = data
        return made
    if not hasattr(quantizer, "storage_metadata"):  # Transformer Engine before 2.20
        return quantizer.make_empty(like.shape, dtype=like.dtype, device="cpu")
    return create_empty_quantized_tensor(quantizer, like.shape, like.dtype, None, False)


def create_empty_quantized_tensor(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device: Any, pinned: bool
) -> Quantized:
    metadata = quantizer.storage_metadata(dtype)
    kind = metadata["cls"]
    context = {
        "cls": kind,
        "is_tensor": issubclass(kind, Tensor),
        "requires_grad": False,
        "nontensor_kwargs": metadata["nontensor_kwargs"],
    }
    inner = {
        name: torch.zeros(size, dtype=kept)
        for name, (size, kept) in quantizer.inner_tensor_specs(tuple(shape)).items()
    }
    return kind.__tensor_unflatten__(inner, context, shape, None)


def _reads_columns_of_rows() -> bool:
    """Return whether GEMMs read the same copy for rows and columns, as Blackwell's do."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return is_non_tn_fp8_gemm_supported()


def operand(tensor: Quantized, rowwise: bool) -> Tensor:
    """Return the values that a GEMM reads of ``tensor``, which may be a plain one."""
    if not hasattr(tensor, "_quantizer"):
        return tensor
    if not hasattr(tensor, "_transpose"):
        data = tensor._rowwise_data if rowwise else tensor._columnwise_data
        assert data is not None, "the GEMM's operand is not there"
        return data
    if rowwise or _reads_columns_of_rows():
        assert tensor._data is not None, "the GEMM's operand is not there"
        return tensor._data
    assert tensor._transpose is not None and not tensor._transpose_invalid
    return tensor._transpose.movedim(0, -1)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    moved = data.movedim(-1, 0).contiguous()
    return moved if out is None or out.dtype != moved.dtype else out.copy_(moved)


def dequantize(tensor: Quantized, dtype: Any) -> Tensor:
    return operand(tensor, rowwise=True).to(tensor._dtype)


def bgrad_quantize(dy: Tensor, quantizer: Quantizer) -> tuple[Tensor, Quantized]:
    return dy.reshape(-1, dy.shape[-1]).sum(0), quantize(dy, quantizer)


def split_quantize(
    tensor: Tensor, sizes: Sequence[int], quantizers: Sequence[Quantizer], **options: Any
) -> list[Quantized]:
    parts = tensor.split(list(sizes))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def _delayed(quantizer: Quantizer, tensor: Tensor) -> tuple[Tensor, Tensor]:
    values = tensor.float()
    if values.numel():
        quantizer.amax.copy_(torch.maximum(quantizer.amax, values.abs().amax()))
    made = _as_fp8(values * quantizer.scale, quantizer) / quantizer.scale
    return made, made


def _current(quantizer: Quantizer, tensor: Tensor) -> tuple[Tensor, Tensor]:
    made = _in_blocks(tensor, tensor.shape, quantizer)
    return made, made


def _blockwise(quantizer: Quantizer, tensor: Tensor) -> tuple[Tensor, Tensor]:
    if quantizer.block_scaling_dim == 2:
        made = _in_blocks(tensor, (128, 128), quantizer)
        return made, made
    return _in_blocks(tensor, (1, 128), quantizer), _in_blocks(tensor, (128, 1), quantizer)


def _mx(quantizer: Quantizer, tensor: Tensor) -> tuple[Tensor, Tensor]:
    return (
        _in_blocks(tensor, (1, 32), quantizer, power_of_two=True),
        _in_blocks(tensor, (32, 1), quantizer, power_of_two=True),
    )


def _nvfp4(quantizer: Quantizer, tensor: Tensor) -> tuple[Tensor, Tensor]:
    return (
        _in_blocks(tensor, (1, 16), quantizer, round_to=_as_fp4),
        _in_blocks(tensor, (16, 1), quantizer, round_to=_as_fp4),
    )


_ROUNDED: dict[str, Callable[[Quantizer, Tensor], tuple[Tensor, Tensor]]] = {
    "Float8Quantizer": _delayed,
    "Float8CurrentScalingQuantizer": _current,
    "Float8BlockQuantizer": _blockwise,
    "MXFP8Quantizer": _mx,
    "NVFP4Quantizer": _nvfp4,
}


def _format(quantizer: Quantizer) -> torch.dtype:
    return E5M2 if quantizer.dtype.name == "kFloat8E5M2" else E4M3


def _as_fp8(scaled: Tensor, quantizer: Quantizer) -> Tensor:
    number = _format(quantizer)
    largest = torch.finfo(number).max
    return scaled.clamp(-largest, largest).to(number).float()


def _as_fp4(scaled: Tensor, quantizer: Quantizer) -> Tensor:
    """Round to the nearest FP4 number or, for gradients that need it, up or down at random. Random
    numbers come from the device's default generator, as on a GPU."""
    grid = E2M1
    size = scaled.abs().clamp(max=6)
    above = torch.bucketize(size, grid).clamp(max=7)
    below = (above - 1).clamp(min=0)
    low, high = grid[below], grid[above]
    part = ((size - low) / (high - low).clamp(min=0.5)).clamp(0, 1)
    chance = torch.rand(size.shape) if quantizer.stochastic_rounding else 0.5
    return torch.where(part > chance, high, low).copysign(scaled)


def _in_blocks(
    tensor: Tensor,
    block: Sequence[int],
    quantizer: Quantizer,
    power_of_two: bool = False,
    round_to: Callable[[Tensor, Quantizer], Tensor] = _as_fp8,
) -> Tensor:
    """Return ``tensor`` rounded with one scale for each block; ``block`` has its rows and
    columns."""
    values = tensor.float().reshape(-1, tensor.shape[-1])
    if not values.numel():
        return tensor.float()
    sizes = [
        min(a, b) for a, b in zip((math.prod(block[:-1]), block[-1]), values.shape, strict=True)
    ]
    rows, columns = (-(-n // s) for n, s in zip(values.shape, sizes, strict=True))
    padded = values.new_zeros(rows * sizes[0], columns * sizes[1])
    padded[: values.shape[0], : values.shape[1]] = values
    blocks = padded.view(rows, sizes[0], columns, sizes[1])
    amax = blocks.abs().amax((1, 3), keepdim=True)
    largest = 6.0 if round_to is _as_fp4 else torch.finfo(_format(quantizer)).max
    scale = torch.where(amax > 0, largest / amax, 1.0)
    if power_of_two:
        scale = scale.log2().floor().exp2()
    made = (round_to(blocks * scale, quantizer) / scale).view_as(padded)
    return made[: values.shape[0], : values.shape[1]].reshape(tensor.shape).contiguous()


OPERATIONS = (
    quantize,
    dequantize,
    create_empty_quantized_tensor,
    fp8_transpose,
    bgrad_quantize,
    split_quantize,
)
