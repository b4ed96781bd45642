"""``megatron-ext``: its commands, each of which has a file of its own.

A command is a function whose parameters are its flags. Here the functions get their names, their
help, and the one treatment of output that cannot be written.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from megatron_ext import __version__
from megatron_ext.commands.command_help import HELP, CliCommand, CliGroup
from megatron_ext.commands.doctor import doctor
from megatron_ext.commands.jobs.job_argument import JobCommand
from megatron_ext.commands.parity import app as parity
from megatron_ext.commands.plan import plan
from megatron_ext.commands.rehearse import rehearse
from megatron_ext.commands.schedules import schedules
from megatron_ext.commands.simulate import simulate
from megatron_ext.commands.trace import trace
from megatron_ext.commands.verify import verify


class _Commands(typer.Typer):
    """Commands that report an error if their output cannot be written, as with `> file` on a full
    disk."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except OSError as error:
            # The standard output is replaced by /dev/null. Otherwise Python would flush the rest of
            # its output when it ends, and fail once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            what = error.filename or "the standard output"
            sys.stderr.write(f"megatron-ext: error: {what}: {error.strerror}\n")
            raise SystemExit(2) from None


app = _Commands(
    help="Better pipeline schedules for stock Megatron-LM. To train: "
    "python -m megatron_ext SCRIPT ARGS --pipeline-schedule NAME",
    cls=CliGroup,
    context_settings=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked_for: bool) -> None:
    if asked_for:
        typer.echo(f"megatron_ext {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


for command in (schedules, simulate, verify, trace):
    app.command(cls=CliCommand)(command)
app.command(
    cls=JobCommand,
    context_settings={"allow_extra_args": True},
    epilog="megatron-ext plan --gpu h100 -- torchrun ... SCRIPT ARGS, or megatron-ext plan --gpu "
    "h100 layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000,pp=8,m=64,tp=4,dp=2",
)(plan)
app.command(
    cls=JobCommand,
    context_settings={"allow_extra_args": True},
    epilog="megatron-ext doctor --gpu h100 -- torchrun ... SCRIPT ARGS; --pipeline-... flags "
    "without a JOB show the patches that a launch with them would apply.",
)(doctor)
app.command(
    cls=CliCommand,
    context_settings={"allow_extra_args": True},
    epilog="Behind -- a launch command: megatron-ext rehearse --schedules 'stock zb-v' -- torchrun "
    "... SCRIPT ARGS.",
)(rehearse)
app.add_typer(parity, name="parity")
