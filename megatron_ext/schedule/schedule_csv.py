"""A schedule as CSV: a row per rank, PyTorch's grammar."""

from __future__ import annotations

import csv
import io
import re

from megatron_ext.schedule.action import Action, parse
from megatron_ext.schedule.flip import (
    FlippedPlacement,
    flip_rows,
    flipped,
    opens_on_first_rank,
)
from megatron_ext.schedule.kinds import RULES, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule, is_compute


def to_csv(schedule: Schedule) -> str:
    """The compute actions, one line per rank in rank order, PyTorch's grammar: ``0F0,0F1,0B0``.

    A table that `from_csv` has flipped is flipped back.
    """
    rows = schedule.compute_rows
    if isinstance(schedule.placement, FlippedPlacement):
        rows = flip_rows(rows)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, name: str) -> Schedule:
    """The schedule that ``text`` holds: the inverse of `to_csv`. Empty cells are idle time.

    A compound such as ``(0F1;4B0)OVERLAP_F_B`` is its parts, one after the other. A V or wave that
    opens on rank 0 is flipped (`flip`).

    The placement is read off the table: a stage is on the rank that first names it. (That a stage
    stays there, and all else, is for `prove` to say.)

    Raises:
        ValueError: a cell is no compute action, a line is empty, or a stage is missing.
    """
    rows: list[tuple[Action, ...]] = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            row = tuple(parse(part) for cell in cells for part in _parts(cell))
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        for action in row:
            if not is_compute(action):
                raise ValueError(
                    f"{name}, line {number}: {action} is no pass; messages and waits are inserted "
                    f"by us, leave them out"
                )
            if RULES[action.kind].where is not Where.STAGE:
                raise ValueError(
                    f"{name}, line {number}: {action} is a pass of vocabulary parallelism; those "
                    f"are inserted by us, leave them out"
                )
        if not row:
            raise ValueError(
                f"{name}, line {number} holds no action; there is one line per rank, and every "
                f"rank has a stage"
            )
        rows.append(row)
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            rank_of.setdefault(action.stage, rank)
    if not rank_of:
        raise ValueError(f"{name} holds no action")
    missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
    if missing:
        raise ValueError(f"{name} names stage {max(rank_of)} but no action of stage {missing[0]}")
    placement = Placement("file", tuple(rank_of[stage] for stage in range(len(rank_of))))
    if placement.ranks == len(rows) and opens_on_first_rank(placement.rank_of):
        return Schedule(name, flipped(placement), flip_rows(tuple(rows)))
    return Schedule(name, placement, tuple(rows))


_COMPOUND = re.compile(r"\((.*)\)OVERLAP_F_B")


def _parts(cell: str) -> list[str]:
    """The actions in a cell: none, one, or those of a compound."""
    compound = _COMPOUND.fullmatch(cell.strip())
    if compound:
        return compound[1].split(";")
    return [cell] if cell.strip() else []
