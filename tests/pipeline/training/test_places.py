"""Tests of programs made for measured costs of each place in a step (a microbatch's position), in
Megatron's loop.

The test sets the seconds of passes; everything else is a real training with ordered microbatches.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_ext
from megatron_ext.adapter import programs as programs_module
from megatron_ext.adapter.programs import Programs
from megatron_ext.adapter.step import pipeline_training
from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.measured.places import (
    RankPlaces,
    measured_places,
    seconds_by_place,
)
from megatron_ext.features.profile.adapter import step_profile as profile_observer
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.measure import profile
from megatron_ext.runtime.measure.profile import Profile
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recording import clock_of
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.timeline import Event
from tests.helpers.adversary import MODES
from tests.helpers.combinations import nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import assert_same, losses, train_or_fail
from tests.helpers.packed import packed_on_the_cpu
from tests.helpers.ranks import run_ranks, values
from tests.helpers.stages import WIDTH, Pipeline, program_for, world
from tests.pipeline.callers import test_callers as callers
from tests.pipeline.features.test_microbatch_order import ORDERED, flags, trained

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
SECONDS = {F: 10e-3, I: 12e-3, W: 8e-3, Kind.FULL_BACKWARD: 20e-3}
PLACES = (0.2, 1.4, 2.0, 0.4)
# one step after the warm-up is timed, with the seconds that this test sets
STEPS = profile.WARM_UP + 1
ITERATIONS = STEPS + 2
ORDER: dict[str, Any] = {"microbatch_order": "small-ends"}


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with packed_on_the_cpu():
        yield


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Emulate the seconds of passes, and return a folder in which each rank writes, for each step,
    its microbatches and the digest of its program."""

    def medians(events: Any) -> dict[tuple[int, Kind], float]:
        kinds = {(event.action.stage, event.action.kind) for event in events}
        return {(stage, kind): SECONDS[kind] for stage, kind in kinds}

    def by_place(steps: Any, microbatches: int) -> dict[Kind, Any]:
        return {
            kind: (tuple(seconds * place for place in PLACES),) * len(steps)
            for kind, seconds in SECONDS.items()
            if kind in {event.action.kind for event in steps[0]}
        }

    run_passes = pipeline_training.run_passes

    def noted(step: Any, *more: Any) -> Any:
        problem = step.program.problem
        kind = "places" if problem.costs.at_places else "equal"
        what = "evaluation" if problem.forward_only else f"{problem.microbatches} {kind}"
        with open(tmp_path / str(dist.get_rank()), "a") as file:
            file.write(f"{what} {step.program.digest}\n")
        return run_passes(step, *more)

    monkeypatch.setattr(profile, "MEASURED", STEPS - profile.WARM_UP)
    monkeypatch.setattr(profile, "STEPS", STEPS)
    monkeypatch.setattr(profile_observer, "STEPS", STEPS)
    monkeypatch.setattr(profile, "medians", medians)
    monkeypatch.setattr(profile, "seconds_by_place", by_place)
    monkeypatch.setattr(pipeline_training, "run_passes", noted)
    return tmp_path


def profiled(folder: Path, schedule: str = "v-half", **more: object) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "pipeline_schedule": schedule,
        "pipeline_costs": f"profile:{folder / 'costs.json'}",
        "global_batch_size": len(PLACES),
        "train_iters": ITERATIONS,
    }
    return ours | more


def programs(folder: Path, ranks: int) -> list[tuple[str, str]]:
    """Return, for each step, what ran and the digest of its program, and assert that all ranks ran
    the same."""
    of_ranks = [(folder / str(rank)).read_text() for rank in range(ranks)]
    assert len(set(of_ranks)) == 1
    steps = [line.rpartition(" ") for line in of_ranks[0].splitlines()]
    return [(what, digest) for what, _, digest in steps]


