"""``megatron-ext schedules``: the list of schedules. The list has what a user compares first;
formulas and pictures stand in docs/schedules.md.
"""

from __future__ import annotations

import json

import typer

from megatron_ext.commands.options import Json
from megatron_ext.commands.output import print_table
from megatron_ext.compile.registry import entries


def schedules(as_json: Json = False) -> None:
    """List the schedules.

    maturity: stable schedules are those that plan recommends. Experimental ones train too, and have
    hardly been tried together with other features. Laboratory ones exist for comparisons.
    """
    rows = [
        {
            "name": entry.name,
            "maturity": entry.maturity,
            "placement": entry.place(4).name,
            "chunks": entry.place(4).chunks,
            "uses_costs": entry.traits.uses_costs,
            "source": entry.source,
        }
        for entry in entries().values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    print_table([{_HEADERS.get(key, key): value for key, value in row.items()} for row in rows])


# Table headings that differ from the keys of --json.
_HEADERS = {
    "name": "schedule",
    "chunks": "stages of a rank",
    "uses_costs": "made for the costs",
}
