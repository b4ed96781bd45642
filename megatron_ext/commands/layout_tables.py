"""How layouts are printed: which layers lie on which stage, and what that gains."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from megatron_ext.commands.output import print_table
from megatron_ext.schedule.plan.candidate import VocabMethod
from megatron_ext.schedule.plan.layouts.lines import EQUAL, UNSURE, Lines
from megatron_ext.schedule.plan.layouts.work import Evaluated
from megatron_ext.schedule.words import bytes_text

if TYPE_CHECKING:
    from megatron_ext.launch_check.alternatives.layouts import LaidOut, Written

_WORDS = {
    "chunks": "Megatron's schedules, layers as it lays them",
    "stock": "Megatron's schedules, any layout",
    "ours": "any schedule, any layout",
}


def print_layouts(made: LaidOut, *, is_estimate: bool) -> None:
    """The line, what it could gain by other layouts, and what to write for each."""
    lines = made.lines
    bound = "" if lines.bound is None else f", in {bytes_text(lines.bound)} of a rank"
    typer.echo(f"\nwith other layers on its stages{bound}:")
    rows = [_row("the line as it is", lines.own, lines)]
    rows += [_row(_WORDS[name], other, lines) for name, other in lines.others.items()]
    print_table([{key: row[key] for key in rows[0] if any(r[key] for r in rows)} for row in rows])
    typer.echo("a step is here with its optimizer, and with reductions that no pass hides")
    before = lines.own
    for (name, other), written in zip(lines.others.items(), made.written, strict=True):
        if before.seconds / other.seconds - 1 >= EQUAL:
            _print_words(_WORDS[name], other, before, written, is_estimate=is_estimate)
            before = other
    if before is lines.own:
        typer.echo("as far as can be told all are equal: the line can stay as it is")
    if lines.barred is not None and lines.barred.seconds < (1 - EQUAL) * lines.ours.seconds:
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


def _print_words(
    words: str, made: Evaluated, before: Evaluated, written: Written, *, is_estimate: bool
) -> None:
    """What ``made`` gains over ``before``, and what to write for it."""
    gain, unsure = before.seconds / made.seconds - 1, ""
    if is_estimate and gain < UNSURE and made.schedule == before.schedule:
        unsure = ", within the error of an estimate: --pipeline-costs profile measures layers"
    typer.echo(f"\n{words}: {gain:.1%} faster{unsure}")
    dropped = " ".join(written.dropped)
    if written.added:
        instead = f"\n  in place of {dropped}" if dropped else ""
        typer.echo(f"write {shlex.join(written.added)}{instead}")
    elif dropped:
        typer.echo(f"drop {dropped}")
