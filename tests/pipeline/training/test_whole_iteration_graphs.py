"""Tests of trainings in which Megatron's own `FullCudaGraphWrapper` captures and replays our whole
step. They equal trainings without a graph bitwise. Other tests show that the emulator of such
graphs fails if a captured step contains a decision of the host.

Our code refuses such graphs until a GPU has run `scripts/gpu_tests.sh --one-gpu graphs`; the
refusal is lifted here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.adapter.transformer_engine.graph_hooks import WholeGraphHooks
from tests.helpers import whole_graphs
from tests.helpers.combinations import at_night, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import Run, assert_same, model_flags, train, train_or_fail
from tests.helpers.whole_graphs import Event, Graph, Groups, HostDecision, capturing

REPLAYS = 10
FLAGS: dict[str, object] = {
    "pipeline_model_parallel_size": 2,
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
    "train_iters": 1 + REPLAYS,
    "no_check_for_nan_in_loss_and_grad": True,
}
DISTRIBUTED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
GRAPH = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 1}


@functools.cache
def without_graphs(**more: object) -> list[Run]:
    return train(2, model_flags(**FLAGS, **more), model_provider=drawn_by_name)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks forked from now on capture whole iterations without a GPU."""
    whole_graphs.captured_on_the_cpu(monkeypatch.setattr)
    whole_graphs.without_the_refusal(monkeypatch.setattr)


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("zb-v", {}),
        *at_night(
            ("1f1b", {}),
            ("zb-h1", {}),
            ("zb-h1", {"pipeline_p2p": "batched"}),
            ("interleaved-zb", {}),
            ("zb-v", {"overlap_grad_reduce": True}),
            ("zb-h1", {"use_distributed_optimizer": True}),
            ("interleaved-zb", DISTRIBUTED),
            ("zb-v", DISTRIBUTED),
        ),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_ten_replays_are_ten_steps(
    schedule: str, more: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    ours = {name: value for name, value in more.items() if name.startswith("pipeline_")}
    theirs = {name: value for name, value in more.items() if name not in ours}
    words = model_flags(**FLAGS, **GRAPH, **theirs, pipeline_schedule=schedule, **ours)
    runs = train(2, words, model_provider=drawn_by_name)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert capfd.readouterr().out.count(whole_graphs.REPLAYED) == 2 * REPLAYS
    assert_same(runs, without_graphs(**theirs))


@nightly("a step that takes none")
@pytest.mark.usefixtures("graphs")
def test_a_step_whose_times_are_taken_fails() -> None:
    words = model_flags(**FLAGS, **GRAPH, pipeline_schedule="zb-h1", pipeline_metrics=True)
    results = train_or_fail(2, words, model_provider=drawn_by_name)
    assert any("a time in a captured step" in result.error for result in results), results


@nightly("a step that does not")
@pytest.mark.usefixtures("graphs")
def test_a_host_that_waits_for_its_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture of a whole step fails if the host waits for its device in that step. The test
    lets the host wait before a pass for an earlier pass (`DeviceProgress.hold_back`), as it used
    to."""
    monkeypatch.setattr(WholeGraphHooks, "limits_host", True)
    words = model_flags(**FLAGS, **GRAPH, pipeline_schedule="zb-h1")
    results = train_or_fail(2, words, model_provider=drawn_by_name)
    assert any("DeviceProgress.hold_back" in result.error for result in results), results


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, graphs: None) -> Iterator[Groups]:
    """The emulator in this process, with no findings before or after."""
    monkeypatch.setattr(Graph, "findings", [])
    yield Groups()


DECISIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "tensor": lambda x: torch.tensor(1.0, device="cpu"),
    "event": lambda x: Event().query(),
    "waits": lambda x: Event().synchronize(),
    "store": lambda x: dist.HashStore().set("key", "value"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_of_the_host_fails(name: str, groups: Groups) -> None:
    x = torch.ones(3)
    with pytest.raises(HostDecision, match="in a captured step"), capturing(groups, Graph()):
        DECISIONS[name](x)
    assert len(Graph.findings) == 1


def test_an_event_of_a_capture_is_never_queried(groups: Groups) -> None:
    event = Event()
    with capturing(groups, Graph()):
        event.record()
    with pytest.raises(HostDecision, match=r"Event\.query of an event recorded"):
        event.query()


def test_a_wait_copies_what_its_call_has_made(groups: Groups) -> None:
    """A replay of a reduce-scatter gives the gradients of that replay's data. In its wait, gloo
    copies the result from memory that its call has allocated. The emulator used to record that copy
    as an operation of the step, so replays gave the gradients of the capture."""
    x, reduced = torch.ones(3), torch.zeros(3)

    def reduce(group: object) -> SimpleNamespace:
        made = x.clone()
        return SimpleNamespace(wait=lambda: reduced.copy_(made))

    call = groups.noted(reduce)
    graph = Graph()
    with capturing(groups, graph):
        call(None).wait()
    for _ in "12":
        x += 1
        graph.replay()
    assert torch.equal(reduced, x)


def test_a_replay_does_what_the_device_did_and_no_more(groups: Groups) -> None:
    """A capture runs nothing, and a replay repeats only the device's operations: a number that the
    host has counted stays as it was captured."""
    x, total, counted = torch.ones(3), torch.zeros(3), 0
    graph = Graph()
    with capturing(groups, graph):
        counted += 1
        y = x * 2
        total += y + counted
    assert not total.any() and not torch.equal(y, x * 2)
    for _ in "12":
        x += 1
        graph.replay()
    assert torch.equal(total, torch.full((3,), 4.0 + 1 + 6 + 1)) and torch.equal(y, x * 2)
