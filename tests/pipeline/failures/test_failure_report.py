"""Tests of a failing rank on devices where a host never waits for a message, as with NCCL.

Every rank must still end soon, and say which rank has failed, and at which action.
"""

from __future__ import annotations

import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_ext.compile.program.verify import Program  # noqa: E402
from megatron_ext.compile.registry import choose  # noqa: E402
from megatron_ext.runtime import watchdog  # noqa: E402
from megatron_ext.runtime.interruption import listen  # noqa: E402
from megatron_ext.runtime.messages.channels import Channels  # noqa: E402
from megatron_ext.runtime.messages.peer_call import PeerFailure  # noqa: E402
from megatron_ext.runtime.messages.transport import Boundary, Transport  # noqa: E402
from megatron_ext.runtime.rank_identity import rank_identity  # noqa: E402
from megatron_ext.runtime.store import failure_report  # noqa: E402
from megatron_ext.runtime.store.failure_report import connect_failure_report  # noqa: E402
from megatron_ext.schedule.action import Action, parse_action  # noqa: E402
from tests.helpers import broken_stderr  # noqa: E402
from tests.helpers.ranks import RankResult, Script, running_ranks, values  # noqa: E402
from tests.helpers.stages import WIDTH, Pipeline, program_for, world  # noqa: E402
from tests.pipeline.failures.test_faults import HERE, say, throw, wait_until_told  # noqa: E402

pytestmark = pytest.mark.real_time

RANKS = 3
SOON = 10.0  # seconds on a busy machine; torch's own timeout is 30 minutes


class NoWaits(Transport):
    """Transport on which no rank waits for another. ``wanted`` runs where a device would wait for a
    message."""

    wanted: Callable[[], None]

    def send(self, action: Action, tensor: Tensor) -> None:
        with self._calling_peer(action):
            pass

    def wait_sent(self, send: Action) -> None:
        with self._calling_peer(send):
            pass

    def receive(self, action: Action) -> None:
        with self._calling_peer(action):
            pass

    def received(self, action: Action) -> Tensor:
        with self._calling_peer(action):
            self.wanted()
        return torch.zeros(3, WIDTH)


ABORTED = threading.Event()


class Communicators:
    """Stand-in for communicators whose messages a device waits for until the communicators are
    aborted."""

    def close(self) -> None:
        ABORTED.set()


@dataclass
class PipelineWithoutWaits(Pipeline):
    wanted: Callable[[], None] = lambda: None
    communicators: Communicators = field(default_factory=Communicators)

    def transport(self, program: Program) -> Transport:
        boundary = Boundary((3, WIDTH), torch.float32)
        assert isinstance(self.connection, Channels)
        placement = program.schedule.placement
        transport = NoWaits(self.connection, boundary, placement, self.recorder)
        transport.wanted = self.wanted
        return transport


def connected(fault: Callable[[], None] | None, wanted: Callable[[], None]) -> PipelineWithoutWaits:
    """Connect a pipeline with a watchdog, in which rank 1 runs ``fault`` if there is one. All ranks
    of the world must call it."""
    failure_report.LOOK_SECONDS = 0.1
    watchdog.GRACE_SECONDS = 2.0
    faults = {parse_action("1I2"): fault} if fault else {}
    pipeline = PipelineWithoutWaits(
        program_for(choose("zb-h1"), RANKS, 6), world(), faults=faults, wanted=wanted
    )
    pipeline.recorder.rank_identity = rank_identity(world())
    pipeline.recorder.begin(5)
    watchdog.Watchdog(pipeline.recorder).start()
    assert listen(pipeline.recorder, [pipeline.connection, pipeline.communicators]) is not None
    return pipeline


