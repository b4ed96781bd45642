"""Messages of post-validation between the ranks of a pipeline.

They are a few numbers on which the host decides, so they go over gloo from host to host, each
direction in a group of its own. A sender does not wait until a message is received, which may be
passes later. The verdict must be passed back without waiting until a rank is between two passes, so
a thread does it (`_Relay`).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.groups import make_groups
from megatron_ext.runtime.messages.peer_call import PeerCall
from megatron_ext.runtime.messages.transport import closed
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Placement, line

# Seconds between two polls for the verdict on a step. The verdict goes from rank to rank, and each
# rank delays it by half of this time on average.
LOOK_SECONDS = 0.001

_Message = tuple[dist.Work, Tensor]  # work of a message in flight, and its tensor


class ValidationMessages:
    """Messages of one rank by which a pipeline post-validates optimizer steps, for all steps.

    The ranks form a chain, in the order of their first stages.
    """

    def __init__(
        self, pipeline: dist.ProcessGroup, placement: Placement, recorder: Recorder
    ) -> None:
        """Create the process groups of the messages. Collective over the pipeline."""
        groups: dict[Kind, dist.ProcessGroup] = {}
        for kind in (Kind.SEND_P, Kind.SEND_V):
            with connecting(recorder, pipeline, f"{kind} of the pipeline"):
                groups |= make_groups(pipeline, {kind: range(placement.ranks)}, backend="gloo")
        self._up: dist.ProcessGroup | None = groups[Kind.SEND_P]
        self._down: dist.ProcessGroup | None = groups[Kind.SEND_V]
        self._recorder = recorder
        self._stage = placement.stages_of[pipeline.rank()][0]
        # The sums of gradient norms, and the verdict back, go along the ranks in the order of their
        # first stages.
        firsts = line(placement.ranks)
        before, after = firsts.previous(self._stage), firsts.next(self._stage)
        self._before = None if before is None else placement.rank_of[before]
        self._after = None if after is None else placement.rank_of[after]
        # Number of steps whose state was passed on. The number is sent with each message, and must
        # be the same at both ends.
        self._steps = 0
        self._passed_on: _Message | None = None
        self._coming: _Message | None = None  # the verdict, while its receive is posted
        self._come: Tensor | None = None
        self._passed_back: _Message | None = None
        self._relay: _Relay | None = None
        # Whether this rank has passed on a state and not yet taken the verdict on it.
        self.is_pending = False

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the chain, which passes on its gradient norm alone."""
        return self._before is None

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last of the chain, which gets the norm of the whole pipeline."""
        return self._after is None

    def partial(self) -> PartialState:
        """Wait for the validation state of the ranks before this one (RECV_P), and return it."""
        group = self._open(self._up)
        if self._before is None:
            return PartialState()
        with self._calling(Kind.RECV_P, self._before, "from"):
            numbers = _buffer_for_numbers()
            group.recv([numbers], self._before, 0).wait()
        return _state(numbers, self._steps)

    def pass_on(self, state: PartialState) -> None:
        """Send ``state``, of all ranks up to this one, to the next rank of the chain (SEND_P).

        A verdict on the step will come back.
        """
        assert not self.is_pending, "the verdict on the last step has not been taken"
        group = self._open(self._up)
        numbers = _numbers(self._steps, state)
        if self._after is None:
            self._come = numbers
        else:
            with self._calling(Kind.SEND_P, self._after, "to"):
                self._passed_on = group.send([numbers], self._after, 0), numbers
        self._steps += 1
        self.is_pending = True

    def expect(self) -> None:
        """Start to receive the verdict on the pending step (RECV_V).

        It is passed back as soon as it arrives (SEND_V).
        """
        if not self.is_pending or self._relay is not None:
            return
        group = self._open(self._down)
        if self._after is not None:
            numbers = _buffer_for_numbers()
            with self._calling(Kind.RECV_V, self._after, "from"):
                self._coming = group.recv([numbers], self._after, 0), numbers
        self._relay = _Relay(self)

    def verdict(self) -> PartialState:
        """Wait for the verdict (SETTLE), and return the state of all ranks on the pending step."""
        assert self.is_pending, "no step is pending"
        self.expect()
        self._stop_relay()
        if self._after is not None:
            with self._calling(Kind.SETTLE, self._after, "from"):
                self.take()
        if self._before is not None:
            with self._calling(Kind.SEND_V, self._before, "to"):
                self.pass_back()
        # The waits for this step's messages do not delay the step: either both ranks have arrived,
        # or this rank could not go on anyway, since its next forward pass needs a message that the
        # previous rank sends in this step.
        for kind, peer, message in (
            (Kind.SEND_P, self._after, self._passed_on),
            (Kind.SEND_V, self._before, self._passed_back),
        ):
            if message is not None:
                assert peer is not None
                work, _ = message
                with self._calling(kind, peer, "to"):
                    work.wait()
        assert self._come is not None
        state = _state(self._come, self._steps - 1)
        self._passed_on = self._passed_back = self._come = None
        self.is_pending = False
        return state

    def look(self) -> Callable[[], bool]:
        """Return a function that tells whether the verdict has arrived, or will within moments.

        The function does not call torch.
        """
        if self._coming is None:
            return lambda: True
        _, numbers = self._coming
        memory = memoryview(numbers.numpy())
        return lambda: not math.isnan(memory[0])

    def take(self) -> None:
        """Wait for the verdict that is being received."""
        if self._coming is not None:
            work, numbers = self._coming
            work.wait()
            self._coming, self._come = None, numbers

    def pass_back(self) -> None:
        """Send the verdict to the rank before this one in the chain, unless it was sent already."""
        if self._before is not None and self._passed_back is None:
            assert self._come is not None
            group = self._open(self._down)
            self._passed_back = group.send([self._come], self._before, 0), self._come

    def abandon(self) -> None:
        """Cut the connections after an error, so that ranks waiting at the other ends fail now."""
        self._stop_relay()
        # References to messages in flight are dropped, as they would keep gloo's connections open.
        self._passed_on = self._passed_back = self._coming = None
        for group in (self._up, self._down):
            if group is not None:
                # The error for which messages are aborted is shown, not one of aborting a group.
                with contextlib.suppress(RuntimeError):
                    dist.distributed_c10d._abort_process_group(group)
        self._up = self._down = None

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.stop()
            self._relay = None

    def _open(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise closed(self._recorder.rank)
        return group

    def _calling(self, kind: Kind, peer: int, direction: str) -> PeerCall:
        return PeerCall(self._recorder, Action(self._stage, kind, 0), peer, direction)


class _Relay:
    """Thread that passes the verdict back as soon as it arrives.

    The thread never waits inside gloo, where only the message or the end of the peer could wake it.
    A failure on this rank, which has to cut its connections, could not, nor could the end of this
    process. So the thread polls the memory that gloo writes to, and waits for a lock in between. A
    poll costs the thread of the passes, which needs the interpreter too, a microsecond.
    """

    def __init__(self, messages: ValidationMessages) -> None:
        self._messages = messages
        self._has_come = messages.look()
        # A lock is used in place of a threading.Event, whose `wait` is slower, as it is written in
        # Python.
        self._runs = threading.Lock()
        self._runs.acquire()
        self._thread = threading.Thread(target=self._run, name="megatron_ext verdict", daemon=True)
        self._thread.start()
        # The thread must have left torch before the interpreter exits, or the process would crash.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the relay's thread. If it has not passed the verdict back, the caller must do so."""
        atexit.unregister(self.stop)
        if self._runs.locked():  # the thread has not been stopped before
            self._runs.release()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_come():
            if self._runs.acquire(timeout=LOOK_SECONDS):
                return
        with contextlib.suppress(RuntimeError):  # the caller of `verdict` gets this error, too
            self._messages.take()
            self._messages.pass_back()


# Messages are in float64, which is exact for any number of tokens or steps of a training.


def _numbers(step: int, state: PartialState) -> Tensor:
    numbers = [step, state.squared_norm, state.found_inf, state.tokens]
    return torch.tensor(numbers, dtype=torch.float64)


def _buffer_for_numbers() -> Tensor:
    """Return memory that receives the numbers of a message (`_numbers`), NaN until they arrive."""
    return torch.full((4,), math.nan, dtype=torch.float64)


def _state(numbers: Tensor, step: int) -> PartialState:
    sent, squared_norm, found_inf, tokens = numbers.tolist()
    assert sent == step, f"a validation message of step {sent:g} has come in step {step}"
    return PartialState(squared_norm, bool(found_inf), int(tokens))
