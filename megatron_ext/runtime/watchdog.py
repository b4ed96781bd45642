"""Report of a rank that is stuck, or ended by a signal.

A rank blocked in a wait of torch.distributed runs no Python signal handler: a launcher's SIGTERM
would end it silently, and Ctrl-C would not end it at all. A thread, woken through
`signal.set_wakeup_fd`, reports the rank's action and then ends the process.

On a GPU the device is what waits. Another thread queries it, so that a driver that does not answer
does not delay signals.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

import torch

from megatron_ext.runtime.recorder import Recorder

# Seconds that the main thread has to end after a signal, before the process is ended.
GRACE_SECONDS = 3.0
STUCK_SECONDS = 60.0
LOOK_SECONDS = 1.0
SAY_SECONDS = 1.0  # longest time in seconds that writing a line to stderr may take

_Handler = Callable[[int, FrameType | None], None]
_DEFAULTS: dict[int, _Handler | signal.Handlers] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class Watchdog:
    """Watchdog that reports a stuck rank, or one ended by a signal, from `start` to `forget`.

    The rank's state is read from its `Recorder`. One watchdog runs per process: the first watchdog
    that is started also watches for later ones. A signal is handled only if no other handler is
    installed: Megatron handles SIGTERM with --exit-signal-handler, to save a checkpoint first, and
    an event loop uses the wakeup descriptor.
    """

    _running: ClassVar[Watchdog | None] = None

    def __init__(self, recorder: Recorder) -> None:
        self._recorders = [recorder]
        # Start times of the stuck actions that were reported, so that each is reported once.
        self._reported: dict[tuple[Recorder, str], float] = {}
        self._interrupted = False  # whether the main thread has handled Ctrl-C
        self._has_signals = False
        self._thread: threading.Thread | None = None  # thread that ends this process at a signal
        self._handlers: dict[int, _Handler] = {
            signal.SIGTERM: self._on_sigterm,
            signal.SIGINT: self._on_sigint,
        }

    def start(self) -> None:
        """Start to watch a rank.

        Signals are handled only if the main thread calls this; otherwise only stuck waits are
        reported.
        """
        _stderr.take()
        running = Watchdog._running
        if running is None:
            running = Watchdog._running = self
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            os.register_at_fork(after_in_child=self._end_in_child)
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = _start("megatron_ext watchdog", self._watch)
            _start("megatron_ext device watchdog", lambda: self._watch_device(device))
        else:
            running._recorders = [*running._recorders, *self._recorders]
        if threading.current_thread() is threading.main_thread():
            running._take_signals()

    @classmethod
    def forget(cls, recorder: Recorder) -> None:
        """Stop watching ``recorder``, whose training has ended."""
        if (running := cls._running) is None:
            return
        # Lists and dictionaries are replaced, not changed, since the watching threads may be
        # iterating over them.
        running._recorders = [other for other in running._recorders if other is not recorder]
        running._reported = {
            key: since for key, since in running._reported.items() if key[0] is not recorder
        }

    @classmethod
    def stop_asking_devices(cls) -> None:
        """Stop querying device events, because a CUDA graph is about to be captured.

        A query by any thread would break the capture.
        """
        for recorder in cls._running._recorders if cls._running is not None else ():
            recorder.device.stop_asking()

    def _take_signals(self) -> None:
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            return
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) is _DEFAULTS[signum]:
                signal.signal(signum, handler)
        self._has_signals = True

    def _end_in_child(self) -> None:
        """Disable the watchdog in a forked process, such as a data loader's.

        Such a process has no watchdog thread, but would write its signals to the parent's pipe.
        """
        if Watchdog._running is not self:
            return
        Watchdog._running = None
        if not self._has_signals:
            return
        signal.set_wakeup_fd(-1)
        for signum in self._handlers:
            if self._is_ours(signum):
                signal.signal(signum, _DEFAULTS[signum])

    def _is_ours(self, signum: int) -> bool:
        return signum in self._handlers and signal.getsignal(signum) == self._handlers[signum]

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Leave SIGTERM to the watchdog thread, so that a failing main thread can report its error.

        If the thread has ended, the process is ended here.
        """
        if self._thread is None or not self._thread.is_alive():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.default_int_handler(signum, frame)

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], LOOK_SECONDS)
            if ready:
                for signum in self._reader.recv(64):
                    self._signalled(signum)
            with contextlib.suppress(Exception):  # signals must be handled even if the report fails
                self._report_if_stuck()

    def _signalled(self, signum: int) -> None:
        if not self._is_ours(signum):
            return  # another package's handler decides what the signal means
        with contextlib.suppress(Exception):  # the process must end even if its report fails
            say(f"got {signal.Signals(signum).name}: {self._report()}")
        time.sleep(GRACE_SECONDS)
        if signum == signal.SIGINT and self._interrupted:
            return  # the main thread handles the KeyboardInterrupt, and may take long
        os._exit(128 + signum)

    def _report(self) -> str:
        """Return the positions of the watched recorders, in words."""
        recorders = self._recorders
        reports = [r.report() for r in recorders if r.position or r.device.position]
        idle = recorders[0].report() if recorders else "no training is under way"
        return "; ".join(reports) or idle

    def _watch_device(self, device: int | None) -> None:
        if device is not None:
            # The thread sets its device, since otherwise its queries would create a CUDA context on
            # another one.
            torch.cuda.set_device(device)
        while True:
            for recorder in self._recorders:
                try:
                    recorder.device.look()
                except RuntimeError:
                    return  # the device has failed, and the thread that uses it gets the error
            time.sleep(LOOK_SECONDS)

    def _report_if_stuck(self) -> None:
        for recorder in self._recorders:
            host, device = recorder.position, recorder.device.position
            if host is not None and host.peer is not None and host.seconds > STUCK_SECONDS:
                note = recorder.rank_identity.note(*host.peers)
                self._report_once(recorder, "host", host.since, f"{host}: it may hang {note}")
            if device is not None and device.seconds > STUCK_SECONDS:
                who = f"the device of pipeline rank {recorder.rank}"
                note = recorder.rank_identity.note(*device.pending.peers)
                report = f"{who} {device}: it may hang {note}"
                self._report_once(recorder, "device", device.since, report)

    def _report_once(self, recorder: Recorder, who: str, since: float, report: str) -> None:
        if self._reported.get((recorder, who)) != since:
            self._reported[recorder, who] = since
            say(report)


