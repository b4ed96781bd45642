"""``megatron-ext trace``: the time of measured steps by its causes.

A trace has thousands of passes; the question is why a step took longer than its passes. The command
prints the parts of its time, the largest single causes, and for Megatron's own step what our
schedules would take.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_ext.base.words import counted
from megatron_ext.commands.options import HtmlPage, Json
from megatron_ext.commands.output import command_line, fail, print_table
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.observe.slow_ranks import SLOW
from megatron_ext.observe.trace import TracedStep, read_trace
from megatron_ext.observe.trace_report import TraceReport, median_step, trace_report
from megatron_ext.observe.trace_text import (
    milliseconds,
    prospect_rows,
    remarks,
    schedule_name,
    sections,
)
from megatron_ext.schedule.rank_speeds import RankSpeeds
from megatron_ext.viz.page.run import traced
from megatron_ext.viz.page.write import SECONDS, Page, check_page, write_page


def trace(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder written by --pipeline-trace, or the trace.json in it."
        ),
    ],
    as_json: Json = False,
    page: HtmlPage = None,
) -> None:
    """Print where the time of traced steps went, and the largest causes of lost time.

    For Megatron's own steps, also print the predicted step times of our schedules.
    """
    try:
        if page is not None:
            check_page(page)
        with showing_progress():
            steps = read_trace(folder)
            report = trace_report(steps)
        if page is not None:
            _write_page(median_step(steps), report, page)
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    _print_trace(report, folder)
    if page is not None:
        typer.echo(f"\npage: {page}")


def _write_page(step: TracedStep, report: TraceReport, path: Path) -> None:
    title = f"{schedule_name(report)}: a measured step compared with its prediction"
    write_page(Page(title, traced(step), command_line(), SECONDS), path)


def _print_trace(report: TraceReport, folder: Path) -> None:
    of_several = f", the median of {len(report.iterations)} by its makespan"
    typer.echo(
        f"{schedule_name(report)} on {counted(report.pp, 'rank')}, "
        f"{counted(report.microbatches, 'microbatch')}; iteration {report.iteration}"
        f"{of_several * (len(report.iterations) > 1)}"
    )
    print_table(
        [
            {"": name.replace("_", " "), "measured": figure(value), "predicted": figure(other)}
            for name, value in asdict(report.measured).items()
            for other in [getattr(report.predicted, name)]
            for figure in [_share if "share" in name else milliseconds]
        ]
    )
    typer.echo(
        f"prediction: with the program's costs times {report.cost_factor:.4g}, so that its passes "
        f"take as long as the measured ones; clocks agree to {report.clock_error * 1e6:.0f} us"
    )
    typer.echo("\nwhere the makespan went")
    makespan = report.measured.makespan
    print_table(
        [
            {"": part, "time": milliseconds(seconds), "of the makespan": _share(seconds / makespan)}
            for part, seconds in report.parts.items()
        ]
    )
    typer.echo("\nthe largest causes, and by how much the step would be shorter without each")
    for number, cause in enumerate(report.causes, start=1):
        typer.echo(
            f"{number}. {cause.text}: {milliseconds(cause.seconds)} "
            f"({_share(cause.seconds / makespan)})"
        )
    if not report.causes:
        typer.echo("none stands out")
    if report.rank_speeds is not None:
        speeds = RankSpeeds(report.rank_speeds)
        typer.echo(
            f"\nranks differ by more than {SLOW:.0%} from the costs of their stages (speeds "
            f"{speeds}): megatron-ext plan --trace {folder} -- and the launch command tells a "
            f"layout for them"
        )
    if report.what_if is not None:
        for title, prospects in sections(report.what_if):
            typer.echo(f"\n{title}")
            print_table(prospect_rows(prospects))
        typer.echo()
        for line in remarks(report.what_if):
            typer.echo(line)


def _share(part: float) -> str:
    return f"{part:.1%}"
