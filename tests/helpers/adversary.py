"""Adversaries, which do on the CPU what a GPU may do and gloo never does.

gloo moves messages in threads of its own, so a message that cannot move yet blocks only the rank
that waits for it. Between the start and the wait of a message its buffers look as if it had moved
already, or not yet. On a GPU a posted message is a kernel that runs, any call of the host may stop
behind it, and the contents of its buffer are unknown before the wait.

`synchronising`: before each pass a rank waits until everything that it posted has ended, as behind
a host call that waits for the device. If something posted needs an action that the rank runs only
later, the rank fails and names it. `one_queue` waits before each action: messages and copies, too,
run one after the other.

`late`: received data arrive when they are waited for, not before, and data that are sent must stay
unchanged until then. Before its wait, a buffer that is being filled has no numbers in it. Data that
are sent or summed move at once, from a copy: if they moved at their wait, sound programs would
deadlock, as a wait comes where the rank already knows that the message was used. At the wait the
tensor itself must exist and have the bytes that it had. Copies to and from the host run when they
are waited for.

`streams`: every operation is attributed to a stream, as on a GPU. A rank fails at its end if two
accesses to the same memory are not ordered, or if memory is freed while another stream may still
use it (`tests.helpers.streams`).

The first two act between the runtime and the functions that move tensors, in this process and in
ranks forked from it meanwhile. Messages of post-validation go from host to host, which no device
blocks, so they are left as they are. The first also waits for everything that Megatron starts in
parallel to the passes: its reductions of gradients and gathers of parameters. Messages that
Megatron sends within passes, over the default group, go through both. NCCL creates a communicator
at the first message of two ranks, so a rank fails if that message is in a pass.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _CoalescingManager
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ext.compile.program.graph import Channel
from megatron_ext.features.offload.runtime import offload
from megatron_ext.runtime.executor import _Execution
from megatron_ext.runtime.host.copies import CopiedBytes, DirectCopies, HostCopies, Transfer
from megatron_ext.runtime.messages.batched import PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.schedule import is_compute
from tests.helpers.stages import InOrderGroup
from tests.helpers.streams.emulation import emulated_streams

# Seconds after which a posted message, collective or copy is taken to hang. Even on a busy machine
# none needs as long.
SECONDS = 60.0

POISON = 0xFF  # value of every byte of a poisoned tensor: a number of such bytes is NaN or -1


def synchronising(seconds: float = SECONDS) -> AbstractContextManager[None]:
    """Let a rank fail at a pass if a message, collective or copy that it posted before has not
    ended after ``seconds``."""
    return _installed(Synchronising(seconds))


def one_queue(seconds: float = SECONDS) -> AbstractContextManager[None]:
    """Let a rank fail at any action if a message, collective or copy that it posted before has not
    ended after ``seconds``. Batched messages always fail here, as they must move together."""
    return _installed(Synchronising(seconds, everywhere=True))


def late() -> AbstractContextManager[None]:
    """Let a rank fail at a wait if the tensor of the message or copy has been freed or changed
    since its start."""
    return _installed(Late())


def streams(at_least: int, traces: Path | None = None) -> AbstractContextManager[None]:
    """Emulate streams. A rank fails if there are findings, or if fewer than ``at_least`` accesses
    crossed streams. ``traces`` is a folder for records of the ranks' allocations."""
    return emulated_streams(at_least, traces)


MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "synchronising": synchronising,
    "late": late,
}


class Use(enum.Enum):
    """Use of a tensor by a message or a collective."""

    GIVEN = "it leaves"
    SPOILT = "it leaves, and what is in it afterwards is of no use"
    FILLED = "it is brought here"


# Function that starts the transfer of the given tensors and returns their works
# (`torch.distributed.Work`).
Start = Callable[[Sequence[Tensor]], Sequence[Any]]


class _Adversary(Protocol):
    def post(self, action: Action | None, start: Start, uses: Sequence[Use], *tensors: Tensor): ...

    def before(self, action: Action) -> None: ...

    def after_step(self) -> None: ...

    def post_foreign(self, work: Any) -> Any: ...

    def copies_on(self, device: torch.device) -> HostCopies: ...


# Function that takes a `Start`, and each tensor together with its `Use`; it returns the works.
Post = Callable[..., list[Any]]
Substitute = tuple[Any, str, Any]  # class or module, name of the attribute, and its substitute


@contextlib.contextmanager
def _installed(adversary: _Adversary) -> Iterator[None]:
    """Let all messages, collectives and copies of the runtime go through ``adversary``."""
    current: list[Action] = []  # one item: the action that the executor runs

    def post(start: Start, *used: tuple[Tensor, Use]) -> list[Any]:
        # no action runs before the first step, when messages test the connections
        action = current[-1] if current else None
        return adversary.post(action, start, [use for _, use in used], *(t for t, _ in used))

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, substitute in (
            *_adverse_channels(post),
            *_adverse_collectives(post),
            *_adverse_groups(post),
            *_adverse_pairs(post, current),
            *_adverse_execution(adversary, current),
        ):
            patch.setattr(owner, name, substitute)
        patch.setattr(offload, "copies_on", adversary.copies_on)
        yield