def block() -> None:
    """Block as in a call that waits for a device that never ends: no Python code runs here."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def tell() -> None:
    """Leave a file that says that this rank has come here."""
    (Path(tempfile.gettempdir()) / f"told by {dist.get_rank()}").touch()


def wait_for(*ranks: int) -> None:
    """Wait until each of ``ranks`` has called `tell`."""
    while not all((Path(tempfile.gettempdir()) / f"told by {rank}").exists() for rank in ranks):
        time.sleep(0.01)


def tell_and_block() -> None:
    tell()
    block()


def tell_and_wait_for_device() -> None:
    tell()
    ABORTED.wait()


def tell_and_use_what_comes() -> None:
    """Use the weights after a step that failed, as an optimizer would."""
    tell_and_wait_for_device()
    say("the weights are spoilt")


def throw_at_once() -> None:
    tell()
    throw()


def throw_when_others_block() -> None:
    wait_for(0, 2)
    throw()


def take_long() -> None:
    """Wait until rank 1 has failed, and a moment longer."""
    wait_for(1)
    time.sleep(0.3)


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Step:
    """Step of zb-h1 in which rank 1 fails in 1I2.

    ``wanted`` runs on the other ranks where they need a message, ``after`` runs on them after the
    step.
    """

    fault: Callable[[], None]
    wanted: Callable[[], None] = nothing
    after: Callable[[], None] = nothing
    swallows: bool = False

    def __call__(self, rank: int) -> None:
        fails = rank == 1
        pipeline = connected(self.fault if fails else None, nothing if fails else self.wanted)
        try:
            pipeline.step()
        except ValueError:
            if not self.swallows:
                raise
            wait_until_told()
            return
        self.after()


def check_words(rank: int, result: RankResult, failed: int = 1) -> None:
    """Assert that ``rank`` has ended and said that rank ``failed`` has failed, where and why."""
    host = re.escape(socket.gethostname())
    own = rf"\[pipeline rank {rank} is global rank {rank} on {host}.*iteration 5; [-\d]+ [:\d]+\]"
    theirs = rf"\[pipeline rank {failed} is global rank {failed} on {host}; iteration 5; .*\]"
    assert re.search(
        rf"^megatron_ext: pipeline rank {rank} .*{own}: it ends, as another rank has failed: "
        rf"pipeline rank {failed}, in {failed}I2 {theirs}: ValueError: the model is broken$",
        result.stderr,
        re.MULTILINE,
    ), result.stderr
    assert result.exit_code == 1, (result.exit_code, result.stderr)
    assert "Fatal" not in result.stderr


@pytest.mark.parametrize(
    ("step", "is_interrupted"),
    [
        (Step(throw_when_others_block, wanted=tell_and_block), False),
        (Step(throw_when_others_block, after=tell_and_block), False),
        (Step(throw_when_others_block, after=tell_and_use_what_comes), False),
        (Step(throw_when_others_block, wanted=tell_and_wait_for_device), True),
        (Step(throw_at_once, wanted=take_long), True),
    ],
    ids=[
        "blocked in the step",
        "blocked after it",
        "waiting for its device after the step",
        "waiting for its device in the step",
        "running ahead",
    ],
)
def test_every_rank_ends_when_one_fails(script: Script, step: Step, is_interrupted: bool) -> None:
    """If one rank fails, every other rank ends soon. No error used to end their waits, so they
    waited until torch's timeout."""
    with running_ranks(RANKS, step, script) as running:
        results = running.wait()
    failed = results[1]
    assert failed.exit_code == 1
    assert "ValueError: the model is broken" in failed.stderr
    # the failed rank raises its own error, and hears nothing from others
    assert "it ends" not in failed.stderr
    for rank in (0, 2):
        check_words(rank, results[rank])
        assert results[rank].seconds - failed.seconds < SOON
        assert "spoilt" not in results[rank].stderr
        assert ("PeerFailure: pipeline rank" in results[rank].stderr) == is_interrupted


@dataclass(frozen=True)
class CannotSay:
    """Step in which the other ranks wait while rank 1 fails. The waiting ranks cannot write to
    their stderr."""

    broken: Callable[[], None]

    def __call__(self, rank: int) -> None:
        if rank != 1:
            self.broken()
        Step(throw_when_others_block, wanted=tell_and_wait_for_device)(rank)


@pytest.mark.parametrize("broken", broken_stderr.WAYS)
def test_a_rank_that_can_say_nothing_ends_with_the_others(
    script: Script, broken: Callable[[], None]
) -> None:
    """A rank that cannot write to stderr ends when another rank fails. Such a rank used to run for
    ever, because it reported the failure first and ended only after the write."""
    with running_ranks(RANKS, CannotSay(broken), script) as running:
        results = running.wait(timeout=15)
    assert [result.exit_code for result in results] == [1, 1, 1]
    for rank in (0, 2):
        assert "PeerFailure: pipeline rank" in results[rank].stderr


