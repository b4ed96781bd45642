"""A record, made on the CPU, of the work that a GPU's streams would get from this project's
messages and from Megatron's schedule plans, which overlap a forward and a backward pass.

The nodes of a plan run on two streams, each after the plan's event. On the CPU everything runs at
once and in the host's order. `note_streams` records what a rank would have given its device, and
`two_streams` checks the record.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common import model_chunk_schedule_plan
from megatron.core.pipeline_parallel import utils

from megatron_ext.runtime.messages.channels import Channels
from tests.helpers.two_streams import Given, What

given: list[Given] = []


class _Stream:
    names = itertools.count()

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.name = f"stream {next(self.names)}"

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *unused: None


_current = [_Stream()]


@contextlib.contextmanager
def _on(stream: _Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def _note(what: What, which: object, stream: _Stream | str | None = None) -> None:
    stream = stream or _current[-1]
    given.append(Given(stream if isinstance(stream, str) else stream.name, what, which))


class _NotedEvent:
    names = itertools.count()

    def __init__(self, **unused: object) -> None:
        self.name = next(self.names)

    def record(self, stream: Any = None) -> None:
        _note(What.RECORD, self.name, stream)

    def wait(self, stream: Any = None) -> None:
        _note(What.WAIT, self.name, stream)


class _OneEvent(_NotedEvent):
    """Event that all plans of a process share."""

    def __init__(self, **unused: object) -> None:
        self.name = -1


_COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


def note_streams(*, one_event: bool = False, many_streams: bool = False) -> None:
    """Record in `given` all work that is given to streams from now on, in a forked rank under
    `megatron_ext.patches.cpu`.

    ``one_event``: plans share one event. ``many_streams``: each all-to-all has its own stream.
    """
    torch.cuda.Event = _OneEvent if one_event else _NotedEvent  # type: ignore[assignment,misc]
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.stream = _on  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: _current[-1]  # type: ignore[assignment,return-value]
    utils._COMM_STREAM = None
    if many_streams:
        model_chunk_schedule_plan.get_comm_stream = _Stream
    for name in _COLLECTIVES:
        setattr(dist, name, _noted_collective(name, getattr(dist, name)))
    utils.ScheduleNode.stream_acquire_context = _noted_node(
        utils.ScheduleNode.stream_acquire_context
    )
    Channels.send = _noted_message(What.SEND, Channels.send)  # type: ignore[method-assign]
    Channels.receive = _noted_message(What.RECEIVE, Channels.receive)  # type: ignore[method-assign]


def _noted_collective(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, group: Any = None, **more: Any) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            _note(What.COLLECTIVE, ((ranks, group.group_name), name))
        return run(*args, group=group, **more)

    return noted


def _noted_node(context: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def noted(node: Any, name: str) -> Iterator[None]:
        with context(node, name):
            _note(What.NODE, (_plan_of(node), name))
            yield

    return noted


def _plan_of(node: Any) -> int:
    """Return the number of the schedule plan that contains ``node``. The node of the loss function
    belongs to no plan, and counts as a plan of its own."""
    owner = getattr(node, "chunk_state", node)
    number: int = vars(owner).setdefault("noted", next(_plans))
    return number


def _noted_message(what: What, post: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``post`` with its message recorded. A message runs on the stream of its channel, after
    the work that its sender's stream has been given so far, and a wait for it makes the waiting
    stream wait."""

    def noted(channels: Channels, channel: Any, tensor: torch.Tensor) -> Any:
        number = next(_messages)
        ranks = tuple(dist.get_process_group_ranks(channels._groups[channel]))
        here = f"{what} on {channel}"
        _note(What.RECORD, ("posted", number))
        _note(What.WAIT, ("posted", number), here)
        _note(what, (str(channel), ranks), here)
        _note(What.RECORD, ("moved", number), here)
        return _NotedWork(post(channels, channel, tensor), number)

    return noted


_messages, _plans = itertools.count(), itertools.count()


class _NotedWork:
    def __init__(self, work: dist.Work, number: int) -> None:
        self._work, self._number = work, number

    def wait(self) -> None:
        _note(What.WAIT, ("moved", self._number))
        self._work.wait()
