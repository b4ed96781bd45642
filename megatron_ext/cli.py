"""The commands of ``megatron-ext``."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.build import build_program
from megatron_ext.schedule.costs import parse_costs
from megatron_ext.schedule.draw import draw
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.registry import choose, entries
from megatron_ext.schedule.report import report
from megatron_ext.schedule.schedule import Problem, to_csv
from megatron_ext.schedule.simulate import simulate as predict
from megatron_ext.schedule.summary import stock_1f1b

app = typer.Typer(
    help="Better pipeline schedules for stock Megatron-LM. To train: "
    "python -m megatron_ext SCRIPT ARGS --pipeline-schedule NAME",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object or list.")]
Schedule = Annotated[str, typer.Argument(metavar="SPEC", help="NAME[:key=value,...] or a CSV file")]


def fail(error: Exception) -> NoReturn:
    """End a command with status 2 and the error's text."""
    typer.echo(f"megatron-ext: error: {error}", err=True)
    raise typer.Exit(2)


@app.command()
def schedules(as_json: Json = False) -> None:
    """List the schedules there are."""
    rows = [
        {
            "name": entry.name,
            "placement": entry.place(4).name,
            "chunks": entry.place(4).chunks,
            "uses_costs": entry.uses_costs,
            "runnable": entry.place(4).name == "line",
            "source": entry.source,
        }
        for entry in entries().values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    _print_table(rows)


@app.command()
def simulate(
    spec: Schedule,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")],
    microbatches: Annotated[int, typer.Option("-m", "--microbatches", help="Of one step.")],
    costs: Annotated[
        str, typer.Option(help="f=10,i=12,w=8,comm=1 per microbatch of a rank, or a JSON file")
    ] = "f=1,i=1,w=1,comm=0",
    memory_limit: Annotated[str | None, typer.Option(help="5, 0.5x or 60GiB")] = None,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it beneath 1F1B, as .svg or .png.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write its compute actions.")] = None,
) -> None:
    """Predict how long a schedule takes and what it holds."""
    try:
        choice = choose(spec)
        placement = choice.place(pp)
        limit = parse_limit(memory_limit, pp, microbatches) if memory_limit else None
        problem = Problem(placement, microbatches, parse_costs(costs, placement), limit)
        result = report(choice, problem)
        if csv is not None:
            csv.write_text(to_csv(build_program(choice, problem).schedule))
        if plot is not None:
            timeline = predict(build_program(choice, problem), problem.costs)
            draw([stock_1f1b(problem), timeline], plot)
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    _print_table([{"": key, spec: value} for key, value in result.items()])
    if plot is not None:
        typer.echo(f"picture: {plot}")


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog="Give --pipeline-* flags to see the patches a launch with them would apply.",
)
def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Show the environment, and each patch with its target, reason and state."""
    from megatron_ext.config import from_argv
    from megatron_ext.doctor import diagnose

    try:
        config: PipelineConfig = from_argv(context.args)
    except ValueError as error:
        fail(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron misses here is in the table
        found = diagnose(config)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_table([{"": key, "found": value} for key, value in found["environment"].items()])
        for patch in found["patches"]:
            typer.echo(f"\n{patch['state']}: {patch['how']} {patch['target']}")
            typer.echo(f"  {patch['feature']}: {patch['reason']}")
    if any(patch["state"].startswith("does not fit") for patch in found["patches"]):
        raise typer.Exit(1)


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width of its own
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return str(value)
