"""A schedule as CSV: a row per rank, in PyTorch's grammar.

A schedule can be exchanged as a table: torch.distributed.pipelining, torchtitan and spreadsheets
read it. Tables of others may count ranks from the other end, and may contain mistakes; what is read
is checked for gaps in its numbers before it is a schedule.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_ext.base.progress import task
from megatron_ext.base.words import counted
from megatron_ext.schedule.action import (
    COMPOUND,
    Action,
    Kind,
    OverlappedPasses,
    Rows,
    Slice,
    parse_action,
    parse_overlapped,
    slices_named,
    whole_of,
)
from megatron_ext.schedule.flip import (
    FlippedPlacement,
    flip_rows,
    flipped,
    opens_on_first_rank,
    opens_on_last_rank,
)
from megatron_ext.schedule.kinds import RULES, Lane, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule, is_compute


def to_csv(schedule: Schedule) -> str:
    """Return the compute actions of ``schedule`` as CSV in PyTorch's grammar, one line per rank.

    A line reads ``0F0,0F1,0B0``; an overlapped forward and backward pass are
    ``(0F1;4I0)OVERLAP_F_B``. If `from_csv` has reversed the ranks of a table, they are reversed
    back.
    """
    rows = schedule.compute_rows
    if isinstance(schedule.placement, FlippedPlacement):
        rows = flip_rows(rows)
    return _table(map(schedule.cells, rows))


def to_torch_csv(schedule: Schedule) -> str:
    """Return ``schedule`` as a CSV table for torch.distributed.pipelining and torchtitan.

    A V or wave has stage 0 on rank 0 in this table, on the last rank in that of `to_csv`.
    `from_csv` reads the same schedule from both.

    Raises:
        ValueError: torch does not know one of its passes, or microbatches are in slices.
    """
    rows = schedule.compute_rows
    unknown = next((action for row in rows for action in row if action.kind not in _TORCHS), None)
    if unknown is not None:
        raise ValueError(
            f"torch.distributed.pipelining has no pass like {unknown} "
            f"({RULES[unknown.kind].does}): it has F, I, W and B; torch.utils.checkpoint "
            "recomputes a stage's activations in its backward pass"
        )
    if schedule.arrays.slices > 1:
        raise ValueError(
            "torch.distributed.pipelining has no slices of a microbatch, and would take "
            f"{rows[0][0]} for a whole microbatch: drop the slices, or write a table for "
            "megatron_ext (to_csv, simulate --csv)"
        )
    if opens_on_last_rank(schedule.placement.rank_of):
        rows = flip_rows(rows)
    return _table(map(schedule.cells, rows))


_TORCHS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)


def _table(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, name: str) -> Schedule:
    """Return the schedule in a CSV table. The inverse of `to_csv`. Empty cells are idle time.

    Messages and FSDP's actions in a dump of torch's runtime are ignored: its default format,
    ``compute_comms``, has them. Cells may also be separated by semicolons or tabs, as Excel writes
    them in many countries. A compound such as ``(0F1;4B0)OVERLAP_F_B`` is an overlapped forward and
    backward pass. The ranks of a V or wave that has stage 0 on rank 0 are reversed (`flip`).

    The placement is read from the table: a stage is on the rank that first names it. `prove` checks
    the rest, also that no other rank names the stage.

    Raises:
        ValueError: a cell is no compute action, a line is empty or has no stage of its own, or a
            stage or microbatch is missing below the largest.
    """
    rows = rows_from_csv(text, name)
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            rank_of.setdefault(action.stage, rank)
        if rank not in rank_of.values():
            raise ValueError(
                f"{name}, line {rank + 1} has no stage of its own: {row[0]} is of stage "
                f"{row[0].stage}, which is on line {rank_of[row[0].stage] + 1}; all passes of a "
                "stage must stand on one line"
            )
    placement = Placement("file", tuple(rank_of[stage] for stage in range(len(rank_of))))
    if placement.ranks == len(rows) and opens_on_first_rank(placement.rank_of):
        return Schedule(name, flipped(placement), flip_rows(rows), _pairs(text))
    return Schedule(name, placement, rows, _pairs(text))


def rows_from_csv(text: str, name: str) -> Rows:
    """Return the actions of each rank in the CSV table ``text``, whatever ranks its stages are on.

    If the actions name slices, as ``3F7.2`` does, the slices are taken to be of equal length.

    Raises:
        ValueError: a cell is no compute action, a line is empty, or a number of a stage or
            microbatch below the largest is missing.
    """
    lines = csv.reader(io.StringIO(text.rstrip()), delimiter=_delimiter(text))
    rows: list[tuple[Action, ...]] = []
    try:
        slices = slices_named(text)
    except ValueError as error:
        raise ValueError(f"{name}, {error}") from None
    with task(f"reading {name}", steps=text.rstrip().count("\n") + 1) as reading:
        while (cells := _next_line(lines, name, len(rows) + 1)) is not None:
            rows.append(_row(cells, f"{name}, line {len(rows) + 1}", slices))
            reading.done += 1
    if not rows:
        raise ValueError(f"{name} has no action")
    _check_numbers(rows, name)
    return tuple(rows)


# Kinds of passes that a file or a family may contain, with what they do.
KINDS_IN_FILES = {
    kind: rule.does
    for kind, rule in RULES.items()
    if rule.lane is Lane.COMPUTE and rule.where is Where.STAGE
}
_KINDS = ", ".join(f"{kind} ({does})" for kind, does in KINDS_IN_FILES.items())


# Actions that the runtime of torch.distributed.pipelining adds, and that its dumps contain by
# default: messages, and FSDP's gathered or released parameters. They are dropped, as the runtime
# here adds its own.
_OF_TORCHS_RUNTIME = re.compile(r"\d+((SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def _pairs(text: str) -> frozenset[OverlappedPasses]:
    """Return the overlapped passes, F and a backward pass, that a CSV table names.

    The actions of the table have been checked.
    """
    slices = slices_named(text)
    named = (parse_overlapped(found[0], slices) for found in COMPOUND.finditer(text))
    return frozenset(overlapped for overlapped in named if overlapped is not None)


def _delimiter(text: str) -> str:
    """Return the delimiter between the cells of a CSV table: comma, semicolon or tab."""
    outside = COMPOUND.sub("", text)
    return "," if "," in outside else next((d for d in ";\t" if d in outside), ",")


def _next_line(lines: Iterator[list[str]], name: str, number: int) -> list[str] | None:
    try:
        return next(lines, None)
    except csv.Error as error:
        raise ValueError(f"{name}, line {number} is not a line of a CSV file: {error}") from None


def _row(cells: Sequence[str], where: str, slices: int) -> tuple[Action, ...]:
    """Return the actions in a rank's line of a CSV table. Errors call the line ``where``."""
    try:
        row = tuple(parse_action(part, slices) for cell in cells for part in _parts(cell))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; the kinds in a file are {_KINDS}") from None
    for action in row:
        if not is_compute(action):
            raise ValueError(
                f"{where}: {action} is a message or a wait, not a pass; omit messages and waits, "
                f"which are inserted for you; the kinds in a file are {_KINDS}"
            )
        if action.kind not in KINDS_IN_FILES:
            raise ValueError(
                f"{where}: {action} is a pass of vocabulary parallelism; omit such passes, which "
                f"are inserted for you; the kinds in a file are {_KINDS}"
            )
    if not row:
        raise ValueError(
            f"{where} has no action; the file has one line per rank, and every rank has a stage"
        )
    return row