def _adverse_channels(post: Post) -> list[Substitute]:
    send, receive = Channels.send, Channels.receive

    def adverse_send(channels: Channels, channel: Channel, tensor: Tensor) -> Any:
        (work,) = post(lambda moved: [send(channels, channel, moved[0])], (tensor, Use.GIVEN))
        return work

    def adverse_receive(channels: Channels, channel: Channel, tensor: Tensor) -> Any:
        (work,) = post(lambda moved: [receive(channels, channel, moved[0])], (tensor, Use.FILLED))
        return work

    return [(Channels, "send", adverse_send), (Channels, "receive", adverse_receive)]


def _adverse_collectives(post: Post) -> list[Substitute]:
    broadcast, total, gather = Collectives.broadcast, Collectives.sum, Collectives.gather

    def adverse_broadcast(
        collectives: Collectives, kind: Kind, tensors: Sequence[Tensor], root: int
    ) -> Any:
        use = Use.GIVEN if collectives.rank == root else Use.FILLED
        start = partial(broadcast, collectives, kind, root=root)
        return post(start, *((tensor, use) for tensor in tensors))

    def adverse_sum(collectives: Collectives, kind: Kind, tensor: Tensor, root: int) -> Any:
        use = Use.FILLED if collectives.rank == root else Use.SPOILT
        (work,) = post(lambda moved: [total(collectives, kind, moved[0], root)], (tensor, use))
        return work

    def adverse_gather(
        collectives: Collectives, kind: Kind, gathered: Tensor, tensor: Tensor
    ) -> Any:
        used = (gathered, Use.FILLED), (tensor, Use.GIVEN)
        (work,) = post(lambda moved: [gather(collectives, kind, *moved)], *used)
        return work

    return [
        (Collectives, "broadcast", adverse_broadcast),
        (Collectives, "sum", adverse_sum),
        (Collectives, "gather", adverse_gather),
    ]


