"""Tests of schedules of every family on ranks whose simulated device blocks or finishes late
(`tests.helpers.adversary`).

Each case compares losses and gradients with the same stages run in one process, to the last bit.
The last tests seed the mistakes that each kind of simulated device must find.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove  # noqa: E402
from megatron_ext.compile.registry import choose, entries  # noqa: E402
from megatron_ext.features.offload.runtime import offload  # noqa: E402
from megatron_ext.runtime.messages.collectives import Collectives, StepCollectives  # noqa: E402
from megatron_ext.runtime.messages.transport import Transport  # noqa: E402
from megatron_ext.runtime.recorder import Recorder  # noqa: E402
from megatron_ext.schedule.action import Action, Kind, parse_action  # noqa: E402
from megatron_ext.schedule.problem import P2P, Offload, VocabularyParallel  # noqa: E402
from megatron_ext.schedule.schedule import Schedule  # noqa: E402
from tests.helpers.adversary import MODES, late, one_queue, synchronising  # noqa: E402
from tests.helpers.combinations import at_night, each_once, in_pairs  # noqa: E402
from tests.helpers.random_schedules import mutate  # noqa: E402
from tests.helpers.ranks import RankResult, run_ranks, values  # noqa: E402
from tests.helpers.stages import Pipeline, program_for, world  # noqa: E402
from tests.helpers.vocabulary import (  # noqa: E402
    Model,
    VocabularyPipeline,
    alone,
    connect,
)
from tests.helpers.vocabulary import program_for as with_vocabulary  # noqa: E402
from tests.pipeline.features.test_post_validation import bad_days, run_courses  # noqa: E402
from tests.pipeline.features.test_vocabulary import (  # noqa: E402
    ULP,
    ULPS_PER_STAGE,
    check_losses,
    check_step,
)
from tests.pipeline.runtime.test_executor import check_numbers  # noqa: E402


@pytest.fixture
def adverse(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the ranks of a test on the simulated device that the test's parameter names."""
    with MODES[request.param]():
        yield


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", 0)


# --- tests of programs that the proof has accepted


WAYS: dict[str, dict[str, Any]] = {
    "async": {},
    "batched": {"p2p": P2P.BATCHED},
    "evaluation": {"forward_only": True},
    "batched evaluation": {"forward_only": True, "p2p": P2P.BATCHED},
    "varying shapes": {},
    "offload": {"offload": Offload.FULL},
    "offload of half": {"offload": Offload.HALF},
}


@pytest.mark.usefixtures("adverse", "everything_is_large")
@pytest.mark.parametrize(
    ("name", "adverse", "ranks"),
    [(name, *how) for name, how in each_once(entries(), in_pairs(MODES, [2, 4]))],
    indirect=["adverse"],
)
def test_every_family(name: str, ranks: int) -> None:
    """Schedules of every family give the right numbers on devices that block or finish late. The
    step has once fewer microbatches than ranks, and once a number that is not a multiple of the
    ranks."""
    programs = {
        way: [program_for(choose(name), ranks, m, **how) for m in (ranks - 1, ranks + 3)]
        for way, how in WAYS.items()
    }
    values(run_ranks(ranks, partial(run_all, programs)))


# By day each placement has two families here, one with and one without a split backward pass. Other
# families differ only in the order of their passes, and the test above runs all of them on devices
# that block.
ON_ONE_QUEUE = ("1f1b", "zb-h1", "interleaved", "gis", "1f1b-v", "zb-v", "hanayo", "wave-auto")


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("name", at_night(*entries()) or ON_ONE_QUEUE)
def test_every_family_on_one_queue(name: str) -> None:
    programs = {
        way: [program_for(choose(name), 3, 5, **how)]
        for way, how in WAYS.items()
        if "batched" not in way
    }
    with one_queue():
        values(run_ranks(3, partial(run_all, programs)))


def run_all(programs: dict[str, list[Program]], rank: int) -> None:
    """Run a step of each program on this rank; ``programs`` are listed by the settings that run
    them."""
    connections: dict[tuple[P2P, bool], Any] = {}
    for way, of_one_way in programs.items():
        for program in of_one_way:
            varies = way == "varying shapes"
            use = program.problem.options.p2p, varies
            pipeline = Pipeline(program, world(), varies=varies, connect=connections.get(use))
            connections[use] = partial(connected, pipeline.connection)
            assert pipeline.step().is_empty()
            check_numbers(pipeline)


