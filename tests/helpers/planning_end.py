"""The end of the planning time before a line of code, for tests of what it interrupts there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from megatron_ext.planner.planning_time import PlanningEnd


def ended_at(number: int, codes: tuple[CodeType, ...], compute: Callable[[], object]) -> bool:
    """Whether ``compute`` executes more than ``number`` lines of ``codes``.

    If so, the planning time ends before the line with this ``number``, as a signal ends it.
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
