"""Tests of CUDA graphs of layers: the order of their capture, and tensors that outlive the graphs'
memory.

tests/gpu/test_cuda_graphs.py captures and replays real graphs.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer import cuda_graphs
from torch import nn

from megatron_ext.adapter.compatibility import refuse, refuse_order
from megatron_ext.adapter.dimensions import execution
from megatron_ext.adapter.transformer_engine import layer_graphs
from megatron_ext.adapter.transformer_engine.capture_order import (
    capture_order,
    check_buffers,
    check_capture,
    input_buffers,
)
from megatron_ext.adapter.transformer_engine.captured import left_to_w
from megatron_ext.adapter.transformer_engine.layer_graphs import GraphMemory, LayerGraphs
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.rates import CPU
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.core.tensor_parallel import layers as split_layers
from megatron_ext.patches.megatron.core.transformer import cuda_graphs as patched
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.problem import Offload, ScheduleOptions, VocabularyParallel
from tests.helpers import graphs_on_cpu
from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers.combinations import nightly
from tests.helpers.graphed_rows import WIDTH, Layer, gradients, row_cases, row_of
from tests.helpers.ranks import run_ranks, values
from tests.helpers.schedules import rows_of, written


def stocks_order(p: int, rank: int, microbatches: int, chunks: int) -> list[int]:
    """Return the order in which Megatron itself captures the passes of ``rank``."""
    group = SimpleNamespace(size=lambda: p, rank=lambda: rank)
    p2p = SimpleNamespace(
        pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    _, _, warmup, _ = schedules.get_pp_rank_microbatches(
        microbatches, chunks, p, forward_only=False, p2p_communicator=p2p
    )
    schedule_table = schedules.get_schedule_table(microbatches, chunks, p)
    made: list[int] = cuda_graphs.convert_schedule_table_to_order(warmup, chunks, schedule_table)
    return made


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_the_order_of_megatrons_own_schedules_is_megatrons(schedule: str, chunks: int) -> None:
    for rank in range(4):
        row, stages = row_of(schedule, 4, 8, rank)
        assert capture_order(row, stages) == stocks_order(4, rank, 8, chunks)


# On a V, chunk 1 of the last rank is the first stage, and chunk 2 is the last stage.
@pytest.mark.parametrize(
    ("schedule", "orders"),
    [
        ("zb-h1", ["1 1 -1 1 -1 -1", "1 -1 1 -1 1 -1"]),
        ("interleaved-zb", ["1 1 2 2 1 -2 2 -2 -1 -1 -2 -1", "1 1 2 -2 2 -2 1 -1 2 -1 -2 -1"]),
        ("zb-v", ["1 2 1 2 -2 1 -1 2 -2 -1 -2 -1", "1 1 1 2 -2 2 -2 -1 2 -2 -1 -1"]),
    ],
)
def test_weight_gradients_are_omitted_from_the_order(schedule: str, orders: list[str]) -> None:
    for rank, expected in enumerate(orders):
        row, stages = row_of(schedule, 2, 3, rank)
        assert any(action.kind is Kind.BACKWARD_WEIGHT for action in row)
        assert " ".join(map(str, capture_order(row, stages))) == expected


@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        "gpipe",
        "zb-h1",
        "zb-2p",
        "interleaved-zb",
        "gis",
        "zb-v",
        "v-half",
        "v-min",
        "hanayo",
    ],
)
def test_every_row_of_ours_can_be_captured(schedule: str, m: int) -> None:
    for rank in range(4):
        row, stages = row_of(schedule, 4, m, rank)
        layers = range(1, len(stages) + 1)  # no two chunks have equally many layers
        check_capture(capture_order(row, stages), row, stages, layers)


ROW = rows_of("0F0 0F1 0I0 1F0 0W0 1I0 0I1 1F1 0W1 1I1 1W0 1W1")[0]


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ([1, 1, -1, 2, -1.5, -2, -1, 2, -1.5, -2, -2.5, -2.5], "-1.5, a separate weight gradient"),
        ([1, 1, -1, 2, -2, -1, 2], "has 7 entries, and the rank runs 8 passes"),
        ([1, 1, 2, -1, -2, -1, 2, -2], "has 2 where the rank runs 0I0 in chunk 1"),
    ],
)
def test_a_wrong_order_is_found(order: list[float], why: str) -> None:
    """`check_capture` refuses an order of captures that does not fit the rank's passes. Transformer
    Engine accepts the first two of these orders, because it does not know the passes."""
    check_capture([1, 1, -1, 2, -2, -1, 2, -2], ROW, (0, 1))
    with pytest.raises(ValueError, match=why):
        check_capture(order, ROW, (0, 1))


def test_microbatches_out_of_order_are_found() -> None:
    """A rank's row is refused for CUDA graphs if its backward passes have another order than its
    forward passes. Transformer Engine frees the buffers of the oldest forward pass, so 1F2 would
    overwrite those of 0F0."""
    (row,) = rows_of("0F0 0F1 0I1 0F2 0I0 0I2")
    order = capture_order(row, (0,))
    with pytest.raises(ValueError, match="0I1 is number 0 among the passes of its kind"):
        check_capture(order, row, (0,))
    with pytest.raises(ValueError, match="0F2 would overwrite the input buffers of microbatch 0"):
        check_buffers(order, row, (0,), [2])


def test_a_stage_without_backward_passes_is_found() -> None:
    """A rank's row is refused for CUDA graphs if a stage has no backward passes, as a stage before
    all trained layers. Transformer Engine would count the graphs wrongly."""
    (row,) = rows_of("0F0 1F0 0F1 1I0 1W0 1F1 1I1 1W1")
    with pytest.raises(ValueError, match="stage 0 has 2 forward passes and 0 backward passes"):
        check_capture(capture_order(row, (0, 1)), row, (0, 1))


def test_a_file_that_runs_microbatches_out_of_order_is_refused() -> None:
    schedule = written("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", (0, 1))
    refuse_order(SimpleNamespace(cuda_graph_impl="none", transformer_impl="local"), schedule)
    graphs = SimpleNamespace(cuda_graph_impl="transformer_engine", transformer_impl="local")
    with pytest.raises(ValueError, match="run microbatches in order, or write --cuda-graph-impl"):
        refuse_order(graphs, schedule)
    refuse_order(graphs, written("0F1 0F0\n1F1 1F0", (0, 1)))  # an evaluation has no graphs


def test_megatron_is_given_the_latest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = LayerGraphs()
    monkeypatch.setattr(patched, "layer_graphs", graphs)
    table = schedules.get_schedule_table(3, 2, 2)
    with apply(patched.patches(PipelineConfig(schedule="zb-v"))):
        with pytest.raises(ValueError, match="--cuda-graph-warmup-steps 1 or more"):
            cuda_graphs.convert_schedule_table_to_order(1, 2, table)
        row, stages = row_of("zb-v", 2, 3, 0)
        graphs.begin(row, stages, [])
        assert cuda_graphs.convert_schedule_table_to_order(1, 2, table) == capture_order(
            row, stages
        )
        # A vision encoder comes before the first chunk's layers, and has one layer here.
        tower = cuda_graphs.convert_schedule_table_to_order(1, 1, [(m, 0) for m in range(3)])
        assert tower == [1, 1, 1, -1, -1, -1]
        with pytest.raises(ValueError, match="is to capture a step of 4 microbatches, and earlier"):
            cuda_graphs.convert_schedule_table_to_order(1, 2, schedules.get_schedule_table(4, 2, 2))


def test_steps_that_are_not_as_captured_are_refused() -> None:
    """A step that differs from the step whose CUDA graphs were captured is refused: a batch of
    another size, or another schedule, as in a race of schedules (--pipeline-race)."""
    graphs = LayerGraphs()
    model = nn.Linear(1, 1)
    row, stages = row_of("zb-v", 2, 3, 0)
    graphs.begin(row, stages, [model])
    graphs.order(2, 3)
    model.cuda_graphs = [print]  # type: ignore[assignment]
    more, _ = row_of("zb-v", 2, 4, 0)
    with pytest.raises(ValueError, match="a step of 3 microbatches, and this step has 4 microb"):
        graphs.begin(more, stages, [model])
    other, _ = row_of("v-min", 2, 3, 0)
    with pytest.raises(ValueError, match="and this step has another order of passes"):
        graphs.begin(other, stages, [model])
    model.cuda_graphs = []  # type: ignore[assignment]  # as after delete_cuda_graphs
    graphs.begin(more, stages, [model])


def test_memory_is_recognised_by_its_addresses() -> None:
    tensor = torch.arange(8)
    address = tensor.data_ptr()
    memory = GraphMemory([(address + 8, address + 24), (address + 40, address + 48)])
    assert [memory.holds(tensor[i]) for i in range(8)] == [0, 1, 1, 0, 0, 1, 0, 0]
    assert not GraphMemory([]).holds(tensor)


class Split(nn.Linear):
    """Linear layer that calls Megatron's autograd function, whose backward pass our patches
    split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = (None, False, False, False, None, None, None, 1)[: _ARGUMENTS - 2]
        function = parallel_layers.LinearWithGradAccumulationAndAsyncCommunication
        made: torch.Tensor = function.apply(x, self.weight, *rest)
        return made


