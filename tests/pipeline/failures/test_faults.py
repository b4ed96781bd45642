"""Tests of a rank that fails in the middle of a step: every rank ends soon, and says at which
action it was.

The ranks end as a training script's do, by the interpreter's own shutdown, with gloo's threads
alive and messages pending.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_ext.compile.registry import choose  # noqa: E402
from megatron_ext.runtime import watchdog  # noqa: E402
from megatron_ext.runtime.messages.batched import PipelineGroup  # noqa: E402
from megatron_ext.runtime.recorder import Recorder  # noqa: E402
from megatron_ext.runtime.weight_gradients import queue  # noqa: E402
from megatron_ext.schedule.action import parse_action  # noqa: E402
from megatron_ext.schedule.problem import P2P  # noqa: E402
from tests.helpers import broken_stderr  # noqa: E402
from tests.helpers.ranks import (  # noqa: E402
    HANGS,
    RankResult,
    Script,
    run_ranks,
    running_ranks,
    values,
)
from tests.helpers.stages import Pipeline, alone, program_for, world  # noqa: E402

pytestmark = pytest.mark.real_time

RANKS = 3
HERE = "here it is"
NOTE = r"\[.*\d\d:\d\d:\d\d\]"  # a rank's identity in brackets, at the end of a line


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Step:
    """Step of zb-h1 on three ranks with a watchdog; ``faults`` are functions that run at the named
    actions.

    Rank 1's row in zb-h1 on three ranks begins: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1.
    """

    faults: Mapping[str, Callable[[], None]]
    before: Callable[[], None] = nothing
    varies: bool = False
    p2p: P2P = P2P.ASYNC

    def __call__(self, rank: int) -> None:
        # Python handles Ctrl-C only if the shell that started the tests has not disabled it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        watchdog.GRACE_SECONDS = 0.5
        self.before()
        faults = {parse_action(action): fault for action, fault in self.faults.items()}
        program = program_for(choose("zb-h1"), RANKS, 6, p2p=self.p2p)
        connect = PipelineGroup if self.p2p is P2P.BATCHED else None
        pipeline = Pipeline(program, world(), faults=faults, varies=self.varies, connect=connect)
        watchdog.Watchdog(pipeline.recorder).start()
        pipeline.step()
        say("done")


def stay() -> None:
    """Sleep for a minute in short sleeps: a signal at the start of a sleep is noticed only at its
    end."""
    for _ in range(600):
        time.sleep(0.1)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# --- a rank fails, and the other ranks lose their connection to it


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def throw() -> None:
    raise ValueError("the model is broken")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def run_out_of_host_memory() -> None:
    raise MemoryError


def leave() -> None:
    sys.exit(3)


def stop() -> None:
    time.sleep(0.5)  # time for gloo's thread, which is stopped too, to send pending messages
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_told() -> None:
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: signals.append(signum))
    say(HERE)
    while not signals:
        time.sleep(0.02)
    time.sleep(0.3)  # time for gloo's thread to notice that the neighbour has gone


def check_cut_off(rank: int, result: RankResult) -> None:
    """Assert that ``rank`` has ended by an error that names the message and the rank it waited
    for."""
    assert result.exit_code == 1, (rank, result.exit_code, result.stderr)
    match = re.search(
        rf"PeerFailure: pipeline rank {rank} was waiting for {rank}(SEND|RECV)_([FB])\d "
        r"\((to|from) pipeline rank (\d)\)",
        result.stderr,
    )
    assert match, result.stderr
    lane, tensor, direction, peer = match.groups()
    assert direction == {"SEND": "to", "RECV": "from"}[lane]
    forwards = (lane == "SEND") == (tensor == "F")
    assert int(peer) == rank + (1 if forwards else -1)
    assert re.search(rf"megatron_ext: pipeline rank {rank}, in {rank}\D", result.stderr)
    assert "Fatal" not in result.stderr


@pytest.mark.parametrize(
    ("at", "fault", "exit_code", "error"),
    [
        ("1I2", kill, -signal.SIGKILL, None),
        ("2F4", kill, -signal.SIGKILL, None),
        ("1I2", throw, 1, "ValueError: the model is broken"),
        ("0W0", throw, 1, "ValueError: the model is broken"),
        ("2I1", run_out_of_memory, 1, "OutOfMemoryError: CUDA out of memory"),
        ("1F2", run_out_of_host_memory, 1, "MemoryError"),
        ("1W1", leave, 3, None),
    ],
)
def test_every_rank_ends_when_one_fails(
    script: Script, at: str, fault: Callable[[], None], exit_code: int, error: str | None
) -> None:
    with running_ranks(RANKS, Step({at: fault}), script) as running:
        results = running.wait()
    failed = parse_action(at).stage
    for rank, result in enumerate(results):
        if rank != failed:
            check_cut_off(rank, result)
    result = results[failed]
    assert result.exit_code == exit_code, result.stderr
    if error is None:
        assert result.stderr == ""
    else:
        assert f"{error}\n[rank{failed}]: megatron_ext: pipeline rank {failed}, in {at} [" in (
            result.stderr
        )
        assert "PeerFailure" not in result.stderr and "Fatal" not in result.stderr


@pytest.mark.parametrize(
    ("at", "fault", "exit_code"), [("1I2", kill, -signal.SIGKILL), ("0W0", throw, 1)]
)
def test_every_rank_of_a_batched_pipeline_ends_when_one_fails(
    script: Script, at: str, fault: Callable[[], None], exit_code: int
) -> None:
    """If a rank of a pipeline with batched messages fails, every rank ends. gloo's connections end
    with the failed process, although the process group itself stays."""
    with running_ranks(RANKS, Step({at: fault}, p2p=P2P.BATCHED), script) as running:
        results = running.wait()
    failed = parse_action(at).stage
    assert results[failed].exit_code == exit_code, results[failed].stderr
    for rank, result in enumerate(results):
        if rank != failed:
            check_cut_off(rank, result)


@pytest.mark.parametrize("varies", [False, True])
def test_sending_to_a_rank_that_has_failed(script: Script, varies: bool) -> None:
    """A send to a rank that has died is reported with the pass and the peer. If a rank computes
    when its neighbour dies, the next send or receive fails at its start, not at its wait, and only
    gloo's bare error used to be printed. (Rank 1 dies in 1F0. Its receive 1RECV_F1 comes before
    1F0, and it waits there for the message if shapes vary.)"""
    step = Step({"1F0": kill, "0F2": wait_until_told}, varies=varies)
    with running_ranks(RANKS, step, script) as running:
        running.wait_until_it_says(0, HERE)
        running.wait_until_ended(1)
        running.send_signal(0, signal.SIGUSR1)
        results = running.wait()
    check_cut_off(0, results[0])
    assert "waiting for 0SEND_F2 (to pipeline rank 1)" in results[0].stderr


# --- a rank hangs, and the other ranks wait until they are ended from outside


def hang() -> None:
    say(HERE)
    stay()


def hang_in_torch() -> None:
    """Hang as in a collective whose other ranks do not come: no Python signal handler runs
    meanwhile."""
    say(HERE)
    dist.recv(torch.zeros(1), src=0)


def be_soon_stuck() -> None:
    watchdog.STUCK_SECONDS = 0.1


# The messages that the other ranks of zb-h1 wait for when rank 1 stops in 1I2, by rank.
WAIT_FOR_1I2 = {
    0: "pipeline rank 0 waiting for 0RECV_B2 from pipeline rank 1",
    2: "pipeline rank 2 waiting for 2RECV_F4 from pipeline rank 1",
}


def check_signal_report(stderr: str, name: str, where: str) -> None:
    line = rf"^megatron_ext: got {name}: {where} for \d+\.\d s {NOTE}$"
    assert re.search(line, stderr, re.MULTILINE), stderr


@pytest.mark.parametrize(
    ("name", "exit_code"), [("SIGTERM", 128 + signal.SIGTERM), ("SIGINT", 128 + signal.SIGINT)]
)
def test_ranks_blocked_in_gloo_report_and_are_ended_from_outside(
    script: Script, name: str, exit_code: int
) -> None:
    """Ranks that are blocked in gloo report their position, and end at a launcher's SIGTERM or at
    Ctrl-C. Rank 1 is stopped, and the other ranks wait for it."""
    with running_ranks(RANKS, Step({"1I2": stop}, before=be_soon_stuck), script) as running:
        for rank, where in WAIT_FOR_1I2.items():
            running.wait_until_it_says(rank, where)
        time.sleep(1.5)  # the watchdog looks every second, and must not repeat its message
        for rank in WAIT_FOR_1I2:
            running.send_signal(rank, signal.Signals[name])
        running.wait_until_ended(*WAIT_FOR_1I2)
        running.send_signal(1, signal.SIGKILL)
        results = running.wait()
    for rank, where in WAIT_FOR_1I2.items():
        assert results[rank].exit_code == exit_code
        report = rf"^megatron_ext: {where} for \d+\.\d s: it may hang {NOTE}$"
        assert len(re.findall(report, results[rank].stderr, re.MULTILINE)) == 1
        check_signal_report(results[rank].stderr, name, where)


@pytest.mark.parametrize("fault", [hang, hang_in_torch])
def test_sigterm_to_a_rank_that_hangs_in_a_pass(script: Script, fault: Callable[[], None]) -> None:
    with running_ranks(RANKS, Step({"1I2": fault}), script) as running:
        running.wait_until_it_says(1, HERE)
        running.send_signal(1, signal.SIGTERM)
        results = running.wait()
    assert results[1].exit_code == 128 + signal.SIGTERM
    check_signal_report(results[1].stderr, "SIGTERM", "pipeline rank 1 in 1I2")
    for rank in (0, 2):
        check_cut_off(rank, results[rank])


@dataclass(frozen=True)
class CannotSay:
    """Step in which rank 0 soon has something to report, but cannot write to its stderr."""

    broken: Callable[[], None]

    def __call__(self, rank: int) -> None:
        watchdog.STUCK_SECONDS = watchdog.LOOK_SECONDS = 0.1
        watchdog.SAY_SECONDS = 0.2
        Step({"1I2": hang}, before=self.broken if rank == 0 else nothing)(rank)


@pytest.mark.parametrize("broken", broken_stderr.WAYS)
def test_sigterm_ends_a_rank_that_can_say_nothing(
    script: Script, broken: Callable[[], None]
) -> None:
    """SIGTERM ends a rank that cannot write to stderr. Such a rank used to ignore SIGTERM: the
    watchdog's thread, which handles the signal, had ended or was blocked when it wrote that the
    rank may hang."""
    with running_ranks(RANKS, CannotSay(broken), script) as running:
        # When rank 2 writes that it may hang, rank 0 writes the same, or tries to.
        running.wait_until_it_says(2, "it may hang")
        time.sleep(0.5)
        running.send_signal(0, signal.SIGTERM)
        running.wait_until_ended(0)
        results = running.wait(timeout=0)
    assert results[0].exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("broken", [nothing, *broken_stderr.WAYS])
def test_without_a_thread_a_line_is_written_unless_that_blocks(
    broken: Callable[[], None],
) -> None:
    """If no further thread can be started, the watchdog still writes its line, unless the write
    would block. Such a line used to be lost although stderr was writable."""

    def no_thread(name: str, target: Callable[[], None]) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    def speak(rank: int) -> None:
        watchdog._start = no_thread
        broken()
        watchdog.say("it may hang")

    (result,) = run_ranks(1, speak, connect=False)
    assert result.exit_code == 0 and result.seconds < HANGS
    assert ("megatron_ext: it may hang\n" in result.stderr) == (broken is nothing)


FILE = "weights"


def open_a_file_as_stderr() -> None:
    """Close stderr, and open a file, which gets the file descriptor of stderr."""
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.close(2)
    file = open(Path(tempfile.gettempdir()) / FILE, "wb", buffering=0)  # noqa: SIM115
    assert file.fileno() == 2
    file.write(b"0123")
    FILES.append(file)


FILES: list[IO[bytes]] = []


def start_and_lose_stderr(rank: int) -> None:
    start_watchdog()
    open_a_file_as_stderr()
    os.set_inheritable(2, True)  # a checkpoint that C++ code opens is inheritable
    hang()


def start_without_stderr(rank: int) -> None:
    open_a_file_as_stderr()
    start_watchdog()
    hang()


@pytest.mark.parametrize(
    ("run", "is_said"), [(start_and_lose_stderr, True), (start_without_stderr, False)]
)
def test_a_file_with_the_number_of_stderr_is_left_alone(
    script: Script, run: Callable[[int], None], is_said: bool
) -> None:
    """The watchdog never writes into another file that has the descriptor of a closed stderr. If a
    program closes stderr, the next file that it opens, such as a checkpoint, gets descriptor 2, and
    the watchdog used to write its lines into that file. The watchdog writes to the stderr that
    existed at its start."""
    with running_ranks(1, run, script, connect=False) as running:
        running.wait_until_it_says(0, HERE)
        running.send_signal(0, signal.SIGTERM)
        (result,) = running.wait()
        written = (Path(running._folder) / FILE).read_bytes()
    assert written == b"0123"
    assert result.exit_code == 128 + signal.SIGTERM
    assert ("megatron_ext: got SIGTERM" in result.stderr) is is_said


def test_ctrl_c_in_a_pass_is_a_keyboard_interrupt(script: Script) -> None:
    with running_ranks(RANKS, Step({"1I2": hang}), script) as running:
        running.wait_until_it_says(1, HERE)
        running.send_signal(1, signal.SIGINT)
        results = running.wait()
    assert results[1].exit_code == -signal.SIGINT  # Python itself ends like this on Ctrl-C
    assert "KeyboardInterrupt\n" in results[1].stderr
    assert "pipeline rank 1, in 1I2" in results[1].stderr


def save_on_interrupt() -> None:
    say(HERE)
    try:
        stay()
    except KeyboardInterrupt:
        time.sleep(3 * watchdog.GRACE_SECONDS)
        say("saved")


def test_who_catches_ctrl_c_may_take_long(script: Script) -> None:
    """A training that catches Ctrl-C may take its time. The watchdog used to end a process 3 s
    after Ctrl-C if it was between two passes, although the main thread had caught the interrupt and
    was saving a checkpoint."""
    with running_ranks(RANKS, Step({"1I2": save_on_interrupt}), script) as running:
        running.wait_until_it_says(1, HERE)
        running.send_signal(1, signal.SIGINT)
        results = running.wait()
    values(results)
    assert "saved" in results[1].stderr


# --- signals that another part of the process handles


def save_and_go_on(signum: int, frame: FrameType | None) -> None:
    say("saved")


def take_sigterm() -> None:
    signal.signal(signal.SIGTERM, save_and_go_on)


def take_sigterm_and_be_soon_stuck() -> None:
    take_sigterm()
    be_soon_stuck()


@pytest.mark.parametrize(
    "step",
    [
        Step({"1I2": stop}, before=take_sigterm_and_be_soon_stuck),
        Step({"1I2": stop, "0F0": take_sigterm}, before=be_soon_stuck),
    ],
    ids=["taken before the watchdog starts", "taken after"],
)
def test_a_sigterm_handler_of_other_code_is_left_alone(script: Script, step: Step) -> None:
    """The watchdog leaves SIGTERM to a handler that is set already, or set later, such as
    Megatron's --exit-signal-handler, which saves a checkpoint at the end of the step."""
    with running_ranks(RANKS, step, script) as running:
        running.wait_until_it_says(0, WAIT_FOR_1I2[0])
        running.send_signal(0, signal.SIGTERM)
        time.sleep(1.0)  # twice the time after which the watchdog would have ended the rank
        running.send_signal(1, signal.SIGCONT)
        results = running.wait()
    values(results)
    assert "saved" in results[0].stderr and "SIGTERM" not in results[0].stderr


