"""How layouts are printed: which layers lie on which stage, and what that gains."""

from __future__ import annotations

from typing import Any

import typer

from megatron_ext.commands.output import print_table
from megatron_ext.schedule.plan.candidate import VocabMethod
from megatron_ext.schedule.plan.layouts.lines import Lines
from megatron_ext.schedule.plan.layouts.work import Evaluated
from megatron_ext.schedule.plan.verdict import WORTH
from megatron_ext.schedule.words import bytes_text

_WORDS = {
    "chunks": "Megatron's schedules, layers as it lays them",
    "stock": "Megatron's schedules, any layout",
    "ours": "any schedule, any layout",
}


def print_layouts(lines: Lines) -> None:
    """Print the launch command, and what it could gain by other layouts."""
    bound = "" if lines.bound is None else f", in {bytes_text(lines.bound)} of a rank"
    typer.echo(f"\nwith other layers on its stages{bound}:")
    rows = [_row("the line as it is", lines.own, lines)]
    rows += [_row(_WORDS[name], other, lines) for name, other in lines.others.items()]
    print_table([{key: row[key] for key in rows[0] if any(r[key] for r in rows)} for row in rows])
    typer.echo("a step is here with its optimizer, and with reductions that no pass hides")
    if lines.barred is not None and lines.barred.seconds < (1 - WORTH) * lines.ours.seconds:
        barred = lines.barred
        more = lines.ours.seconds / barred.seconds - 1
        why = lines.refused.get(barred.schedule, "")
        typer.echo(f"{barred.schedule} would gain {more:.1%} more, and is refused: {why}")


def _row(words: str, made: Evaluated, lines: Lines) -> dict[str, Any]:
    divided = "" if made.method is VocabMethod.NAIVE else made.method.value
    fullest = max(range(len(made.rank_bytes)), key=made.rank_bytes.__getitem__, default=None)
    return {
        "": words,
        "schedule": made.schedule,
        "vocabulary divided": divided,
        "run again": str(made.recompute) if lines.is_recompute_other else "",
        "step": made.seconds,
        "gain": "" if made is lines.own else f"{lines.gain(made):.1%}",
        "slowest stage": f"{made.slowest}, {made.slowest_over_mean:+.0%}",
        "fullest rank": ""
        if fullest is None
        else f"{fullest}, {bytes_text(made.rank_bytes[fullest])}",
    }