def test_a_program_for_the_places_takes_over_and_trains_to_the_same_bits(
    emulated: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program for microbatches of different costs replaces the one for equal costs during a
    training, whose numbers do not change. The replacement happens once, after the measured steps;
    evaluations keep their program."""
    more = ORDERED | {"train_iters": ITERATIONS, "global_batch_size": len(PLACES)}
    more |= {"eval_interval": 1}
    stock = trained(2, **more)
    capfd.readouterr()
    assert_same(trained(2, **profiled(emulated) | more), stock)
    (said,) = [line for line in capfd.readouterr().out.splitlines() if "that differ" in line]
    assert "v-half, microbatches that differ: the program for equal ones is replaced by one" in said
    ran = programs(emulated, 2)
    trainings = [(what, digest) for what, digest in ran if what != "evaluation"]
    assert [what for what, _ in trainings] == ["4 equal"] * STEPS + ["4 places"] * 2
    assert len({digest for _, digest in trainings[STEPS:]} - {trainings[0][1]}) == 1
    assert len({digest for what, digest in ran if what == "evaluation"}) == 1


def test_replicas_swap_at_the_same_step(emulated: Path) -> None:
    more = ORDERED | {"global_batch_size": 8, "train_iters": ITERATIONS, "eval_iters": 0}
    stock = trained(4, **more)
    assert_same(trained(4, **profiled(emulated) | more), stock)
    expected = ["4 equal"] * STEPS + ["4 places"] * 2
    assert [what for what, _ in programs(emulated, 4)] == expected


@nightly("test_replicas_swap_at_the_same_step, and such devices are in test_adversary_training.py")
@pytest.mark.parametrize(("mode", "schedule"), [("synchronising", "v-half"), ("late", "zb-h1")])
def test_programs_change_while_devices_wait_or_are_late(
    mode: str, schedule: str, emulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = iter((2.0, 1.0))
    monkeypatch.setattr(programs_module, "median_makespan", lambda *of: next(judged))
    more = ORDERED | {"train_iters": ITERATIONS, "global_batch_size": len(PLACES), "eval_iters": 0}
    stock = trained(2, **more)
    with MODES[mode]():
        assert_same(trained(2, **profiled(emulated, schedule) | more), stock)
    ran = programs(emulated, 2)
    assert [what for what, _ in ran] == ["4 equal"] * STEPS + ["4 places"] * 2


@pytest.mark.parametrize("swap", ["measured costs", "places"])
def test_a_rank_that_swaps_a_step_late_ends_the_training(
    swap: str, emulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that swaps its program a step later than the others is named before any pass of the
    new program runs. Otherwise its neighbours might wait for ever."""
    known = Programs.known

    def late(own: Programs, *request: Any) -> Any:
        found, before = known(own, *request), getattr(own, "before", None)
        if found is not None and not found.problem.forward_only:
            own.before = found  # type: ignore[attr-defined]
        return before if before is not None and dist.get_rank() == 1 else found

    monkeypatch.setattr(Programs, "known", late)
    # One substitute makes no program for unequal microbatches, and the other takes the program of
    # measured costs, whose order differs.
    if swap == "measured costs":
        monkeypatch.setattr(programs_module, "program_for_places", lambda *of: None)
        monkeypatch.setattr(programs_module, "better_of", lambda made, *of: made)
    more = profiled(emulated) | ORDERED | {"eval_iters": 0}
    results = train_or_fail(2, flags(**more), model_provider=drawn_by_name)
    told = "".join(str(result.error) for result in results)
    both = r"\w+ on global rank 0; \w+ on global rank 1; one of them swaps"
    assert re.search(
        f"ranks run different programs from v-half: programs with the digest {both}", told
    )
    began = [len((emulated / str(rank)).read_text().splitlines()) for rank in (0, 1)]
    assert sorted(began) == [STEPS, STEPS + 1]  # the rank that compares first waits for nobody


@nightly("two replicas: test_replicas_swap_at_the_same_step")
@pytest.mark.parametrize(
    ("pipeline", "schedule", "virtual"),
    [(2, "zb-h1", None), (4, "zb-h1", None), (2, "zb-v", 2)],
)
def test_eight_ranks_swap_and_train_to_the_same_bits(
    pipeline: int,
    schedule: str,
    virtual: int | None,
    emulated: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight ranks swap the program during training and get the same numbers: four replicas of two
    stages, or two of four, with microbatches dealt to the replicas by cost.

    gloo adds four gradients in an order that depends on their position in a buffer. Each chunk of a
    rank has a buffer of its own on a V, as it has in Megatron's interleaved schedule. So the V
    equals that schedule bitwise, while Megatron's two schedules differ from each other by rounding
    in some gradients.
    """
    judged = iter((2.0, 1.0))
    monkeypatch.setattr(programs_module, "median_makespan", lambda *of: next(judged))
    more = ORDERED | {
        "pipeline_deal_microbatches": True,
        "pipeline_model_parallel_size": pipeline,
        "num_layers": 2 * pipeline,
        "global_batch_size": 4 * 8 // pipeline,
        "train_iters": ITERATIONS,
        "eval_iters": 0,
    }
    stock = trained(8, **more, num_virtual_stages_per_pipeline_rank=virtual)
    assert_same(trained(8, **profiled(emulated, schedule) | more), stock)
    ran = [what for what, _ in programs(emulated, 8)]
    assert ran == ["4 equal"] * STEPS + ["4 places"] * 2
    if virtual is not None:
        with pytest.raises(AssertionError):
            assert_same(trained(8, **more), stock)


@nightly("test_a_step_of_fewer_microbatches_runs_a_program_for_equal_ones")
def test_steps_of_a_batch_that_grows_run_a_program_for_equal_ones(emulated: Path) -> None:
    more = ORDERED | {
        "global_batch_size": None,
        "step_batch_size_schedule": "0:4 192:8",
        "train_iters": None,
        "train_samples": (STEPS + 1) * 4 + 2 * 8,
        "eval_iters": 0,
    }
    stock = trained(2, **more)
    assert_same(trained(2, **profiled(emulated) | more), stock)
    ran = [what for what, _ in programs(emulated, 2)]
    assert ran == ["4 equal"] * STEPS + ["4 places", *["8 equal"] * 2]


def test_a_step_of_fewer_microbatches_runs_a_program_for_equal_ones(
    emulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with fewer microbatches than the measured steps runs the program for equal costs. Here
    a caller runs such a step between two steps of the program for different costs, and all numbers
    are stock's."""
    numbers = [len(PLACES)] * (STEPS + 1) + [2, len(PLACES)]
    judged = iter((2.0, 1.0))
    monkeypatch.setattr(programs_module, "median_makespan", lambda *of: next(judged))

    def loop(rank: int) -> list[Any]:
        with apply(cpu.patches()):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=callers.RANKS)
            model_parallel_cuda_manual_seed(0)
            stock = [callers.step(own_groups=False, microbatches=number) for number in numbers]
            settings = {"costs": f"profile:{emulated / 'costs.json'}"} | ORDER
            with megatron_ext.install(schedule="zb-h1", **settings):
                for number, (expected, of_stock) in zip(numbers, stock, strict=True):
                    told, gradients = callers.step(own_groups=False, microbatches=number)
                    assert told == expected
                    assert all(torch.equal(gradients[name], of_stock[name]) for name in of_stock)
                evaluated = callers.step(
                    own_groups=False, microbatches=len(PLACES), forward_only=True
                )
                dist.barrier()
            return evaluated[0]

    values(run_ranks(callers.RANKS, loop))
    ran = [what for what, _ in programs(emulated, callers.RANKS)]
    expected = ["4 equal"] * STEPS + ["4 places", "2 equal", "4 places", "evaluation"]
    assert ran == expected


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("v-half", "better than one for the cost of each place in a step, which takes 2.000 of it"),
        ("v-half", "kept, as CUDA graphs are captured in its order"),
        ("1f1b", "kept, as it cannot be searched for unequal ones"),
    ],
    ids=["no better", "graphs", "no W"],
)
def test_the_program_for_equal_ones_is_kept(
    schedule: str,
    said: str,
    emulated: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "graphs" in said:
        monkeypatch.setattr(profile_observer, "captures", lambda config: True)
    judged = iter((1.0, 2.0))
    monkeypatch.setattr(programs_module, "median_makespan", lambda *of: next(judged))
    runs = trained(2, **profiled(emulated, schedule) | ORDERED | {"eval_iters": 0})
    assert len(losses(runs)) == ITERATIONS
    assert said in capfd.readouterr().out
    assert not [what for what, _ in programs(emulated, 2) if "places" in what]


def test_a_rank_with_another_program_for_the_places_ends_the_training(
    emulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank's program for microbatches of different costs is not that of the other ranks, the
    training ends before that program runs, because ranks with different orders would deadlock."""
    prove = programs_module.prove_built

    def another(schedule: Any, problem: Any) -> Any:
        if not problem.costs.at_places:
            return prove(schedule, problem)
        return build_program(choose("zb-v"), replace(problem, memory_limit=None))

    monkeypatch.setattr(programs_module, "prove_built", another)
    more = profiled(emulated) | ORDERED | {"eval_iters": 0}
    results = train_or_fail(2, flags(**more), model_provider=drawn_by_name)
    assert "built different programs" in "".join(str(result.error) for result in results)
    assert [what for what, _ in programs(emulated, 2)] == ["4 equal"] * STEPS


# ---- measured memory and seconds


@pytest.mark.parametrize("by_place", [True, False])
def test_memory_is_that_of_the_largest_microbatch(by_place: bool) -> None:
    """Bytes are measured on the largest microbatch if microbatches differ, else on the median
    one."""
    sizes = {False: 100.0, True: 300.0}

    class Counting:
        def around(self, action: Action) -> Any:
            return contextlib.nullcontext()

        def per_microbatch(self, *, largest: bool = False) -> dict[tuple[int, Held], float]:
            return {(0, Held.ACTIVATION): sizes[largest]}

    def on_rank(rank: int) -> float:
        pipeline = Pipeline(program_for(choose("zb-h1"), 2, 4), world())
        profile = Profile(clock_of(torch.device("cpu")), Counting())
        for _ in range(STEPS):
            profile.begin(pipeline.recorder)
            pipeline.step()
            profile.end(pipeline.recorder, pipeline.program)
            pipeline.recorder.end()
        boundary = Boundary((3, WIDTH), torch.float32)
        figures = profile.figures(pipeline.connection, world(), boundary, by_place=by_place)
        return figures.held[0, Held.ACTIVATION]

    assert values(run_ranks(2, on_rank)) == [sizes[by_place]] * 2


def test_seconds_of_a_rank_are_summed_over_its_stages() -> None:
    def step(first: float) -> list[Event]:
        passes = [(0, F, 0, first), (3, F, 0, 2.0), (0, F, 1, 4.0), (3, W, 1, 8.0)]
        return [Event(0, Action(s, kind, k), 1.0, 1.0 + took) for s, kind, k, took in passes]

    seconds = seconds_by_place([step(1.0), step(3.0)], 2)
    assert seconds == {F: ((3.0, 4.0), (5.0, 4.0)), W: ((0.0, 8.0), (0.0, 8.0))}


def test_costs_of_places_are_sums_over_ranks_relative_to_their_median() -> None:
    """The cost of a place (a microbatch's position in the step) is the sum of the seconds that the
    ranks of a pipeline take for it, divided by the median of all such sums. In each step the
    pipeline with the larger sum counts, and of several steps the mean."""
    ranks = [
        RankPlaces(pipeline, {F: ((1.0, factor), (1.0, 3.0 * factor))})
        for pipeline, factor in ((0, 2.0), (1, 1.0), (0, 2.0), (1, 1.0))
    ]
    measured = measured_places(ranks)
    assert measured is not None
    # Sums of the first step's two places are (2, 4) and (2, 2) in the two pipelines, and those of
    # the second step (2, 12) and (2, 6). Their median is 2.
    assert [step[F].tolist() for step in measured.steps] == [[[1, 2], [1, 1]], [[1, 6], [1, 3]]]
    assert measured.at_places == {F: (1.0, 4.0)}


def test_pipelines_of_other_lengths_have_no_common_places() -> None:
    ranks = [RankPlaces(rank, {F: ((1.0,) * (2 + rank),)}) for rank in (0, 1)]
    assert measured_places(ranks) is None
