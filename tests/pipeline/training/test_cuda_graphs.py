"""Tests of trainings with CUDA graphs of layers (``--cuda-graph-impl transformer_engine``) under
split backward passes.

Losses and weights equal stock's without graphs, to the last bit. Only `make_graphed_callables` is a
stand-in: it computes a layer in the graph's buffers wherever a GPU would replay the graph.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs, transformer_layer

from megatron_ext.adapter.transformer_engine import layer_graphs
from megatron_ext.patches import cpu
from tests.helpers import graphs_on_cpu
from tests.helpers.combinations import IS_NIGHT, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import EXPERTS, Run, assert_same, losses, model_flags, train

Flags = dict[str, object]

MODELS: dict[str, Flags] = {
    "dense": {},
    "experts": EXPERTS,
    "shared expert": {**EXPERTS, "moe_shared_expert_intermediate_size": 32},
    "multi-token prediction": {
        "mtp_num_layers": 1,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    },
}
ROUTER = "moe_router moe_preprocess"
BY_DAY = {("dense", "mlp", "zb-v")}
BY_NIGHT = {
    ("dense", "mlp", "1f1b"),
    ("dense", "mlp", "zb-h1"),
    ("dense", "mlp", "interleaved-zb"),
    ("dense", "attn", "zb-h1"),
    ("dense", "attn", "zb-v"),
    ("dense", "", "zb-h1"),
    ("dense", "", "interleaved-zb"),
    ("dense", "", "v-half"),
    ("experts", f"attn {ROUTER}", "zb-h1"),
    ("experts", f"attn {ROUTER}", "interleaved-zb"),
    ("experts", f"attn {ROUTER}", "zb-v"),
    ("experts", ROUTER, "zb-h1"),
    ("experts", ROUTER, "zb-v"),
    ("shared expert", ROUTER, "interleaved-zb"),
    ("multi-token prediction", "attn", "zb-v"),
}
COVERS = {"zb-h1": "line", "interleaved-zb": "loop"}


def case(model: str, parts: str, schedule: str) -> Any:
    if schedule == "1f1b":  # 1F1B splits no backward pass
        return pytest.param(model, parts, schedule)
    kind = COVERS.get(schedule, "v")
    settings = {**MODELS[model], "cuda_graph_impl": "transformer_engine"}
    settings["cuda_graph_scope"] = parts.split() or ["layer"]
    return pytest.param(model, parts, schedule, marks=pytest.mark.covers("B", (kind,), **settings))


CASES = [case(*names) for names in sorted(BY_DAY | (BY_NIGHT if IS_NIGHT else set()))]


def flags(model: str, **more: object) -> list[str]:
    return model_flags(
        **{
            "pipeline_model_parallel_size": 2,
            "untie_embeddings_and_output_weights": True,
            "bf16": True,
            "train_iters": 3,
            **MODELS[model],
            **more,
        }
    )


@functools.cache
def stock(model: str) -> list[Run]:
    return train(2, flags(model), model_provider=drawn_by_name)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are forked from now on capture layers without a GPU."""
    monkeypatch.delitem(cpu._REFUSED, "--cuda-graph-impl")
    monkeypatch.setattr(graphs_on_cpu, "pool", graphs_on_cpu.Pool())
    monkeypatch.setattr(layer_graphs, "graph_memory", lambda: graphs_on_cpu.pool.ranges())
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
    monkeypatch.setattr(
        cuda_graphs,
        "make_graphed_callables",
        graphs_on_cpu.make_graphed_callables,
        raising=False,
    )
    for module in (cuda_graphs, transformer_layer):
        monkeypatch.setattr(module, "is_te_min_version", lambda *version: True)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    tracker = random.CudaRNGStatesTracker
    monkeypatch.setattr(random, "CudaRNGStatesTracker", lambda **unused: tracker())
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def with_graphs(model: str, parts: str, schedule: str, **more: object) -> list[Run]:
    words = flags(
        model,
        pipeline_schedule=schedule,
        cuda_graph_impl="transformer_engine",
        cuda_graph_warmup_steps=1,
        cuda_graph_modules=tuple(parts.split()) or None,
        **more,
    )
    return train(2, words, model_provider=drawn_by_name)


@pytest.mark.parametrize(("model", "parts", "schedule"), CASES)
@pytest.mark.usefixtures("graphs")
def test_training_is_stocks_to_the_last_bit(
    model: str, parts: str, schedule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    reference = stock(model)
    runs = with_graphs(model, parts, schedule, pipeline_report_split=True)
    assert len(losses(runs)) == 3
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert_same(runs, reference)
    lines = capfd.readouterr().out.splitlines()
    assert any("CUDA graphs hold" in line for line in lines) == (schedule != "1f1b")
    reports = [line for line in lines if "without a W" in line]
    assert len(reports) == 2 and all("(in CUDA graphs)" in line for line in reports)


@nightly("graphs by themselves, and each of these")
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("interleaved-zb", {"use_distributed_optimizer": True, "overlap_grad_reduce": True}),
        ("zb-v", {"pipeline_vocab_parallel": 1}),
        ("zb-h1", {"pipeline_vocab_parallel": 2}),
        ("zb-v", {"recompute_granularity": "selective"}),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_settings_do_the_same_with_graphs_as_without(schedule: str, more: Flags) -> None:
    """A training with CUDA graphs of layers equals the one without them under further settings:
    batched messages, a split vocabulary, recompute. With a split vocabulary, passes of the
    vocabulary use a gradient that is also sent to another rank."""
    words = flags("dense", pipeline_schedule=schedule, **more)
    reference = train(2, words, model_provider=drawn_by_name)
    assert_same(with_graphs("dense", "mlp", schedule, **more), reference)
