"""The end of the planning time before a chosen line of code, for tests that interrupt code
there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from megatron_ext.planner.planning_time import PlanningEnd


def ended_at(number: int, codes: tuple[CodeType, ...], compute: Callable[[], object]) -> bool:
    """Run ``compute``, let the planning time end in it, and return whether that has happened.

    The time ends after ``number`` executed lines of ``codes``, by the exception that a signal
    raises there in a plan. It does not end if ``compute`` executes no more lines of ``codes``.
    """
    left, has_ended = iter([None] * number), False
    trace = sys.gettrace()

    def end(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal has_ended
        if frame.f_code not in codes:
            return None
        if event == "line" and next(left, PlanningEnd) is PlanningEnd:
            has_ended = True
            raise PlanningEnd
        return end

    sys.settrace(end)
    try:
        compute()
    except PlanningEnd:
        assert has_ended
    finally:
        sys.settrace(trace)
    return has_ended
