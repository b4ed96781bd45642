"""Tests of the memory of very large schedules: it is announced, or refused, before it is
allocated."""

from __future__ import annotations

import tracemalloc

import pytest

from megatron_ext.compile import size
from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.compile.size import bytes_to_build, problem_size
from tests.helpers.schedules import line_problem, program


def test_a_small_schedule_is_announced_without_time_and_memory() -> None:
    assert problem_size(line_problem(8, 32)) == "8 ranks and 32 microbatches"
    assert problem_size(line_problem(1, 1)) == "1 rank and 1 microbatch"


def test_a_large_schedule_is_announced_with_time_and_memory() -> None:
    """A command with a large schedule says how long it takes and how much memory. ``simulate zb-h1
    --pp 512 -m 4096`` used to run for minutes and take gigabytes without a message."""
    told = problem_size(line_problem(512, 4096))
    assert "512 ranks and 4096 microbatches (6,291,456 passes: they take about 3 min" in told
    assert "6.84 GiB of memory)" in told


def test_what_this_machine_cannot_hold_is_refused_at_once() -> None:
    """A schedule too large for this machine's memory is refused at once. With ``-m 999999999999``
    the system used to kill the command."""
    with pytest.raises(ValueError, match=r"takes about [\d.]+ [GT]iB of memory, and this "):
        build_program(choose("zb-h1"), line_problem(4, 10**12))


def test_what_it_can_hold_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = line_problem(4, 64)
    monkeypatch.setattr(size, "_machine_bytes", lambda: bytes_to_build(problem))
    program("zb-h1", problem)
    with pytest.raises(ValueError, match="write fewer microbatches or ranks"):
        program("zb-h1", line_problem(4, 65))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_estimate_is_of_the_right_size(name: str) -> None:
    problem = line_problem(8, 64)
    tracemalloc.start()
    try:
        made = program(name, problem)
        assert made.graph
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bytes_to_build(problem) / 3 < taken < 2 * bytes_to_build(problem)
