"""Tests of a real GPU's progress as its host knows it: the host's lead, and the action that is
stuck."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_ext.runtime.device_progress import PASSES_AHEAD  # noqa: E402
from megatron_ext.runtime.recorder import Recorder  # noqa: E402
from megatron_ext.schedule.action import Action, Kind  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CYCLES = 200_000_000  # clock cycles of a pass: about a tenth of a second


def test_the_host_is_a_few_passes_ahead() -> None:
    torch.cuda.init()
    recorder = Recorder(0)
    ends: list[Any] = []
    for microbatch in range(3 * PASSES_AHEAD):
        with recorder.computing(Action(0, Kind.FORWARD, microbatch)):
            assert sum(not end.query() for end in ends) < PASSES_AHEAD
            torch.cuda._sleep(CYCLES)
        ends.append(torch.cuda.Event())
        ends[-1].record()
    assert not ends[-1].query(), "the device was no slower than its host: nothing was shown"
    torch.cuda.synchronize()


def test_another_thread_sees_where_the_device_is() -> None:
    """A second thread sees which pass the device has ended and which it is running, while the host
    waits for the device."""
    torch.cuda.init()
    recorder = Recorder(0)
    for microbatch in range(2):
        with recorder.computing(Action(0, Kind.FORWARD, microbatch)):
            torch.cuda._sleep(10 * CYCLES if microbatch else 1)
    seen = []

    def look() -> None:
        for _ in range(3):
            time.sleep(0.1)
            recorder.device.look()
        seen.append(recorder.device.position)

    thread = threading.Thread(target=look)
    thread.start()
    torch.cuda.synchronize()
    thread.join()
    (position,) = seen
    assert position is not None, "the device was quicker than the thread: nothing was shown"
    assert position.ended == Action(0, Kind.FORWARD, 0)
    assert position.pending.action == Action(0, Kind.FORWARD, 1)
    recorder.device.look()
    assert recorder.device.position is None
