"""A step composed of ranks that ran alone takes as long as the step of all ranks together."""

from __future__ import annotations

import pytest

from scripts.benchmarks.rehearsed import SCHEDULES, measure
from tests.helpers.combinations import IS_NIGHT, nightly

BY_DAY = ("zb-h1",)


@pytest.mark.parametrize("spec", SCHEDULES.split() if IS_NIGHT else BY_DAY)
def test_a_composed_step_takes_as_long_as_a_real_one(spec: str) -> None:
    """Passes sleep. Each microbatch's own seconds count: medians lose up to 3 %."""
    assert abs(measure(spec).error) < 0.013


@nightly("a composed step is compared by day with passes that always take as long")
@pytest.mark.parametrize("spec", SCHEDULES.split())
def test_passes_that_are_slower_after_a_wait_are_missed_in_part(spec: str) -> None:
    """Alone no pass but the first of a step waits, so no other is 4 ms longer. Composed of the
    passes of ranks together, which are longer, the step is as long as a real one."""
    found = measure(spec, slower_after_wait=0.004)
    assert -0.03 < found.error < 0.013
    assert abs(found.error_of_real_passes) < 0.013
