"""Progress reports of long work.

Work that may take seconds names itself (`task`) and counts its steps. Reports exist only inside
`reporting`, which prints a line after `FIRST` seconds and then every `EVERY` seconds. A separate
thread prints them, so that a long step is reported too and the work never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

Say = Callable[[str], None]

FIRST, EVERY = 2.0, 12.0  # seconds until the first progress line, and between two lines
_LOOKS = 0.1  # seconds between two polls of the tasks
_LEAVE = 1.0  # longest wait in seconds at the end for a line that is being written


@dataclass
class Task:
    """Long work, such as a search, whose progress is reported.

    Attributes:
        what: the activity, as a report line begins: ``v-auto packs plans``.
        steps: largest possible number of steps; 0 if unknown.
        equal_steps: whether all steps take about the same time, so that the remaining time can be
            estimated.
        seconds: time limit; None without one.
        done: number of steps done.
        found: quality of the best result so far, in words: ``the best is 2.1% above the bound``.
    """

    what: str
    steps: int = 0
    equal_steps: bool = False
    seconds: float | None = None
    done: int = 0
    found: str = ""
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left(self) -> float | None:
        """Seconds after which the work ends at the latest; None if unknown."""
        if self.seconds is not None:
            return max(self.seconds - self.elapsed, 0.0)
        if not self.equal_steps or not self.done:
            return None
        return self.elapsed / self.done * (self.steps - self.done)

    def __str__(self) -> str:
        text = f"{self.what}, {self.done:,} of {self.steps:,}" if self.steps else self.what
        return f"{text}, {self.found}" if self.found else text


@dataclass
class _Listener:
    remark: Say
    # Stack of running tasks, each of which is a part of the task before.
    tasks: list[Task] = field(default_factory=list)


_LISTENER: ContextVar[_Listener | None] = ContextVar("listener", default=None)
_REMARKS: set[str] = set()


@contextmanager
def task(
    what: str, steps: int = 0, *, equal_steps: bool = False, seconds: float | None = None
) -> Iterator[Task]:
    """Declare work in the block that may take seconds, so that its progress is reported.

    The code in the block counts ``done`` up. Arguments as in `Task`.
    """
    work, listener = Task(what, steps, equal_steps, seconds), _LISTENER.get()
    if listener is None:
        yield work
        return
    listener.tasks.append(work)
    try:
        yield work
    finally:
        listener.tasks.pop()


def remark(text: str) -> None:
    """Report a remark ``text`` on long work, at most once in a process (`reporting`)."""
    listener = _LISTENER.get()
    if listener is not None and text not in _REMARKS:
        _REMARKS.add(text)
        listener.remark(text)


@contextmanager
def reporting(
    say: Say, remarks: Say | None = None, *, first: float = FIRST, every: float = EVERY
) -> Iterator[None]:
    """Report long work in the block: pass ``say`` a line about each task that takes long.

    The first line comes after ``first`` seconds of a task, then one every ``every`` seconds.
    ``say`` is called from another thread, and the block ends even if lines cannot be written.

    ``remarks`` gets the texts of `remark`; None sends them to ``say``.

    Inside another `reporting` this does nothing: the outer one reports all tasks.
    """
    if _LISTENER.get() is not None:
        yield
        return
    listener, over = _Listener(remarks or say), threading.Event()

    def watch() -> None:
        due = 0.0
        while not over.wait(_LOOKS):
            tasks, now = tuple(listener.tasks), time.perf_counter()
            if tasks and now >= max(due, tasks[0].started + first):
                # A progress line that cannot be written is skipped, whatever the error: the next
                # one may succeed.
                with suppress(Exception):
                    say(_line(tasks))
                due = now + every

    token = _LISTENER.set(listener)
    thread = threading.Thread(target=watch, name="megatron_ext progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _LISTENER.reset(token)
        over.set()
        thread.join(_LEAVE)


def _line(tasks: Sequence[Task]) -> str:
    """Return the progress of nested ``tasks``, outermost first, as one line.

    ``v-auto packs plans, 312 of 1,300; 12 s so far, 40 s more at the most``. The time left at the
    most is that of the innermost task alone, because the tasks around it have further steps.
    """
    left = tasks[-1].left
    text = f"{': '.join(map(str, tasks))}; {duration(tasks[0].elapsed)} so far"
    if left is None:
        return text
    ending = f"{duration(left)} more at the most"
    is_part = any(around.steps - around.done > 1 for around in tasks[:-1])
    return f"{text}, {'this part ' * is_part}{ending}"


def duration(seconds: float) -> str:
    """Return ``seconds`` as text: 40 s, 2 min 5 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
