"""Transformer Engine's real kernels, in BF16 and FP8. Written without a GPU, and not run yet.

pytest tests/gpu            # layers on one GPU, trainings on two or more
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import apply
from megatron_ext.patches.transformer_engine import can_split
from megatron_ext.patches.transformer_engine.pytorch.module import _common
from megatron_ext.runtime.weight_gradients import queue
from tests.gpu.runs import GPUS, losses, needs_two_gpus

ROWS, WIDTH = 128, 256
TOKENS = ([96, 32], [0, 128], [64, 64])  # rows of a GroupedLinear's parts, by microbatch
MICROBATCHES = len(TOKENS)
OPTIONS = {"device": "cuda", "params_dtype": torch.bfloat16}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a GPU"),
    pytest.mark.skipif(not can_split(), reason="needs Transformer Engine 2.8 or later"),
]

LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda te, **options: te.Linear(WIDTH, WIDTH, **OPTIONS, **options),
    "LayerNormLinear": lambda te, **options: te.LayerNormLinear(WIDTH, WIDTH, **OPTIONS, **options),
    "LayerNormMLP": lambda te, **options: te.LayerNormMLP(WIDTH, WIDTH, **OPTIONS, **options),
    "GroupedLinear": lambda te, **options: te.GroupedLinear(2, WIDTH, WIDTH, **OPTIONS, **options),
}

RECIPES = {"fp8 delayed": "DelayedScaling", "fp8 current": "Float8CurrentScaling"}


def steps(layer: Any, te: Any, recipe: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, y and dy of each microbatch, the same at each call."""
    generator = torch.Generator("cuda").manual_seed(1)
    for tokens in TOKENS:
        rows = (tokens,) if hasattr(layer, "num_gemms") else ()
        x, dy = (
            torch.randn(ROWS, WIDTH, device="cuda", generator=generator).bfloat16() for _ in "12"
        )
        x.requires_grad_()
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = layer(x, *rows)
        yield x, y, dy


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("precision", ["bf16", *RECIPES])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_stocks(name: str, precision: str, fused: bool) -> None:
    te = importlib.import_module("transformer_engine.pytorch")
    if precision != "bf16" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    recipe = getattr(recipes, RECIPES[precision])() if precision in RECIPES else None
    torch.manual_seed(0)
    stock, ours = (LAYERS[name](te, fuse_wgrad_accumulation=fused) for _ in "12")
    with torch.no_grad():
        for parameter, other in zip(stock.parameters(), ours.parameters(), strict=True):
            other.copy_(parameter)
    if fused:
        for parameter in (*stock.parameters(), *ours.parameters()):
            if parameter.dim() == 2:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    expected: list[Any] = []
    for x, y, dy in steps(stock, te, recipe):
        y.backward(dy)
        expected.append(x.grad)
    found: list[Any] = []
    with apply(_common.patches(PipelineConfig(schedule="zb-h1"))):
        queue.splitting = True
        try:
            for microbatch, (x, y, dy) in enumerate(steps(ours, te, recipe)):
                with queue.collecting(0, microbatch):
                    y.backward(dy)
                found.append(x.grad)
                if microbatch:
                    queue.run(0, microbatch - 1)
            queue.run(0, MICROBATCHES - 1)
        finally:
            queue.clear()
    assert all(map(torch.equal, found, expected))
    for (each, parameter), other in zip(stock.named_parameters(), ours.parameters(), strict=True):
        for kind in ("grad", "main_grad"):
            pair: list[Any] = [getattr(parameter, kind, None), getattr(other, kind, None)]
            assert pair[0] is pair[1] is None or torch.equal(*pair), f"{kind} of {each}"


# With one expert a token no sum depends on the order of atomic additions.
EXPERTS: dict[str, str | int | bool | None] = {
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_ffn_hidden_size": 128,
    "moe_token_dispatcher_type": "alltoall",
    "disable_bias_linear": True,
}
TRAININGS: dict[str, dict[str, str | int | bool | None]] = {
    "bf16": {},
    "bf16, overlapped": {"overlap_grad_reduce": True},
    "bf16, fused": {"no_gradient_accumulation_fusion": None},
    "fp8 current": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8 delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "experts one by one": EXPERTS,
    "experts, grouped": EXPERTS | {"moe_grouped_gemm": True},
    "experts, grouped, fp8 current": {
        **EXPERTS,
        "moe_grouped_gemm": True,
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
    },
    "experts, grouped, expert parallel": {
        **EXPERTS,
        "moe_grouped_gemm": True,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
}


@needs_two_gpus
@pytest.mark.parametrize("setting", TRAININGS)
def test_losses_are_stocks(setting: str) -> None:
    """1F1B of stock's, with Transformer Engine's layers; one stage a rank, so the same weights."""
    if "fused" in setting and not importlib.util.find_spec("fused_weight_gradient_mlp_cuda"):
        pytest.skip("the output layer's fused accumulation needs NVIDIA apex")
    if "expert parallel" in setting and GPUS < 4:
        pytest.skip(f"a pipeline of two with expert parallelism needs four GPUs, here are {GPUS}")
    flags: dict[str, str | int | bool | None] = {
        "transformer_impl": "transformer_engine",
        "bf16": True,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        "max_position_embeddings": 64,
        **TRAININGS[setting],
    }
    assert losses("zb-h1", **flags) == losses(None, **flags)
