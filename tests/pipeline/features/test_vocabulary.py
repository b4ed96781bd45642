"""Tests of vocabulary parallelism on real ranks over gloo, compared with the same model in one
process."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_ext.compile.program.verify import Program  # noqa: E402
from megatron_ext.runtime import watchdog  # noqa: E402
from megatron_ext.runtime.interruption import listen  # noqa: E402
from megatron_ext.runtime.messages import closing  # noqa: E402
from megatron_ext.runtime.messages.collectives import Collectives, StepCollectives  # noqa: E402
from megatron_ext.runtime.messages.peer_call import PeerFailure  # noqa: E402
from megatron_ext.runtime.recorder import Recorder  # noqa: E402
from megatron_ext.runtime.store import failure_report  # noqa: E402
from megatron_ext.schedule.action import Action, Kind, parse_action  # noqa: E402
from megatron_ext.schedule.kinds import RULES  # noqa: E402
from megatron_ext.schedule.problem import VocabularyParallel  # noqa: E402
from tests.helpers.combinations import at_night, each_once  # noqa: E402
from tests.helpers.ranks import RankResult, Script, run_ranks, running_ranks, values  # noqa: E402
from tests.helpers.stages import WIDTH, world  # noqa: E402
from tests.helpers.storages import LiveStorages, storages  # noqa: E402
from tests.helpers.vocabulary import (  # noqa: E402
    SHAPE,
    VOCABULARY,
    Model,
    Reference,
    VocabularyPipeline,
    alone,
    connect,
    program_for,
)
from tests.pipeline.failures.test_failure_report import tell_and_block, wait_for  # noqa: E402
from tests.pipeline.failures.test_faults import HERE, hang, kill, throw, wait_until_told  # noqa: E402

# Bound on the relative difference from float64, in a tensor's norm: this many units in the last
# place for each stage between the embedding and the loss, because each stage rounds some four
# times.
ULPS_PER_STAGE = 4
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def error_of(got: Tensor | None, expected: Tensor) -> float:
    assert got is not None
    return float((got.double() - expected).norm() / expected.norm())


def check_losses(pipeline: VocabularyPipeline, reference: Reference) -> dict[str, float]:
    """Assert that only the last stage's rank has losses, of all microbatches. Return by how much
    they differ from the reference."""
    placement = pipeline.program.schedule.placement
    got = pipeline.ends.losses
    is_last = pipeline.rank == placement.rank_of[-1]
    assert sorted(got) == (sorted(reference.losses) if is_last else [])
    return {f"loss {m}": error_of(got[m], reference.losses[m]) for m in got}


def check_step(pipeline: VocabularyPipeline) -> None:
    """Assert that losses and gradients equal those of one process up to rounding."""
    program, model, shard = pipeline.program, pipeline.model, pipeline.shard
    placement = program.schedule.placement
    reference = alone(model, placement.stages, program.problem.microbatches)
    errors = check_losses(pipeline, reference)
    rows = slice(shard.first_row, shard.first_row + shard.rows)
    assert shard.rows * placement.ranks * shard.tensor_parallel_size == VOCABULARY
    for name, parameter in (("embedding", shard.embedding), ("output", shard.output)):
        errors[name] = error_of(parameter.grad, getattr(reference, name)[rows])
    for number, stage in pipeline.stages.items():
        got = torch.cat([gradient.flatten() for gradient in stage.gradients])
        if model.sequence_parallel:
            got = pipeline.connections.whole(got, divides=False)
        errors[f"stage {number}"] = error_of(got, reference.stages[number])
    bound = ULPS_PER_STAGE * ULP[model.dtype] * placement.stages
    # The comparison also fails if an error is NaN.
    assert all(error <= bound for error in errors.values()), errors


def train(
    programs: Sequence[Program], models: Sequence[Model], tensor_parallel: int = 1
) -> Callable[[int], None]:
    """Return a function that runs and checks a step of every model under every program on a
    rank."""

    def run(rank: int) -> None:
        connections = connect(programs[0], tensor_parallel)
        for program in programs:
            for model in models:
                pipeline = VocabularyPipeline(program, connections, model)
                pipeline.step()
                check_step(pipeline)

    return run


BOTH = (VocabularyParallel.ONE, VocabularyParallel.TWO)
MODELS = [Model(dtype, is_tied) for dtype in ULP for is_tied in (False, True)]


@pytest.mark.parametrize(
    ("name", "ranks"),
    at_night(*each_once(["1f1b", "zb-h1", "zb-v", "v-half"], [3, 2, 4]))
    or [("1f1b", 3), ("zb-v", 4)],
)
def test_training(name: str, ranks: int) -> None:
    programs = [program_for(name, ranks, m, how) for how in BOTH for m in (1, 3, 8)]
    values(run_ranks(ranks, train(programs, MODELS)))


@pytest.mark.parametrize(("name", "sequence_parallel"), each_once(["1f1b", "zb-v"], [False, True]))
def test_training_with_tensor_parallel_ranks(name: str, sequence_parallel: bool) -> None:
    programs = [program_for(name, 2, 3, how) for how in BOTH]
    models = [replace(model, sequence_parallel=sequence_parallel) for model in MODELS]
    values(run_ranks(4, train(programs, models, tensor_parallel=2)))


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_evaluation_between_steps(name: str, how: VocabularyParallel) -> None:
    """A vocabulary split over the ranks trains, evaluates with another number of microbatches, and
    trains on with the right losses."""
    program = program_for(name, 3, 3, how)
    evaluation = program_for(name, 3, 5, how, forward_only=True)

    def run(rank: int) -> None:
        pipeline = VocabularyPipeline(program, connect(program), Model())
        pipeline.step()
        check_step(pipeline)
        tables = pipeline.shard.embedding, pipeline.shard.output
        gradients = [torch.clone(table.grad) for table in tables]
        pipeline.ends.losses.clear()
        pipeline.step(evaluation)
        stages = program.schedule.placement.stages
        errors = check_losses(pipeline, alone(Model(), stages, 5))
        bound = ULPS_PER_STAGE * ULP[torch.float32] * stages
        assert all(error <= bound for error in errors.values()), errors
        for table, gradient in zip(tables, gradients, strict=True):
            assert torch.equal(table.grad, gradient)
            table.grad = None
        for stage in pipeline.stages.values():
            stage.weight.grad = stage.bias.grad = None
        pipeline.ends.losses.clear()
        pipeline.step()
        check_step(pipeline)

    values(run_ranks(3, run))


def test_a_stage_is_complete_after_its_shard() -> None:
    """A rank synchronizes the gradients of its first stage and of its part of the vocabulary
    together, after the last gradient of the two."""
    program = program_for("1f1b", 3, 4, VocabularyParallel.TWO)

    def run(rank: int) -> None:
        events: list[str] = []
        pipeline = VocabularyPipeline(
            program, connect(program), Model(), after=lambda action: events.append(str(action))
        )
        for stage in pipeline.stages.values():
            stage.events = events
        pipeline.step()
        row = [
            str(action)
            for action in program.schedule.rows[rank]
            if RULES[action.kind].adds_to_gradients
        ]
        at = events.index(f"{rank} complete")
        assert events[at - 1] == row[-1] and events.count(f"{rank} complete") == 1
        assert not set(row) & set(events[at:])

    values(run_ranks(3, run))


# --- memory of a split vocabulary


@pytest.mark.real_time
@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_what_is_held(name: str, how: VocabularyParallel) -> None:
    """A rank's part of a split vocabulary stores little. Between S and SW a microbatch stores the
    logits in the type of the product (bfloat16, without a copy in float32), the hidden states, and
    a few numbers a token. After SW only gradients remain."""
    model = Model(torch.bfloat16)
    ranks = 2
    program = program_for(name, ranks, 4, how)
    tokens = SHAPE[0] * SHAPE[1]
    hidden, logits = (tokens * width * 2 for width in (WIDTH, VOCABULARY // ranks))
    figures = tokens * 4  # bytes of one float32 value a token
    labels = tokens * 8

    def run(rank: int) -> None:
        live = LiveStorages()
        is_last = rank == program.schedule.placement.rank_of[-1]
        waiting: set[int] = set()  # microbatches between S and SW

        def before(action: Action) -> None:
            if action.kind is Kind.LOGITS_WEIGHT:
                made = [kind for kind in (Kind.BCAST_S, Kind.LOGITS) if not is_last]
                check(action.microbatch, made or [Kind.LOGITS])
            live.maker = action

        def after(action: Action) -> None:
            live.maker = None

        def check(microbatch: int, kinds: list[Kind]) -> None:
            sizes = live.sizes()
            held = sum(
                sizes[address]
                for address, maker in live.maker_of.items()
                if maker is not None and maker.microbatch == microbatch and maker.kind in kinds
            )
            # A rank's part stores three statistics a token: the largest logit, the sum, and the
            # label's logit.
            received = hidden + labels if Kind.BCAST_S in kinds else 0
            assert held == logits + 3 * figures + received
            waiting.add(microbatch)

        pipeline = VocabularyPipeline(program, connect(program), model, before, after)
        with live:
            pipeline.step()
        assert waiting == set(range(4))
        tables = 2 * pipeline.shard.rows * WIDTH * 2
        ours = {address for address, maker in live.maker_of.items() if maker is not None}
        kept = {storage._cdata for storage in storages(list(pipeline.ends.losses.values()))}

        def left_over() -> int:
            sizes = live.sizes()
            return sum(sizes[address] for address in (ours & sizes.keys()) - kept)

        # On a busy machine gloo's thread may free the last collective's tensors only after its
        # wait.
        end = time.monotonic() + 10.0
        while left_over() != tables and time.monotonic() < end:
            time.sleep(0.01)
        assert left_over() == tables

    values(run_ranks(ranks, run))


# --- ranks of a split vocabulary that fail


@dataclass(frozen=True)
class Step:
    """Step of zb-h1 on three ranks with a split vocabulary; ``faults`` are functions that run at
    the named actions.

    The ranks listen for each other's failures, as in a training, but by default much later than
    their connections break. They must listen, because gloo forgets a send that is pending when its
    connection breaks, and a rank of a collective may then wait for ever.
    """

    faults: Mapping[str, Callable[[], None]]
    goes_on: bool = False
    listens_every: float = 10.0  # seconds between two looks for failures of other ranks

    def __call__(self, rank: int) -> None:
        failure_report.LOOK_SECONDS = self.listens_every
        program = program_for("zb-h1", 3, 6, VocabularyParallel.TWO)

        def before(action: Action) -> None:
            self.faults.get(str(action), lambda: None)()

        connections = connect(program)
        pipeline = VocabularyPipeline(program, connections, Model(), before)
        assert (
            listen(pipeline.recorder, [connections.channels, connections.collectives]) is not None
        )
        try:
            pipeline.step()
        except ValueError:
            if not self.goes_on:
                raise
            with pytest.raises(RuntimeError, match="has failed in an earlier step, and its"):
                pipeline.step()
            wait_until_told()


def ranks_cut_off(results: Mapping[int, RankResult]) -> list[int]:
    """Return the ranks whose connections broke; other ranks have heard another rank's report.
    Asserts that all have ended and said where they were, and for a broken connection also what they
    waited for."""
    cut_off = []
    for rank, result in results.items():
        stderr = result.stderr
        assert result.exit_code == 1, (rank, result.exit_code, stderr)
        assert "Fatal" not in stderr
        heard = (
            r"megatron_ext: pipeline rank (\d) .*: it ends, as another rank has failed: pipeline"
        )
        if match := re.search(heard, stderr):
            assert match[1] == str(rank), stderr
            continue
        cut_off.append(rank)
        assert re.search(
            rf"PeerFailure: pipeline rank {rank} was waiting for {rank}[A-Z_]+\d "
            r"\((to|from|with) (the other )?pipeline rank",
            stderr,
        ), stderr
        assert re.search(rf"megatron_ext: pipeline rank {rank}, in {rank}\D", stderr)
    return cut_off


@pytest.mark.parametrize(
    ("at", "fault", "exit_code"),
    [
        ("1S2", throw, 1),
        ("0SW5", kill, -signal.SIGKILL),
        ("1BCAST_S4", throw, 1),
        *at_night(
            ("1S2", kill, -signal.SIGKILL),
            ("2SI1", throw, 1),
            ("0E3", throw, 1),
            ("2L0", throw, 1),
        ),
    ],
)
def test_every_rank_ends_when_one_fails(
    script: Script, at: str, fault: Callable[[], None], exit_code: int
) -> None:
    """If one rank of a split vocabulary fails, every rank ends. Broadcasts that are posted ahead,
    for which gloo would keep a closed group open, do not prevent this."""
    with running_ranks(3, Step({at: fault}), script) as running:
        results = running.wait()
    failed = parse_action(at).stage
    assert ranks_cut_off({rank: result for rank, result in enumerate(results) if rank != failed})
    result = results[failed]
    assert result.exit_code == exit_code, result.stderr
    assert "PeerFailure" not in result.stderr and "Fatal" not in result.stderr
    if fault is throw:
        assert f"pipeline rank {failed}, in {at} [" in result.stderr


@pytest.mark.parametrize("at", ["1S2", "2S0", "0SI4"])
def test_a_rank_whose_caller_goes_on_after_its_error(script: Script, at: str) -> None:
    with running_ranks(3, Step({at: throw}, goes_on=True), script) as running:
        failed = parse_action(at).stage
        others = [rank for rank in range(3) if rank != failed]
        running.wait_until_it_says(failed, HERE)
        running.wait_until_ended(*others)
        running.send_signal(failed, signal.SIGUSR1)
        results = running.wait()
    assert results[failed].exit_code == 0, results[failed].stderr
    assert ranks_cut_off({rank: results[rank] for rank in others})


def wait_for_ever() -> None:
    """Wait for ever, as in a collective whose send gloo has forgotten."""
    watchdog.GRACE_SECONDS = 0.1
    tell_and_block()


def throw_once_rank_1_waits() -> None:
    wait_for(1)
    throw()


def test_a_rank_that_is_not_cut_off_hears_of_the_failure(script: Script) -> None:
    step = Step({"0S0": throw_once_rank_1_waits, "1S0": wait_for_ever}, listens_every=0.1)
    with running_ranks(3, step, script) as running:
        results = running.wait()
    assert 1 not in ranks_cut_off({rank: results[rank] for rank in (1, 2)})


def test_who_has_failed_does_not_wait_long_for_one_that_hangs(script: Script) -> None:
    """A rank that fails ends soon although another rank hangs. The hanging rank 0 is the root of a
    broadcast that rank 1 has posted ahead. gloo keeps the group until that broadcast comes, on a
    thread that must not block the end of rank 1's process."""
    with running_ranks(3, Step({"0S1": hang, "1S1": throw}), script) as running:
        running.wait_until_ended(1, 2)
        running.send_signal(0, signal.SIGKILL)
        results = running.wait()
    assert results[1].exit_code == 1, results[1].stderr
    assert "ValueError: the model is broken" in results[1].stderr
    assert "Fatal" not in results[1].stderr
    ranks_cut_off({2: results[2]})