def start_watchdog() -> None:
    watchdog.GRACE_SECONDS = 0.2
    watchdog.Watchdog(Recorder(0)).start()


def fork_a_worker(rank: int) -> None:
    # A worker of tests that were started in the background would otherwise ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start_watchdog()
    for signum in (signal.SIGTERM, signal.SIGINT):
        reader, writer = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(writer, b"up")
            stay()
            os._exit(0)
        os.read(reader, 2)
        os.kill(worker, signum)
        _, status = os.waitpid(worker, 0)
        say(f"worker ended by {os.waitstatus_to_exitcode(status)}")
    time.sleep(3 * watchdog.GRACE_SECONDS)


def test_a_forked_workers_signals_are_its_own(script: Script) -> None:
    """A rank does not react to signals of its forked data-loader workers. A loader ends its workers
    with SIGTERM. The workers used to inherit the socket of the rank's watchdog, so the rank took
    the signal for its own and ended 3 s later."""
    with running_ranks(1, fork_a_worker, script, connect=False) as running:
        (result,) = running.wait()
    assert result.exit_code == 0, result.stderr
    assert "worker ended by -15" in result.stderr
    assert "worker ended by -2" in result.stderr
    assert "megatron_ext" not in result.stderr


def start_two_watchdogs(rank: int) -> None:
    start_watchdog()
    second = Recorder(0)
    watchdog.Watchdog(second).start()
    assert [thread.name for thread in threading.enumerate()].count("megatron_ext watchdog") == 1
    with second.computing(parse_action("0F0")):
        hang()


