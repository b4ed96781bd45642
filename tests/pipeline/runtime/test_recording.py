"""Tests of recorded steps: a recording has the times of passes, without the times for which ranks
waited."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.futures import Future  # noqa: E402

from megatron_ext.compile.program.graph import channels  # noqa: E402
from megatron_ext.compile.program.simulate import simulate  # noqa: E402
from megatron_ext.compile.program.verify import Program  # noqa: E402
from megatron_ext.compile.registry import choose  # noqa: E402
from megatron_ext.observe.trace import traced_step  # noqa: E402
from megatron_ext.runtime.executor import execute  # noqa: E402
from megatron_ext.runtime.measure import clocks  # noqa: E402
from megatron_ext.runtime.measure.clocks import Offset, clock_offsets  # noqa: E402
from megatron_ext.runtime.messages.channels import Channels  # noqa: E402
from megatron_ext.runtime.messages.transport import Boundary, Transport  # noqa: E402
from megatron_ext.runtime.recorder import Recorder  # noqa: E402
from megatron_ext.runtime.recording import HostClock, Recording  # noqa: E402
from megatron_ext.runtime.weight_gradients import queue  # noqa: E402
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses  # noqa: E402
from megatron_ext.schedule.problem import P2P  # noqa: E402
from megatron_ext.schedule.timeline import Event, GradientReduction, Timeline  # noqa: E402
from scripts.benchmarks.contestants import EmulatedStage, program_of  # noqa: E402
from scripts.benchmarks.emulated import DTYPE, SHAPE, EmulatedChunk  # noqa: E402
from tests.helpers.ranks import run_ranks, values  # noqa: E402
from tests.helpers.stages import CPU, Pipeline, program_for, world  # noqa: E402

pytestmark = pytest.mark.real_time

SLEEP = 0.2
SLOW = Action(0, Kind.FORWARD, 0)


def recorded_step(rank: int, p2p: P2P) -> list[Event]:
    """Run three steps, and return the recorded events of the second."""
    program = program_for(choose("zb-h1"), 2, 3, p2p=p2p)
    faults = {SLOW: lambda: time.sleep(SLEEP)}
    pipeline = Pipeline(program, world(), faults=faults)
    recorder = pipeline.recorder
    pipeline.step()
    recording = recorder.record(HostClock())
    pipeline.step()
    recorder.end()
    pipeline.step()
    events, reductions = recording.read()
    assert reductions == []
    assert [event.action for event in events] == list(program.schedule.compute_rows[rank])
    return events


def test_two_passes_that_run_as_one_share_their_time() -> None:
    """An overlapped forward and backward share their recorded time. The forward pass is recorded
    first and the backward pass behind it, so that a rank's seconds add up."""
    pair = OverlappedPasses(SLOW, Action(3, Kind.BACKWARD_INPUT, 1))
    recording = Recording(0, TickingClock())
    for action in (Action(3, Kind.FORWARD, 1), pair, Action(3, Kind.BACKWARD_WEIGHT, 1)):
        recording.add_pass(action, recording.clock.record_event())
    assert recording.actions()[1:3] == tuple(pair)
    assert recording.times([0, 1, 2, 3]) == [0, 1, 2, 2.5, 2.5, 3, 4, 5]
    assert (recording.busy(), recording.span()) == (3, 5)
    events, _ = recording.read()
    assert [(event.start, event.end) for event in events] == [(0, 1), (2, 2.5), (2.5, 3), (4, 5)]


class TickingClock(HostClock):
    """Clock that is a second later at each event."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def record_event(self) -> float:
        return next(self._seconds)


@pytest.mark.parametrize("p2p", P2P)
def test_a_pass_is_recorded_and_not_what_waits_for_it(p2p: P2P) -> None:
    """A pass is recorded without the time that it waited for its inputs. Ranks of one machine share
    a clock, so a pass that is recorded to begin before its inputs existed would include waiting."""
    first, second = values(run_ranks(2, lambda rank: recorded_step(rank, p2p)))
    slow = first[0]
    assert slow.action == SLOW and slow.end - slow.start >= SLEEP
    for row, rank in ((first, 0), (second, 1)):
        assert {event.rank for event in row} == {rank}
        assert all(event.start < event.end for event in row)
        assert all(earlier.end <= later.start for earlier, later in pairwise(row))
    passes = {event.action: event for event in (*first, *second)}
    for microbatch in range(3):
        forward, backward = (
            [passes[Action(stage, kind, microbatch)] for stage in range(2)]
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)
        )
        assert forward[0].end <= forward[1].start
        assert backward[1].end <= backward[0].start


def emulated_steps(rank: int, program: Program, steps: int) -> list[list[Event]]:
    """Run steps whose passes sleep for as long as they cost, and return each step's events."""
    placement, costs = program.schedule.placement, program.problem.costs
    ways = Channels(world(), channels(program.schedule), CPU)
    recorder = Recorder(rank)
    stages = {
        number: EmulatedStage(number, EmulatedChunk(number, costs), number == placement.stages - 1)
        for number in placement.stages_of[rank]
    }
    queue.splitting = True
    recorded = []
    for _ in range(steps):
        recording = recorder.record(HostClock())
        transport = Transport(ways, Boundary(SHAPE, DTYPE), placement, recorder)
        execute(program, stages, transport, recorder)
        recorder.end()
        recorded.append(recording.read()[0])
    return recorded


