"""Times at which the messages and collectives of a rehearsed rank have moved.

Without a replay a message is complete as soon as it is posted. In the timed steps of a replay it is
complete at its time in the composed step: a wait for it lasts until then, and on a GPU the message
occupies thread blocks meanwhile, as a posted kernel of NCCL's does (`holding_kernel`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_ext.compile.program.communicators import ctas_used
from megatron_ext.rehearsal.holding_kernel import begin_time, hold, holding_kernel
from megatron_ext.rehearsal.request import ReplayRequest


class _Clock(Protocol):
    """Clock that tells when messages of a rehearsed step are complete: the host's or the GPU's."""

    def begin(self) -> None:
        """Take the present time as the start of the step."""

    def work(self, name: str, moved: float, blocks: int) -> dist.Work:
        """Return the handle of a message or collective that is posted now.

        Args:
            name: its channel, or its kind of collective.
            moved: seconds after the start of the step at which it is complete.
            blocks: thread blocks of the GPU that it occupies until then.
        """


class Moved(dist.Work):
    """Handle of a message that is complete as soon as it is posted."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class MessageTimes:
    """Times at which messages and collectives of a rehearsed rank are complete, by step."""

    def __init__(self, replay: ReplayRequest | None = None, *, is_on_gpu: bool = False) -> None:
        self._replay = replay
        self._make_clock: Callable[[], _Clock] = _DeviceClock if is_on_gpu else _HostClock
        self._clock: _Clock | None = None
        self._is_on_time = False
        self._has_begun = False
        self._posted: Counter[str] = Counter()

    def begin_step(self, *, is_timed: bool) -> None:
        """Begin a step.

        Args:
            is_timed: whether the step counts. Only in such a step do messages come at the times of
                the composed step. In steps of warm-up they come at once, as whatever the GPU does
                for the first time must not wait for a kernel that occupies thread blocks.
        """
        self._is_on_time = is_timed
        self._has_begun = False
        self._posted.clear()

    def begin_time(self) -> None:
        """Start the clock of the step at its first pass or message; later calls do nothing."""
        if self._replay is None or self._has_begun:
            return
        if self._clock is None:
            self._clock = self._make_clock()
        self._clock.begin()
        self._has_begun = True

    def post(self, names: Sequence[str], max_ctas: int | None = None) -> dist.Work:
        """Return the handle of messages that are posted now and are complete together.

        Args:
            names: their channels, or kinds of collectives.
            max_ctas: limit on the thread blocks that NCCL takes for a kernel of their communicator;
                None: there is none.
        """
        if self._replay is None:
            return Moved()
        self.begin_time()
        assert self._clock is not None
        latest = max(self._time_of(name, self._replay.moved) for name in names)
        blocks = 0
        if self._replay.has_blocks:
            most = self._replay.ctas
            blocks = most if max_ctas is None else min(most, ctas_used(max_ctas))
        return self._clock.work(names[0], latest if self._is_on_time else 0.0, blocks)

    def _time_of(self, name: str, moved: Mapping[str, Sequence[float]]) -> float:
        number = self._posted[name]
        self._posted[name] += 1
        times = moved.get(name, ())
        if number >= len(times):
            raise ValueError(
                f"{name}: a replayed rank has posted message {number + 1} of this channel, and "
                f"the composed step has only {len(times)}: report this error with the launch "
                "command"
            )
        return times[number]


class _HostClock:
    """Clock of a rank that is rehearsed on the CPU; the host waits for its messages."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def work(self, name: str, moved: float, blocks: int) -> dist.Work:
        return _HostWait(self._began + moved)


class _HostWait(dist.Work):
    """Handle of a message that is complete at a given time of the host's clock."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        time.sleep(max(0.0, self._until - time.perf_counter()))
        return True


class _DeviceClock:
    """Clock of a GPU. Each channel has a CUDA stream of its own, as each NCCL communicator has."""

    def __init__(self) -> None:
        holding_kernel()  # loads the kernel before any kernel occupies thread blocks
        self._began = torch.zeros(2, dtype=torch.int64, device="cuda")
        self._streams: dict[str, torch.cuda.Stream] = {}

    def begin(self) -> None:
        begin_time(torch.cuda.current_stream(), self._began)

    def work(self, name: str, moved: float, blocks: int) -> dist.Work:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream()
        stream = self._streams[name]
        # The kernel starts after all work that was launched before it, as NCCL's kernels do.
        stream.wait_stream(torch.cuda.current_stream())
        hold(stream, self._began, moved, blocks)
        return _StreamWait(stream.record_event())


class _StreamWait(dist.Work):
    """Handle of a message that is complete after a CUDA event.

    The computing stream waits for the event.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        return True