def connected(connection: Any, *unused: object) -> Any:
    """Stand in for connecting: return ``connection``, as the pipeline's ranks are connected
    already."""
    return connection


@pytest.mark.usefixtures("adverse")
@pytest.mark.parametrize(
    ("adverse", "name"),
    each_once(MODES, ["1f1b", "zb-h1", "zb-v", "v-half"]),
    indirect=["adverse"],
)
def test_divided_vocabulary(name: str) -> None:
    """Steps with a vocabulary split over the ranks have the right losses on devices that finish
    late, also if an evaluation runs between two steps."""
    ranks = 3
    ways = VocabularyParallel.ONE, VocabularyParallel.TWO
    programs = [with_vocabulary(name, ranks, m, how) for how in ways for m in (2, 7)]
    evaluations = [with_vocabulary(name, ranks, 5, how, forward_only=True) for how in ways]

    def run(rank: int) -> None:
        connections = connect(programs[0])
        for program in programs:
            pipeline = VocabularyPipeline(program, connections, Model())
            pipeline.step()
            check_step(pipeline)
        for program in evaluations:
            pipeline = VocabularyPipeline(program, connections, Model())
            pipeline.step()
            stages = program.schedule.placement.stages
            errors = check_losses(pipeline, alone(Model(), stages, 5))
            bound = ULPS_PER_STAGE * ULP[torch.float32] * stages
            assert all(error <= bound for error in errors.values()), errors

    values(run_ranks(ranks, run))


@pytest.mark.usefixtures("adverse")
@pytest.mark.parametrize(
    ("adverse", "name"),
    each_once(MODES, ["zb-2p", "zb-h2", "zb-v", *at_night("v-auto")]),
    indirect=["adverse"],
)
def test_post_validation_of_bad_steps(name: str) -> None:
    ranks = 3
    programs = [program_for(choose(name), ranks, m, steps_overlap=True) for m in (2, 7)]
    values(run_ranks(ranks, run_courses(programs, bad_days(ranks), shapes=(False, True))))


# --- tests of random schedules that the proof accepts or refuses


def changed_a_little(start: Program) -> Iterator[tuple[Schedule, Program | InvalidSchedule]]:
    """Yield without end random small changes of ``start``'s schedule, of its messages and waits
    too, each with its proved program or the proof's error."""
    rng = random.Random(0)
    while True:
        schedule = mutate(start.schedule, rng)
        if schedule == start.schedule:
            continue
        try:
            yield schedule, prove(schedule, start.problem)
        except InvalidSchedule as error:
            yield schedule, error


def let_through(start: Program) -> list[Program]:
    outcomes = (outcome for _, outcome in changed_a_little(start))
    return list(islice((it for it in outcomes if isinstance(it, Program)), 15))


def refused_for_such_a_device(start: Program) -> list[Program]:
    refused = (
        unproved(start, schedule)
        for schedule, outcome in changed_a_little(start)
        if "it would hang on a device" in str(outcome)
    )
    return list(islice(refused, 3))


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(
    ("mode", "way"),
    [
        (one_queue, "async"),
        (one_queue, "evaluation"),
        (one_queue, "offload"),
        (synchronising, "batched"),
        (late, "async"),
        (late, "offload"),
    ],
)
def test_what_the_proof_lets_through(
    mode: Callable[[], AbstractContextManager[None]], way: str
) -> None:
    start = program_for(choose("zb-v"), 3, 4, **WAYS[way])
    with mode():
        values(run_ranks(3, partial(run_all, {way: let_through(start)})))


