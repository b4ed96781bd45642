"""``megatron-ext doctor``: this environment, or a launch line before it is launched."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_ext.commands.options import Json
from megatron_ext.commands.output import fail, gib, print_table
from megatron_ext.commands.progress import showing_progress
from megatron_ext.config import PipelineConfig

if TYPE_CHECKING:
    from megatron_ext.launch_check.report import RankPrediction


def doctor(
    context: typer.Context,
    as_json: Json = False,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of the launch line, if torchrun's words are not there")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="What a GPU has, as 80GiB, to judge the launch line's by.")
    ] = None,
) -> None:
    """Show the environment and each patch's state, or check a launch line before it is launched."""
    if context.args and (context.args[0] == "-m" or not context.args[0].startswith("-")):
        _check_launch_line(context.args, world_size, gpu_memory, as_json)
    else:
        _show_environment(context.args, as_json)


def _show_environment(words: Sequence[str], as_json: bool) -> None:
    from megatron_ext.config import from_argv
    from megatron_ext.launch_check.doctor import diagnose

    try:
        config: PipelineConfig = from_argv(words)
    except ValueError as error:
        fail(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron misses here is in the table
        diagnosis = diagnose(config)
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        print_table([{"": key, "found": value} for key, value in diagnosis.environment.items()])
        for patch in diagnosis.patches:
            typer.echo(f"\n{patch.state}: {patch.how} {patch.target}")
            typer.echo(f"  {patch.feature}: {patch.reason}")
    if any(not patch.fits for patch in diagnosis.patches):
        raise typer.Exit(1)


def _check_launch_line(
    words: Sequence[str], world_size: int | None, gpu_memory: str | None, as_json: bool
) -> None:
    from megatron_ext.launch_check.check import check_launch, read_launch
    from megatron_ext.patches.engine import PatchError

    try:
        with showing_progress():
            report = check_launch(read_launch(words), world_size, gpu_memory)
    except (ValueError, PatchError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(report.as_data(), indent=2))
    else:
        print_table(
            [
                {"": f.verdict, "what": f.subject, "found": f.text, "what to do": f.fix}
                for f in report.findings
            ]
        )
        if report.prediction is not None and report.prediction.ranks:
            typer.echo("\npredicted memory")
            print_table([_memory_row(rank) for rank in report.prediction.ranks])
        wrong = [f for f in report.findings if f.verdict == "wrong"]
        typer.echo(f"\n{len(wrong) or 'nothing'} {'are' if len(wrong) > 1 else 'is'} wrong")
    if not report.is_right:
        raise typer.Exit(1)


def _memory_row(rank: RankPrediction) -> dict[str, Any]:
    activations = rank.activation_bytes
    return {
        "pipeline rank": rank.rank,
        "layers": rank.layers,
        "parameters, gradients, optimizer": gib(rank.model_bytes),
        "peak activations": f"{rank.activation_microbatches:g} microbatches",
        "of": "not known" if activations is None else gib(activations),
        "together": gib(rank.total_bytes),
    }
