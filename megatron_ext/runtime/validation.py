"""The messages of post-validation between the ranks of a pipeline.

They are a few numbers that the host decides by, so they go over gloo from host to host, each way in
a group of its own. Passing the verdict back must not wait until a rank is between two passes: a
thread does it.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

import torch
import torch.distributed as dist

from megatron_ext.runtime.partial_state import PartialState
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.transport import Dealing, make_groups
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Placement


class ValidationMessages:
    """Of one rank, over all steps. The ranks are a chain, in the order of their first stages."""

    def __init__(
        self, pipeline: dist.ProcessGroup, placement: Placement, recorder: Recorder
    ) -> None:
        """Collective over the world, as `transport.make_groups` is."""
        ranks = range(placement.ranks)
        groups = make_groups(
            pipeline,
            {Kind.SEND_P: ranks, Kind.SEND_V: ranks},
            torch.device("cpu"),
            backend="gloo",
        )
        self._up: dist.ProcessGroup | None = groups[Kind.SEND_P]
        self._down: dist.ProcessGroup | None = groups[Kind.SEND_V]
        self._recorder = recorder
        self._stage = placement.stages_of[pipeline.rank()][0]
        self._before = placement.rank_of[self._stage - 1] if self._stage else None
        is_last = self._stage == placement.ranks - 1
        self._after = None if is_last else placement.rank_of[self._stage + 1]
        self._steps = 0  # that were passed on; both ends of a message must speak of the same
        self._whole: PartialState | None = None  # on the last of the chain
        self._verdict: Future[PartialState] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank begins the chain."""
        return self._before is None

    @property
    def is_last(self) -> bool:
        """Whether this rank ends the chain: what it knows is all there is to know."""
        return self._after is None

    def partial(self) -> PartialState:
        """RECV_P: the state of the ranks before this one, when it has come."""
        if self._before is None:
            return PartialState()
        assert self._up is not None, "post-validation goes on after a failure"
        with Dealing(self._recorder, self._action(Kind.RECV_P), self._before, "from"):
            return _receive(self._up, self._before, self._steps)

    def pass_on(self, state: PartialState) -> None:
        """SEND_P: ``state`` is that of all ranks up to this one. A verdict will come."""
        if self._after is None:
            self._whole = state
        else:
            assert self._up is not None
            with Dealing(self._recorder, self._action(Kind.SEND_P), self._after, "to"):
                _send(self._up, self._after, state, self._steps)
        self._steps += 1

    def expect(self) -> None:
        """RECV_V and SEND_V: from now on the verdict is received and passed back as it comes."""
        if self._verdict is None:
            self._verdict = Future()
            threading.Thread(
                target=self._relay, args=(self._verdict,), name="megatron_ext verdict", daemon=True
            ).start()

    def verdict(self) -> PartialState:
        """SETTLE: the state of all ranks, when it has come."""
        self.expect()
        assert self._verdict is not None
        peer = self._recorder.rank if self._after is None else self._after
        with Dealing(self._recorder, self._action(Kind.SETTLE), peer, "from"):
            state = self._verdict.result()
        self._verdict = None
        return state

    def abandon(self) -> None:
        """Cut the connections, so that whoever waits at their other ends fails now."""
        for group in (self._up, self._down):
            if group is not None:
                with contextlib.suppress(RuntimeError):  # the first error is the one to show
                    dist.distributed_c10d._abort_process_group(group)
        self._up = self._down = None

    def _relay(self, verdict: Future[PartialState]) -> None:
        try:
            group, step = self._down, self._steps - 1
            assert group is not None, "post-validation goes on after a failure"
            if self._after is None:
                assert self._whole is not None
                state = self._whole
            else:
                state = _receive(group, self._after, step)
            if self._before is not None:
                _send(group, self._before, state, step)
        except BaseException as error:
            verdict.set_exception(error)
        else:
            verdict.set_result(state)

    def _action(self, kind: Kind) -> Action:
        return Action(self._stage, kind, 0)


# As float64: exact for any count of tokens or steps that a training can have.


def _send(group: dist.ProcessGroup, peer: int, state: PartialState, step: int) -> None:
    numbers = [step, state.squared_norm, state.found_inf, state.tokens]
    group.send([torch.tensor(numbers, dtype=torch.float64)], peer, 0).wait()


def _receive(group: dist.ProcessGroup, peer: int, step: int) -> PartialState:
    numbers = torch.empty(4, dtype=torch.float64)
    group.recv([numbers], peer, 0).wait()
    sent, squared_norm, found_inf, tokens = numbers.tolist()
    assert sent == step, f"a validation message of step {sent:g} has come in step {step}"
    return PartialState(squared_norm, bool(found_inf), int(tokens))
