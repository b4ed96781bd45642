"""Tests of post-validation, in which a rank's optimizer step does not wait for the other ranks,
over gloo.

Each case compares consecutive steps with the same steps run in one process, which wait for all
gradients, to the last bit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from megatron_ext.compile.program.verify import Program  # noqa: E402
from megatron_ext.compile.registry import choose  # noqa: E402
from megatron_ext.features.post_validation.runtime.messages import ValidationMessages  # noqa: E402
from megatron_ext.features.post_validation.runtime.partial_state import PartialState  # noqa: E402
from megatron_ext.runtime.recorder import Recorder  # noqa: E402
from megatron_ext.runtime.weight_gradients import queue  # noqa: E402
from megatron_ext.schedule.placement import Placement, line  # noqa: E402
from tests.helpers.combinations import each_once  # noqa: E402
from tests.helpers.ranks import run_ranks, values  # noqa: E402
from tests.helpers.stages import (  # noqa: E402
    Pipeline,
    expected_events,
    program_for,
    v_placement,
    world,
)
from tests.helpers.validation import (  # noqa: E402
    Course,
    StepAtOnce,
    parameters,
    read_data_of,
    synchronously,
)


def check_course(pipeline: Pipeline, course: Course) -> None:
    """Assert that the pipeline runs the steps of ``course`` as one process would."""
    program, rank = pipeline.program, pipeline.group.rank()
    reference = synchronously(pipeline, course)
    validation = StepAtOnce(pipeline, course, reference.limits)
    last = pipeline.stages.get(program.schedule.placement.stages - 1)
    for step in range(course.steps):
        read_data_of(pipeline.stages.values(), pipeline.data, step)
        transport = pipeline.step(validation=validation)
        begins_again = course.is_bad(step - 1)
        assert pipeline.events == expected_events(program, rank, begins_again), f"step {step}"
        assert transport.is_empty()
        assert pipeline.recorder.position is None
        assert len(queue) == 0
        assert all(stage.is_empty() for stage in pipeline.stages.values())
        if last is not None:
            assert last.losses == reference.losses[step], f"step {step}"
        validation.optimizer_step()
    validation.commit_or_rollback()
    assert validation.states == [states[validation.position] for states in reference.states]
    bad = {**course.clips, **course.overflows}
    assert validation.taken_back == [s for s in sorted(bad) if validation.position < bad[s]]
    expected = [reference.stages[number] for number in pipeline.stages]
    for got, wanted in zip(parameters(pipeline.stages.values()), parameters(expected), strict=True):
        assert torch.equal(got, wanted)


def run_courses(
    programs: list[Program], course: Course, shapes: Iterable[bool] = (False,)
) -> Callable[[int], None]:
    """Return a function that checks ``course`` on a rank for each program. ``shapes`` says whether
    shapes vary; each value runs in turn."""

    def run(rank: int) -> None:
        for program, varies in itertools.product(programs, shapes):
            check_course(Pipeline(program, world(), varies=varies), course)

    return run


def bad_days(ranks: int) -> Course:
    """Return eight steps with good and bad ones. Bad steps are known to the last rank only, or to
    the first rank already; two follow each other, some are clipped and one overflows, and the last
    step is bad."""
    last = ranks - 1
    return Course(8, clips={1: last, 4: 0, 5: last // 2, 7: last}, overflows={3: last})


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*each_once(["zb-2p", "zb-v", "zb-h2", "v-auto"], [2, 3, 4]), ("zb-2p", 1)],
)
def test_parameters_are_those_of_synchronous_steps(name: str, ranks: int) -> None:
    """Parameters under post-validation equal those of steps that wait for all ranks. The steps
    have fewer microbatches than ranks, or a number that is not a multiple of them, and shapes that
    vary."""
    programs = [program_for(choose(name), ranks, m, steps_overlap=True) for m in (1, 2, 5)]
    values(run_ranks(ranks, run_courses(programs, bad_days(ranks), shapes=(False, True))))


@pytest.mark.parametrize("name", ["zb-2p", "zb-v"])
@pytest.mark.parametrize("pipelines", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_two_pipelines_in_one_world(name: str, pipelines: list[list[int]]) -> None:
    """Two pipelines in one world run post-validation independently: each has its own data, partial
    states and verdicts."""
    program = program_for(choose(name), 2, 3, steps_overlap=True)
    courses = [Course(5, clips={0: 1, 3: 0}), Course(5, clips={2: 1}, overflows={3: 0})]

    def run(rank: int) -> None:
        groups = [dist.new_group(ranks) for ranks in pipelines]
        mine = next(data for data, ranks in enumerate(pipelines) if rank in ranks)
        group = groups[mine]
        assert isinstance(group, dist.ProcessGroup)
        check_course(Pipeline(program, group, data=mine), courses[mine])

    values(run_ranks(4, run))


# --- the messages of post-validation, without steps


def messages_of(rank: int, placement: Placement) -> ValidationMessages:
    return ValidationMessages(world(), placement, Recorder(rank))


@pytest.mark.parametrize("place", [line, v_placement])
def test_states_go_along_the_chain_and_the_verdict_comes_back(
    place: Callable[[int], Placement],
) -> None:
    """Partial states of the gradient norm are passed from rank to rank, and the verdict comes back.
    They are added in the order of the ranks' first stages, since a sum of floats depends on its
    order."""
    norms = [0.1, 0.2, 0.3, 1e17]

    def run(rank: int) -> list[PartialState]:
        placement = place(4)
        messages = messages_of(rank, placement)
        position = placement.stages_of[rank][0]
        assert (messages.is_first, messages.is_last) == (position == 0, position == 3)
        own = PartialState(norms[position], position == 2, 7 if position == 3 else 0)
        state = messages.partial().plus(own)
        messages.pass_on(state)
        return [state, messages.verdict()]

    results = values(run_ranks(4, run))
    sums = [0.1, 0.1 + 0.2, 0.1 + 0.2 + 0.3, 0.1 + 0.2 + 0.3 + 1e17]
    whole = PartialState(sums[3], True, 7)
    for rank, (state, verdict) in enumerate(results):
        position = place(4).stages_of[rank][0]
        tokens = 7 if position == 3 else 0
        assert state == PartialState(sums[position], position >= 2, tokens)
        assert verdict == whole


def test_no_rank_waits_until_its_state_is_taken() -> None:
    """A rank sends its partial state and does not wait until the next rank receives it. The next
    rank receives the state at the end of its own part of the step, which is later by the delay
    between neighbours."""

    def run(rank: int) -> None:
        messages = messages_of(rank, line(2))
        if rank == 0:
            messages.pass_on(PartialState(1.0))
            dist.barrier()
        else:
            dist.barrier()
            messages.pass_on(messages.partial())
        assert messages.verdict() == PartialState(1.0)

    values(run_ranks(2, run, timeout=20))


def test_a_verdict_is_passed_back_by_a_rank_that_is_in_a_pass() -> None:
    """Rank 0 gets the verdict on a step although rank 1, which passes it back, is in a pass and has
    not requested the verdict itself."""

    def run(rank: int) -> None:
        messages = messages_of(rank, line(3))
        messages.pass_on(messages.partial().plus(PartialState(1.0)))
        messages.expect()
        if rank == 1:
            dist.barrier()
        assert messages.verdict() == PartialState(3.0)
        if rank != 1:
            dist.barrier()

    values(run_ranks(3, run, timeout=20))


def test_nothing_is_expected_where_nothing_is_pending() -> None:
    """A rank expects no verdict if no earlier step awaits one: in the first step, in a step before
    which the verdict was already received, and in a step that restarts."""

    def run(rank: int) -> None:
        messages = messages_of(rank, line(2))
        for _ in range(2):
            messages.expect()
            assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
            with pytest.raises(AssertionError, match="no step is pending"):
                messages.verdict()
            messages.pass_on(messages.partial())
            with pytest.raises(AssertionError, match="has not been taken"):
                messages.pass_on(PartialState())
            messages.verdict()

    values(run_ranks(2, run))


def test_ranks_that_are_in_different_steps() -> None:
    """Partial states from different steps are refused. Otherwise a rank would take the verdict on
    another step for that on its own."""

    def run(rank: int) -> None:
        messages = messages_of(rank, line(2))
        if rank == 0:
            messages.pass_on(PartialState())
            messages.verdict()
            messages.pass_on(PartialState())
        else:
            messages.pass_on(messages.partial())
            messages.verdict()
            messages._steps += 1
            with pytest.raises(AssertionError, match="of step 1 has come in step 2"):
                messages.partial()
        dist.barrier()  # the barrier keeps the sender of a message alive

    values(run_ranks(2, run))
