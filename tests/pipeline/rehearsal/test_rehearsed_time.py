"""Tests that a step composed of separately rehearsed ranks takes as long as the real step of all
ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts.benchmarks.rehearsed import SCHEDULES, Composed, measure
from tests.helpers.combinations import IS_NIGHT, nightly

BY_DAY = ("v-half",)  # the schedule with the largest error
# Other work on the machine lengthens a measured step now and then; an error of ours is in each
# measurement.
MEASUREMENTS = 3


@pytest.mark.parametrize("spec", SCHEDULES.split() if IS_NIGHT else BY_DAY)
def test_passes_that_are_slower_after_a_wait_are_seen_in_a_replay(spec: str) -> None:
    """A replay finds passes that are slower after a wait, here by 4 ms. In a first rehearsal only
    the first pass of a step waits. In a replay every pass waits that waits in the whole training,
    so a second replay changes next to nothing. Passes sleep in the rehearsals and in the real
    step."""

    def are_seen(found: Composed) -> bool:
        return (
            -0.03 < found.error < 0.013
            and abs(found.error_of_replay) < 0.010
            and abs(found.change_of_another_replay) < 0.005
            and abs(found.error_of_real_passes) < 0.013
        )

    assert _in_a_measurement(are_seen, spec, slower_after_wait=0.004)


@nightly("a composed step is compared by day with passes that are slower after a wait")
@pytest.mark.parametrize("spec", SCHEDULES.split())
def test_a_composed_step_takes_as_long_as_a_real_one(spec: str) -> None:
    """A composed step takes as long as a real one, in which passes sleep, to 1.3 %. Each pass has
    the seconds of its own microbatch: medians over the microbatches make a step up to 3 % too
    short."""

    def is_as_long(found: Composed) -> bool:
        return abs(found.error) < 0.013 and abs(found.error_of_replay) < 0.010

    assert _in_a_measurement(is_as_long, spec)


def _in_a_measurement(
    holds: Callable[[Composed], bool], spec: str, *, slower_after_wait: float = 0.0
) -> bool:
    """Measure up to `MEASUREMENTS` times; return whether ``holds`` is true of one measurement, and
    print those before it."""
    for _ in range(MEASUREMENTS):
        found = measure(spec, slower_after_wait=slower_after_wait)
        if holds(found):
            return True
        print(found)
    return False