def _adverse_groups(post: Post) -> list[Substitute]:
    """Return the substitutes for the functions that send batched messages, which use the pipeline's
    own group."""

    def adverse_start(start: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def started(
            group: PipelineGroup, messages: Sequence[tuple[Channel, Tensor]]
        ) -> Sequence[Any]:
            channels = [channel for channel, _ in messages]
            used = [
                (tensor, Use.GIVEN if channel.sender == group.rank else Use.FILLED)
                for channel, tensor in messages
            ]
            return post(lambda moved: start(group, list(zip(channels, moved, strict=True))), *used)

        return started

    return [(group, "start", adverse_start(group.start)) for group in (PipelineGroup, InOrderGroup)]


def _adverse_pairs(post: Post, current: Sequence[Action]) -> list[Substitute]:
    """Return the substitutes for the functions that send messages over the default group.
    ``current`` is the pass that sends them."""
    met: set[int] = set()

    def adverse(move: Callable[..., Any], use: Use) -> Callable[..., Any]:
        def adverse_move(tensor: Tensor, *args: Any, **named: Any) -> Any:
            peer = named.get("dst", named.get("src"))
            if peer is None or "group" in named:
                return move(tensor, *args, **named)
            assert peer in met or not current, (
                f"global ranks {dist.get_rank()} and {peer} make a communicator in {current[-1]}"
            )
            met.add(peer)
            (work,) = post(lambda moved: [move(moved[0], peer)], (tensor, use))
            return work

        return adverse_move

    substitutes = {
        "isend": adverse(dist.isend, Use.GIVEN),
        "irecv": adverse(dist.irecv, Use.FILLED),
    }
    return [  # both modules have these functions, and batches of messages (P2POp) refer to them
        (module, name, substitute)
        for module in (dist, distributed_c10d)
        for name, substitute in substitutes.items()
    ]


def _adverse_execution(adversary: _Adversary, current: list[Action]) -> list[Substitute]:
    perform, run, append = _Execution.perform, _Execution.run, _CoalescingManager.append

    def adverse_perform(execution: _Execution, action: Action) -> None:
        adversary.before(action)
        current.append(action)
        try:
            perform(execution, action)
        finally:
            current.pop()

    def adverse_run(execution: _Execution) -> None:
        run(execution)
        adversary.after_step()

    def adverse_append(manager: _CoalescingManager, work: Any = None) -> None:
        append(manager, work and adversary.post_foreign(work))

    return [
        (_Execution, "perform", adverse_perform),
        (_Execution, "run", adverse_run),
        (_CoalescingManager, "append", adverse_append),
    ]


# --- synchronising


class _Posted:
    """A work that, unlike gloo's, may be waited for twice."""

    def __init__(self, name: str, work: Any) -> None:
        self.name = name
        self._work = work
        self._has_ended = False

    def wait(self, *timeout: timedelta) -> None:
        if not self._has_ended:
            self._work.wait(*timeout)
            self._has_ended = True


class Synchronising:
    """The adversary that waits before passes. Copies are direct: they have ended when they have
    started."""

    def __init__(self, seconds: float, everywhere: bool = False) -> None:
        self._seconds = seconds
        self._everywhere = everywhere
        self._under_way: list[_Posted] = []

    def post(
        self, action: Action | None, start: Start, uses: Sequence[Use], *tensors: Tensor
    ) -> list[_Posted]:
        posted = [_Posted(str(action), work) for work in start(tensors)]
        self._under_way += posted
        return posted

    def post_foreign(self, work: Any) -> _Posted:
        self._under_way.append(_Posted("a collective of Megatron's", work))
        return self._under_way[-1]

    def before(self, action: Action) -> None:
        if not (self._everywhere or is_compute(action)):
            return
        for posted in self._under_way:
            began = time.monotonic()
            try:
                posted.wait(timedelta(seconds=self._seconds))
            except RuntimeError as error:
                if time.monotonic() - began < self._seconds:
                    raise  # the error came before the time limit, so another rank has failed
                raise AssertionError(
                    f"{posted.name}, posted before {action}, has not ended in {self._seconds:g} s, "
                    "so it needs something that a rank does later, and a rank that waits here for "
                    "its GPU would hang"
                ) from error
        self._under_way.clear()

    def after_step(self) -> None:
        pass

    def copies_on(self, device: torch.device) -> HostCopies:
        return DirectCopies()


# --- late


class Late:
    def __init__(self) -> None:
        self._under_way: list[_LateWork] = []

    def post(
        self, action: Action | None, start: Start, uses: Sequence[Use], *tensors: Tensor
    ) -> list[_LateWork]:
        stand_ins = [_StandIn(tensor, use) for tensor, use in zip(tensors, uses, strict=True)]
        works = start([stand_in.moves for stand_in in stand_ins])
        shares = [stand_ins]
        if len(works) > 1:  # each tensor has a work of its own
            shares = [[stand_in] for stand_in in stand_ins]
        posted = [_LateWork(action, *pair) for pair in zip(works, shares, strict=True)]
        self._under_way += posted
        return posted

    def before(self, action: Action) -> None:
        pass

    def after_step(self) -> None:
        forgotten = [str(work.action) for work in self._under_way if not work.was_waited_for]
        self._under_way.clear()
        assert not forgotten, f"nobody has waited for {', '.join(forgotten)}"

    def post_foreign(self, work: Any) -> Any:
        return work

    def copies_on(self, device: torch.device) -> HostCopies:
        return LateCopies()


class _LateWork:
    def __init__(self, action: Action | None, work: Any, stand_ins: Sequence[_StandIn]) -> None:
        self.action = action
        self.was_waited_for = False
        self._work = work
        self._stand_ins = stand_ins

    def wait(self) -> None:
        assert not self.was_waited_for, f"{self.action} has been waited for before"
        self.was_waited_for = True
        self._work.wait()
        for stand_in in self._stand_ins:
            stand_in.hand_over(self.action)
        self._stand_ins = ()


class _StandIn:
    """A copy of a tensor's data that is sent, or received into, in place of the tensor, and does
    not keep the tensor alive."""

    def __init__(self, tensor: Tensor, use: Use) -> None:
        assert tensor.is_contiguous()
        self.moves = tensor.detach().clone()
        self._use = use
        own = _bytes(tensor)
        if use is Use.FILLED:
            own.fill_(POISON)
        self._expected = own.clone()
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._offset = own.storage_offset()

    def hand_over(self, action: Action | None) -> None:
        """Write the data to the tensor as if they had moved just now, at the wait for
        ``action``."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        size = self._expected.numel()
        assert storage is not None and storage.nbytes() >= self._offset + size, (
            f"the memory of {action} was given back before its wait"
        )
        own = torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, (size,), (1,))
        assert torch.equal(own, self._expected), (
            f"the tensor of {action} was written to before its wait"
        )
        if self._use is Use.FILLED:
            own.copy_(_bytes(self.moves))
        elif self._use is Use.SPOILT:
            own.fill_(POISON)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view of the memory of ``tensor`` as bytes. A tensor of one number is contiguous with
    any stride, but only stride 1 can be viewed."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class LateCopies(DirectCopies):
    """Copies that run when they are waited for: in order, as late as possible."""

    def __init__(self) -> None:
        self._last: dict[Lane, LateTransfer] = {}

    def start(
        self, action: Action, pieces: Sequence[CopiedBytes], after: Transfer | None
    ) -> Transfer:
        lane = RULES[action.kind].lane
        before = [transfer for transfer in (self._last.get(lane), after) if transfer is not None]
        if lane is Lane.FROM_HOST:
            for to, _ in pieces:
                to.fill_(POISON)
        transfer = self._last[lane] = LateTransfer(pieces, before)
        return transfer


class LateTransfer:
    def __init__(self, pieces: Sequence[CopiedBytes], before: Sequence[Transfer]) -> None:
        self._pieces, self._before = pieces, before

    def wait(self) -> None:
        pieces, before = self._pieces, self._before
        self._pieces, self._before = (), ()
        for transfer in before:
            transfer.wait()
        for to, source in pieces:
            to.copy_(source)

    finish = wait
