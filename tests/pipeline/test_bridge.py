"""Megatron-Bridge's own training loop, under its own schedule and under ours.

The recipe, `pretrain` and the forward step are Bridge's; the recipe's model is made small. All
trainings of this file run in one process, whose import of Bridge takes longer than they do.
"""

from __future__ import annotations

import functools

import pytest

from scripts.bridge_environment import prepare
from tests.helpers import bridge_on_cpu
from tests.helpers.bridge_on_cpu import Job
from tests.helpers.combinations import IS_NIGHT, at_night
from tests.helpers.megatron_runs import Run, assert_same, whole_state
from tests.helpers.ranks import HANGS, run_ranks, values

COSTS = {"costs": "f=1,i=1,w=1,comm=0"}
DENSE = Job("dense")
OURS = {
    "v-auto": {"schedule": "v-auto", "memory_limit": "0.5x", **COSTS},
    "zb-h1": {"schedule": "zb-h1", **COSTS},
    "zb-v": {"schedule": "zb-v", **COSTS},
    "interleaved-zb": {"schedule": "interleaved-zb", **COSTS},
}
BY_DAY = ("v-auto",)


def of_ours(job: Job) -> list[Job]:
    """``job`` under each schedule, named ``job/schedule``."""
    names = [*OURS] if IS_NIGHT else BY_DAY
    return [job.but(f"{job.name}/{name}", OURS[name]) for name in names]


JOBS = [DENSE, *of_ours(DENSE)]


@functools.cache
def trained() -> dict[str, list[Run] | str]:
    folder, problem = prepare()
    if problem:
        pytest.skip(f"Megatron-Bridge cannot be installed with pip: {problem}")
    (results,) = values(
        run_ranks(
            1,
            lambda rank: bridge_on_cpu.run(folder, JOBS),
            timeout=HANGS * (1 + len(JOBS)),
            connect=False,
        )
    )
    return results


def runs(name: str) -> list[Run]:
    made = trained()[name]
    assert not isinstance(made, str), made
    return made


@pytest.mark.parametrize(
    "schedule", [*BY_DAY, *at_night(*(name for name in OURS if name not in BY_DAY))]
)
def test_bridge_trains_to_the_same_bits_under_our_schedule(schedule: str) -> None:
    stock, ours = runs("dense"), runs(f"dense/{schedule}")
    assert {run.schedule for run in stock} == {"forward_backward_pipelining_without_interleaving"}
    assert {run.schedule for run in ours} == {"PipelineStep"}
    assert_same(ours, stock)
    assert len(ours[-1].losses) == 4
    state = whole_state(ours)
    assert any("exp_avg_sq" in name for name in state)
    assert len(state) > 400
