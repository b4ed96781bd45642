"""``megatron-ext verify``: a proof of a schedule file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_ext.commands.output import fail
from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.build.report import report
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule_csv import from_csv


def verify(file: Annotated[Path, typer.Argument(help="Compute actions, a line per rank.")]) -> None:
    """Prove a schedule file: complete, in order, free of deadlock."""
    try:
        choice = choose(str(file))
        schedule = from_csv(file.read_text(), file.name)
        microbatches = 1 + max(action.microbatch for row in schedule.rows for action in row)
        placement = schedule.placement
        problem = Problem(placement, microbatches, uniform(placement, 1, 1, 1))
        _, made = report(choice, problem)
    except (ValueError, OSError) as error:
        fail(error)
    order = "in" if made.bitwise_order else "not in"
    typer.echo(
        f"{file} is valid: {placement.ranks} ranks, {placement.stages} stages, {microbatches} "
        f"microbatches, {order} microbatch order, peak "
        f"{made.peak:g} microbatches"
    )
