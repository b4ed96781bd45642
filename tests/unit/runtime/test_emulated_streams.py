"""Tests of the streams that `tests.helpers.streams` emulates on the CPU: they report each missing
wait, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.ranks import run_ranks, values
from tests.helpers.streams.device import MAIN, Device, cuda_names, watch_resizes
from tests.helpers.streams.engine import TELLS_OF_NODES, Engine
from tests.helpers.streams.findings import Findings
from tests.helpers.streams.groups import EmulatedGroups
from tests.helpers.streams.operations import Operations
from tests.helpers.streams.storages import Memory

pytestmark = pytest.mark.skipif(
    not TELLS_OF_NODES, reason="this torch does not tell when a node of autograd is made"
)


class Emulated(SimpleNamespace):
    """An emulated device and its replacements for the names of torch.cuda."""

    device: Device
    groups: EmulatedGroups

    @property
    def found(self) -> list[str]:
        return list(self.device.findings.found)

    @property
    def main(self) -> Any:
        return self.default_stream()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    device = Device()
    engine, groups = Engine(device), EmulatedGroups(device)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", watch_resizes(device))
    with Operations(device, engine, groups), engine.watching():
        yield Emulated(device=device, groups=groups, **cuda_names(device))


def test_a_read_that_waits_for_nothing(cuda: Emulated) -> None:
    side = cuda.Stream()
    x = torch.ones(2)
    with cuda.stream(side):
        x.sum()
    (found,) = cuda.found
    assert "aten::sum on stream 1 does not wait for aten::ones" in found
    assert "which writes the same memory on the main stream" in found


def test_a_write_that_does_not_wait_for_a_read(cuda: Emulated) -> None:
    side = cuda.Stream()
    x = torch.ones(2)
    side.wait_stream(cuda.main)
    with cuda.stream(side):
        x.sum()
    assert not cuda.found
    x.add_(1)
    (found,) = cuda.found
    assert "which reads the same memory on stream 1" in found


def test_parts_of_one_storage_are_distinguished(cuda: Emulated) -> None:
    side = cuda.Stream()
    x = torch.empty(4)
    side.wait_stream(cuda.main)
    with cuda.stream(side):
        x[:2].zero_()
    x[2:].zero_()
    assert not cuda.found
    x[1:].zero_()
    assert len(cuda.found) == 1


@pytest.mark.parametrize("how", ["stream", "event", "two events", "host", "device", "host event"])
def test_what_waits(cuda: Emulated, how: str) -> None:
    side, third = cuda.Stream(), cuda.Stream()
    x = torch.ones(2)
    match how:
        case "stream":
            side.wait_stream(cuda.main)
        case "event":
            side.wait_event(cuda.main.record_event())
        case "two events":
            third.wait_event(cuda.main.record_event())
            side.wait_event(third.record_event())
        case "host":
            cuda.main.synchronize()
        case "device":
            cuda.synchronize()
        case "host event":
            cuda.main.record_event().synchronize()
    with cuda.stream(side):
        x.sum()
    assert not cuda.found
    assert cuda.device.findings.crossings == {("the main stream", "stream 1"): 1}
    x = torch.ones(2)  # this tensor is made after the wait
    with cuda.stream(side):
        x.sum()
    assert len(cuda.found) == 1


def test_the_host_waits_for_a_number(cuda: Emulated) -> None:
    x = torch.ones(2)
    x.sum().item()
    with cuda.stream(cuda.Stream()):
        x.sum()
    assert not cuda.found


def test_an_event_that_was_never_recorded(cuda: Emulated) -> None:
    cuda.Event().wait()
    (found,) = cuda.found
    assert found.startswith("an event is waited for before it is recorded, in no pass")


@pytest.mark.parametrize("foreign", ["a mock", "of another device"])
def test_a_stream_of_another_device_is_refused(cuda: Emulated, foreign: str) -> None:
    """A stream of another device is refused.

    Megatron's token dispatcher stores its stream in a class. If an earlier test of the same process
    had built a model while `torch.cuda.Stream` was a mock, the mock used to stay there. Its waits
    did nothing, and as an index it meant stream 1: the emulated streams reported wrong findings and
    missed others.
    """
    stream = mock.MagicMock() if foreign == "a mock" else cuda_names(Device())["Stream"]()
    for use in (
        lambda: cuda.stream(stream),
        lambda: cuda.set_stream(stream),
        lambda: cuda.main.wait_stream(stream),
        lambda: cuda.main.record_event().wait(stream),
        lambda: cuda.device.record_stream(torch.ones(2), stream),
    ):
        with pytest.raises(AssertionError, match="is not a stream of this emulated device"):
            use()


def used_elsewhere(cuda: Emulated) -> tuple[Tensor, Any]:
    """Return a tensor of the main stream that another stream has read, and that stream."""
    side = cuda.Stream()
    x = torch.ones(2)
    side.wait_stream(cuda.main)
    with cuda.stream(side):
        x.sum()
    return x, side


@pytest.mark.parametrize("resized", [False, True])
def test_memory_that_another_stream_still_uses(cuda: Emulated, resized: bool) -> None:
    x, _ = used_elsewhere(cuda)
    if resized:
        x.untyped_storage().resize_(0)
    else:
        del x
    assert not cuda.found
    torch.ones(2)
    (found,) = cuda.found
    assert found.startswith("memory of the main stream is allocated again in no pass, while aten::")


@pytest.mark.parametrize("how", ["recorded", "waited", "behind one that is recorded"])
def test_memory_that_is_given_back_in_time(cuda: Emulated, how: str) -> None:
    x, side = used_elsewhere(cuda)
    record = cuda.device.record_stream
    if how == "recorded":
        record(x, side)
    elif how == "waited":
        cuda.main.wait_stream(side)
    else:
        third = cuda.Stream()
        third.wait_stream(side)
        record(x, third)
    del x
    torch.ones(2)
    assert not cuda.found


def test_a_stream_named_before_what_is_waited_for_does_not_help(cuda: Emulated) -> None:
    x, _ = used_elsewhere(cuda)
    cuda.device.record_stream(x, cuda.Stream())
    del x
    torch.ones(2)
    assert len(cuda.found) == 1


def test_memory_of_the_stream_that_uses_it(cuda: Emulated) -> None:
    with cuda.stream(cuda.Stream()):
        x = torch.ones(2)
        x.sum()
        del x
        torch.ones(2)
    torch.ones(2)
    assert not cuda.found


def test_saved_tensors_are_given_back_when_nodes_are(cuda: Emulated) -> None:
    side = cuda.Stream()
    x = torch.ones(2, requires_grad=True)
    side.wait_stream(cuda.main)
    y = x.exp()
    with cuda.stream(side):
        side.wait_stream(cuda.main)
        z = y * y
    del y
    torch.ones(2)
    assert not cuda.found
    del z
    torch.ones(2)
    assert len(cuda.found) == 1


def host_buffer(cuda: Emulated) -> Tensor:
    buffer = torch.empty(2)
    cuda.device.storages.place_on_host(buffer.untyped_storage(), Memory.PINNED)
    return buffer


def test_a_host_buffer_that_is_used_again_too_early(cuda: Emulated) -> None:
    out, back = cuda.Stream(), cuda.Stream()
    x, buffer = torch.ones(2), host_buffer(cuda)
    out.wait_stream(cuda.main)
    with cuda.stream(out):
        buffer.copy_(x, non_blocking=True)
    with cuda.stream(back):
        buffer.copy_(torch.zeros(2), non_blocking=True)
    (found,) = cuda.found
    assert "on stream 2 does not wait for aten::copy_, which writes the same memory" in found


@pytest.mark.parametrize("waits", [False, True])
def test_a_host_buffer_that_ends_while_it_is_copied(cuda: Emulated, waits: bool) -> None:
    x, buffer = torch.ones(2), host_buffer(cuda)
    x.copy_(buffer, non_blocking=True)
    if waits:
        cuda.main.synchronize()
    del buffer
    assert len(cuda.found) == (not waits)


# --- autograd


def test_nodes_run_on_the_stream_of_their_forward_operation(cuda: Emulated) -> None:
    """Autograd nodes run on the stream of their forward operation. Here the product is computed on
    the side stream and the sum on the main one, so in the backward pass the side stream waits for
    the main one, and at the end the main one waits for the leaf's gradient."""
    side = cuda.Stream()
    x = torch.ones(2, requires_grad=True)
    side.wait_stream(cuda.main)
    with cuda.stream(side):
        y = x * 3
    cuda.main.wait_stream(side)
    y.sum().backward()
    assert x.grad is not None
    x.grad.sum()
    assert not cuda.found
    names = "the main stream", "stream 1"
    assert cuda.device.findings.crossings[names] and cuda.device.findings.crossings[names[::-1]]


