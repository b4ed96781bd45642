"""Tests of CUDA graphs of single layers, captured by Transformer Engine and replayed between layers
that are split. The trainings have not run yet. The rows have run, but not since the change by which
their gradients are added as soon as they are computed.

pytest tests/gpu            # a rank's row on one GPU, trainings on two or more
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch

from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.adapter.transformer_engine.layer_graphs import LayerGraphs
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import apply
from megatron_ext.patches.transformer_engine.pytorch.module import _common
from tests.gpu.runs import GPUS, losses, needs_two_gpus
from tests.helpers.graphed_rows import WIDTH, Layer, gradients, row_cases, row_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a GPU"),
    pytest.mark.skipif(not can_split(), reason="needs Transformer Engine 2.8 or later"),
]


def layer(te: Any) -> Layer:
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    return Layer(te.LayerNormLinear(WIDTH, WIDTH, **options), te.Linear(WIDTH, WIDTH, **options))


@pytest.mark.parametrize("schedule", row_cases("C"))
def test_a_row_with_graphs_has_the_gradients_of_one_without(schedule: str) -> None:
    """A row of passes whose layers are CUDA graphs computes the gradients of the same row without
    graphs. All chunks of a rank are on one GPU, and there are no messages."""
    te = importlib.import_module("transformer_engine.pytorch")
    run = partial(
        gradients,
        te.make_graphed_callables,
        partial(layer, te),
        device="cuda",
        dtype=torch.bfloat16,
    )
    with apply(_common.patches(PipelineConfig(schedule="zb-v"))):
        for rank in range(2):
            row, stages = row_of(schedule, 2, 4, rank)
            expected = run(row=row, stages=stages, graphs=None)
            found = run(row=row, stages=stages, graphs=LayerGraphs())
            assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def case(parts: str, schedule: str, kind: str) -> Any:
    settings = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": parts.split()}
    return pytest.param(parts, schedule, marks=pytest.mark.covers("C", (kind,), **settings))


@needs_two_gpus
@pytest.mark.parametrize(
    ("parts", "schedule"),
    [
        case("mlp", "zb-h1", "line"),
        case("attn", "zb-v", "v"),
        case("attn moe_router moe_preprocess", "interleaved-zb", "loop"),
        case("moe_router moe_preprocess", "zb-v", "v"),
    ],
)
def test_a_training_with_graphs_has_the_losses_of_one_without(parts: str, schedule: str) -> None:
    """A training with CUDA graphs has the losses of the same schedule without graphs, from the same
    weights."""
    flags: dict[str, str | int | bool | tuple[str, ...] | None] = {
        "transformer_impl": "transformer_engine",
        "bf16": True,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        "max_position_embeddings": 64,
    }
    if "moe" in parts:
        flags |= {
            "num_experts": 4,
            "moe_router_topk": 1,
            "moe_ffn_hidden_size": 128,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
        }
    graphs: dict[str, str | int | bool | tuple[str, ...] | None] = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": tuple(parts.split()),
        "cuda_graph_warmup_steps": 2,
    }
    assert losses(schedule, **flags | graphs) == losses(schedule, **flags)
