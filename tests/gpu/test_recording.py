"""Tests of passes that are timed by device events."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from megatron_ext.runtime.recording import Recording, clock_of
from megatron_ext.schedule.action import Action, Kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]

CYCLES = 200_000_000  # clock cycles of a pass: about a tenth of a second


def test_what_the_device_does_is_timed_and_not_its_host() -> None:
    """The recorder times what the device does, not its host. Three passes are queued at once; each
    is recorded when the device runs it, and for as long."""
    torch.cuda._sleep(1000)  # the first call of _sleep loads its kernel
    recording = Recording(0, clock_of(torch.device("cuda")))
    actions = [Action(0, Kind.FORWARD, microbatch) for microbatch in range(3)]
    begin = time.perf_counter()
    for action in actions:
        began = recording.clock.record_event()
        torch.cuda._sleep(CYCLES)
        recording.add_pass(action, began)
    queued = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    assert queued - begin < (end - begin) / 3, "the host waited for the device"
    events, _ = recording.read()
    assert [event.action for event in events] == actions
    assert begin - 1e-3 <= events[0].start and events[-1].end <= end + 1e-3
    for earlier, later in pairwise(events):
        assert earlier.end <= later.start + 1e-4
    took = [event.end - event.start for event in events]
    assert sum(took) == pytest.approx(end - begin, rel=0.1)
    assert min(took) == pytest.approx(max(took), rel=0.1)
