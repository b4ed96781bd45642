"""Progress of long work on stderr: one changing line, or on a pipe a new line now and then. The
work itself only reports how far it is (`base.progress`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from megatron_ext.base.progress import reporting

_REFRESHED = 0.5  # seconds between two updates of the line


@contextmanager
def showing_progress() -> Iterator[None]:
    """Show the progress of long work in the block of the ``with`` on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with reporting(lambda line: typer.echo(f"megatron-ext: {line}", err=True)):
            yield
        return
    status = Status("", console=console)

    def show(line: str) -> None:
        status.update(Text(line))  # a Text object, so that rich takes nothing for markup
        status.start()

    try:
        with reporting(show, lambda line: console.print(Text(line)), every=_REFRESHED):
            yield
    finally:
        status.stop()
