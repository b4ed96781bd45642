"""``megatron-ext parity``: whether two launch commands train to the same numbers.

It runs both commands here, or, where a launcher has to run them, records each and compares the
recordings. The runs stand in `parity`, the comparison in `recordings`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_ext.commands.command_help import HELP, CliCommand, CliGroup
from megatron_ext.commands.options import Json
from megatron_ext.commands.output import fail, print_table
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.launch.planner.chosen_plan import choose_plan
from megatron_ext.launch.script import RecordingRequest, launch
from megatron_ext.parity.run_command import (
    RunCommand,
    as_stock,
    quiet,
    read_run_command,
    record_here,
    recorded,
)
from megatron_ext.parity.runs import RecordedRuns, check_comparable, run_both, run_reversed
from megatron_ext.recordings import comparison_text
from megatron_ext.recordings.comparable import adds_in_another_order
from megatron_ext.recordings.compare import ParityVerdict, RunComparison, compare_runs
from megatron_ext.recordings.run_recording import read_recording
from megatron_ext.recordings.writing import already_there, lines_file
from megatron_ext.written_settings import given_in_environment

_COMMANDS = "commands"
_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}

Iterations = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of iterations of each run. Take 2 or more: the first loss precedes any "
        "update.",
    ),
]


class _RunsUnlessNamed(CliGroup):
    """Group whose arguments are launch commands if they do not begin with the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *HELP["help_option_names"]):
            args = [_COMMANDS, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunsUnlessNamed,
    no_args_is_help=True,
    help=(
        "Compare the numbers of two trainings: megatron-ext parity -- COMMAND_A -- COMMAND_B, or "
        "megatron-ext parity -- COMMAND, for a launch command and the same without our flags."
    ),
    epilog="Options stand before the first --; megatron-ext parity commands --help lists them. "
    "The exit status is 0 if the numbers are the same, 1 if they differ, 2 if the commands cannot "
    "be compared.",
)


@app.command(_COMMANDS, cls=CliCommand, context_settings=_WORDS)
def commands(
    context: typer.Context,
    iterations: Iterations = 4,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder to write recordings and logs into.")
    ] = Path("parity"),
    from_seed: Annotated[
        bool,
        typer.Option(
            "--from-seed",
            help=(
                "Start both commands from random weights of their seed, not from a checkpoint. "
                "Both commands must draw the same weights."
            ),
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run both launch commands here, A twice, and compare their numbers. The word 'commands' may
    be omitted."""
    try:
        a, b, is_stock = _two_commands(context.args)
        if not is_stock or b.value("--pipeline-slices") is not None:
            with showing_progress():
                check_comparable(a, b)
        places = run_both(a, b, folder, iterations, from_seed, is_stock, _tell)
        found = _compare(places.a, places.b, places.second)
        if found.verdict is ParityVerdict.DIFFER and _adds_in_another_order(places):
            reordered = run_reversed(a, places, iterations, is_stock, _tell)
            found = _compare(places.a, places.b, places.second, reordered)
    except (ValueError, OSError) as error:
        fail(error)
    _finish(found, as_json)


@app.command(cls=CliCommand, context_settings=_WORDS)
def record(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder to write the recording into, on a file system that all ranks share. A "
            "folder that has a recording is refused.",
        ),
    ],
    iterations: Iterations = 4,
    is_reversed: Annotated[
        bool,
        typer.Option(
            "--reversed",
            help=(
                "Run the microbatches of each step in reverse order, so that all sums over "
                "microbatches are added in another order."
            ),
        ),
    ] = False,
) -> None:
    """Run a launch command for a few iterations and record its numbers: record DIR -- COMMAND.

    Works also as one rank of many, started by a launcher: srun python -m megatron_ext parity record
    DIR -- pretrain_gpt.py ARGS.
    """
    try:
        command = read_run_command(context.args)
        argv = record_here(command)
        if argv is None and lines_file(folder, 0).exists():
            raise ValueError(already_there(folder))
    except ValueError as error:
        fail(error)
    if argv is not None:
        request = RecordingRequest(folder.absolute(), iterations, is_reversed)
        launch([*argv, *quiet()], choose_plan, request)
        return
    status = subprocess.call(recorded(command, folder, iterations, is_reversed=is_reversed))
    raise typer.Exit(status)


@app.command("compare", cls=CliCommand)
def compare_folders(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of the recording of command A.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the recording of command B.")],
    second: Annotated[
        Path | None,
        typer.Option(
            "--second",
            metavar="DIR",
            help=(
                "Folder of a second recording of A. Differences between the two recordings of A "
                "count as noise."
            ),
        ),
    ] = None,
    reordered: Annotated[
        Path | None,
        typer.Option(
            "--reordered",
            metavar="DIR",
            help=(
                "Folder of a recording of A with --reversed, for a command B that by design adds "
                "in another order, such as one with slices of sequences or vocabulary "
                "parallelism. Differences as large as those between A and this recording do not "
                "count."
            ),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two recordings. Needs numpy only, and neither torch nor a GPU."""
    try:
        found = _compare(a, b, second, reordered)
    except (ValueError, OSError) as error:
        fail(error)
    _finish(found, as_json)


def _two_commands(words: Sequence[str]) -> tuple[RunCommand, RunCommand, bool]:
    """Return the launch commands A and B, and whether A is B without flags of ours.

    If ``words`` are a single launch command, that is B.
    """
    count = list(words).count("--")
    if not words or count > 1:
        raise ValueError(
            "give one or two launch commands, each behind --: megatron-ext parity -- COMMAND_A -- "
            "COMMAND_B"
        )
    if count:
        at = list(words).index("--")
        return read_run_command(words[:at]), read_run_command(words[at + 1 :]), False
    b = read_run_command(words)
    a = as_stock(b)
    if a == b and not given_in_environment({}, os.environ)[0]:
        raise ValueError(
            "the command has no flag of megatron_ext, so it would be compared with itself: give "
            "two commands, or add --pipeline-schedule"
        )
    return a, b, True


def _tell(text: str) -> None:
    typer.echo(text, err=True, nl=False)


def _compare(a: Path, b: Path, *floors: Path | None) -> RunComparison:
    """Return the comparison of the recordings in the folders ``a`` and ``b``.

    Args:
        floors: folders of a second recording of A, and of one with its sums in another order; None
            for each that does not exist.
    """
    recordings = (None if folder is None else read_recording(folder) for folder in floors)
    return compare_runs(read_recording(a), read_recording(b), *recordings)


def _adds_in_another_order(places: RecordedRuns) -> bool:
    of_a, of_b = (read_recording(folder).arguments for folder in (places.a, places.b))
    return adds_in_another_order(of_a, of_b)


def _finish(found: RunComparison, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(comparison_text.as_data(found), indent=2))
    else:
        _print(found)
    if found.verdict is ParityVerdict.DIFFER:
        raise typer.Exit(1)


def _print(found: RunComparison) -> None:
    print_table(comparison_text.rows(found))
    if (settings := comparison_text.settings(found)) is not None:
        typer.echo(f"\narguments that differ between A and B: {settings}")
    if found.beyond:
        typer.echo()
        print_table(comparison_text.tensor_rows(found))
    typer.echo()
    for line in comparison_text.verdict_text(found):
        typer.echo(line)