_ARGUMENTS = 10


def layer() -> Layer:
    captured = nn.Sequential(Split(WIDTH, WIDTH, bias=False), nn.Tanh())
    return Layer(captured, Split(WIDTH, WIDTH, bias=False))


@pytest.mark.parametrize("schedule", row_cases("B"))
def test_layers_that_are_split_between_graphs_have_their_gradients(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split layers between captured layers get the right gradients. Their operands, and the tensors
    that are sent, are outputs of CUDA graphs, in memory that later passes overwrite. Without copies
    the gradients of the second step were NaN."""
    monkeypatch.setattr(graphs_on_cpu, "pool", graphs_on_cpu.Pool())
    monkeypatch.setattr(layer_graphs, "graph_memory", lambda: graphs_on_cpu.pool.ranges())
    run: Callable[..., list[torch.Tensor]] = partial(
        gradients, graphs_on_cpu.make_graphed_callables, layer
    )
    with apply(split_layers.patches(PipelineConfig(schedule="zb-v"))):
        for rank in range(2):
            row, stages = row_of(schedule, 2, 4, rank)
            expected = run(row, stages, None)
            found = run(row, stages, LayerGraphs())
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("settings", "options", "why"),
    [
        ({"cuda_graph_impl": "local"}, ScheduleOptions(), "made at the end of Megatron's own step"),
        ({"cuda_graph_impl": "full_iteration"}, ScheduleOptions(), "have run on no GPU"),
        (
            {"cuda_graph_warmup_steps": 0},
            ScheduleOptions(),
            "write --cuda-graph-warmup-steps 1 or more",
        ),
        ({"rampup_batch_size": [2, 2, 8]}, ScheduleOptions(), "drop --rampup-batch-size"),
        (
            {"step_batch_size_schedule": "0:2 8:4"},
            ScheduleOptions(),
            "drop --step-batch-size-schedule",
        ),
        ({"variable_seq_lengths": True}, ScheduleOptions(), "a graph has one shape"),
        ({}, ScheduleOptions(activation_offload=Offload.FULL), "stays in its memory"),
        (
            {},
            ScheduleOptions(steps_overlap=True),
            "not the order that CUDA graphs are captured in",
        ),
        ({}, ScheduleOptions(vocab_parallel=VocabularyParallel.ONE), None),
        ({"recompute_granularity": "selective"}, ScheduleOptions(), None),
    ],
)
def test_settings_that_go_with_graphs_and_settings_that_do_not(
    settings: dict[str, object], options: ScheduleOptions, why: str | None
) -> None:
    given = SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        transformer_impl="local",
        **{"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 3, **settings},
    )
    if why is None:
        refuse(given, choose("zb-v"), options)
    else:
        with pytest.raises(ValueError, match=why):
            refuse(given, choose("zb-v"), options)


MODEL = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "num_query_groups": 4,
    "ffn_hidden_size": 256,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "bf16": True,
    "fp16": False,
    "recompute_granularity": None,
    "sequence_parallel": False,
    "mtp_num_layers": None,
    "cuda_graph_impl": "transformer_engine",
}


@pytest.mark.parametrize(
    ("parts", "share", "line"),
    [
        (["attn"], 2 / 3, "CUDA graphs hold attn: .*; W has those of dense MLPs"),
        (["mlp"], 1 / 3, "CUDA graphs hold mlp: .*; W has those of attention"),
        ([], 0, "CUDA graphs hold whole layers: .*; no layer leaves any to W"),
    ],
)
def test_costs_know_what_is_captured(parts: list[str], share: float, line: str) -> None:
    settings = SimpleNamespace(**MODEL, cuda_graph_modules=parts)
    plain = SimpleNamespace(**MODEL | {"cuda_graph_impl": "none"}, cuda_graph_modules=parts)
    before, costs = (
        estimate(model, stages_of(model, [4, 4]), execution(s, 16, 1), CPU)
        for s, model in ((s, describe(s)) for s in (plain, settings))
    )
    f, i, w = (
        costs.seconds[k][0] for k in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    assert w == pytest.approx(share * before.seconds[Kind.BACKWARD_WEIGHT][0])
    whole = before.seconds[Kind.BACKWARD_INPUT][0] + before.seconds[Kind.BACKWARD_WEIGHT][0]
    assert i + w == pytest.approx(whole) and f == before.seconds[Kind.FORWARD][0]
    assert re.fullmatch(line, left_to_w(settings))


def test_experts_are_left_where_routers_are_captured() -> None:
    settings = SimpleNamespace(
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=["attn", "moe_router", "moe_preprocess"],
        num_experts=8,
        moe_layer_freq=1,
    )
    assert left_to_w(settings).endswith("W has those of experts")
    settings.moe_shared_expert_overlap = True
    assert left_to_w(settings).endswith("W has those of experts, shared experts")


class Noted(nn.Linear):
    """Linear layer that notes the address of its input."""

    taken: ClassVar[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Noted.taken.append(x.data_ptr())
        return super().forward(x)


@nightly("the stand-in for graphs has the same arithmetic, and the checker's own tests are by day")
@pytest.mark.parametrize("version", on_cpu.VERSIONS)
def test_transformer_engine_shares_buffers_as_the_checker_says(version: str) -> None:
    """Transformer Engine shares the buffers of CUDA graphs between passes as our `check_buffers`
    assumes. Transformer Engine's own code runs here, with a plain call of the layer in place of a
    capture."""
    folder = on_cpu.fetch(version)

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            on_cpu.load(folder)
            graph: Any = importlib.import_module("transformer_engine.pytorch.graph")
            torch.cuda.graph = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment,misc]
            torch.cuda.CUDAGraph = SimpleNamespace  # type: ignore[assignment,misc]
            graph._graph_pool_handle = lambda: (0, 0)
            graph.graph_safe_rng_available = lambda: False
            graph.make_weak_ref = lambda tensors: tensors
            for schedule in ("1f1b", "interleaved-zb", "zb-v", "v-half"):
                for here in range(2):
                    row, stages = row_of(schedule, 2, 4, here)
                    check_sharing(graph.make_graphed_callables, capture_order(row, stages))

    values(run_ranks(1, on_rank))


def check_sharing(make: Callable[..., Any], order: list[int]) -> None:
    layers = list(range(1, max(order) + 1))  # no two chunks have equally many layers
    callables = tuple(Noted(2, 2) for _ in range(sum(layers)))
    samples = [(torch.ones(1, 2, requires_grad=True),) for _ in range(sum(layers) * order.count(1))]
    Noted.taken = []
    make(
        callables,
        samples,
        sample_kwargs=[{} for _ in samples],
        num_warmup_iters=1,
        _order=order,
        _num_layers_per_chunk=layers,
        _reuse_graph_input_output_buffers=True,
    )
    captured = Noted.taken[-len(samples) :]
    expected, begun = [], Counter[int]()
    buffers = input_buffers(order, layers)
    for entry in order:
        if entry > 0:
            own = range(layers[entry - 1])
            expected += [buffers[entry - 1, begun[entry], layer] for layer in own]
            begun[entry] += 1
    pairs = set(zip(captured, expected, strict=True))
    assert len(pairs) == len(set(captured)) == len(set(expected))