def test_a_rank_whose_caller_goes_on_after_its_error(script: Script) -> None:
    with running_ranks(
        RANKS, Step(throw_when_others_block, wanted=tell_and_block, swallows=True), script
    ) as running:
        running.wait_until_it_says(1, HERE)
        start = time.monotonic()
        running.wait_until_ended(0, 2)
        assert time.monotonic() - start < SOON
        running.send_signal(1, signal.SIGUSR1)
        results = running.wait()
    assert results[1].exit_code == 0, results[1].stderr
    for rank in (0, 2):
        check_words(rank, results[rank])


# --- stores that end or do not answer


def keep_the_store(rank: int) -> None:
    """Connect two ranks with the store in the process of global rank 0, as without torchrun."""
    file = Path(tempfile.gettempdir()) / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
    else:
        while not file.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(file.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()  # the barrier keeps a rank that ends early until the other has connected


def fail_with_the_store(rank: int) -> None:
    keep_the_store(rank)
    # The other rank polls so rarely that this process could have ended long before.
    failure_report.LOOK_SECONDS = 2.0
    words = connect_failure_report()
    assert words is not None
    heard = threading.Event()

    def hear(text: str) -> None:
        say(text)
        heard.set()

    words.start(hear)
    if rank == 0:
        time.sleep(0.3)
        words.leave("rank 0, in 0F0")
        return
    assert heard.wait(SOON)


def test_the_rank_that_keeps_the_store_is_heard(script: Script) -> None:
    """Other ranks get the failure report of the rank whose process has the store. That report used
    to be lost with the process, before any rank had read it."""
    with running_ranks(2, fail_with_the_store, script, connect=False) as running:
        results = running.wait()
    values(results)
    assert "rank 0, in 0F0" in results[1].stderr
    assert "rank 0" not in results[0].stderr


def fail_and_begin_again(rank: int) -> None:
    fault, wanted = (throw_at_once, nothing) if rank == 1 else (None, take_long)
    pipeline = connected(fault, wanted)
    with pytest.raises(ValueError if rank == 1 else PeerFailure):
        pipeline.step()
    again = connected(None, nothing)
    time.sleep(5 * failure_report.LOOK_SECONDS + watchdog.GRACE_SECONDS)
    again.step()
    say("done")


def test_words_of_another_run_are_not_heard(script: Script) -> None:
    """A rank ignores failure reports of an earlier run. A store may outlive the ranks that failed,
    and a process may outlive one of its pipelines."""
    with running_ranks(RANKS, fail_and_begin_again, script) as running:
        results = running.wait()
    values(results)
    for rank, result in enumerate(results):
        assert "done" in result.stderr
        assert result.stderr.count("it ends") == (rank != 1)


def end_well(rank: int) -> None:
    """End both ranks without an error: first the rank with the store, later the other."""
    keep_the_store(rank)
    failure_report.LOOK_SECONDS = 0.05
    words = connect_failure_report()
    assert words is not None
    words.start(lambda text: say(f"heard {text}"))
    time.sleep(0.5 * rank)


def test_a_store_that_goes_at_the_end_is_no_failure(script: Script) -> None:
    with running_ranks(2, end_well, script, connect=False) as running:
        results = running.wait()
    values(results)
    for result in results:
        assert "heard" not in result.stderr and "Fatal" not in result.stderr


class DeadStore:
    """Stand-in for a store that answers no request, and fails after `SOON` seconds."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def answer(*arguments: object) -> None:
            self.has_ended.wait(SOON)
            raise dist.DistStoreError("timed out")

        return answer


def test_a_store_that_does_not_answer_delays_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "LEAVE_SECONDS", 0.2)
    store = DeadStore()
    words = failure_report.FailureReport(store, "key")  # type: ignore[arg-type]
    words.start(lambda text: None)
    start = time.monotonic()
    words.leave("rank 0, in 0F0")
    words.stop()
    assert time.monotonic() - start < SOON / 2
    store.has_ended.set()  # end the thread, because later tests fork this process
    assert words._thread is not None
    words._thread.join()