@pytest.mark.parametrize("mode", [one_queue, late])
def test_what_the_proof_lets_through_of_a_divided_vocabulary(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    start = with_vocabulary("zb-v", 3, 4, VocabularyParallel.TWO)
    accepted = let_through(start)

    def run(rank: int) -> None:
        connections = connect(start)
        for program in accepted:
            pipeline = VocabularyPipeline(program, connections, Model())
            pipeline.step()
            check_step(pipeline)

    with mode():
        values(run_ranks(3, run))


def test_what_the_proof_refuses_for_such_a_device_alone() -> None:
    """The proof refuses some schedules only because a device may wait for all posted messages at
    each pass. These schedules run under gloo and hang on a simulated device that waits so, so the
    proof is not too strict."""
    for program in refused_for_such_a_device(program_for(choose("zb-v"), 3, 4)):
        run = partial(run_all, {"async": [program]})
        values(run_ranks(3, run))
        with one_queue(seconds=1.0):
            errors = [result.error for result in run_ranks(3, run, timeout=30)]
        assert any("has not ended in 1 s" in error for error in errors), errors


# --- mistakes that a device that blocks must find


def unproved(program: Program, schedule: Schedule) -> Program:
    """Return ``program`` with ``schedule`` in place of its own, although the proof has not checked
    it."""
    spoilt = copy.copy(program)
    object.__setattr__(spoilt, "schedule", schedule)
    return spoilt


def beginning_with(program: Program, first: str, rank: int) -> Program:
    """Return ``program`` with its action ``first`` moved to the start of the row of ``rank``,
    unproved."""
    rows = list(program.schedule.rows)
    action = parse_action(first)
    rows[rank] = (action, *(a for a in rows[rank] if a != action))
    return unproved(program, replace(program.schedule, rows=tuple(rows)))


def test_a_receive_posted_too_early() -> None:
    """The simulated device reports a receive that is posted too early: the peer sends the data only
    after it has got a later output of this rank. gloo runs such a program without an error, and a
    device that waits for all posted messages hangs."""
    program = program_for(choose("gpipe"), 2, 2)
    spoilt = beginning_with(program, "0RECV_B0", rank=0)

    def run(rank: int) -> None:
        pipeline = Pipeline(spoilt, world())
        pipeline.step()
        check_numbers(pipeline)

    values(run_ranks(2, run))
    with synchronising(seconds=1.0):
        check_stands_still(run_ranks(2, run, timeout=30), "0RECV_B0", "0F0")


def test_a_collective_posted_too_early() -> None:
    program = with_vocabulary("1f1b", 2, 2, VocabularyParallel.ONE)
    spoilt = beginning_with(program, "1BCAST_EW0", rank=1)

    def run(rank: int) -> None:
        pipeline = VocabularyPipeline(spoilt, connect(spoilt), Model())
        pipeline.step()
        check_step(pipeline)

    values(run_ranks(2, run))
    with synchronising(seconds=1.0):
        check_stands_still(run_ranks(2, run, timeout=30), "1BCAST_EW0", "1E0")


def check_stands_still(results: list[RankResult], posted: str, before: str) -> None:
    """Assert that both ranks end with an error, and that the rank that waits names the action that
    has not ended. The other rank may learn only that its peer has ended."""
    rank = parse_action(posted).stage
    assert [result.exit_code for result in results] == [1, 1]
    assert f"{posted}, posted before {before}, has not ended" in results[rank].error


# --- mistakes that a device that finishes late must find


def errors_when_late(run: Callable[[int], None], ranks: int = 2) -> list[str]:
    with late():
        return [result.error for result in run_ranks(ranks, run)]


def test_a_wait_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that reads a received tensor before it waits for the message is found. On a
    simulated late device the tensor holds no numbers before the wait."""

    def received(transport: Transport, action: Action) -> Tensor:
        work, tensor = transport._receiving.pop(action)
        early = tensor.clone()
        work.wait()
        return early

    monkeypatch.setattr(Transport, "received", received)
    program = program_for(choose("1f1b"), 2, 2)

    def run(rank: int) -> bool:
        pipeline = Pipeline(program, world())
        pipeline.step()
        return all(g.isnan().any() for stage in pipeline.stages.values() for g in stage.gradients)

    with late():
        assert values(run_ranks(2, run)) == [True, True]


def test_a_collective_that_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(exchange: StepCollectives, action: Action) -> list[Tensor]:
        works, tensors, _ = exchange._in_flight.pop(action)
        early = [tensor.clone() for tensor in tensors]
        for work in works:
            work.wait()
        return early

    monkeypatch.setattr(StepCollectives, "result", result)
    program = with_vocabulary("1f1b", 2, 2, VocabularyParallel.TWO)

    def run(rank: int) -> None:
        pipeline = VocabularyPipeline(program, connect(program), Model())
        pipeline.step()
        check_step(pipeline)

    for error in errors_when_late(run):
        assert re.search(r"AssertionError: {.*: nan\b", error), error


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (lambda output: output.untyped_storage().resize_(0), "was given back"),
        (lambda output: output.zero_(), "was written to"),
    ],
    ids=["freed", "overwritten"],
)
def test_an_output_that_goes_before_it_has_left(
    spoil: Callable[[Tensor], None], finding: str
) -> None:
    """An output that is freed or overwritten before its send has ended is found, here that of
    microbatch 0. The later wait for that send names the mistake."""
    program = program_for(choose("1f1b"), 2, 3)
    at = parse_action("0F1")
    assert program.schedule.rows[0].index(at) < program.schedule.rows[0].index(
        parse_action("0WAIT_F0")
    )

    def run(rank: int) -> None:
        def fault() -> None:
            spoil(pipeline.stages[0]._unsent[0].detach())

        pipeline = Pipeline(program, world(), faults={at: fault})
        pipeline.step()

    error, _ = errors_when_late(run)
    assert "0SEND_F0 " in error and f"{finding} before its wait" in error


def test_a_tensor_that_is_freed_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that keeps no reference to a tensor until it is sent is found. The tensor is a
    contiguous copy that the transport made, so no other owner keeps its memory."""
    send = Transport.send

    def careless(transport: Transport, action: Action, tensor: Tensor) -> None:
        # The tensor is not contiguous, so the transport sends a copy.
        send(transport, action, tensor.t().contiguous().t())
        transport._sending[action] = [(work, tensor) for work, _ in transport._sending[action]]

    monkeypatch.setattr(Transport, "send", careless)
    program = program_for(choose("1f1b"), 2, 3)

    def run(rank: int) -> None:
        Pipeline(program, world()).step()

    error, _ = errors_when_late(run)
    assert "the memory of 0SEND_F0 was given back before its wait" in error


def test_a_send_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transport, "wait_sent", lambda transport, send: None)
    program = program_for(choose("1f1b"), 2, 2)

    def run(rank: int) -> None:
        Pipeline(program, world()).step()

    # The last rank ends and cuts the first off from messages that have not left yet.
    _, last = errors_when_late(run)
    assert "nobody has waited for 1SEND_B0, 1SEND_B1" in last