def test_passes_of_known_length_are_recorded_with_it() -> None:
    """Passes that sleep for a known time are recorded with at least that time, because a sleep
    never ends early."""
    program = program_of(choose("zb-v"), 3, 6, "f=15,i=18,w=12")
    costs = program.problem.costs
    predicted = simulate(program, costs)
    rows = values(run_ranks(3, lambda rank: emulated_steps(rank, program, 2)))
    measured = [
        Timeline(program.schedule, tuple(event for row in step for event in row))
        for step in zip(*rows, strict=True)
    ]
    for step in measured:
        assert all(e.end - e.start >= 0.999 * costs.of(e.action) for e in step.events)
        assert step.makespan >= 0.999 * predicted.makespan
        assert traced_step(1, step, predicted, 0.0).cost_factor > 0.999


def skewed_offsets(rank: int, ahead: float) -> tuple[list[Offset], list[float]]:
    """Return the offsets between the ranks' clocks, and this rank's readings. Rank 1's clock is
    ``ahead`` seconds fast, and rank 2 comes late to every exchange."""
    skew = ahead if rank == 1 else 0.0
    shown: list[float] = []

    def perf_counter() -> float:
        if rank == 2:
            time.sleep(0.001)
        shown.append(time.perf_counter() + skew)
        return shown[-1]

    clocks.__dict__["time"] = SimpleNamespace(perf_counter=perf_counter)
    offsets = clock_offsets(world(), CPU)
    return offsets, [left - entered for entered, left in itertools.batched(shown, 2)]


@pytest.mark.parametrize("ahead", [0.0, 3.5, -1000.0])
def test_clocks_that_differ(ahead: float) -> None:
    results = values(run_ranks(3, lambda rank: skewed_offsets(rank, ahead)))
    (first, rounds), *others = results
    assert len(rounds) == clocks.ROUNDS
    assert all(offsets == first for offsets, _ in others), "ranks disagree"
    for offset, truth, (_, own) in zip(first, (0.0, ahead, 0.0), results, strict=True):
        assert abs(offset.seconds - truth) <= offset.error + 1e-9
        best = min(map(operator.add, rounds, own))
        assert offset.error <= best / 2 + 1e-9, "a round tells more"
    assert first[0] == Offset(0.0, 0.0)


def recorded_reductions(rank: int) -> list[GradientReduction]:
    """Record two reductions. The work of the first tells when it ends. Of the second it is only
    known when it was waited for. Rank 1 comes late."""
    recording = Recording(rank, HostClock())
    tensor = torch.ones(8)
    telling = recording.begin_reduction(3)
    dist.barrier()
    if rank == 1:
        time.sleep(SLEEP)
    assert telling.ends_with(dist.all_reduce(tensor, async_op=True))
    silent = recording.begin_reduction(4)
    assert not silent.ends_with(SimpleNamespace())
    recording.begin_reduction(5)
    time.sleep(SLEEP)  # stands for passes
    while not telling.ends:
        time.sleep(SLEEP)  # more passes, during which nobody asks whether a reduction has ended
    silent.was_awaited()
    return recording.read()[1]


def test_a_reduction_ends_when_it_is_done_and_not_when_it_is_polled() -> None:
    for rank, (telling, silent) in enumerate(values(run_ranks(2, recorded_reductions))):
        assert (telling.rank, telling.stage, telling.is_exact) == (rank, 3, True)
        assert telling.end - telling.start >= SLEEP
        assert telling.end < silent.end, "it ended when somebody asked"
        assert (silent.rank, silent.stage, silent.is_exact) == (rank, 4, False)
        assert silent.end - silent.start >= SLEEP


def test_an_end_that_is_marked_late_is_waited_for() -> None:
    """The recorder waits for the end of a reduction that gloo marks late: gloo first wakes the
    thread that waits for a work, and runs the work's callbacks after that."""
    recording = Recording(0, HostClock())
    future: Future[None] = Future()
    recording.begin_reduction(0).ends_with(SimpleNamespace(get_future=lambda: future))
    threading.Timer(SLEEP, lambda: future.set_result(None)).start()
    (reduction,) = recording.read()[1]
    assert reduction.end - reduction.start >= SLEEP
