"""Transformer Engine's layers, split and whole: whether their gradients are the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import apply
from megatron_ext.patches.transformer_engine.pytorch.module import _common
from megatron_ext.runtime.weight_gradients import queue

ROWS, WIDTH = 128, 256
TOKENS = ([96, 32], [0, 128], [64, 64])  # rows of a GroupedLinear's parts, by microbatch
MICROBATCHES = len(TOKENS)
RECIPES = {"fp8 delayed": "DelayedScaling", "fp8 current": "Float8CurrentScaling"}

LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda te, **options: te.Linear(WIDTH, WIDTH, **options),
    "LayerNormLinear": lambda te, **options: te.LayerNormLinear(WIDTH, WIDTH, **options),
    "LayerNormMLP": lambda te, **options: te.LayerNormMLP(WIDTH, WIDTH, **options),
    "GroupedLinear": lambda te, **options: te.GroupedLinear(2, WIDTH, WIDTH, **options),
}


def differences(name: str, precision: str, fused: bool, kind: str = "cuda") -> list[str]:
    """What is not bitwise the same when the layer's weight gradients wait for W."""
    te = importlib.import_module("transformer_engine.pytorch")
    recipe = None
    if precision in RECIPES:
        recipe = getattr(
            importlib.import_module("transformer_engine.common.recipe"), RECIPES[precision]
        )()
    torch.manual_seed(0)
    options = {"device": kind, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
    stock, ours = (LAYERS[name](te, **options) for _ in "12")
    with torch.no_grad():
        for parameter, other in zip(stock.parameters(), ours.parameters(), strict=True):
            other.copy_(parameter)
    if fused:
        for parameter in (*stock.parameters(), *ours.parameters()):
            if parameter.dim() == 2:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    expected: list[Any] = []
    for x, y, dy in _steps(stock, te, recipe, kind):
        y.backward(dy)
        expected.append(x.grad)
    gradients = _split(ours, te, recipe, kind)
    different = [
        f"dx of microbatch {microbatch}"
        for microbatch, (dx, wanted) in enumerate(zip(gradients, expected, strict=True))
        if not torch.equal(dx, wanted)
    ]
    for (words, parameter), other in zip(stock.named_parameters(), ours.parameters(), strict=True):
        for gradient in ("grad", "main_grad"):
            pair: list[Any] = [getattr(parameter, gradient, None), getattr(other, gradient, None)]
            if not (pair[0] is pair[1] is None or torch.equal(*pair)):
                different.append(f"{gradient} of {words}")
    return different


def _split(layer: Any, te: Any, recipe: Any, kind: str) -> list[Any]:
    """dx by microbatch; W of each runs after the I of the next."""
    gradients = []
    with apply(_common.patches(PipelineConfig(schedule="zb-h1"))):
        queue.splitting = True
        try:
            for microbatch, (x, y, dy) in enumerate(_steps(layer, te, recipe, kind)):
                with queue.collecting(0, microbatch):
                    y.backward(dy)
                gradients.append(x.grad)
                if microbatch:
                    queue.run(0, microbatch - 1)
            queue.run(0, MICROBATCHES - 1)
        finally:
            queue.clear()
    return gradients


def _steps(layer: Any, te: Any, recipe: Any, kind: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, y and dy of each microbatch, the same at each call."""
    generator = torch.Generator(kind).manual_seed(1)
    for tokens in TOKENS:
        rows = (tokens,) if hasattr(layer, "num_gemms") else ()
        x, dy = (
            torch.randn(ROWS, WIDTH, device=kind, generator=generator).bfloat16() for _ in "12"
        )
        x.requires_grad_()
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = layer(x, *rows)
        yield x, y, dy
