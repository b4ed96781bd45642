"""Tests of watching Megatron's own pipeline functions: which names are replaced, and what is
recorded of a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel import schedules

import megatron_ext
from megatron_ext.adapter.stock.stock_order import family_of, why_unseen
from megatron_ext.adapter.stock.stock_passes import (
    StockPasses,
    watched_backward,
    watched_forward,
    watching,
)
from megatron_ext.adapter.stock.stock_step import StockStep
from megatron_ext.features.trace.adapter.step_trace import _other_order
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import HostClock
from megatron_ext.schedule.placement import loop
from megatron_ext.schedule.timeline import Timeline
from tests.helpers.schedules import line_problem, program

NAMES = ("get_forward_backward_func", "forward_step", "backward_step")


def test_only_calls_are_stood_for() -> None:
    stock = {name: getattr(schedules, name) for name in NAMES}
    with megatron_ext.install(trace="folder"):
        step = schedules.get_forward_backward_func(4, None)
        assert isinstance(step, StockStep)
        assert step.function is schedules.forward_backward_pipelining_without_interleaving
        assert all(getattr(schedules, name) is not stock[name] for name in NAMES)
    assert all(getattr(schedules, name) is stock[name] for name in NAMES)
    with megatron_ext.install(schedule="1f1b", trace="folder"):
        assert schedules.forward_step is stock["forward_step"]


def forward(*args: Any, **kwargs: Any) -> tuple[Any, int]:
    return kwargs["output"], 1


def backward(inputs: Any, output: Any, gradient: Any, config: Any) -> None:
    if config == "broken":
        raise RuntimeError("broken")


def test_a_backward_pass_is_that_of_its_output() -> None:
    recorder = Recorder(1)
    recording = recorder.record(HostClock())
    outputs = [[object()] for _ in range(2)]
    with watching(StockPasses(recorder, loop(2, vpp=2))):
        for microbatch, output in enumerate(outputs):
            watched_forward(forward, output=output, vp_stage=1, current_microbatch=microbatch)
        watched_backward(backward, None, outputs[1], None, None)
        # This backward pass is that of a forward pass which was not observed.
        watched_backward(backward, None, [object()], None, None)
        with pytest.raises(RuntimeError) as caught:
            watched_backward(backward, None, outputs[0], None, "broken")
    watched_forward(forward, output=outputs[0])
    passes = [str(event.action) for event in recording.read()[0]]
    assert passes == ["3F0", "3F1", "3B1", "3B0"]
    assert "megatron_ext: pipeline rank 1, in 3B0" in caught.value.__notes__[0]


def test_an_unknown_order_is_reported() -> None:
    made = program("1f1b", line_problem(2, 3))
    measured = Timeline(made.schedule, ())
    assert "pass 1 of pipeline rank 0 is nothing, not 0F0" in str(_other_order(made, measured))


def test_the_family_of_megatrons_order() -> None:
    loops = schedules.forward_backward_pipelining_with_interleaving
    for group, spec in ((None, ""), (4, ""), (6, ",group=6")):
        config = SimpleNamespace(microbatch_group_size_per_vp_stage=group)
        assert family_of(loops, config, 4, 3) == f"interleaved:vpp=3{spec}"
    line = schedules.forward_backward_pipelining_without_interleaving
    assert family_of(line, None, 4, 1) == "1f1b"


@pytest.mark.parametrize(
    ("ranks", "settings", "text"),
    [
        (1, {}, "one pipeline rank"),
        (2, {"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        (2, {"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration"),
        (2, {"cuda_graph_impl": "local"}, None),
    ],
)
def test_what_cannot_be_seen(ranks: int, settings: dict[str, Any], text: str | None) -> None:
    known = {"overlap_moe_expert_parallel_comm": False, "cuda_graph_impl": "none"} | settings
    why = why_unseen(ranks, SimpleNamespace(**known))
    assert why is None if text is None else text in str(why)