def test_copies_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", 0)
    monkeypatch.setattr(offload, "_wait", lambda action, transfer: None)
    program = program_for(choose("1f1b"), 2, 4, offload=Offload.FULL)

    def run(rank: int) -> None:
        pipeline = Pipeline(program, world())
        pipeline.step()
        check_numbers(pipeline)

    assert any("gradients of stage" in error for error in errors_when_late(run))


def collective(kind: str) -> Action:
    return Action(0, Kind[kind], 0)


def test_collectives_bring_nothing_before_their_wait() -> None:
    """The result of a collective does not exist before its wait: until then the simulated late
    device fills the result, and a tensor that is summed for another rank, with wrong numbers."""

    def run(rank: int) -> None:
        exchange = StepCollectives(Collectives(world(), torch.device("cpu")), Recorder(rank))
        ones = torch.full((2,), 1.0 + rank)
        gathered, summed = collective("GATHER_S"), collective("REDUCE_E")
        shared = collective("BCAST_S")
        exchange.gather(gathered, ones)
        own = ones.clone()
        exchange.sum(summed, own, root=0)
        labels = torch.tensor([7, 8]) if rank == 0 else torch.zeros(2, dtype=torch.int64)
        exchange.broadcast(shared, [labels], root=0)
        early = exchange._in_flight[gathered][1][0]
        assert early.isnan().all()
        assert own.isnan().all() if rank == 0 else torch.equal(own, ones)
        assert labels.tolist() == ([7, 8] if rank == 0 else [-1, -1])
        assert exchange.result(gathered)[0].tolist() == [[1, 1], [2, 2]]
        assert exchange.result(shared)[0].tolist() == [7, 8]
        exchange.result(summed)
        assert own.tolist() == [3, 3] if rank == 0 else own.isnan().all()

    with late():
        values(run_ranks(2, run))


def test_what_is_given_to_a_collective_must_stay() -> None:
    def run(rank: int) -> None:
        exchange = StepCollectives(Collectives(world(), torch.device("cpu")), Recorder(rank))
        own = torch.ones(2)
        exchange.sum(collective("REDUCE_E"), own, root=0)
        own.add_(rank)
        exchange.result(collective("REDUCE_E"))

    _, error = errors_when_late(run)
    assert "was written to before its wait" in error
