"""``megatron-ext doctor``: a check of this environment, or of a launch.

Without a job it says whether the patches fit what is installed, and with one whether the launch
would run and fit. The checks stand in `launch.doctor`; here their findings are printed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_ext.base.words import bytes_text, counted, shown
from megatron_ext.commands.jobs.job_argument import (
    JobArgument,
    JobKind,
    JobWord,
    flags_outside,
    job_of,
    launch_of,
)
from megatron_ext.commands.options import Json, WorldSize, gpu_option
from megatron_ext.commands.output import fail, print_table
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.config import ALLOW_UNKNOWN, OVERLAP, PipelineConfig, flag
from megatron_ext.cost_model.gpus import Gpu, parse_gpus
from megatron_ext.planner.mixed_gpus import reference_of

if TYPE_CHECKING:
    from megatron_ext.launch.doctor.doctor import Diagnosis, PatchState
    from megatron_ext.launch.doctor.launch_report import RankPrediction


def doctor(
    context: typer.Context,
    job: JobWord = None,
    gpu: Annotated[
        str | None,
        gpu_option("For a JOB: GPU whose rates and memory the prediction takes"),
    ] = None,
    world_size: WorldSize = None,
    patches: Annotated[
        bool,
        typer.Option(
            "--patches", help="Without a JOB: list each patch, and whether it fits this Megatron."
        ),
    ] = False,
    versions: Annotated[
        bool,
        typer.Option(
            "--versions",
            help="Without a JOB: list the known versions of Megatron, its dependencies and the "
            "frameworks that call it.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show whether our patches fit the versions installed here, or check a JOB before its
    launch."""
    given = {"--gpu": gpu, "--world-size": world_size}
    given |= {"--patches": patches, "--versions": versions}
    try:
        checked = job_of(context, job)
        check_doctor(checked, [name for name, value in given.items() if value])
        gpus = () if gpu is None else parse_gpus(gpu)
        if len(gpus) > 1:
            raise ValueError(
                f"--gpu {gpu}: doctor checks a launch on GPUs of one kind; name one GPU, or "
                "compare several by megatron-ext plan"
            )
    except ValueError as error:
        fail(error)
    if checked is None:
        _show_environment(flags_outside(context), patches, versions, as_json)
    else:
        _check_job(checked, world_size, reference_of(gpus) if gpus else None, as_json)


def check_doctor(job: JobArgument | None, given: Sequence[str]) -> None:
    """Raise ValueError if ``job`` cannot be checked, or does not go with an option that is given.

    Nothing is read or checked yet.

    Args:
        given: names of the options that the user gave.
    """
    of_job, of_environment = ("--gpu", "--world-size"), ("--patches", "--versions")
    if job is not None and job.kind is JobKind.SIZES:
        raise ValueError(
            f"{shown(job.word)}: doctor checks launches, and these are only the sizes of one; "
            "write a launch command behind --, or use megatron-ext plan for sizes"
        )
    wrong = [name for name in given if name in (of_job if job is None else of_environment)]
    if wrong:
        names = ", ".join(wrong)
        why = "there is no JOB to check" if job is None else "a JOB is checked, not this machine"
        raise ValueError(f"{names}: {why}; drop {names}")


def _show_environment(words: Sequence[str], patches: bool, versions: bool, as_json: bool) -> None:
    from megatron_ext.launch.command.importing import quickly, silently
    from megatron_ext.launch.doctor.doctor import diagnose
    from megatron_ext.written_settings import from_argv

    try:
        if OVERLAP in words:
            raise ValueError(
                f"{OVERLAP}: there is no JOB to check, and no patch depends on this flag; drop "
                f"{OVERLAP}"
            )
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
    elif config.changes_launch:
        what = "of these settings"
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


def _check_job(job: JobArgument, world_size: int | None, gpu: Gpu | None, as_json: bool) -> None:
    from megatron_ext.patches.engine import PatchError

    try:
        with showing_progress():
            launch = launch_of(job)
            try:
                from megatron_ext.launch.doctor.check import check_launch
            except (ImportError, OSError) as error:  # OSError: libraries are not found
                raise PatchError(
                    f"a check needs Megatron, which cannot be imported here: {error}"
                ) from error
            report = check_launch(launch, world_size, gpu)
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
