"""A step composed of ranks that ran alone takes as long as the step of all ranks together."""

from __future__ import annotations

import pytest

from scripts.benchmarks.rehearsed import SCHEDULES, measure
from tests.helpers.combinations import IS_NIGHT, nightly

BY_DAY = ("v-half",)  # alone it is farthest off


@pytest.mark.parametrize("spec", SCHEDULES.split() if IS_NIGHT else BY_DAY)
def test_passes_that_are_slower_after_a_wait_are_seen_in_a_replay(spec: str) -> None:
    """A replay sees passes that are slower after a wait, here by 4 ms. Alone only the first pass of
    a step waits; replayed the same passes wait as among the other ranks. Another replay changes
    next to nothing. Passes sleep, in the real step as well."""
    found = measure(spec, slower_after_wait=0.004)
    assert -0.03 < found.error < 0.013
    assert abs(found.error_of_replay) < 0.010
    assert abs(found.change_of_another_replay) < 0.005
    assert abs(found.error_of_real_passes) < 0.013


@nightly("a composed step is compared by day with passes that are slower after a wait")
@pytest.mark.parametrize("spec", SCHEDULES.split())
def test_a_composed_step_takes_as_long_as_a_real_one(spec: str) -> None:
    """A composed step takes as long as a real one, whose passes sleep. Each microbatch's own
    seconds count: medians lose up to 3 %."""
    found = measure(spec)
    assert abs(found.error) < 0.013
    assert abs(found.error_of_replay) < 0.010
