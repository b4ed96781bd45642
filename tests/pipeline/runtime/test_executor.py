"""Tests of programs that real ranks execute over gloo: the actions that run, their order, and the
results.

Each case compares losses and gradients with the same stages run in one process, to the last bit.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_ext.compile.program import verify  # noqa: E402
from megatron_ext.compile.program.graph import Channel, batches_of  # noqa: E402
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove  # noqa: E402
from megatron_ext.compile.registry import choose  # noqa: E402
from megatron_ext.runtime.executor import NEIGHBOURS, _Execution  # noqa: E402
from megatron_ext.runtime.messages.batched import BatchedTransport, PipelineGroup  # noqa: E402
from megatron_ext.runtime.messages.channels import Channels  # noqa: E402
from megatron_ext.runtime.messages.peer_call import PeerFailure  # noqa: E402
from megatron_ext.runtime.messages.transport import Boundary, Transport  # noqa: E402
from megatron_ext.runtime.recorder import Recorder  # noqa: E402
from megatron_ext.runtime.weight_gradients import queue  # noqa: E402
from megatron_ext.schedule.action import Action, Kind  # noqa: E402
from megatron_ext.schedule.kinds import RULES, Lane  # noqa: E402
from megatron_ext.schedule.placement import Neighbour, Placement, line  # noqa: E402
from megatron_ext.schedule.problem import P2P, Recompute  # noqa: E402
from megatron_ext.schedule.schedule import Schedule, recomputed  # noqa: E402
from tests.helpers.combinations import at_night, in_pairs  # noqa: E402
from tests.helpers.random_schedules import mutate, random_case  # noqa: E402
from tests.helpers.ranks import run_ranks, values  # noqa: E402
from tests.helpers.schedules import written  # noqa: E402
from tests.helpers.stages import (  # noqa: E402
    CountingTransport,
    InOrderGroup,
    Pipeline,
    alone,
    as_file,
    expected_events,
    greedy,
    loop_placement,
    problem_for,
    program_for,
    v_placement,
    world,
)

Place = Callable[[int], Placement]

# Numbers of microbatches: fewer than the three ranks, and no multiple of three.
MICROBATCHES = (1, 2, 5)


def check_step(pipeline: Pipeline, transport: CountingTransport, program: Program) -> None:
    """Assert that the latest step ran exactly the actions of its program, and that no tensor or
    message is left after it."""
    rank = transport.rank
    row = program.schedule.rows[rank]
    assert pipeline.events == expected_events(program, rank)
    assert transport.read == messages_used(program, rank)
    assert transport.is_empty()
    assert pipeline.recorder.position is None
    assert len(queue) == 0
    assert all(stage.is_empty() for stage in pipeline.stages.values())
    waits = Counter(a for a in row if RULES[a.kind].lane is Lane.WAIT)
    sends = [a for a in row if RULES[a.kind].lane is Lane.SEND]
    assert len(waits) == len(sends) and set(waits.values()) <= {1}


def messages_used(program: Program, rank: int) -> list[Action]:
    """Return the messages that the passes of ``rank`` read, in the order of the passes."""
    placement = program.schedule.placement
    used = []
    for stage, kind, microbatch in program.schedule.rows[rank]:
        if kind is Kind.FORWARD and placement.is_remote(stage, Neighbour.PREVIOUS):
            used.append(Action(stage, Kind.RECV_F, microbatch))
        elif Kind.BACKWARD_INPUT in RULES[kind].covers and placement.is_remote(
            stage, Neighbour.NEXT
        ):
            used.append(Action(stage, Kind.RECV_B, microbatch))
    return used


def check_numbers(pipeline: Pipeline, steps: int = 1) -> None:
    """Assert that gradients and losses equal those of one process, to the last bit."""
    reference = alone(pipeline, steps)
    for number, stage in pipeline.stages.items():
        assert len(stage.gradients) == (0 if pipeline.program.problem.forward_only else 2)
        for got, expected in zip(stage.gradients, reference[number].gradients, strict=True):
            assert torch.equal(got, expected), f"gradients of stage {number}"
        assert stage.losses == reference[number].losses


def run_programs(programs: list[Program], varies: bool = False) -> Callable[[int], None]:
    """Return a function that runs and checks all ``programs`` on a rank, one after the other."""

    def run(rank: int) -> None:
        for program in programs:
            pipeline = Pipeline(program, world(), varies=varies)
            check_step(pipeline, pipeline.step(), program)
            check_numbers(pipeline)

    return run


@pytest.mark.parametrize(
    ("name", "ranks", "p2p"), in_pairs(["gpipe", "1f1b", "zb-h1"], [1, 2, 3, 4, 5], P2P)
)
def test_line(name: str, ranks: int, p2p: P2P) -> None:
    programs = [program_for(choose(name), ranks, m, p2p=p2p) for m in MICROBATCHES]
    values(run_ranks(ranks, run_programs(programs)))


@pytest.mark.parametrize(
    ("place", "ranks", "splits", "p2p"),
    in_pairs([v_placement, loop_placement], [1, 2, 4], [False, True], P2P),
)
def test_two_chunks_a_rank(place: Place, ranks: int, splits: bool, p2p: P2P) -> None:
    """The executor runs two chunks a rank. Neighbouring stages on one rank pass tensors without
    messages: at the turn of a V, and everywhere in a pipeline of one rank."""
    programs = [
        program_for(as_file(greedy(place(ranks), m, splits)), ranks, m, p2p=p2p)
        for m in MICROBATCHES
    ]
    values(run_ranks(ranks, run_programs(programs)))


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_are_reduced_in_one_order_whatever_the_program(reverse: bool) -> None:
    """A rank reduces the gradients of its chunks in the same order under all programs. In a race of
    schedules (--pipeline-race), one replica may run the baseline while another runs a candidate,
    and steps of other sizes run other programs too. Replicas whose chunks ended in different orders
    used to meet in collectives of different chunks: the job hung, or summed gradients of different
    chunks."""
    schedule = greedy(loop_placement(1), 3, True)
    (row,) = schedule.rows
    ends = sorted((a for a in row if a.kind is Kind.BACKWARD_WEIGHT), reverse=reverse)
    rest = [action for action in row if action.kind is not Kind.BACKWARD_WEIGHT]
    program = program_for(as_file(replace(schedule, rows=((*rest, *ends),))), 1, 3)

    def run(rank: int) -> list[str]:
        pipeline = Pipeline(program, world())
        pipeline.step()
        return [event for event in pipeline.events if event[1:] in ("W2", "W0", " complete")]

    (events,) = values(run_ranks(1, run))
    if reverse:  # the reduction of the later chunk starts without waiting
        assert events == ["1W2", "1W0", "1 complete", "0W2", "0W0", "0 complete"]
    else:
        assert events == ["0W0", "0W2", "1W0", "1W2", "1 complete", "0 complete"]


@pytest.mark.parametrize("p2p", P2P)
def test_recomputed_passes(p2p: P2P) -> None:
    again = Recompute(first=3)
    programs = [program_for(choose("zb-v"), 2, m, p2p=p2p, recompute=again) for m in MICROBATCHES]
    assert all(any(recomputed(row) for row in program.schedule.rows) for program in programs)
    values(run_ranks(2, run_programs(programs)))


@pytest.mark.parametrize("p2p", P2P)
def test_pairs(p2p: P2P) -> None:
    """The executor runs an overlapped forward and backward as one call, after the receives of both
    passes and before their sends."""
    names = ["interleaved", "zb-v", "dualpipe-v"]
    programs = [program_for(choose(name), 2, 6, p2p=p2p, pairs=True) for name in names]
    assert all(program.schedule.pairs for program in programs)
    values(run_ranks(2, run_programs(programs)))


def test_who_fails_in_a_pair_says_so() -> None:
    """If one of two overlapped passes fails, the error names both passes, as either may be the
    cause."""
    program = program_for(choose("zb-v"), 2, 6, pairs=True)
    rank = program.schedule.placement.rank_of[0]
    pair = next(pair for pair in sorted(program.schedule.pairs) if pair.forward.stage == 0)

    def fail() -> None:
        raise ArithmeticError("too much")

    def run(own: int) -> str:
        pipeline = Pipeline(program, world(), faults={pair.backward: fail})
        with pytest.raises((ArithmeticError, PeerFailure)) as failure:
            pipeline.step()
        return "".join(failure.value.__notes__)

    assert f"pipeline rank {rank}, in {pair}" in values(run_ranks(2, run))[rank]


def test_who_fails_shows_the_place_in_its_row() -> None:
    """A rank whose own pass fails prints the failed action among its neighbours in the rank's row
    of the schedule. The other ranks only name what they waited for."""
    program = program_for(choose("zb-h1"), 2, 6)

    def fail() -> None:
        raise ArithmeticError("too much")

    def run(own: int) -> str:
        pipeline = Pipeline(program, world(), faults={Action(0, Kind.FORWARD, 3): fail})
        with pytest.raises((ArithmeticError, PeerFailure)) as failure:
            pipeline.step()
        return "\n".join(failure.value.__notes__)

    first, second = values(run_ranks(2, run))
    row = [str(action) for action in program.schedule.rows[0]]
    place = row.index("0F3")
    words = [
        *row[place - NEIGHBOURS : place],
        "0F3 <-- ERROR HERE,",
        *row[place + 1 :][:NEIGHBOURS],
    ]
    assert first.splitlines()[-1] == f"megatron_ext: its row: ... {' '.join(words)} ..."
    assert "ERROR HERE" not in second


@pytest.mark.parametrize("place", [line, v_placement, loop_placement])
def test_shapes_that_vary_by_microbatch(place: Place) -> None:
    programs = [program_for(as_file(greedy(place(3), m, True)), 3, m) for m in (1, 7)]
    values(run_ranks(3, run_programs(programs, varies=True)))


@pytest.mark.parametrize("microbatches", [6, 8])
def test_evaluation_with_varying_shapes_does_not_hang(microbatches: int) -> None:
    """A receive of a tensor of unknown shape happens when a pass needs it, not ahead of it. The
    proof used to treat this receive as posted ahead and accepted this evaluation, in which three
    ranks waited for one another."""
    m = range(microbatches)
    forward = {stage: [Action(stage, Kind.FORWARD, k) for k in m] for stage in range(5)}
    backward = {stage: [Action(stage, Kind.FULL_BACKWARD, k) for k in m] for stage in range(5)}
    rows = (
        (*forward[0], *forward[2], *backward[2], *backward[0]),
        (
            forward[1][0],
            forward[4][0],
            *forward[1][1:],
            *forward[4][1:],
            *backward[4],
            *backward[1],
        ),
        (*forward[3], *backward[3]),
    )
    schedule = Schedule("tangled", Placement("file", (0, 1, 0, 2, 1)), rows)
    program = program_for(as_file(schedule), 3, microbatches, forward_only=True)
    values(run_ranks(3, run_programs([program], varies=True)))


@pytest.mark.parametrize(
    ("varies", "p2p"), [(False, P2P.ASYNC), (True, P2P.ASYNC), (False, P2P.BATCHED)]
)
@pytest.mark.parametrize("place", [line, v_placement, loop_placement])
def test_steps_over_the_same_channels(place: Place, varies: bool, p2p: P2P) -> None:
    """A training step, an evaluation and another training step run over the same channels. The
    evaluation has more microbatches than sends may be pending."""
    train = program_for(as_file(greedy(place(3), 4, True)), 3, 4, p2p=p2p)
    evaluate = program_for(as_file(greedy(place(3), 9, True)), 3, 9, True, p2p)

    def run(rank: int) -> None:
        pipeline = Pipeline(train, world(), varies=varies)
        for program in (train, evaluate, train):
            check_step(pipeline, pipeline.step(program), program)
            if program is evaluate:
                assert not any("complete" in event for event in pipeline.events)
                last = pipeline.stages.get(train.schedule.placement.stages - 1)
                assert last is None or sorted(last.losses) == list(range(9))
        for stage in pipeline.stages.values():
            stage.losses = {k: loss for k, loss in stage.losses.items() if k < 4}
        check_numbers(pipeline, steps=2)

    values(run_ranks(3, run))


@pytest.mark.parametrize("p2p", P2P)
def test_a_step_lets_go_of_its_stages(p2p: P2P) -> None:
    """A step releases its stages at its end, without the garbage collector. A stage refers to
    Megatron's data iterator, whose worker processes must end before the interpreter waits for them.
    A run with --exit-signal-handler and --num-workers used not to end."""
    program = program_for(choose("zb-h1"), 2, 3, p2p=p2p)

    def run(rank: int) -> None:
        pipeline = Pipeline(program, world())
        gc.disable()
        pipeline.step()
        (stage,) = map(weakref.ref, pipeline.stages.values())
        del pipeline
        assert stage() is None, gc.get_referrers(stage())

    values(run_ranks(2, run))


def test_a_kind_without_a_handler_is_an_error() -> None:
    program = program_for(choose("gpipe"), 1, 1)
    with pytest.raises(AssertionError, match="nobody runs 0F0"):
        _Execution(program, 0, {}, Recorder(0), []).run()


@pytest.mark.parametrize("p2p", P2P)
@pytest.mark.parametrize("pipelines", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_two_pipelines_in_one_world(pipelines: list[list[int]], p2p: P2P) -> None:
    """Two pipelines in one world each create the channels of their own ranks only, and train."""
    program = program_for(choose("zb-h1"), 2, 3, p2p=p2p)

    def run(rank: int) -> None:
        groups = [dist.new_group(ranks) for ranks in pipelines]
        mine = next(data for data, ranks in enumerate(pipelines) if rank in ranks)
        group = groups[mine]
        assert isinstance(group, dist.ProcessGroup)
        pipeline = Pipeline(program, group, data=mine)
        check_step(pipeline, pipeline.step(), program)
        check_numbers(pipeline)

    values(run_ranks(4, run))


@pytest.mark.parametrize("ranks", [2, 3, *at_night(4)])
def test_any_valid_schedule_runs(ranks: int) -> None:
    """Random valid schedules run: with random placements and orders, fixed and varying shapes,
    batched messages, and with forward passes alone."""
    cases = [case for case in map(random_case, range(60)) if case.problem.ranks == ranks][:6]
    assert len(cases) == 6

    def programs(p2p: P2P) -> list[Program]:
        return [
            program_for(as_file(case.schedule), ranks, case.problem.microbatches, forward_only, p2p)
            for forward_only in (False, True)
            for case in cases
        ]

    made = {p2p: programs(p2p) for p2p in P2P}

    def run(rank: int) -> None:
        for series in made.values():
            run_programs(series)(rank)
        run_programs(made[P2P.ASYNC], varies=True)(rank)

    values(run_ranks(ranks, run))


@pytest.mark.parametrize("p2p", P2P)
def test_what_the_proof_lets_through_runs(p2p: P2P) -> None:
    """Every program that the proof accepts runs to its end. Programs are small random changes of
    one program, its messages and waits included.

    Each changed program is either rejected by the proof or run on real ranks. If the proof accepted
    a wrong one, its run would hang: batched messages go over a group that is as strict about their
    order as NCCL's.
    """
    rng = random.Random(0)
    problem = problem_for(v_placement(3), 4).with_options(p2p=p2p)
    start = program_for(as_file(greedy(problem.placement, 4, True)), 3, 4, p2p=p2p).schedule
    accepted: list[Program] = []
    rejected = 0
    while len(accepted) < 20:
        try:
            changed = mutate(start, rng)
            if changed != start:
                accepted.append(prove(changed, problem))
        except InvalidSchedule as error:
            assert error.actions
            rejected += 1
    assert rejected
    values(run_ranks(3, run_programs(accepted)))


def test_what_the_proof_refuses_hangs() -> None:
    """A schedule that the proof refuses hangs if it runs all the same; otherwise the test of
    accepted programs could not fail. With batched messages, receives that are posted ahead block
    the messages that they wait for. This test creates a program without a proof."""
    schedule = written(
        """
        0RECV_B0 0F0 0SEND_F0 0B0 0WAIT_F0
        1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_B0
        """,
        (0, 1),
    )
    problem = problem_for(line(2), 1).with_options(p2p=P2P.BATCHED)
    with pytest.raises(InvalidSchedule, match="it would hang: "):
        prove(schedule, problem)
    forged = Program(schedule, problem, verify._SEAL)

    def run(rank: int) -> None:
        Pipeline(forged, world(), connect=InOrderGroup).step()

    assert [result.exit_code for result in run_ranks(2, run, timeout=3)] == [None, None]


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), (3, 4)),
        (torch.zeros(3, 4, dtype=torch.float64), None),
        (torch.zeros(2, 4), (3, 4)),
    ],
)
def test_a_tensor_that_the_other_rank_does_not_expect(
    tensor: Tensor, shape: tuple[int, ...] | None
) -> None:
    """Sending a tensor of another type or shape than the next rank expects is an error. gloo used
    to interpret the bytes as the expected type, and the next stage computed with noise."""

    def run(rank: int) -> None:
        channels = Channels(world(), [Channel(0, 1, Kind.SEND_F)], torch.device("cpu"))
        channels.connect_hosts()
        boundary = Boundary(shape, torch.float32)
        transport = Transport(channels, boundary, line(2), Recorder(rank))
        if rank == 0:
            with pytest.raises(ValueError, match=r"0SEND_F1 has .* have torch\.float32"):
                transport.send(Action(0, Kind.SEND_F, 1), tensor)
        dist.barrier()  # the barrier keeps a rank alive until its peer has connected

    values(run_ranks(2, run))


@pytest.mark.real_time
def test_of_a_batch_the_message_that_fails_is_named() -> None:
    """If a message of a batch fails, the error names that message rather than the one that the rank
    waited for, which has arrived."""
    program = program_for(choose("1f1b"), 3, 3, p2p=P2P.BATCHED)
    row = program.schedule.rows[1]
    receive, send = next(
        (row[batch[0]], row[batch[1]])
        for batch in batches_of(row)
        if [row[position].kind for position in batch] == [Kind.RECV_F, Kind.SEND_F]
    )
    tensor = torch.ones(3, 4)

    def run(rank: int) -> str:
        group = PipelineGroup(world(), torch.device("cpu"))
        if rank == 0:
            (work,) = group.start([(Channel(0, 1, Kind.SEND_F), tensor)])
            work.wait()
        if rank == 2:
            time.sleep(1)  # time for rank 1 to start its messages
        if rank != 1:
            return ""
        boundary = Boundary((3, 4), torch.float32)
        transport = BatchedTransport(group, boundary, program, Recorder(rank))
        transport.receive(receive)
        transport.send(send, tensor)
        with pytest.raises(PeerFailure) as caught:
            transport.received(receive)
        return str(caught.value)

    message = values(run_ranks(3, run))[1]
    assert f"waiting for {send} (to pipeline rank 2)" in message


def test_stages_agree_with_autograd() -> None:
    """The stages that tests of the executor use have the gradients that autograd computes."""

    def run(rank: int) -> None:
        pipeline = Pipeline(program_for(choose("gpipe"), 1, 2), world())
        pipeline.step()
        (stage,) = pipeline.stages.values()
        weight = stage.weight.detach().clone().requires_grad_()
        bias = stage.bias.detach().clone().requires_grad_()
        for microbatch in range(2):
            x = torch.tanh(stage.sample(microbatch))
            torch.nn.functional.linear(x, weight, bias).square().mean().backward()
        torch.testing.assert_close(stage.gradients, [weight.grad, bias.grad])

    values(run_ranks(1, run))
