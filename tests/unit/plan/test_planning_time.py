"""Tests of the end of a plan: after its CPU seconds, and at Ctrl-C."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_ext.planner import planner
from megatron_ext.planner.candidate import Candidate, Plan, Variant, VocabMethod
from megatron_ext.planner.fitting import TooFull
from megatron_ext.planner.planner import NO_TIME, make_plan
from megatron_ext.planner.planning_time import (
    LAYOUTS,
    PAIRS,
    SCHEDULES,
    SLICES,
    answered,
    planning,
    provisional,
    start_planning_time,
    unfinished_alternatives,
    until_end,
    within,
)
from megatron_ext.planner.training import Training
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.placement import line
from tests.helpers.planning_end import ended_at


@pytest.fixture(autouse=True)
def unchanged_handlers() -> Iterator[None]:
    before = [signal.getsignal(name) for name in (signal.SIGPROF, signal.SIGINT)]
    yield
    assert [signal.getsignal(name) for name in (signal.SIGPROF, signal.SIGINT)] == before
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def work_for(seconds: float) -> str:
    """Use ``seconds`` of CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "done"


def test_work_ends_after_its_cpu_seconds() -> None:
    with planning(limit=0.5) as plan:
        start_planning_time()
        assert until_end(lambda: work_for(60), "ended", LAYOUTS) == "ended"
        # The timer counts ticks of the system, so it may run ahead of the CPU seconds on a busy
        # machine.
        assert 0.25 <= plan.seconds < 10
        assert plan.is_short and unfinished_alternatives() == (LAYOUTS,)
        assert "0.5 CPU seconds" in plan.why_short
        work_for(0.5)
        assert until_end(lambda: work_for(0), "ended") == "ended", "nothing begins after the end"
        until_end(lambda: work_for(0), "ended", SLICES)
        assert unfinished_alternatives() == (LAYOUTS, SLICES)


