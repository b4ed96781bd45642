"""Optimizer states that any placement can load, cut out of buffers at the right offsets.

For --dist-ckpt-optim-fully-reshardable Megatron gathers a buffer without the padding at its
buckets' ends, but up to Megatron 0.19 each parameter is cut out at its offset with padding. Behind
a padded bucket (a tied embedding has one of its own, after the layers') a checkpoint then contains
optimizer states and fp32 weights that are shifted and end in zeros. Megatron only warns when it
loads them, and the loss differs after the resume.

Not patched: how states are gathered and loaded, and the other formats, in which buffers and
parameters' offsets count the padding alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect, wrap

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that save optimizer states at their places in buffers without padding."""
    return (
        wrap(
            f"{_OPTIMIZER}.sharded_param_state_fully_reshardable",
            cut_without_padding,
            reason="Megatron saves the optimizer states behind a padded bucket at shifted offsets",
            signature="(self, model_sharded_state_dict, is_loading=False, metadata=None)",
            digests={"0.18": "700ff1c53e47", "0.19": "dfa3ca8dc4d0"},
            needless={"0.20": "e2092978eb68"},
        ),
        wrap(
            f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            with_bits_as_they_were,
            reason="Megatron gathers the low 16 bits of main parameters as if they were floats",
            signature="(self, model_param, tensors)",
        ),
        expect(
            f"{_OPTIMIZER}.get_parameter_state_dp_zero",
            reason="the patches of saving rely on this function, which gathers without padding",
            digests={"0.18": "8439c766e7b1", "0.19, 0.20": "9972fbc0722c"},
        ),
    )


def cut_without_padding(
    original: Callable[..., Any], optimizer: Any, *args: Any, **named: Any
) -> Any:
    """Run ``original`` while the parameter index of each buffer ignores the buckets' padding."""
    indices = [buffer.param_index_map for buffer in optimizer.buffers]
    for buffer in optimizer.buffers:
        buffer.param_index_map = index_without_padding(buffer)
    try:
        return original(optimizer, *args, **named)
    finally:
        for buffer, index in zip(optimizer.buffers, indices, strict=True):
            buffer.param_index_map = index


def index_without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return (first element, end, bucket) of each parameter in ``buffer`` without padding."""
    padding_before = [0]
    for bucket in buffer.buckets:
        padding = bucket.grad_data.numel() - bucket.numel_unpadded
        padding_before.append(padding_before[-1] + padding)
    return {
        parameter: (start - padding_before[bucket], end - padding_before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def with_bits_as_they_were(
    original: Callable[..., None], optimizer: Any, parameter: torch.Tensor, tensors: dict[str, Any]
) -> None:
    """Run ``original`` with the remainder of a bf16 main parameter converted to 16-bit integers.

    The remainder has the bits of an fp32 value that bf16 lacks; a checkpoint may have it as floats.
    """
    keeps_bits = getattr(optimizer.optimizer, "store_param_remainders", False)
    if keeps_bits and parameter.dtype is torch.bfloat16 and "param" in tensors:
        tensors = {**tensors, "param": tensors["param"].to(torch.int16)}
    original(optimizer, parameter, tensors)
