"""``megatron-ext doctor``: a check of this environment, or of a launch command."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.commands.options import Bridge, Json, MegatronArgs
from megatron_ext.commands.output import fail, print_table
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.config import ALLOW_UNKNOWN, PipelineConfig, flag

if TYPE_CHECKING:
    from megatron_ext.launch.doctor.doctor import Diagnosis, PatchState
    from megatron_ext.launch.doctor.launch_report import RankPrediction


def doctor(
    context: typer.Context,
    as_json: Json = False,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks. Default: the number in the launcher's flags, or the ranks of "
            "one copy of the model."
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a GPU, such as 80GiB, with which the predicted memory is compared. "
            "Default: no comparison."
        ),
    ] = None,
    megatron_args: MegatronArgs = None,
    bridge: Bridge = None,
    patches: Annotated[
        bool, typer.Option("--patches", help="List each patch and whether it fits.")
    ] = (False),
    versions: Annotated[
        bool,
        typer.Option(
            "--versions",
            help="List the known versions of Megatron, its dependencies and the frameworks that "
            "call it.",
        ),
    ] = False,
) -> None:
    """Show whether our patches fit the versions installed here, or check a launch command before
    its launch."""
    words = context.args
    # A launch command begins with a script, a launcher, or -m MODULE. Other words are flags of ours
    # (--pipeline-...), for which the patches of this environment are checked.
    is_launch = words and (words[0] == "-m" or not words[0].startswith("-"))
    if is_launch or megatron_args is not None or bridge is not None:
        _check_launch_command(words, megatron_args, bridge, world_size, gpu_memory, as_json)
    else:
        _show_environment(words, patches, versions, as_json)


def _show_environment(words: Sequence[str], patches: bool, versions: bool, as_json: bool) -> None:
    from megatron_ext.launch.command.importing import quickly, silently
    from megatron_ext.launch.doctor.doctor import diagnose
    from megatron_ext.written_settings import from_argv

    try:
        config: PipelineConfig = from_argv(words)
        with silently(), quickly():
            diagnosis = diagnose(config)
    except ValueError as error:
        fail(error)
    if as_json:
        data = {**asdict(diagnosis), "allow_unknown": diagnosis.allowance}
        typer.echo(json.dumps(data, indent=2))
    else:
        print_table([{"": key, "found": value} for key, value in diagnosis.environment.items()])
        _print_summary(diagnosis, config)
        if patches:
            for patch in diagnosis.patches:
                typer.echo(f"\n{patch.state}: {patch.how} {patch.target}")
                typer.echo(f"  {patch.feature}: {patch.reason}")
        if versions and diagnosis.versions:
            typer.echo()
            print_table(list(diagnosis.versions))
        if not (patches or versions):
            typer.echo("--patches lists all patches, --versions the versions that are known to fit")
    if diagnosis.misfits:
        raise typer.Exit(1)


def _print_summary(diagnosis: Diagnosis, config: PipelineConfig) -> None:
    required = [patch for patch in diagnosis.patches if patch.is_required]
    what = "of ours"
    if config.schedule is not None:
        what = f"that {flag('schedule')} {config.schedule} needs"
    elif config.watches_stock:
        what = "that measure Megatron's own step"
    elif config.arranges_microbatches:
        what = "that order and deal microbatches"
    misfits = diagnosis.misfits
    if not misfits:
        typer.echo(f"\nall {len(required)} patches {what} fit this Megatron")
        return
    if diagnosis.missing:
        typer.echo(
            f"\nno patch was checked: {diagnosis.missing}; run this where the training runs, such "
            f"as in its container"
        )
        return
    typer.echo(f"\n{len(misfits)} of the {len(required)} patches {what} do not fit this Megatron:")
    by_cause: dict[str, list[PatchState]] = defaultdict(list)
    for patch in misfits:
        by_cause[patch.cause or patch.why].append(patch)
    for first, *others in by_cause.values():
        typer.echo(f"\n{first.why}")
        if others:
            typer.echo(f"the same is missing for: {', '.join(patch.feature for patch in others)}")
    if diagnosis.allowance:
        typer.echo(
            f"\nread the changes first; if our patches still do what they should, allow these "
            f"sources until they change again:\n"
            f"  export {ALLOW_UNKNOWN}={diagnosis.allowance}\n"
        )


def _check_launch_command(
    words: Sequence[str],
    log: Path | None,
    recipe: str | None,
    world_size: int | None,
    gpu_memory: str | None,
    as_json: bool,
) -> None:
    from megatron_ext.launch.command.log.megatron_log import launch_from
    from megatron_ext.launch.doctor.check import check_launch
    from megatron_ext.patches.engine import PatchError

    try:
        with showing_progress():
            launch = launch_from(words, log, recipe)
            report = check_launch(launch, world_size, gpu_memory)
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
        number = Counter[str](finding.verdict for finding in report.findings)
        wrong = f"to correct before the launch: {number['wrong']}"
        result = wrong if number["wrong"] else "nothing is wrong"
        if number["remark"]:
            result += f"; {counted(number['remark'], 'remark')} to read"
        if report.unchecked:
            wrong = f"{wrong}; " if number["wrong"] else ""
            result = f"{wrong}the check stopped: {report.unchecked}"
        typer.echo(f"\n{result}")
    if report.unchecked:
        raise typer.Exit(2)
    if not report.is_right:
        raise typer.Exit(1)


def _memory_row(rank: RankPrediction) -> dict[str, Any]:
    activations = counted(rank.activation_microbatches, "microbatch")
    if rank.activation_bytes is not None:
        activations += f", {bytes_text(rank.activation_bytes)}"
    return {
        "pipeline rank": rank.rank,
        "layers": rank.layers,
        "parameters, gradients, optimizer": bytes_text(rank.model_bytes),
        "activations at the peak": activations,
        "temporary": bytes_text(rank.temporary_bytes),
        "CUDA and NCCL": bytes_text(rank.context_bytes),
        "together": bytes_text(rank.total_bytes),
    }