def set_timer_speed(monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    """Let the timer of CPU time count ``speed`` seconds in each CPU second."""
    real = signal.setitimer

    def setitimer(timer: int, seconds: float, again: float = 0.0) -> tuple[float, float]:
        factor = 1 / speed if timer == signal.ITIMER_PROF else 1.0
        return real(timer, factor * seconds, again)

    monkeypatch.setattr(signal, "setitimer", setitimer)


def test_a_timer_that_counts_ahead_does_not_end_work_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work has all of its CPU seconds. On a busy machine the timer counts too fast, and a plan used
    to say that its CPU seconds were used up when they were not."""
    set_timer_speed(monkeypatch, 4.0)
    with planning(limit=0.3) as plan:
        start_planning_time()
        assert until_end(lambda: work_for(60), "ended") == "ended"
        assert 0.3 <= plan.seconds < 10 and plan.is_short


def test_work_around_ends_if_inner_work_has_used_up_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outer work ends if inner work returns only after the end of the outer work's time. The
    outer timer used to be set to 0 s then, which stops a timer."""
    set_timer_speed(monkeypatch, 0.25)
    found: list[str] = []

    def around() -> str:
        found.append(until_end(lambda: work_for(0.2), "ended"))
        return work_for(3)

    with planning(limit=0.1):
        start_planning_time()
        assert until_end(around, "ended") == "ended"
    assert found == ["done"]


def test_a_compiler_is_left_to_end() -> None:
    """The time limit of a plan does not interrupt numba's compiler. The exception that ends the
    work used to be raised in the compiler's callback from C++, where it was printed and ended
    nothing."""
    source = """
def call_back(ended):
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
    ended.append(True)
"""
    found: dict[str, Any] = {"time": time}
    exec(compile(source, "site-packages/llvmlite/binding/executionengine.py", "exec"), found)
    ended: list[bool] = []

    def work() -> str:
        found["call_back"](ended)
        return work_for(60)

    with planning(limit=0.1) as plan:
        start_planning_time()
        assert until_end(work, "ended") == "ended"
        assert ended and plan.seconds < 10


def test_work_that_is_soon_done_is_not_ended() -> None:
    with planning(limit=60) as plan:
        start_planning_time()
        assert until_end(lambda: work_for(0.01), "ended") == "done"
    assert not plan.is_short


def test_time_before_the_launch_command_is_validated_is_not_counted() -> None:
    with planning(limit=0.05) as plan:
        assert until_end(lambda: work_for(0.1), "ended") == "done"
        assert plan.seconds == 0


def test_first_answer_is_that_of_the_first_call() -> None:
    with planning() as plan:
        start_planning_time()
        answered()
        first = plan.first_answer
        work_for(0.02)
        answered()
    assert first is not None
    assert plan.first_answer == first


def test_work_around_goes_on_with_what_ended_work_has() -> None:
    def around() -> str:
        return f"around, {until_end(lambda: work_for(60), 'ended')}"

    with planning(limit=0.1):
        start_planning_time()
        assert until_end(around, "nothing") == "around, ended"


def test_schedules_that_are_compared_for_another_kind_are_of_that_kind() -> None:
    """A plan that was cut short names each kind of alternative that it did not finish comparing.
    Schedules with overlapped passes, and schedules without recompute, used to be called just
    "schedules", too."""

    def in_pairs() -> str | None:
        return until_end(lambda: work_for(60), None, SCHEDULES)

    with planning(limit=0.1):
        start_planning_time()
        until_end(in_pairs, None, PAIRS)
        until_end(lambda: work_for(60), None, SCHEDULES)
        assert unfinished_alternatives() == (PAIRS, SCHEDULES)


def test_what_is_compared_once_more_is_not_unfinished_alternatives() -> None:
    """Alternatives that are compared later do not count as unfinished. Recompute gets 15 % of the
    planning time before the first answer. Schedules that were not compared in that time used to be
    named as unfinished, although they were compared later."""
    with planning(limit=20) as plan:
        start_planning_time()
        with provisional(), within(0.005):
            assert until_end(lambda: work_for(60), "ended", SCHEDULES) == "ended"
            assert plan.is_short
        assert not plan.is_short and unfinished_alternatives() == ()


def test_part_of_the_time_leaves_the_rest_to_other_work() -> None:
    with planning(limit=20) as plan:
        start_planning_time()
        with within(0.005):
            assert until_end(lambda: work_for(60), "ended") == "ended"
        assert plan.seconds < 10
        assert until_end(lambda: work_for(0.01), "ended") == "done"


def test_ctrl_c_ends_all_work_and_a_second_one_the_command() -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        work_for(60)

    with planning(limit=60) as plan:
        start_planning_time()
        before = signal.getsignal(signal.SIGINT)
        assert until_end(interrupted, None) is None
        assert plan.is_interrupted
        assert plan.why_short == "the comparison was interrupted"
        assert until_end(lambda: work_for(0), "ended") == "ended"
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        signal.signal(signal.SIGINT, before)


def test_plan_of_another_thread_has_no_end() -> None:
    """A plan in another thread than the main one has no time limit, because only the main thread
    gets signals."""
    found: list[str] = []

    def plan() -> None:
        with planning(limit=0.01):
            start_planning_time()
            found.append(until_end(lambda: work_for(0.05), "ended"))

    thread = threading.Thread(target=plan)
    thread.start()
    thread.join()
    assert found == ["done"]


def test_plan_has_what_was_compared_when_its_time_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    variant_of = Training(2, 8, costs=lambda placement: uniform(placement, 10, 12, 8)).variant
    real = planner.consider

    def slow(variant: Variant, *given: object) -> Candidate:
        if variant.resolved.spec == "zb-v":
            work_for(60)
        return real(variant, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "consider", slow)
    with planning(limit=0.5) as plan:
        start_planning_time()
        made = make_plan(variant_of, specs=("1f1b", "zb-v", "v-half"))
    assert plan.is_short
    assert [candidate.schedule for candidate in made.candidates] == ["1f1b"]
    assert made.refusals["v-half", VocabMethod.NAIVE] == NO_TIME


def test_no_schedule_is_both_compared_and_refused_wherever_the_time_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schedule that fits only at a second attempt is either a candidate or refused, wherever the
    planning time ends. It used to be both if the time ended just as the schedule became a
    candidate."""
    costs = uniform(line(2), 10, 12, 8)
    real, seen = planner.consider, set[str]()

    def full_at_first(variant: Variant, *given: object) -> Candidate:
        spec = variant.resolved.spec
        if spec not in seen:
            seen.add(spec)
            raise TooFull("too full", 1.0)
        return real(variant, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "consider", full_at_first)
    specs = ("1f1b", "zb-h1")
    for number in itertools.count():
        seen.clear()
        made: list[Plan] = []

        def compare(made: list[Plan] = made) -> None:
            with planning(limit=60):
                start_planning_time()
                variant_of = Training(2, 2, costs=lambda placement: costs).variant
                made.append(make_plan(variant_of, specs=specs, is_long=True))

        codes = planner._Comparison.add.__code__, planner._Comparison.make_fit.__code__
        was_ended = ended_at(number, codes, compare)
        compared = {(one.schedule, one.method) for one in made[0].candidates}
        assert not compared & set(made[0].refusals), f"ended at line {number}"
        assert {spec for spec, _ in compared | set(made[0].refusals)} == set(specs)
        if not was_ended:
            break
    assert number > 10 and len(compared) == 2
