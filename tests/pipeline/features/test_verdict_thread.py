"""Test of the thread that passes post-validation's verdict on while the main thread runs the
passes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from megatron_ext.features.post_validation.runtime.messages import ValidationMessages
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.placement import line
from tests.helpers.ranks import run_ranks, values
from tests.helpers.stages import world

pytestmark = pytest.mark.real_time


def test_to_look_for_the_verdict_costs_next_to_nothing() -> None:
    """Polling for the verdict takes nearly no time of the interpreter. A poll in each millisecond
    used to run through torch and an Event's Python code, and the thread of the passes, which
    launches kernels, had to yield the interpreter. A poll only reads a number, and between polls
    the thread waits on a lock without the interpreter."""

    def run(rank: int) -> None:
        messages = ValidationMessages(world(), line(2), Recorder(rank))
        messages.pass_on(messages.partial())
        called: Counter[str] = Counter()
        if rank == 0:

            def note(frame: Any, event: str, function: Any) -> None:
                if event.endswith("call") and threading.current_thread() is not main:
                    called[frame.f_code.co_name if event == "call" else function.__name__] += 1

            main = threading.current_thread()
            threading.setprofile(note)
            messages.expect()
            threading.setprofile(None)
            while called["acquire"] < 20:  # each poll waits on the lock once
                time.sleep(0.001)
            looks = Counter(called)
            dist.barrier()
            for name, calls in looks.items():
                if calls > 5:  # more calls than the start of the thread makes
                    assert name in ("acquire", "isnan", "<lambda>")
        else:
            dist.barrier()
        messages.verdict()

    values(run_ranks(2, run, timeout=20))
