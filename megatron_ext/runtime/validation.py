"""The messages of post-validation between the ranks of a pipeline.

They are a few numbers that the host decides by, so they go over gloo from host to host, each way in
a group of its own. Whoever passes something on does not wait until it is taken, which may be passes
later. Nor must passing the verdict back wait until a rank is between two passes: a thread does it.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.runtime.partial_state import PartialState
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.transport import Dealing, closed, make_groups
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Placement

_Message = tuple[dist.Work, Tensor]  # on its way


class ValidationMessages:
    """Of one rank, over all steps. The ranks are a chain, in the order of their first stages."""

    def __init__(
        self, pipeline: dist.ProcessGroup, placement: Placement, recorder: Recorder
    ) -> None:
        """Collective over the world, as `transport.make_groups` is."""
        ranks = range(placement.ranks)
        ways = {Kind.SEND_P: ranks, Kind.SEND_V: ranks}
        groups = make_groups(pipeline, ways, backend="gloo")
        self._up: dist.ProcessGroup | None = groups[Kind.SEND_P]
        self._down: dist.ProcessGroup | None = groups[Kind.SEND_V]
        self._recorder = recorder
        self._stage = placement.stages_of[pipeline.rank()][0]
        self._before = placement.rank_of[self._stage - 1] if self._stage else None
        is_last = self._stage == placement.ranks - 1
        self._after = None if is_last else placement.rank_of[self._stage + 1]
        self._steps = 0  # that were passed on; both ends of a message must speak of the same
        self._passed_on: _Message | None = None
        self._whole: PartialState | None = None  # on the last of the chain
        self._verdict: Future[tuple[PartialState, _Message | None]] | None = None
        self._relaying = Recorder(recorder.rank)  # the thread is not where its rank is
        self.is_pending = False  # a state was passed on, and its verdict has not been asked for

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
        group = self._open(self._up)
        if self._before is None:
            return PartialState()
        with self._dealing(Kind.RECV_P, self._before, "from"):
            return _receive(group, self._before, self._steps)

    def pass_on(self, state: PartialState) -> None:
        """SEND_P: ``state`` is that of all ranks up to this one. A verdict will come."""
        assert not self.is_pending, "the verdict on the last step has not been asked for"
        group = self._open(self._up)
        if self._after is None:
            self._whole = state
        else:
            with self._dealing(Kind.SEND_P, self._after, "to"):
                self._passed_on = _send(group, self._after, state, self._steps)
        self._steps += 1
        self.is_pending = True

    def expect(self) -> None:
        """RECV_V and SEND_V: a pending verdict is received and passed back as it comes from now
        on."""
        if not self.is_pending or self._verdict is not None:
            return
        self._verdict = Future()
        arguments = self._verdict, self._open(self._down), self._steps - 1
        threading.Thread(
            target=self._relay, args=arguments, name="megatron_ext verdict", daemon=True
        ).start()

    def verdict(self) -> PartialState:
        """SETTLE: the state of all ranks on the pending step, when it has come."""
        assert self.is_pending, "no step is pending"
        self.expect()
        assert self._verdict is not None
        waits_for = self._recorder.rank if self._after is None else self._after
        with self._recorder.waiting(self._action(Kind.SETTLE), waits_for):
            state, passed_back = self._verdict.result()
        # Both ranks are there by now, or nothing would come of going on: this one's next forward
        # pass needs the rank before it in this step.
        for kind, peer, message in (
            (Kind.SEND_P, self._after, self._passed_on),
            (Kind.SEND_V, self._before, passed_back),
        ):
            if message is not None:
                assert peer is not None
                with self._dealing(kind, peer, "to"):
                    message[0].wait()
        self._passed_on = self._verdict = None
        self.is_pending = False
        return state

    def abandon(self) -> None:
        """Cut the connections, so that whoever waits at their other ends fails now.

        A thread that waits for the verdict keeps those of the way back until it comes or the rank
        after this one fails, as it will without this one.
        """
        self._passed_on = self._verdict = None  # what is on its way keeps gloo's connections open
        for group in (self._up, self._down):
            if group is not None:
                with contextlib.suppress(RuntimeError):  # the first error is the one to show
                    dist.distributed_c10d._abort_process_group(group)
        self._up = self._down = None

    def _relay(
        self,
        verdict: Future[tuple[PartialState, _Message | None]],
        group: dist.ProcessGroup,
        step: int,
    ) -> None:
        passed_back = None
        try:
            if self._after is None:
                assert self._whole is not None
                state = self._whole
            else:
                with self._dealing(Kind.RECV_V, self._after, "from", self._relaying):
                    state = _receive(group, self._after, step)
            if self._before is not None:
                with self._dealing(Kind.SEND_V, self._before, "to", self._relaying):
                    passed_back = _send(group, self._before, state, step)
        except BaseException as error:
            verdict.set_exception(error)
        else:
            verdict.set_result((state, passed_back))

    def _open(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise closed(self._recorder.rank)
        return group

    def _dealing(
        self, kind: Kind, peer: int, direction: str, recorder: Recorder | None = None
    ) -> Dealing:
        return Dealing(recorder or self._recorder, self._action(kind), peer, direction)

    def _action(self, kind: Kind) -> Action:
        return Action(self._stage, kind, 0)


# As float64: exact for any count of tokens or steps that a training can have.


def _send(group: dist.ProcessGroup, peer: int, state: PartialState, step: int) -> _Message:
    numbers = torch.tensor(
        [step, state.squared_norm, state.found_inf, state.tokens], dtype=torch.float64
    )
    return group.send([numbers], peer, 0), numbers


def _receive(group: dist.ProcessGroup, peer: int, step: int) -> PartialState:
    numbers = torch.empty(4, dtype=torch.float64)
    group.recv([numbers], peer, 0).wait()
    sent, squared_norm, found_inf, tokens = numbers.tolist()
    assert sent == step, f"a validation message of step {sent:g} has come in step {step}"
    return PartialState(squared_norm, bool(found_inf), int(tokens))