def _start(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class _Stderr:
    """Stderr of this process, as it was when the watchdog started, under a descriptor of its own.

    If stderr is closed later, the next file that is opened gets descriptor 2, and that may be a
    checkpoint's.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._is_taken = False

    def take(self) -> None:
        """Write to the stderr that the process has now, from now on."""
        self._is_taken = True
        if not _is_stderr(2):
            self._descriptor = None
        elif self._descriptor is None:
            self._descriptor = os.dup(2)
        else:
            os.dup2(2, self._descriptor, inheritable=False)

    @property
    def descriptor(self) -> int | None:
        """Descriptor of stderr to write to; None if there is no stderr."""
        if self._is_taken:
            return self._descriptor
        return 2 if _is_stderr(2) else None


_stderr = _Stderr()


def say(text: str) -> None:
    """Write ``text`` to stderr as one line. Returns soon and never raises.

    The line may be lost: stderr may be closed, on a full disk, or a pipe without a reader. It is
    one write, so that lines of several ranks do not mix. It bypasses sys.stderr, whose lock the
    main thread may hold.
    """
    line = f"megatron_ext: {text}\n".encode(errors="replace")
    if (stderr := _stderr.descriptor) is None:
        return

    def write(text: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(stderr, text)

    try:
        _start("megatron_ext says", lambda: write(line)).join(SAY_SECONDS)
    except RuntimeError:  # no thread can start, at a limit or while the interpreter exits
        if _is_writable(stderr):
            write(line[: select.PIPE_BUF])


def _is_stderr(descriptor: int) -> bool:
    """Return whether ``descriptor`` is a stderr, and not a file opened after stderr was closed.

    The test is whether child processes inherit the descriptor: they inherit a stderr, and none of
    the files that Python opens.
    """
    if sys.__stderr__ is None or sys.__stderr__.closed:
        return False
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def _is_writable(descriptor: int) -> bool:
    """Return whether a write of up to `select.PIPE_BUF` bytes to ``descriptor`` returns at once."""
    try:
        poll = select.poll()  # poll supports any file descriptor, select only small numbers
        poll.register(descriptor, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poll.poll(0))
    except OSError:
        return False
