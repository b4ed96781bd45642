"""Tests of what the host knows about its device: how many passes it is ahead, and which action is
stuck."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import apply
from megatron_ext.patches.features import FEATURES
from megatron_ext.patches.torch.cuda import graphs
from megatron_ext.runtime import watchdog
from megatron_ext.runtime.device_progress import PASSES_AHEAD, DeviceProgress
from megatron_ext.runtime.position import Position
from megatron_ext.runtime.rank_identity import Process, RankIdentity
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule.action import parse_action
from megatron_ext.schedule.schedule import is_compute
from tests.helpers.ranks import Script, run_ranks, running_ranks, values
from tests.helpers.stages import Pipeline, alone, program_for, world
from tests.pipeline.failures.test_faults import HERE, say, stay

pytestmark = pytest.mark.real_time


@dataclass
class Device:
    """Stand-in for a device that finishes its work in order: when a test says so, or when the host
    waits for an event."""

    events: list[Event] = field(default_factory=list)
    ended: int = 0

    def record(self) -> Event:
        self.events.append(Event(self, len(self.events)))
        return self.events[-1]


@dataclass
class Event:
    device: Device
    number: int
    was_awaited: bool = False

    def query(self) -> bool:
        return self.number < self.device.ended

    def synchronize(self) -> None:
        assert threading.current_thread() is threading.main_thread(), "a watchdog never waits"
        self.was_awaited = True
        self.device.ended = max(self.device.ended, self.number + 1)


class KnownProgress(DeviceProgress):
    """Progress of a device that also stores, for each of the device's events, a position in the
    schedule."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.record)
        self.device = device
        self.positions: list[Position] = []

    def add(self, position: Position) -> None:
        super().add(position)
        self.positions.append(position)

    @property
    def passes_under_way(self) -> int:
        return sum(position.peer is None for position in self.positions[self.device.ended :])