def test_one_watchdog_serves_two_pipelines(script: Script) -> None:
    """One watchdog serves two pipelines of a process. Only the first pipeline used to handle
    signals, and its report said `between passes` while the second pipeline was in a pass."""
    with running_ranks(1, start_two_watchdogs, script, connect=False) as running:
        running.wait_until_it_says(0, HERE)
        running.send_signal(0, signal.SIGTERM)
        (result,) = running.wait()
    assert result.exit_code == 128 + signal.SIGTERM
    check_signal_report(result.stderr, "SIGTERM", "pipeline rank 0 in 0F0")


def start_with_an_event_loop(rank: int) -> None:
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    start_watchdog()
    assert signal.set_wakeup_fd(-1) == writer
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def start_in_a_thread(rank: int) -> None:
    thread = threading.Thread(target=start_watchdog)
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("start", [start_with_an_event_loop, start_in_a_thread])
def test_signals_that_cannot_be_had_are_left_alone(
    script: Script, start: Callable[[int], None]
) -> None:
    """The watchdog does not take over the wake-up descriptor of signals if another library uses it,
    such as an event loop in the main thread (Ray's, verl's)."""
    with running_ranks(1, start, script, connect=False) as running:
        values(running.wait())


# --- a failed step after which the process continues


def fail_once_then_step(rank: int) -> None:
    failing = True

    def throw_inside_autograd(gradient: Tensor) -> Tensor:
        if failing:
            raise ValueError("the model is broken")
        return gradient

    pipeline = Pipeline(program_for(choose("zb-h1"), 1, 2), world())
    (stage,) = pipeline.stages.values()
    stage.bias.register_hook(throw_inside_autograd)
    with pytest.raises(ValueError, match="the model is broken") as raised:
        pipeline.step()
    note, row = raised.value.__notes__
    assert re.fullmatch(f"megatron_ext: pipeline rank 0, in 0I0 {NOTE}", note)
    assert "0I0 <-- ERROR HERE" in row
    assert pipeline.recorder.position is None
    queue.clear()
    failing = False
    stage.weight.grad = stage.bias.grad = None
    pipeline.step()
    (expected,) = alone(pipeline)
    assert all(map(torch.equal, stage.gradients, expected.gradients))


