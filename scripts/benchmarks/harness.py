"""Arguments and tables of the benchmarks.

Every benchmark documents its flags in its docstring, and prints Markdown as pages quote it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.tables import row


def arguments(
    doc: str | None, words: Sequence[str] | None, **options: tuple[Any, str]
) -> argparse.Namespace:
    """Return the values of ``options`` from ``words``; None takes the words of the command line.

    Args:
        doc: the help text: what is measured, and how.
        options: for each option its default and its help. The option has the type of its default. A
            default of False makes a switch, and a tuple an option with several values.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, text) in options.items():
        sample = default[0] if isinstance(default, tuple) else default
        how: dict[str, Any] = {"type": type(sample), "default": default}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, tuple):
            how["nargs"] = "*"
        flags = [f"--{name.replace('_', '-')}"] + ["-m"] * (name == "microbatches")
        parser.add_argument(*flags, help=text, **how)
    return parser.parse_args(words)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """Print a table below ``title``, each of ``rows`` as soon as it is computed."""
    if title is not None:
        print(f"{title}\n")
    for cells in itertools.chain([headings, ["-"] * len(headings)], rows):
        print(row(cells), end="", flush=True)
