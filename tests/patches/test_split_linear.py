"""The local linear layers' split backward: what is put off to W, and what is not.

Megatron's fused gradient accumulation has a stand-in for its kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_ext.patches.megatron.core.tensor_parallel.layers import split_apply
from megatron_ext.runtime.weight_gradients import queue

MICROBATCHES = 3


def kernel_for(dtype: torch.dtype) -> Any:
    def accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype == dtype and x.dim() == dy.dim() == 2
        main_grad.add_(dy.t().matmul(x))

    return accumulate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w_adds_what_stocks_backward_adds(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The output layer is a local one under any spec, so fusion beside Transformer Engine's layers
    needs it here too. The kernel of main_grad's type must be taken."""
    kernels = SimpleNamespace(
        wgrad_gemm_accum_fp32=kernel_for(torch.float32),
        wgrad_gemm_accum_fp16=kernel_for(torch.bfloat16),
    )
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    stock, ours = (torch.nn.Parameter(torch.randn(5, 4).bfloat16()) for _ in "12")
    ours.data.copy_(stock.data)
    for weight in (stock, ours):
        weight.main_grad = torch.zeros(5, 4, dtype=dtype)  # type: ignore[attr-defined]
    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    rest = (None, True, False, False, None, None, None, 1)
    monkeypatch.setattr(queue, "splitting", True)
    for microbatch in range(MICROBATCHES):
        x, other = (torch.ones(3, 2, 4).bfloat16().mul_(microbatch + 1) for _ in "12")
        x.requires_grad_()
        other.requires_grad_()
        function.apply(x, stock, *rest).square().sum().backward()
        with queue.collecting(0, microbatch):
            split_apply(function.apply, other, ours, *rest).square().sum().backward()
        assert x.grad is not None and other.grad is not None
        assert torch.equal(x.grad, other.grad)
        if microbatch:
            queue.run(0, microbatch - 1)
    queue.run(0, MICROBATCHES - 1)
    assert ours.grad is None
    assert ours.main_grad.count_nonzero()  # type: ignore[attr-defined]
    assert torch.equal(ours.main_grad, stock.main_grad)  # type: ignore[attr-defined]


@pytest.mark.parametrize("without", ["weight", "input"])
def test_where_there_is_nothing_to_put_off_stock_runs(
    monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """A frozen weight has no gradient to compute. An input that needs none would take the split
    layer out of the graph: its weight would never be trained."""
    monkeypatch.setattr(queue, "splitting", True)
    x = torch.ones(3, 2, 4, requires_grad=without != "input")
    weight = torch.nn.Parameter(torch.ones(5, 4), requires_grad=without != "weight")
    rest = (None, False, False, False, None, None, None, 1)
    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    with queue.collecting(0, 0):
        split_apply(function.apply, x, weight, *rest).sum().backward()
        assert not queue.tensors(0, 0)
    queue.run(0, 0)
    expected = {"weight": x.grad, "input": weight.grad}[without]
    assert expected is not None and expected.count_nonzero() == expected.numel()
    assert (weight if without == "weight" else x).grad is None