def go_on_after_failing(rank: int) -> None:
    check_it_takes_no_further_step(P2P.ASYNC)


def go_on_after_failing_in_a_batch(rank: int) -> None:
    check_it_takes_no_further_step(P2P.BATCHED)


def check_it_takes_no_further_step(p2p: P2P) -> None:
    connect = PipelineGroup if p2p is P2P.BATCHED else None
    program = program_for(choose("zb-h1"), RANKS, 6, p2p=p2p)
    pipeline = Pipeline(program, world(), faults={parse_action("1I2"): throw}, connect=connect)
    try:
        pipeline.step()
    except ValueError:
        with pytest.raises(RuntimeError, match="rank 1 has failed in an earlier step, and its"):
            pipeline.step()
        wait_until_told()


def test_a_rank_whose_caller_goes_on_after_its_error(script: Script) -> None:
    """A rank closes its connections after an error, even if its caller continues. A caller may log
    the exception and keep the process alive. Its connections used to stay open, and the other ranks
    waited for torch's timeout of ten minutes."""
    with running_ranks(RANKS, go_on_after_failing, script) as running:
        running.wait_until_it_says(1, HERE)
        running.wait_until_ended(0, 2)
        running.send_signal(1, signal.SIGUSR1)
        results = running.wait()
    assert results[1].exit_code == 0, results[1].stderr
    for rank in (0, 2):
        check_cut_off(rank, results[rank])


def test_a_batched_rank_whose_caller_goes_on_after_its_error(script: Script) -> None:
    """After an error in a pipeline with batched messages, the process group stays open, because
    Megatron owns it. The other ranks wait until the failed process ends."""
    with running_ranks(RANKS, go_on_after_failing_in_a_batch, script) as running:
        running.wait_until_it_says(1, HERE)
        running.send_signal(1, signal.SIGUSR1)
        results = running.wait()
    assert results[1].exit_code == 0, results[1].stderr
    for rank in (0, 2):
        check_cut_off(rank, results[rank])


def test_the_queue_is_clean_after_a_failure(script: Script) -> None:
    with running_ranks(1, fail_once_then_step, script) as running:
        values(running.wait())
