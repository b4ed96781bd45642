"""How commands print: tables, units, and errors."""

from __future__ import annotations

from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text


def fail(error: Exception) -> NoReturn:
    """End a command with status 2 and the error's text."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    typer.echo(f"megatron-ext: error: {text}", err=True)
    raise typer.Exit(2)


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))  # no markup
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width of its own
    console.print(table)


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


def gib(number: float) -> str:
    return f"{number / 2**30:.3g} GiB"
