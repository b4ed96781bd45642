"""End of this rank in bounded time after another rank has failed, and report of its own failures.

The rank's connections are cut, so that its step raises an exception once the main thread reaches
the next action. If the main thread does not end within the grace time, the process exits.

Between steps a caller may catch an error and go on: it may retry, or take StopIteration for the end
of an epoch. There only an error that ends the process is reported, from `sys.excepthook`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType

from megatron_ext.runtime import watchdog
from megatron_ext.runtime.recorder import Closable, Recorder
from megatron_ext.runtime.store.failure_report import FailureReport, connect_failure_report


def listen(recorder: Recorder, connections: Sequence[Closable] = ()) -> FailureReport | None:
    """Start to listen for other ranks' failures.

    Return the report by which this rank tells the other ranks of its own failure. A failure closes
    ``connections``, and those that are added to ``recorder`` later. The result is None if no other
    rank uses torch's store. The call waits for no rank.
    """
    for connection in connections:
        recorder.add_connection(connection)
    report = recorder.failure_report = connect_failure_report()
    if report is not None:
        report.start(Interruption(recorder), recorder.report)
        _listening.add(recorder)
        _report_uncaught_errors()
    return report


def stop_listening(recorder: Recorder) -> None:
    """Stop listening for failures, because the training of ``recorder`` is over."""
    _listening.discard(recorder)
    if recorder.failure_report is not None:
        recorder.failure_report.stop()


_listening: weakref.WeakSet[Recorder] = weakref.WeakSet()

# A forked process, such as a data loader's, does not report its errors as this rank's.
os.register_at_fork(after_in_child=_listening.clear)


def _report_uncaught_errors() -> None:
    """Make `sys.excepthook` report an error to other ranks before it is shown.

    Such an error ends this process.
    """
    show = sys.excepthook
    if getattr(show, "reports", None) is _listening:
        return

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Ctrl-C reaches every rank of a launch that is to end, so other ranks need not be told.
        if isinstance(error, Exception):
            for recorder in list(_listening):
                # The rank's error is shown even if the report to others fails.
                with contextlib.suppress(Exception):
                    recorder.failed_between_steps(error)
        show(kind, error, trace)

    report.reports = _listening  # type: ignore[attr-defined]
    sys.excepthook = report


@contextlib.contextmanager
def heard_if_it_fails(
    recorder: Recorder, where: str, kind: type[BaseException] = BaseException
) -> Iterator[None]:
    """Context in which an error of this ``kind`` ends the other ranks, too.

    Passes and connections report their errors themselves.
    """
    try:
        yield
    except kind as error:
        if not recorder.has_failed:
            recorder.failed(error, where)
        for connection in recorder.connections():
            connection.close()
        raise


class Interruption:
    """Callback that ends this rank after another rank's failure, called by the listening thread.

    It closes the connections of ``recorder`` if passes run or a connection is being made, and ends
    the process if its main thread does not end.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, words: str) -> None:
        """End this rank, because another rank has failed and left the report ``words``.

        The main thread never calls this.
        """
        recorder = self._recorder
        if recorder.has_failed:
            return  # this rank has failed too, and shows its own error
        where = recorder.report()
        recorder.interruption = words
        # Messages are aborted only within a step. Between steps the device could take the
        # incomplete data of an aborted message for gradients; within a step the host notices the
        # interruption before the step ends.
        if recorder.in_step:
            # Each connection has a thread, as aborting a communicator may take long.
            for connection in recorder.connections():
                threading.Thread(target=connection.close, daemon=True).start()
        watchdog.say(f"{where}: it ends, as another rank has failed: {words}")
        end = time.monotonic() + watchdog.GRACE_SECONDS
        while not recorder.has_failed:
            if time.monotonic() > end:
                os._exit(1)
            time.sleep(0.05)