def test_a_gradient_of_the_caller_waits_like_one_of_a_node(cuda: Emulated) -> None:
    side = cuda.Stream()
    x = torch.ones(2, requires_grad=True)
    with cuda.stream(side):
        side.wait_stream(cuda.main)
        y = x * 3
    y.backward(torch.ones(2))
    assert not cuda.found


def test_two_gradients_are_added_where_they_are_taken(cuda: Emulated) -> None:
    side = cuda.Stream()
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    side.wait_stream(cuda.main)
    with cuda.stream(side):
        a = y * 2
    cuda.main.wait_stream(side)
    b = y * 3
    (a + b).sum().backward()
    assert not cuda.found
    assert cuda.device.current == MAIN


def test_no_stream_waits_for_what_a_node_does_on_another(cuda: Emulated) -> None:
    """If a backward function switches to another stream by itself, no stream waits for that work,
    as autograd does not know of it."""
    side = cuda.Stream()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with cuda.stream(side):
                return gradient * 2

    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert any("aten::mul of DoubledBackward on stream 1 does not wait" in f for f in cuda.found)


def test_recomputed_nodes_have_the_stream_of_the_recompute(cuda: Emulated) -> None:
    side = cuda.Stream()
    x = torch.ones(2, requires_grad=True)
    side.wait_stream(cuda.main)
    with cuda.stream(side):
        y = torch.utils.checkpoint.checkpoint(lambda x: (x * 2).exp(), x, use_reentrant=True)
    cuda.main.wait_stream(side)
    y.sum().backward()
    assert x.grad is not None and not cuda.found