def test_groups_are_closed_at_once() -> None:
    """All process groups of a failed rank are closed at the same time. Rank 1 fails with a
    collective pending that rank 0 never starts, because rank 0 waits for rank 1 in another one.
    Groups used to be closed one after the other, and the first one kept both ranks waiting."""

    def run(rank: int) -> None:
        exchange = StepCollectives(Collectives(world(), torch.device("cpu")), Recorder(rank))
        if rank == 1:
            exchange.gather(parse_action("1GATHER_S0"), torch.zeros(1))
        else:
            exchange.broadcast(parse_action("0BCAST_S0"), [torch.zeros(1)], root=1)
            with pytest.raises(PeerFailure, match=r"0BCAST_S0 \(with the other pipeline ranks\)"):
                exchange.result(parse_action("0BCAST_S0"))
        exchange.abandon()

    values(run_ranks(2, run))


def test_a_group_that_does_not_close_is_waited_for_once() -> None:
    """A process waits only once for a process group that does not close. It used to wait a second
    time at its exit."""

    def run(rank: int) -> None:
        never, waits = threading.Event(), list[float]()
        group: Any = object()
        patch = pytest.MonkeyPatch()
        patch.setattr(dist.distributed_c10d, "_abort_process_group", lambda group: never.wait())
        patch.setattr(threading.Thread, "join", lambda thread, timeout: waits.append(timeout))
        patch.setattr(closing, "CLOSING_SECONDS", 0.01)
        closing.close_groups({0: group})
        time.sleep(0.01)
        closing._wait()
        assert waits[1:] == [0.0]

    values(run_ranks(1, run, connect=False))


def test_a_tensor_that_the_other_ranks_do_not_expect() -> None:
    program = program_for("1f1b", 2, 1, VocabularyParallel.ONE)

    def run(rank: int) -> None:
        pipeline = VocabularyPipeline(program, connect(program), Model())
        pipeline.ends.shape = (2, 5)
        pipeline.step()

    first, last = run_ranks(2, run)
    assert "0BCAST_E0 has a tensor of torch.int64 of shape (2, 5), but" in first.error
    assert "PeerFailure" in last.error
