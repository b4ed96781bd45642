"""Output of commands: tables, units, and errors.

Commands print for people on terminals of any width. Tables wrap sentences and never numbers, and
every refusal ends a command in the same way.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ext.base.errors import LONGEST_ERROR
from megatron_ext.base.secrets import masked
from megatron_ext.base.words import shown


def fail(error: Exception) -> NoReturn:
    """Print ``error`` on stderr, and end the command with status 2."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    text = text.encode(errors="backslashreplace").decode()  # names of files may have any bytes
    typer.echo(f"megatron-ext: error: {shown(text, LONGEST_ERROR)}", err=True)
    raise typer.Exit(2)


def command_line() -> str:
    """Return the command line as the user gave it, with secrets masked, to be printed."""
    return masked(["megatron-ext", *sys.argv[1:]])


_SHORT = 20  # Longest name or number of a table in characters; longer cells are sentences.
_GAP = 2  # spaces between two columns of a table


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a table of ``rows``, whose keys are the headings.

    If the table is wider than the terminal, headings and sentences are wrapped, and names and
    numbers are not.
    """
    console = Console()
    width = console.width if console.is_terminal else 200  # a pipe has no width of its own
    cells = [[_cell(value) for value in row.values()] for row in rows]
    longest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    headings = list(rows[0])
    if _width(headings, longest) > width:
        headings = [
            heading if size > _SHORT else "\n".join(heading.split())
            for heading, size in zip(headings, longest, strict=True)
        ]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for heading, size in zip(headings, longest, strict=True):
        table.add_column(heading, overflow="fold", no_wrap=size <= _SHORT)
    for row in cells:
        table.add_row(*map(Text, row))  # Text objects, so that rich takes no cell for markup
    least = _width(headings, [min(size, _SHORT) for size in longest])
    Console(width=max(width, least)).print(table)


def _width(headings: list[str], sizes: list[int]) -> int:
    """Return the width of a table in characters.

    Args:
        headings: headings of the columns, which may have several lines.
        sizes: width of the cells of each column.
    """
    widths = (
        max(size, *map(len, heading.split("\n")))
        for heading, size in zip(headings, sizes, strict=True)
    )
    return sum(widths) + _GAP * (len(sizes) - 1)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return " ".join(map(_cell, value))
    return str(value)