def _parts(cell: str) -> list[str]:
    """Return the actions in a cell of a CSV table: none, one, or two overlapped passes."""
    compound = COMPOUND.fullmatch(cell.strip())
    if compound:
        return compound[1].split(";")
    return [cell] if cell.strip() and not _OF_TORCHS_RUNTIME.fullmatch(cell.strip()) else []


_NUMBERED: dict[str, Callable[[Action], int]] = {
    "stage": lambda action: action.stage,
    "microbatch": lambda action: whole_of(action.microbatch),
    "slice": lambda a: a.microbatch.slice if isinstance(a.microbatch, Slice) else 0,
}


def _check_numbers(rows: Sequence[tuple[Action, ...]], name: str) -> None:
    """Raise ValueError if stages, microbatches or slices are not numbered consecutively from 0.

    After this check there are at most as many stages, microbatches and slices as actions, so a
    typing error such as stage 99999999 cannot allocate much memory.
    """
    lines = list(enumerate(rows, start=1))
    for what, number_of in _NUMBERED.items():
        numbers = {number_of(action) for row in rows for action in row}
        missing = next((n for n in range(len(numbers)) if n not in numbers), None)
        if missing is not None:
            most = max(numbers)
            line, action = next((n, a) for n, r in lines for a in r if number_of(a) == most)
            raise ValueError(
                f"{name}, line {line}: {action} is of {what} {most}, but no action is of {what} "
                f"{missing}; these numbers count from 0 without gaps"
            )
    _check_forwards(rows, name)


def _check_forwards(rows: Sequence[tuple[Action, ...]], name: str) -> None:
    """Raise ValueError if a CSV table has fewer actions than it needs forward passes.

    This bounds the product of stages, microbatches and slices by the size of the file. Other
    missing forward passes are found by `prove`.
    """
    actions = [action for row in rows for action in row]
    stages, wholes, parts = (1 + max(map(number_of, actions)) for number_of in _NUMBERED.values())
    if stages * wholes * parts <= len(actions):
        return
    what = "slice" if parts > 1 else "microbatch"
    there = {tuple(of(a) for of in _NUMBERED.values()) for a in actions if a.kind is Kind.FORWARD}
    needed = itertools.product(range(stages), range(wholes), range(parts))
    stage, microbatch, part = next(numbers for numbers in needed if numbers not in there)
    cut = f".{part}" if parts > 1 else ""
    raise ValueError(
        f"{name}: {Action(stage, Kind.FORWARD, microbatch)}{cut} is missing: "
        f"{counted(len(actions), 'action')} are too few for {counted(stages, 'stage')} and "
        f"{counted(wholes * parts, what)}"
    )
