"""``megatron-ext rehearse``: a pipeline rehearsed on one GPU, rank by rank.

Before a job waits for many GPUs, one GPU can tell whether each rank runs, whether it fits, and how
long a step is under each schedule. The rehearsal itself is in the package `rehearsal`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_ext.base.words import bytes_text
from megatron_ext.commands.options import HtmlPage, Json
from megatron_ext.commands.output import command_line, fail, print_table
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.observe.trace import read_trace
from megatron_ext.observe.trace_text import milliseconds
from megatron_ext.patches.engine import PatchError
from megatron_ext.rehearsal.request import PeerValues
from megatron_ext.viz.page.run import traced
from megatron_ext.viz.page.write import SECONDS, Page, check_page, write_page

if TYPE_CHECKING:
    from megatron_ext.rehearsal.rehearsal_report import (
        RankResult,
        RehearsalReport,
        ScheduleFigures,
    )


def rehearse(
    context: typer.Context,
    schedules: Annotated[
        str,
        typer.Option(
            metavar="'NAME ...'",
            help=(
                "Schedules to rehearse, separated by spaces: names that 'megatron-ext schedules' "
                "lists, and stock, which is the launch command without --pipeline-... flags. The "
                "step times of all schedules are compared with the first one's."
            ),
        ),
    ] = "stock zb-h1",
    cpu: Annotated[
        bool,
        typer.Option(
            "--cpu",
            help="Run on the CPU. This shows that the ranks run, and nothing about their speed.",
        ),
    ] = False,
    folder: Annotated[
        Path,
        typer.Option(
            "--dir", metavar="DIR", help="Folder to write records, costs and traces into."
        ),
    ] = Path("rehearsal"),
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Run each rank once more, with its messages at the times of the step that is "
            "composed of all rehearsed ranks. On a GPU a message that waits occupies as many "
            "thread blocks as NCCL would.",
        ),
    ] = False,
    without_blocks: Annotated[
        bool,
        typer.Option(
            "--without-blocks",
            help=(
                "With --replay: messages that wait occupy no thread blocks. The difference from "
                "a replay without this option is the time that the blocks cost."
            ),
        ),
    ] = False,
    values: Annotated[
        PeerValues,
        typer.Option(
            help=(
                "Values that a rank receives from other ranks. normal: random values as large as "
                "those that the rank sends. real: values that a neighbouring rank, rehearsed "
                "earlier, has sent. zeros: products with zeros take less time."
            )
        ),
    ] = PeerValues.NORMAL,
    imbalance: Annotated[
        float | None,
        typer.Option(
            metavar="STD",
            help="Standard deviation of the bias of random logits of routers "
            "(--moe-router-force-biased). Default: each expert gets equally many tokens.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps of each rank.")] = 3,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Number of steps of each rank before the timed ones.")
    ] = 2,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of ranks. Default: the number in the launcher's flags, or the ranks of "
            "one copy of the model.",
        ),
    ] = None,
    page: HtmlPage = None,
    as_json: Json = False,
) -> None:
    """Rehearse a launch command on one GPU: each rank runs alone, and the simulator composes the
    step of the whole pipeline.

    Ranks with equal stages run once. What other ranks would send is made up.
    """
    try:
        from megatron_ext.launch.command.launch_words import read_launch
        from megatron_ext.rehearsal.prepare import schedules_of
        from megatron_ext.rehearsal.processes import rank_processes
        from megatron_ext.rehearsal.rehearse import RehearsalRequest
        from megatron_ext.rehearsal.rehearse import rehearse as run

        request = RehearsalRequest(
            launch=read_launch(context.args),
            names=schedules_of(schedules),
            folder=folder,
            warm_up=warm_up,
            steps=steps,
            world_size=world_size,
            is_cpu=cpu,
            replays=replay,
            has_blocks=not without_blocks,
            values=values,
            imbalance=imbalance,
        )
        if page is not None:
            check_page(page)
        with showing_progress():
            report = run(request, rank_processes, _tell)
        if page is not None:
            write_composed_steps(report, page)
    except (ValueError, OSError, PatchError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    _print(report, folder)
    if page is not None:
        typer.echo(f"\npage: {page}")


def write_composed_steps(report: RehearsalReport, path: Path) -> None:
    """Write a page with the composed step of each rehearsed schedule, compared with the first.

    Raises:
        ValueError: the page cannot be written there, or a trace cannot be read.
        OSError: a file cannot be written.
    """
    runs = []
    for one in report.schedules:
        _, composed = traced(read_trace(Path(one.trace))[-1])
        runs.append(replace(composed, title=f"{one.name}, rehearsed"))
    write_page(Page(report.facts, tuple(runs), command_line(), SECONDS), path)


def _tell(text: str) -> None:
    typer.echo(f"megatron-ext: {text}", err=True)


def _print(report: RehearsalReport, folder: Path) -> None:
    typer.echo(f"{report.facts}, rehearsed on {report.device}")
    typer.echo("\na step, measured: passes of ranks that ran alone, composed")
    print_table([_step_row(one, report) for one in report.schedules])
    if report.replays:
        typer.echo("\na step, replayed: passes of the same ranks with messages at those times")
        print_table(
            [
                {
                    **_step_row(one.figures, report),
                    "passes over the above": f"{one.over_alone - 1:+.2%}",
                    "a rank's end off by": f"{one.off_end:.2%}",
                }
                for one in report.replays
            ]
        )
    typer.echo(f"\nestimated for {report.estimated_for}, and in no figure above")
    groups = dict.fromkeys(group for one in report.schedules for group in one.estimate.waiting)
    print_table(
        [
            {
                "": one.name,
                "whole step, as plan has it": milliseconds(one.estimate.seconds),
                "messages add": milliseconds(one.estimate.messages),
                **{
                    f"{group} waiting": milliseconds(one.estimate.waiting.get(group, 0.0))
                    for group in groups
                },
                "data-parallel reductions": milliseconds(one.estimate.reductions),
            }
            for one in report.schedules
        ]
    )
    typer.echo("\nranks that ran, measured but for the predicted bytes")
    print_table(list(_rank_rows(report.ranks)))
    typer.echo("\nwritten")
    for one in report.schedules:
        costs, trace = shlex.quote(one.costs), shlex.quote(str(Path(one.trace).parent))
        typer.echo(f"{one.name}: --pipeline-costs {costs}; megatron-ext trace {trace}")
    for text in report.remarks:
        typer.echo(text)
    typer.echo("\nnot rehearsed")
    for text in report.not_rehearsed:
        typer.echo(f"- {text}")


def _step_row(one: ScheduleFigures, report: RehearsalReport) -> dict[str, Any]:
    return {
        "": one.name,
        "first to last pass": milliseconds(one.passes),
        "outside passes": milliseconds(one.outside),
        "step": milliseconds(one.seconds),
        f"of {report.schedules[0].name}'s": f"{one.of_first:.3f}",
        "bubble": f"{one.bubble:.1%}",
        "longest rank": milliseconds(one.span),
    }


def _rank_rows(ranks: tuple[RankResult, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row of the table of ranks for each rank that ran, without empty columns."""
    kinds = dict.fromkeys(kind for one in ranks for kind in one.seconds)
    has_bytes = any(one.allocated is not None for one in ranks)
    has_replay = any(one.is_replay for one in ranks)
    has_real = any(one.real for one in ranks)
    for one in ranks:
        row: dict[str, Any] = {
            "": one.schedule,
            "pipeline rank": one.pipeline_rank,
            "stands for": ",".join(map(str, one.stands_for)),
            "steps": one.trained,
        }
        if has_replay:
            row["messages"] = "on time" if one.is_replay else "at once"
        if has_real:
            row["real values"] = ", ".join(one.real) or "none"
        for kind in kinds:
            row[kind] = milliseconds(one.seconds[kind]) if kind in one.seconds else None
        row["between passes"] = milliseconds(one.between)
        if has_bytes:
            row["most allocated"] = _bytes(one.allocated)
            row["reserved"] = _bytes(one.reserved)
        row["allocated, predicted"] = _bytes(one.predicted)
        yield row


def _bytes(amount: float | None) -> str | None:
    return None if amount is None else bytes_text(amount)
