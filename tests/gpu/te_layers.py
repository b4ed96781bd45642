"""Transformer Engine's layers, split and whole, and a comparison of their gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import apply
from megatron_ext.patches.transformer_engine.pytorch.module import _common
from megatron_ext.runtime.weight_gradients import queue

ROWS, WIDTH = 128, 256
TOKENS = ([96, 32], [0, 128], [64, 64])  # rows of the parts of a GroupedLinear, for each microbatch
MICROBATCHES = len(TOKENS)


@dataclass(frozen=True)
class Recipe:
    """A recipe of Transformer Engine: its class, and the compute capability since which GPUs
    support it."""

    name: str
    since: tuple[int, int]

    def make(self) -> Any:
        return getattr(importlib.import_module("transformer_engine.common.recipe"), self.name)()


RECIPES = {
    "fp8 delayed": Recipe("DelayedScaling", (8, 9)),
    "fp8 current": Recipe("Float8CurrentScaling", (8, 9)),
    "fp8 blockwise": Recipe("Float8BlockScaling", (9, 0)),
    "mxfp8": Recipe("MXFP8BlockScaling", (10, 0)),
    "nvfp4": Recipe("NVFP4BlockScaling", (10, 0)),
}

LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda te, **options: te.Linear(WIDTH, WIDTH, **options),
    "LayerNormLinear": lambda te, **options: te.LayerNormLinear(WIDTH, WIDTH, **options),
    "LayerNormMLP": lambda te, **options: te.LayerNormMLP(WIDTH, WIDTH, **options),
    "GroupedLinear": lambda te, **options: te.GroupedLinear(2, WIDTH, WIDTH, **options),
}


def missing(precision: str) -> str:
    """Return the reason why this GPU or its Transformer Engine cannot run ``precision``, or an
    empty text."""
    if precision not in RECIPES:
        return ""
    recipe = RECIPES[precision]
    if torch.cuda.get_device_capability() < recipe.since:
        since = ".".join(map(str, recipe.since))
        return f"this GPU has no {recipe.name} (compute capability {since} and later have)"
    if not hasattr(importlib.import_module("transformer_engine.common.recipe"), recipe.name):
        return f"this Transformer Engine has no {recipe.name}"
    return ""


def differences(name: str, precision: str, fused: bool, kind: str = "cuda") -> list[str]:
    """Return the tensors that are not bitwise equal if the layer's weight gradients wait for W."""
    te = importlib.import_module("transformer_engine.pytorch")
    recipe = RECIPES[precision].make() if precision in RECIPES else None
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
    torch.manual_seed(1)  # NVFP4 rounds gradients at random
    for x, y, dy in _steps(stock, te, recipe, kind):
        y.backward(dy)
        expected.append(x.grad)
    torch.manual_seed(1)
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
    for key in ("scaling_fwd", "scaling_bwd"):
        states = (layer.fp8_meta.get(key) for layer in (stock, ours))
        for words, kept, other in zip(("scale", "amax_history"), *map(_state, states), strict=True):
            if not (kept is other is None or torch.equal(kept, other)):
                different.append(f"{words} of {key}")
    return different


def _state(recipe_state: Any) -> list[Any]:
    """Return the scales and the amax history of delayed scaling; None with other recipes."""
    return [getattr(recipe_state, name, None) for name in ("scale", "amax_history")]


def _split(layer: Any, te: Any, recipe: Any, kind: str) -> list[Any]:
    """Return dx by microbatch, where the W of each microbatch runs after the I of the next."""
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
    """Yield x, y and dy of each microbatch, the same at each call."""
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
