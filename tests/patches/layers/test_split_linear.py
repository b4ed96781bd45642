"""Tests of the split backward pass of Megatron's local linear layers, in which W computes the
weight gradients.

Megatron's fused gradient accumulation has a stand-in for its kernel.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.patches.megatron.core.tensor_parallel.layers import split_apply
from megatron_ext.runtime.weight_gradients import queue

MICROBATCHES = 3
FUNCTION = layers.LinearWithGradAccumulationAndAsyncCommunication
# Further arguments of newer versions of Megatron: gtp_remat_size since 0.19, output_dtype since
# 0.20.
NEWER = (1, None)[: len(inspect.signature(FUNCTION.forward).parameters) - 10]


def kernel_for(dtype: torch.dtype) -> Any:
    def accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype == dtype and x.dim() == dy.dim() == 2
        main_grad.add_(dy.t().matmul(x))

    return accumulate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w_adds_what_stocks_backward_adds(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """With fused gradient accumulation, W adds the same weight gradient to main_grad as stock's
    backward pass. The output layer is Megatron's local layer in any model, also if other layers are
    Transformer Engine's, so fusion must work in such a model too. The type of main_grad selects the
    kernel."""
    kernels = SimpleNamespace(
        wgrad_gemm_accum_fp32=kernel_for(torch.float32),
        wgrad_gemm_accum_fp16=kernel_for(torch.bfloat16),
    )
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    stock, ours = (torch.nn.Parameter(torch.randn(5, 4).bfloat16()) for _ in "12")
    ours.data.copy_(stock.data)
    for weight in (stock, ours):
        weight.main_grad = torch.zeros(5, 4, dtype=dtype)  # type: ignore[attr-defined]
    function = FUNCTION
    rest = (None, True, False, False, None, None, None, *NEWER)
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


def test_torchs_apply_may_be_a_class_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The split works with any version of torch. Before torch 2.14 the patched `apply` gets the
    function's class as its first argument, and every training of local layers with a split backward
    pass used to fail there."""

    def class_method(function: Any, *args: Any) -> Tensor:
        output: Tensor = function.apply(*args)
        return output

    weight = torch.nn.Parameter(torch.randn(5, 4))
    x = torch.randn(3, 2, 4, requires_grad=True)
    rest = (None, False, False, False, None, None, None, *NEWER)
    monkeypatch.setattr(queue, "splitting", True)
    with queue.collecting(0, 0):
        split_apply(class_method, FUNCTION, x, weight, *rest).sum().backward()
    assert weight.grad is None and x.grad is not None
    weight.main_grad = torch.zeros(5, 4)  # type: ignore[attr-defined]
    queue.run(0, 0)
    weight.requires_grad_(False)  # stock's function computes a frozen weight's layer
    output = split_apply(class_method, FUNCTION, x, weight, *rest)
    assert torch.equal(output, x.matmul(weight.t()))


class Products(TorchDispatchMode):
    """Names of the matrix products that were computed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_the_same_products_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split layer computes the same matrix products as stock, so sums have the same order. The
    output gradient of LLaVA's projection is a view. Because the weight requires no gradient in I,
    torch used to multiply that gradient in batches, without folding its first two dimensions; with
    MKL on an AMD processor this is another order of sums."""
    monkeypatch.setattr(queue, "splitting", True)
    weight = torch.nn.Parameter(torch.randn(5, 4))
    rest = (None, False, False, False, None, None, None, *NEWER)
    gradient = torch.randn(2, 3, 5).transpose(0, 1)
    computed = []
    for apply in (FUNCTION.apply, partial(split_apply, FUNCTION.apply)):
        x = torch.randn(3, 2, 4, requires_grad=True)
        with Products() as products, queue.collecting(0, 0):
            apply(x, weight, *rest).backward(gradient)
            queue.run(0, 0)
        computed.append(products.names)
    stocks, ours = computed
    assert ours == stocks == ["aten::mm"] * 3


def test_what_megatron_notes_on_a_weight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split backward pass does not change the mark on a layer's weight that says that the
    gradient is in ``main_grad``. Stock's function, which the pass calls, sets that mark, and the
    data-parallel wrapper's hook adds nothing to a marked weight. In trainings with CUDA graphs of
    MLPs, whose warm-up steps are split, the MLPs' gradients used to be lost after the capture."""
    monkeypatch.setattr(queue, "splitting", True)
    weight = torch.nn.Parameter(torch.randn(5, 4))
    weight.main_grad = torch.zeros(5, 4)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    before = dict(vars(weight))
    x = torch.randn(3, 2, 4, requires_grad=True)
    rest = (None, False, False, False, None, None, None, *NEWER)
    with queue.collecting(0, 0):
        split_apply(FUNCTION.apply, x, weight, *rest).sum().backward()
        queue.run(0, 0)
    assert weight.main_grad.count_nonzero()  # type: ignore[attr-defined]
    assert vars(weight).keys() == before.keys()
    assert all(vars(weight)[name] is kept for name, kept in before.items())


@pytest.mark.parametrize("without", ["weight", "input"])
def test_where_there_is_nothing_to_put_off_stock_runs(
    monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Stock's function runs if a layer has no weight gradient to defer. A frozen weight has no
    gradient. If the input requires no gradient, a split layer would not be in the autograd graph,
    and its weight would never be trained."""
    monkeypatch.setattr(queue, "splitting", True)
    x = torch.ones(3, 2, 4, requires_grad=without != "input")
    weight = torch.nn.Parameter(torch.ones(5, 4), requires_grad=without != "weight")
    rest = (None, False, False, False, None, None, None, *NEWER)
    function = FUNCTION
    with queue.collecting(0, 0):
        split_apply(function.apply, x, weight, *rest).sum().backward()
        assert not queue.tensors(0, 0)
    queue.run(0, 0)
    expected = {"weight": x.grad, "input": weight.grad}[without]
    assert expected is not None and expected.count_nonzero() == expected.numel()
    assert (weight if without == "weight" else x).grad is None


@pytest.mark.skipif(
    len(NEWER) < 2, reason="before Megatron 0.20 layers' outputs have their weights' type"
)
def test_w_of_an_output_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """W computes the weight gradient of a layer whose output has another type than its weights.
    With logits in fp32 and weights in bf16 (--logit-dtype) W used to fail, because its product
    requires two operands of one type."""
    from megatron.core.extensions import transformer_engine

    def gemm(weight: Tensor, x: Tensor, out_dtype: torch.dtype, **_: Any) -> list[Tensor]:
        return [x.to(out_dtype) @ weight.to(out_dtype).t()]

    monkeypatch.setattr(transformer_engine, "te_general_gemm", gemm)
    monkeypatch.setattr(queue, "splitting", True)
    stock, ours = (torch.nn.Parameter(torch.ones(5, 4).bfloat16()) for _ in "12")
    rest = (None, False, False, False, None, None, None, 1, torch.float32)
    with queue.collecting(0, 0):
        for apply, weight in (
            (FUNCTION.apply, stock),
            (partial(split_apply, FUNCTION.apply), ours),
        ):
            x = torch.full((3, 2, 4), 1.5).bfloat16().requires_grad_()
            output = apply(x, weight, *rest)
            assert output.dtype == torch.float32
            output.square().sum().backward()
    assert stock.grad is not None and ours.grad is None
    queue.run(0, 0)
    gradient: Any = ours.grad
    assert torch.equal(gradient, stock.grad)
