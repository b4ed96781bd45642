"""``megatron-ext plan``: what a training job should run, and everything that was compared.

A job is described by a launch command, a file of arguments, a log, a recipe, or the sizes of a
model. Each description becomes the same kind of job here, and options that do not go with it are
refused; the comparison itself stands in `planner`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megatron_ext.commands.jobs.job_argument import JobWord, job_of
from megatron_ext.commands.jobs.plan_options import CheckedPlan, PlanOptions, check_plan
from megatron_ext.commands.jobs.planned_job import launch_request, planned_job
from megatron_ext.commands.options import HtmlPage, Json, Limit, Speeds, WorldSize, gpu_option
from megatron_ext.commands.output import fail
from megatron_ext.commands.plan_tables import print_refusals, print_tables
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.commands.sizes_text import compared_line, sizes_lines
from megatron_ext.commands.verdict_text import verdict_lines
from megatron_ext.patches.engine import PatchError
from megatron_ext.planner.figures import as_data
from megatron_ext.planner.job_plan import JobPlan
from megatron_ext.planner.planning_time import planning
from megatron_ext.planner.sizes.sizes_plan import SizesPlan


def plan(
    context: typer.Context,
    job: JobWord = None,
    gpu: Annotated[
        str | None,
        gpu_option(
            "GPU to plan for, if the job has a model",
            "With h100:6,a100:2 the first six ranks have H100s, and the last two A100s.",
        ),
    ] = None,
    memory_limit: Limit = None,
    costs: Annotated[
        str | None,
        typer.Option(
            help=(
                "Costs of passes, as --costs of simulate takes them. Default: estimated for a job "
                "with a model, otherwise f=1,i=1,w=1,comm=0. The JSON file of --pipeline-costs "
                "profile has measured costs for a job with a model."
            )
        ),
    ] = None,
    rank_speeds: Speeds = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory written by --pipeline-trace under this job. The plan reserves as much "
            "memory as allocators of GPUs reserved there beyond their allocations, and takes ranks "
            "that were slow there as slow.",
        ),
    ] = None,
    world_size: WorldSize = None,
    vision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|SIZES",
            help=(
                "For jobs with a model: vision tower on the first stage: clip, siglip, internvit, "
                "radio and so on, or sizes such as layers=27,hidden=1152,heads=16,ffn=4304. "
                "tokens=4096 behind it are those of the tower for each sample (default: as many as "
                "the language model has). A frozen tower is followed by trained=projector or "
                "trained=none."
            ),
        ),
    ] = None,
    any_sizes: Annotated[
        bool,
        typer.Option(
            "--any-sizes",
            help=(
                "For launches: also compare other parallel sizes, micro-batches and recompute, on "
                "the same GPUs with the same global batch, sequence, precision and model."
            ),
        ),
    ] = False,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of unequal microbatches, one line each, in the order of training: the "
            "lengths of its documents in tokens (of answers that share a prompt "
            "PROMPT+ANSWER+ANSWER); with --costs, its cost. The plan gives the "
            "gain of three changes: microbatches of a step in another order, distributed to "
            "data-parallel replicas by cost, and a schedule for the mean cost of each position.",
        ),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print all compared schedules, in tables.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the step time of each schedule against its memory into this .svg or .png "
            "file."
        ),
    ] = None,
    page: HtmlPage = None,
    as_json: Json = False,
) -> None:
    """Recommend the schedule and flags of a training job, or no change.

    Only stable schedules are recommended; megatron-ext schedules lists their maturity.
    """
    options = PlanOptions(
        gpu=gpu,
        memory_limit=memory_limit,
        costs=costs,
        rank_speeds=rank_speeds,
        trace=trace,
        world_size=world_size,
        vision=vision,
        any_sizes=any_sizes,
        lengths=lengths,
        all=show_all,
        plot=plot,
        html=page,
        json=as_json,
    )
    try:
        checked = check_plan(job_of(context, job), options)
        if any_sizes:
            _show_sizes(checked)
            return
        make = planned_job(checked)
        with showing_progress(), planning() as time:
            made = make(with_curves=plot is not None, lengths=lengths)
        options.pictures.draw(made.plan, made.curves, in_seconds=made.in_seconds)
    except (ValueError, OSError, PatchError) as error:
        fail(error)
    if as_json:
        _echo(made)
    else:
        _print(made, show_all)
    if time.is_short:
        typer.echo(f"{time.why_short}: some alternatives were not compared", err=True)
    if made.verdict.taken is None:
        fail(ValueError(_why_nothing_fits(made)))


def _print(made: JobPlan, show_all: bool) -> None:
    for text in (*verdict_lines(made), *made.remarks):
        typer.echo(text)
    if show_all:
        print_tables(made)
    elif made.verdict.taken is None and made.has_pipeline:
        print_refusals(made.plan)


def _echo(made: JobPlan | SizesPlan) -> None:
    typer.echo(json.dumps(as_data(made) | {"spread": as_data(made.spread)}, indent=2))


def _show_sizes(checked: CheckedPlan) -> None:
    """Print the recommendation of ``plan --any-sizes`` on other parallel sizes.

    Raises:
        ValueError, PatchError: the launch is not understood, or nothing fits.
    """
    from megatron_ext.launch.planner.any_sizes import LIMIT, plan_sizes

    request = launch_request(checked)
    with showing_progress(), planning(LIMIT) as time:
        made = plan_sizes(request)
    if checked.options.json:
        _echo(made)
    else:
        for text in (*sizes_lines(made), compared_line(made), *made.remarks):
            typer.echo(text)
    if time.is_short:
        typer.echo(f"{time.why_short}: some alternatives were not compared", err=True)
    if made.best is None and time.is_short:
        raise ValueError(
            "no other parallel sizes were compared before the time ended: drop --any-sizes"
        )
    if made.best is None:
        raise ValueError(
            "no parallel sizes fit into the GPUs' memory, by estimate: take more GPUs, or GPUs "
            "with more memory"
        )


def _why_nothing_fits(made: JobPlan) -> str:
    if made.fallbacks:
        return f"no schedule fits, for the reasons above. With {'; with '.join(made.fallbacks)}"
    return made.nothing_fits