# --- process groups


def on_two_ranks(run: Any, *, with_streams: bool = True) -> list[Any]:
    def on_rank(rank: int) -> Any:
        device = Device()
        engine, groups = Engine(device), EmulatedGroups(device)
        with pytest.MonkeyPatch.context() as patch:
            for name, method in groups.methods().items() if with_streams else ():
                patch.setattr(dist.ProcessGroup, name, method)
            with Operations(device, engine, groups), engine.watching():
                return run(Emulated(device=device, groups=groups, **cuda_names(device)))

    return values(run_ranks(2, on_rank))


@pytest.mark.parametrize("waits", [False, True])
def test_a_collective_has_ended_for_the_stream_that_waits(waits: bool) -> None:
    def run(cuda: Emulated) -> list[str]:
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        if waits:
            work.wait()
        x.mul(2)
        work.wait()
        assert cuda.device.findings.crossings
        return cuda.found

    for found in on_two_ranks(run):
        assert not found if waits else "does not wait for allreduce" in found[0]


@pytest.mark.parametrize("waits", [False, True])
def test_memory_of_a_message(waits: bool) -> None:
    """The memory of a message must not be freed before its wait. The work object keeps its tensors
    alive, but not the memory of a storage that is resized."""

    def run(cuda: Emulated) -> list[str]:
        x = torch.ones(2)
        rank = dist.get_rank()
        group: Any = dist.group.WORLD
        work = (group.send if rank else group.recv)([x], 1 - rank, 0)
        if waits:
            work.wait()
        cuda.device.storages.resize(x.untyped_storage(), 0, MAIN)
        torch.ones(2)
        work.wait()
        return cuda.found

    for found in on_two_ranks(run):
        assert not found if waits else "is allocated again" in found[0]


def test_operations_count_while_another_thread_is_in_gloo(cuda: Emulated) -> None:
    """The emulated device checks the operations of one thread while another thread is in gloo.

    While the thread of post-validation sent its verdict, operations of passes used to go unchecked,
    or even all later ones.
    """
    has_begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        may_end.wait()

    thread = threading.Thread(target=cuda.groups.call, args=[call])
    thread.start()
    has_begun.wait()
    x = torch.ones(2)
    may_end.set()
    thread.join()
    with cuda.stream(cuda.Stream()):
        x.sum()
    assert len(cuda.found) == 1


def test_the_root_of_a_broadcast_only_reads() -> None:
    def run(cuda: Emulated) -> list[str]:
        x = torch.ones(2)
        work = dist.broadcast(x, 0, async_op=True)
        x.mul(2)
        assert work is not None
        work.wait()
        return cuda.found

    root, other = on_two_ranks(run)
    assert not root and len(other) == 1


@pytest.mark.parametrize("name", ["recv_anysource", "split_group", "new_window"])
def test_what_is_not_emulated_fails(cuda: Emulated, name: str) -> None:
    if not hasattr(dist.ProcessGroup, name):
        pytest.skip(f"torch has no {name}")
    with pytest.raises(AssertionError, match=f"ProcessGroup.{name} is not emulated"):
        cuda.groups.methods()[name](None)


def test_operations_past_the_methods_of_groups_fail() -> None:
    def run(cuda: Emulated) -> None:
        with pytest.raises(AssertionError, match="c10d::allreduce_ is not emulated"):
            dist.all_reduce(torch.ones(2))

    on_two_ranks(run, with_streams=False)


def test_a_run_without_crossings_has_shown_nothing() -> None:
    findings = Findings()
    with pytest.raises(AssertionError, match="only 0 accesses crossed streams, where at least 1"):
        findings.check(at_least=1)


def test_allocations_are_traced(cuda: Emulated) -> None:
    storages = cuda.device.storages
    storages.trace = []
    storages.mark("0F0")
    x = torch.empty(256, dtype=torch.uint8)
    with cuda.stream(cuda.Stream()):
        y = torch.empty(64, dtype=torch.uint8)
    del x
    y.untyped_storage().resize_(0)
    told = [(event.what, event.stream, event.size, event.note) for event in storages.trace]
    assert told == [
        ("mark", 0, 0, "0F0"),
        ("alloc", 0, 256, ""),
        ("alloc", 1, 64, ""),
        ("free", 0, 256, ""),
        ("free", 1, 64, ""),
    ]
