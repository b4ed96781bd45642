"""CPU seconds of a plan, counted from the validated launch command, and the end of it.

A driver opens `planning`, and calls `start_planning_time` when Megatron has validated the launch
command. From then on the end of the time, or Ctrl-C, raises `PlanningEnd` in whatever runs. Code
that has a partial result runs its work by `until_end`, which catches the exception, and then
returns the partial result. Outside `planning` nothing is limited: a launch, whose ranks must all
find the same schedule, has no clock.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType

# Kinds of alternatives that a plan compares. Its text names the kinds for which time was too short.
SCHEDULES, LAYOUTS = "schedules", "layouts of the layers"
RECOMPUTE, PAIRS, SLICES = "other recompute", "passes in pairs", "slices"
WHOLE_STEPS = "whole steps of long ones"

LIMIT = 50.0  # CPU seconds for comparisons; the winner is built as a whole program after them
# CPU seconds after which the exception that ends a comparison is raised once more, if a destructor
# has swallowed it.
_REPEAT = 0.5
# The exception that ends a comparison is not raised within callbacks from numba's compiler (C++),
# which would only print it; the attempt is repeated soon.
_COMPILER = "llvmlite"
_SOON = 0.01  # CPU seconds until the exception is tried again, and the shortest time that is set


class PlanningEnd(BaseException):
    """Raised when the CPU time of a plan, or of a part of it, is over.

    It is no ValueError: a candidate that is being simulated is not refused, its result is unknown.
    """


@dataclass
class PlanningTime:
    """CPU time that one plan may take, and what it has not compared for lack of time.

    Attributes:
        limit: CPU seconds.
        began: CPU seconds of the process when the launch command had been validated; None: it has
            not been.
        first_answer: CPU seconds from then to the first answer; None: there is none yet.
        is_interrupted: whether Ctrl-C ended the plan.
        is_short: whether some of the comparison was ignored because the time was over.
        unfinished: the kinds of alternatives that were not compared to their end because of that.
        share: share of the limit after which the work that now runs ends.
        kind: the kind of alternatives that the outermost work compares now; "": none.
    """

    limit: float
    began: float | None = None
    first_answer: float | None = None
    is_interrupted: bool = False
    is_short: bool = False
    unfinished: list[str] = field(default_factory=list)
    share: float = 1.0
    kind: str = ""

    @property
    def seconds(self) -> float:
        """CPU seconds since the launch command was validated (`began`)."""
        return 0.0 if self.began is None else time.process_time() - self.began

    def end_early(self, kind: str) -> None:
        """Note that the comparison of a ``kind`` of alternatives has not ended; "" names no
        kind."""
        self.is_short = True
        if kind:
            self.unfinished.append(kind)

    @property
    def why_short(self) -> str:
        """Reason, in words, why the plan's comparison ended early."""
        if self.is_interrupted:
            return "the comparison was interrupted"
        return f"part of the comparison did not end within its share of {self.limit:g} CPU seconds"


_TIME: ContextVar[PlanningTime | None] = ContextVar("planning_time", default=None)


@contextmanager
def planning(limit: float = LIMIT) -> Iterator[PlanningTime]:
    """Limit the plan that is made in the block to ``limit`` CPU seconds.

    Signals reach only the main thread: a plan that another thread makes has no end.
    """
    plan = PlanningTime(limit)
    token = _TIME.set(plan)
    try:
        yield plan
    finally:
        _TIME.reset(token)


def start_planning_time() -> None:
    """Start the clock of the plan, once its launch command has been validated."""
    plan = _TIME.get()
    if plan is not None:
        plan.began = time.process_time()


def answered() -> None:
    """Note that the plan now has its first answer, and after how many CPU seconds."""
    plan = _TIME.get()
    if plan is not None and plan.first_answer is None:
        plan.first_answer = plan.seconds


def has_ended_early() -> bool:
    """Return whether some of the plan's comparison was skipped because its time was over."""
    plan = _TIME.get()
    return plan is not None and plan.is_short


def unfinished_alternatives() -> tuple[str, ...]:
    """Return the kinds of alternatives that the plan has not compared to their end, such as
    layouts."""
    plan = _TIME.get()
    return () if plan is None else tuple(dict.fromkeys(plan.unfinished))


@contextmanager
def within(share: float) -> Iterator[None]:
    """End planning work of the block when a ``share`` of the plan's CPU time is over."""
    plan = _TIME.get()
    if plan is None:
        yield
        return
    before, plan.share = plan.share, share
    try:
        yield
    finally:
        plan.share = before


@contextmanager
def provisional() -> Iterator[None]:
    """Restore after the block which comparisons count as ended early. The plan makes those of the
    block once more later."""
    plan = _TIME.get()
    if plan is None:
        yield
        return
    is_short, unfinished = plan.is_short, plan.unfinished.copy()
    try:
        yield
    finally:
        plan.is_short, plan.unfinished = is_short, unfinished


def until_end[T](work: Callable[[], T], otherwise: T, kind: str = "") -> T:
    """Return what ``work`` returns, or ``otherwise`` if the planning time ends before.

    Ctrl-C ends the time too; a second Ctrl-C is a KeyboardInterrupt. Calls may be nested: outer
    work goes on with the result of inner work that has ended early.

    Args:
        kind: words for the kind of alternatives that ``work`` compares; "": other work names them.
            A kind that outer work has named stays.
    """
    plan = _TIME.get()
    is_main = threading.current_thread() is threading.main_thread()
    if plan is None or plan.began is None or not is_main:
        return work()
    around, _ = signal.getitimer(signal.ITIMER_PROF)
    outer, kind = plan.kind, plan.kind or kind
    seconds = plan.share * plan.limit

    def left() -> float:
        return 0.0 if plan.is_interrupted else seconds - plan.seconds

    if left() <= 0:
        plan.end_early(kind)
        return otherwise
    is_running = True

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            plan.is_interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_running and left() > 0:
            # On a busy machine the timer may run ahead of the CPU seconds: by 62 ms in 400 ms, as
            # measured.
            signal.setitimer(signal.ITIMER_PROF, max(left(), _SOON), _REPEAT)
        elif frame is not None and _COMPILER in frame.f_code.co_filename:
            signal.setitimer(signal.ITIMER_PROF, _SOON, _REPEAT)
        elif is_running:
            raise PlanningEnd

    handlers = {name: signal.signal(name, end) for name in (signal.SIGPROF, signal.SIGINT)}
    try:
        plan.kind = kind
        signal.setitimer(signal.ITIMER_PROF, max(left(), _SOON), _REPEAT)
        return work()
    except PlanningEnd:
        plan.end_early(kind)
        around = 0.0
        return otherwise
    finally:
        is_running, plan.kind = False, outer
        if plan.is_interrupted:
            handlers[signal.SIGINT] = signal.default_int_handler
        signal.setitimer(signal.ITIMER_PROF, max(left(), _SOON) if around else 0.0, _REPEAT)
        for name, handler in handlers.items():
            signal.signal(name, handler)
