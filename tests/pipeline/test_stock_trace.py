"""Traces of Megatron's own steps: its pipeline functions, watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.show.trace import TracedStep, read_trace
from tests.helpers.megatron_runs import assert_same, model_flags, train

Flags = dict[str, object]

LINE: Flags = {
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 8,
    "eval_iters": 1,
    "eval_interval": 2,
}
LOOP: Flags = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "microbatch_group_size_per_virtual_pipeline_stage": 3,
    "num_layers": 4,
    "global_batch_size": 6,
}


def family_rows(spec: str, ranks: int, microbatches: int) -> list[list[str]]:
    choice = choose(spec)
    placement = choice.place(ranks)
    schedule = choice.build(Problem(placement, microbatches, uniform(placement, 1, 1, 1)))
    return [[str(action) for action in row] for row in schedule.rows]


def measured_rows(step: TracedStep) -> list[list[str]]:
    return [[str(event.action) for event in row] for row in step.measured.compute]


@pytest.mark.parametrize(
    ("ranks", "flags", "spec", "microbatches"),
    [(4, LINE, "1f1b", 4), (2, LOOP, "interleaved:vpp=2,group=3", 6)],
    ids=["1f1b", "interleaved"],
)
def test_a_trace_of_megatrons_own_step(
    ranks: int,
    flags: Flags,
    spec: str,
    microbatches: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The flag alone is enough, and changes no number."""
    common = flags | {"train_iters": 8}
    reference = train(ranks, model_flags(**common))
    capfd.readouterr()
    runs = train(ranks, model_flags(**common | {"pipeline_trace": tmp_path}))
    assert_same(runs, reference)
    print(capfd.readouterr().out)
    steps = read_trace(tmp_path)
    assert [step.iteration for step in steps] == [5, 6, 7]
    for step in steps:
        assert measured_rows(step) == family_rows(spec, 2, microbatches)