@pytest.mark.parametrize("has_ended", [True, False])
def test_no_device_is_queried_while_a_graph_is_captured(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread queries a device's events while a CUDA graph is captured. A user's capture used to
    fail because the watchdog's thread queried the last events of the step before. The watchdog
    recognized Transformer Engine's captures of layers, but not the capture of
    --optimizer-cuda-graph."""
    device = Device()
    recorder = Recorder(0, device=DeviceProgress(device.record))
    monkeypatch.setattr(Watchdog, "_running", Watchdog(recorder))
    recorder.device.add(Position(0, parse_action("0F0"), None, "", 0.0))
    device.ended = int(has_ended)
    captured = []

    def capture_begin(graph: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        device.events[0].query = lambda: pytest.fail("it was asked")  # type: ignore[method-assign]
        recorder.device.look()
        recorder.device.look()
        captured.append((graph, pool, capture_error_mode))

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    config = PipelineConfig(schedule="1f1b")
    assert any("torch.cuda.graphs" in f.modules and f.applies_to(config) for f in FEATURES)
    with apply(graphs.patches(config)):
        torch.cuda.CUDAGraph.capture_begin("graph", pool=1, capture_error_mode="global")  # type: ignore[arg-type]
    assert captured == [("graph", 1, "global")]
    assert recorder.device.position is None
    # The next step adds an event, so the device's position is known again.
    recorder.device.add(Position(0, parse_action("0F1"), None, "", 0.0))
    recorder.device.look()
    recorder.device.look()
    assert recorder.device.position is not None


def test_the_host_is_a_few_passes_ahead_of_its_device() -> None:
    """The host enqueues at most a few passes more than its device has finished. On a slow device,
    messages of passes that were enqueued long before used to occupy memory: the host had freed it,
    but the device had not come to the end of the pass."""
    program = program_for(choose("zb-h1"), 2, 8)

    def on_rank(rank: int) -> None:
        most: list[int] = []
        progress = KnownProgress(Device())
        row = [action for action in program.schedule.rows[rank] if is_compute(action)]
        faults = dict.fromkeys(row, lambda: most.append(1 + progress.passes_under_way))
        pipeline = Pipeline(program, world(), faults=faults)
        pipeline.recorder.device = progress
        pipeline.step()
        pipeline.step()  # the bound also holds across steps
        assert len(most) == 2 * len(row)
        assert max(most) == PASSES_AHEAD and most[0] == 1
        # The host has waited once for each pass but the last few, and for nothing else.
        awaited = [p for p, e in zip(progress.positions, progress.device.events, strict=True)
                   if e.was_awaited]  # fmt: skip
        assert [p.action for p in awaited] == [*row, *row][:-PASSES_AHEAD]
        (expected,) = (s for s in alone(pipeline, 2) if s.number == rank)
        (stage,) = pipeline.stages.values()
        for mine, theirs in zip(stage.gradients, expected.gradients, strict=True):
            assert mine.equal(theirs)

    values(run_ranks(2, on_rank))


def test_without_a_device_nothing_is_kept() -> None:
    recorder = Recorder(0)
    for _ in range(3 * PASSES_AHEAD):
        with recorder.computing(parse_action("0F0")):
            pass
    recorder.device.look()
    assert recorder.device.position is None
    assert not recorder.device._given and not recorder.device._passes


def test_what_has_ended_is_forgotten() -> None:
    device = Device()
    progress = DeviceProgress(device.record)
    for _ in range(10):
        progress.add(Position(0, parse_action("0SEND_F0"), 1, "to", 0.0))
        device.ended = len(device.events)
    assert len(progress._given) == 1
    progress.look()
    progress.look()
    assert progress.position is None and not progress._given


def test_a_device_whose_host_goes_on_is_not_queried() -> None:
    """The watchdog queries the device only if the host has made no progress between two checks. The
    watchdog's thread used to query the device every second of a healthy run, between the main
    thread's calls."""
    device = Device()
    progress = DeviceProgress(device.record)
    for microbatch in range(3):
        progress.add(Position(0, parse_action(f"0F{microbatch}"), None, "", 0.0))
        progress.look()
        assert progress.position is None
    progress.look()
    assert progress.position is not None
    assert str(progress.position).startswith("is in 0F0 for ")


# --- a device that waits for ever

PROCESSES = tuple(Process(8 * rank + 3, f"node{rank}", 3) for rank in range(4))


def run_ahead_of_a_stuck_device(rank: int) -> None:
    watchdog.STUCK_SECONDS = 0.3
    watchdog.LOOK_SECONDS = watchdog.GRACE_SECONDS = 0.1
    device = Device()
    recorder = Recorder(3, RankIdentity(3, PROCESSES), DeviceProgress(device.record))
    recorder.begin(12)
    watchdog.Watchdog(recorder).start()
    steps: list[Callable[[], object]] = [
        lambda: recorder.computing(parse_action("3F7")),
        lambda: recorder.waiting(parse_action("3RECV_B2"), 2, "from"),
        lambda: recorder.computing(parse_action("3B2")),
        lambda: recorder.waiting(parse_action("3REDUCE_E4"), 0, "with"),
    ]
    for step in steps:
        with step():  # type: ignore[attr-defined]
            pass
    ends = iter([1, 2, 3])
    device.ended = next(ends)
    signal.signal(signal.SIGUSR1, lambda signum, frame: setattr(device, "ended", next(ends)))
    say(HERE)
    stay()


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
OWN = "pipeline rank 3 is global rank 27, local rank 3 on node3"


def test_a_device_that_waits_is_named_with_action_peer_and_age(script: Script) -> None:
    """The watchdog names the action at which a device waits, its peer and the waiting time. With
    NCCL a host itself never waits for long, so the watchdog used to notice nothing, or to name a
    later pass that the host had come to."""
    waits = "the device of pipeline rank 3 has ended 3F7 and is waiting for 3RECV_B2 from"
    computes = "the device of pipeline rank 3 has ended 3F7 and is in 3B2"
    together = "has ended 3B2 and is waiting for 3REDUCE_E4 with the other pipeline ranks"
    with running_ranks(1, run_ahead_of_a_stuck_device, script, connect=False) as running:
        running.wait_until_it_says(0, waits)
        running.send_signal(0, signal.SIGUSR1)
        running.wait_until_it_says(0, computes)
        running.send_signal(0, signal.SIGUSR1)
        running.wait_until_it_says(0, together)
        running.send_signal(0, signal.SIGTERM)
        (result,) = running.wait()
    assert result.exit_code == 128 + signal.SIGTERM
    peer = "pipeline rank 2 is global rank 19, local rank 3 on node2"
    for line in (
        rf"{waits} pipeline rank 2 for \d\.\d s: it may hang "
        rf"\[{OWN}; {peer}; iteration 12; {TIME}\]",
        rf"{computes} for \d\.\d s: it may hang \[{OWN}; iteration 12; {TIME}\]",
        rf"got SIGTERM: pipeline rank 3 between passes; its device {together} for \d\.\d s "
        rf"\[{OWN}; iteration 12; {TIME}\]",
    ):
        lines = re.findall(rf"^megatron_ext: {line}$", result.stderr, re.MULTILINE)
        assert len(lines) == 1, result.stderr
