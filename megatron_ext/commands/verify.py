"""``megatron-ext verify``: a proof of a schedule file.

A table from elsewhere may be incomplete or may hang. The proof that every schedule of a training
passes tells where it fails, on any machine.
"""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_ext.base.words import counted
from megatron_ext.commands.output import fail
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.compile.registry import choose
from megatron_ext.compile.report import ScheduleReport, report
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem, ScheduleOptions
from megatron_ext.schedule.slices import Slices


def verify(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A .csv file of compute actions, a line per rank, or a .py file with a family "
            "(FILE:key=value,... sets its options).",
        ),
    ],
    pp: Annotated[
        int | None,
        typer.Option(
            help=(
                "Number of pipeline ranks. Required for a .py file; a .csv file has one line per "
                "rank."
            )
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            "-m",
            "--microbatches",
            help="Number of microbatches of a step. Required for a .py file; a .csv file contains "
            "them.",
        ),
    ] = None,
) -> None:
    """Prove a schedule file: complete, in order, free of deadlock, and each stage reads its data in
    the same order."""
    try:
        with showing_progress():
            resolved = choose(spec)
        ranks = resolved.ranks if pp is None else pp
        of_step = resolved.microbatches if microbatches is None else microbatches
        if ranks is None or of_step is None:
            raise ValueError(
                f"{spec} makes a schedule for any number of ranks and microbatches: add "
                "--pp P and -m M with the numbers of your launch"
            )
        placement = resolved.place(ranks)
        cut = Slices(resolved.slices or 1)
        costs = uniform(placement, 1, 1, 1)
        problem = Problem(
            placement, of_step, costs, options=ScheduleOptions(slices=cut, pairs=resolved.has_pairs)
        )
        with showing_progress():
            _, made = report(resolved, problem)
    except ValueError as error:
        fail(error)
    typer.echo(
        f"{spec} is valid: {counted(ranks, 'rank')}, {counted(placement.stages, 'stage')}, "
        f"{_of_step(of_step, cut.count)}; a rank holds at most "
        f"{counted(made.peak, 'microbatch')}{_of_pairs(made)}"
    )
    typer.echo(_results(made))


def _of_step(microbatches: int, slices: int) -> str:
    text = counted(microbatches, "microbatch")
    return text if slices == 1 else f"{text} of {slices} slices"


def _of_pairs(made: ScheduleReport) -> str:
    if not made.pairs:
        return ""
    return f"; {made.pairs} of its forward passes run as one with a backward pass"


def _results(made: ScheduleReport) -> str:
    if made.bitwise_order and made.slices > 1:
        return (
            "every stage takes its slices in one order: training gives the numbers of every such "
            "schedule of these slices to the last bit, and stock Megatron's but for rounding"
        )
    if made.bitwise_order:
        return (
            "every stage takes its microbatches in order: training gives stock Megatron's numbers "
            "to the last bit"
        )
    return (
        "all stages take the forward passes in one order, so inputs and labels match, but a stage "
        "takes its microbatches out of order: gradients are summed in another order than stock "
        "Megatron's, and their last bits differ"
    )
