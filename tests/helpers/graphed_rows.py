"""One rank's passes, run on layers of which a part is captured in CUDA graphs and the rest has its
weight gradients deferred to W.

On the CPU graphs have a stand-in; on a GPU they are Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.adapter.transformer_engine.captured import IMPLEMENTATION
from megatron_ext.adapter.transformer_engine.layer_graphs import LayerGraphs
from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import is_compute

ROWS, WIDTH = 8, 32
LAYERS = 2  # number of layers of a chunk


class Layer(nn.Module):
    """A module that may be captured in a CUDA graph, followed by a linear layer whose weight
    gradient can be deferred to W.

    The output of the linear layer is added to its input, so the layer gets the gradient of the
    graph's output unchanged.
    """

    cuda_graphs: Sequence[Callable[..., Any]] = ()

    def __init__(self, captured: nn.Module, beside: nn.Module) -> None:
        super().__init__()
        self.captured = captured
        self.beside = beside

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        if self.cuda_graphs:
            left = self.cuda_graphs[microbatch](x)
            y = left if isinstance(left, Tensor) else left[0]
        else:
            y = self.captured(x)
        made: Tensor = y + self.beside(y)
        return made


def row_cases(grade: str) -> list[Any]:
    """Return the schedules whose rows the tests run. Those that split the backward have a mark
    ``covers`` of the given ``grade``."""
    kinds = {"zb-h1": "line", "interleaved-zb": "loop", "zb-v": "v", "v-half": "v"}
    covers: Any = pytest.mark.covers
    marked = [
        pytest.param(schedule, marks=covers(grade, (kind,), cuda_graph_impl=IMPLEMENTATION))
        for schedule, kind in kinds.items()
    ]
    return ["1f1b", *marked]


def row_of(schedule: str, ranks: int, microbatches: int, rank: int) -> tuple[list[Action], Any]:
    """Return the passes of ``rank``, and its stages."""
    resolved = choose(schedule)
    placement = resolved.place(ranks)
    problem = Problem(placement, microbatches, uniform(placement, 1, 1, 1))
    row = build_program(resolved, problem).schedule.rows[rank]
    return [action for action in row if is_compute(action)], placement.stages_of[rank]


def gradients(
    make: Callable[..., Any],
    build: Callable[[], Layer],
    row: Sequence[Action],
    stages: Sequence[int],
    graphs: LayerGraphs | None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the gradients of all parameters and inputs after two steps of ``row``, on chunks of
    layers that ``build`` returns.

    Args:
        make: function that captures graphs: `make_graphed_callables`.
        graphs: the graphs to capture; None to run the same passes without any graph.
    """
    torch.manual_seed(0)
    chunks = [nn.ModuleList(build() for _ in range(LAYERS)).to(device, dtype) for _ in stages]
    microbatches = 1 + max(action.microbatch for action in row)
    generator = torch.Generator().manual_seed(1)
    data = {
        (stage, m, what): torch.randn(ROWS, WIDTH, generator=generator).to(device, dtype)
        for stage in stages
        for m in range(microbatches)
        for what in "xg"
    }
    if graphs is not None:
        graphs.begin(row, stages, chunks)
        _capture(make, chunks, graphs.order(len(stages), microbatches), device, dtype)
    layers: list[Any] = [layer for chunk in chunks for layer in chunk]
    captured = [parameter for layer in layers for parameter in layer.captured.parameters()]
    sums: dict[nn.Parameter, Tensor] = {}
    if graphs is not None:
        for parameter in captured:
            parameter.register_post_accumulate_grad_hook(partial(_add_at_once, sums))
    found: list[Tensor] = []
    for _ in range(2):
        sums.clear()
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.grad = None
        if graphs is not None:
            queue.is_lent = graphs.begin(row, stages, chunks)
        queue.splitting = True
        try:
            dx = _run(row, dict(zip(stages, chunks, strict=True)), data)
        finally:
            queue.clear()
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        made = [sums.get(parameter, parameter.grad) for parameter in parameters]
        found = [gradient for gradient in made if gradient is not None]
        found += [dx[key] for key in sorted(dx)]
    return found


def _add_at_once(sums: dict[nn.Parameter, Tensor], parameter: nn.Parameter) -> None:
    """Add the gradient that a graph wrote for ``parameter``, as Megatron's hook does. Autograd uses
    the graph's own memory for ``.grad``, and the next replay overwrites it."""
    assert parameter.grad is not None
    if parameter in sums:
        sums[parameter].add_(parameter.grad)
    else:
        sums[parameter] = parameter.grad.clone()
    parameter.grad = None


def _capture(
    make: Callable[..., Any],
    chunks: Sequence[nn.ModuleList],
    order: list[int],
    device: str,
    dtype: torch.dtype,
) -> None:
    layers: list[Any] = [layer for chunk in chunks for layer in chunk]
    microbatches = len(order) // len(chunks) // 2
    samples = [
        (torch.ones(ROWS, WIDTH, device=device, dtype=dtype, requires_grad=True),)
        for _ in range(len(layers) * microbatches)
    ]
    made = make(
        tuple(layer.captured for layer in layers),
        samples,
        sample_kwargs=[{} for _ in samples],
        _order=order,
        _num_layers_per_chunk=[LAYERS] * len(chunks),
        _reuse_graph_input_output_buffers=True,
        allow_unused_input=True,
    )
    for number, layer in enumerate(layers):
        chunk, own = divmod(number, LAYERS)
        first = chunk * LAYERS * microbatches
        layer.cuda_graphs = [made[first + m * LAYERS + own] for m in range(microbatches)]


def _run(
    row: Sequence[Action], chunks: dict[int, nn.ModuleList], data: dict[Any, Tensor]
) -> dict[tuple[int, int], Tensor]:
    """Run ``row``, and return the gradients of the inputs of each stage. They are stored until the
    end, as the send of such a gradient might still be pending then."""
    between: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    dx: dict[tuple[int, int], Tensor] = {}
    for action in row:
        stage, microbatch = key = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                x = y = data[*key, "x"].clone().requires_grad_()
                for layer in chunks[stage]:
                    y = layer(y, microbatch)
                between[key] = x, y
            case Kind.BACKWARD_INPUT | Kind.FULL_BACKWARD:
                x, y = between.pop(key)
                with queue.collecting(stage, microbatch):
                    y.backward(data[*key, "g"])
                assert x.grad is not None
                dx[key] = queue.keep(x.grad)
                if action.kind is Kind.FULL_BACKWARD:
                    queue.run(stage, microbatch)
            case Kind.BACKWARD_WEIGHT:
                queue.run(stage, microbatch)
    return dx
