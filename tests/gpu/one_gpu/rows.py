"""The rows of the table. A case prints them among its output, where its runner finds them."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

_MARK = "row: "


class State(Enum):
    """Outcome of a case, as its row of the table names it."""

    SHOWN = "shown"
    CANNOT_RUN = "cannot run"  # the machine lacks something that the case needs
    FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """A row of the table. ``figure`` is the measured value, or the reason why there is none."""

    case: str
    figure: str
    state: State = State.SHOWN

    def line(self) -> str:
        return _MARK + json.dumps({**asdict(self), "state": self.state.value})


def parse(line: str) -> Row | None:
    """Return the row in a line of output, or None."""
    if not line.startswith(_MARK):
        return None
    fields = json.loads(line[len(_MARK) :])
    return Row(fields["case"], fields["figure"], State(fields["state"]))


def names_error(line: str) -> bool:
    """Return whether a line of output is the end of a traceback, or one of our messages.

    torch prints ``[rank0]: `` before each line of the traceback that ends a rank.
    """
    return re.match(r"(\[rank\d+\]: )?\S*(Error|Exception)\b|.* error: ", line) is not None


class CannotRun(Exception):
    """Raised if this machine lacks something that the case needs."""


def tell(case: str, figure: str, is_good: bool = True) -> None:
    print(Row(case, figure, State.SHOWN if is_good else State.FAILED).line(), flush=True)


def run_case(case: str, run: Callable[[], object]) -> None:
    """Call ``run`` as the only work of a process. If ``run`` ends early, the last printed row says
    why."""
    try:
        run()
    except (CannotRun, ModuleNotFoundError) as reason:
        print(Row(case, str(reason), State.CANNOT_RUN).line(), flush=True)
    except Exception as error:
        traceback.print_exc()
        first, *more = str(error).strip().splitlines() or [""]
        reasons = [f"{type(error).__name__}: {first}", *filter(names_error, more)]
        # the first line of the error, and the last line of a rank's traceback
        words = "; ".join((reasons[0], *reasons[1:][-1:]))
        print(Row(case, words, State.FAILED).line(), flush=True)
        sys.exit(1)


def table(rows: Sequence[Row]) -> str:
    """Return ``rows`` as a table in Markdown."""
    words = {State.SHOWN: "", State.CANNOT_RUN: "not run: ", State.FAILED: "**failed**: "}
    lines = ["| case | figure |", "|-|-|"]
    for row in rows:
        figure = (words[row.state] + row.figure).replace("|", "\\|")
        lines.append(f"| {row.case} | {figure} |")
    return "\n".join(lines)
