"""Tests of the bytes that layers' weights in 8 bits take in addition to those in 16 bits: the
estimate's formula, compared with a GPU's allocator. They were written without a GPU, and have not
run yet."""

from __future__ import annotations

import importlib

import pytest
import torch

from megatron_ext.adapter.model_bytes import quantized_bytes
from megatron_ext.adapter.transformer_engine.installed import can_split
from tests.gpu.te_layers import RECIPES, missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not can_split(), reason="needs Transformer Engine 2.8 or later"),
]

WIDTH, TOKENS = 4096, 32


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [
        ("fp8 delayed", "delayed"),
        ("fp8 current", "tensorwise"),
        ("fp8 blockwise", "blockwise"),
        ("mxfp8", "mxfp8"),
    ],
)
def test_copies_of_a_step_are_those_of_the_formula(precision: str, recipe: str) -> None:
    """The copies of weights in low precision are as large as the formula says. Weights are cast
    once for all microbatches of a step, by rows and by columns. Blackwell needs only one of the two
    copies if a matrix has one scale, as its products accept either."""
    if lacks := missing(precision):
        pytest.skip(lacks)
    te = importlib.import_module("transformer_engine.pytorch")
    layer, another = (
        te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    # This first product allocates cuBLAS's workspace.
    another(torch.ones(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16))
    layer.weight.grad = torch.zeros_like(layer.weight)
    before = torch.cuda.memory_allocated()
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[precision].make()):
        x = torch.ones(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x, is_first_microbatch=True).sum().backward()
    del x
    torch.cuda.synchronize()
    measured = (torch.cuda.memory_allocated() - before) / WIDTH**2
    has_both = recipe in ("blockwise", "mxfp8") or torch.cuda.get_device_capability() < (10, 0)
    expected = quantized_bytes(recipe) if has_both else 1.0
    assert measured == pytest.approx(expected, abs=0.1)
