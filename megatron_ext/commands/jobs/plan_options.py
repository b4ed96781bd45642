"""Options of ``megatron-ext plan``, and which of them go with which job.

An option that has no effect on a job, or on what another option requests, would be ignored without
a word. `check_plan` refuses it before anything is read or planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_ext.base.words import counted
from megatron_ext.commands.jobs.job_argument import JobArgument, JobKind
from megatron_ext.commands.jobs.job_sizes import JobSizes, options_of_sizes, parse_sizes
from megatron_ext.commands.plan_pictures import PlanPictures
from megatron_ext.cost_model.gpus import Gpu, parse_gpus
from megatron_ext.cost_model.tower import parse_tower
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.problem import ScheduleOptions
from megatron_ext.schedule.rank_speeds import RankSpeeds, parse_rank_speeds

_NO_OPTIONS = ScheduleOptions()
_NO_JOB = (
    "a plan needs a job: a launch command behind --, as in megatron-ext plan --gpu h100 -- "
    "torchrun ... pretrain_gpt.py ARGS, a log, or sizes such as pp=8,m=64"
)
_NO_MODEL = (
    "costs alone have no model: add its sizes, as in layers=64,hidden=6144,heads=48,"
    "sequence=4096,vocabulary=128000, or give a launch command behind --"
)


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``megatron-ext plan`` as the user wrote them; None or False for each that is not
    given."""

    gpu: str | None = None
    memory_limit: str | None = None
    costs: str | None = None
    rank_speeds: str | None = None
    trace: Path | None = None
    world_size: int | None = None
    vision: str | None = None
    any_sizes: bool = False
    lengths: Path | None = None
    all: bool = False
    plot: Path | None = None
    html: Path | None = None
    json: bool = False

    @property
    def given(self) -> frozenset[str]:
        """Names of the options that the user gave."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return frozenset(name for name, value in values if value not in (None, False))

    @property
    def pictures(self) -> PlanPictures:
        return PlanPictures(self.plot, self.html)


@dataclass(frozen=True)
class CheckedPlan:
    """Job to plan, with its parsed options, after the check that all of them go together.

    Attributes:
        job: job, as the user named it.
        options: options, as the user wrote them.
        sizes: sizes of the job; None if it is a launch.
        schedules: options of schedules, if it is a job of sizes.
        gpus: GPU of each pipeline rank, or one for all; empty if the user names none.
        limit: memory limit of the options; None without one.
        speeds: speeds of ranks in the options; None without them.
        tower: values of --vision, which `tower_of` takes; None without that option.
    """

    job: JobArgument
    options: PlanOptions
    sizes: JobSizes | None = None
    schedules: ScheduleOptions = _NO_OPTIONS
    gpus: tuple[Gpu, ...] = ()
    limit: MemoryLimit | None = None
    speeds: RankSpeeds | None = None
    tower: dict[str, Any] | None = None


def check_plan(job: JobArgument | None, options: PlanOptions) -> CheckedPlan:
    """Return ``job`` and its ``options``, parsed, if each of the options has an effect on it.

    Nothing is planned, and no file is read.

    Raises:
        ValueError: there is no job, an option does not go with it or with another option, or a
            value is not understood.
    """
    if job is None:
        raise ValueError(_NO_JOB)
    sizes = parse_sizes(job.word) if job.kind is JobKind.SIZES else None
    for names, why in _conflicts(job.kind, sizes, options):
        if given := [name for name in names if name in options.given]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{flags}: {why}; drop {flags}")
    if options.any_sizes and options.gpu is None and job.kind is not JobKind.LOG:
        raise ValueError(
            "--any-sizes compares what fits into a GPU's memory: name the GPU, as in --gpu h100"
        )
    options.pictures.check()
    ranks, microbatches = (1, 1) if sizes is None else (sizes.pp, sizes.m)
    limit = options.memory_limit
    checked = CheckedPlan(
        job,
        options,
        sizes,
        gpus=() if options.gpu is None else parse_gpus(options.gpu),
        limit=None if limit is None else parse_limit(limit, ranks, microbatches),
        speeds=None if options.rank_speeds is None else parse_rank_speeds(options.rank_speeds),
        tower=None if options.vision is None else parse_tower(options.vision),
    )
    return checked if sizes is None else _with_sizes(checked, sizes)


def _conflicts(
    kind: JobKind, sizes: JobSizes | None, options: PlanOptions
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield groups of options that have no effect on a job of ``kind``, each with the reason."""
    if kind is JobKind.SIZES:
        yield ("any_sizes",), "a launch command's arguments tell which sizes it could have"
        has_model = sizes is not None and sizes.model is not None
        yield (
            ("world_size",),
            "only a launch has a world size"
            + ("; write tp= and dp= into the sizes" if has_model else ", and costs alone have pp="),
        )
    if sizes is not None and sizes.model is None:
        yield ("gpu",), _NO_MODEL
        yield ("vision",), f"{_NO_MODEL}, or write the tower into --costs as tower=F/I/W"
    if options.any_sizes:
        yield ("all", "plot", "html", "lengths"), "--any-sizes prints its verdict alone"
        yield (
            ("costs", "rank_speeds"),
            "costs and speeds are those of the launch's own sizes, and --any-sizes compares others",
        )
        yield ("memory_limit",), "--any-sizes compares within the GPU's memory"
        if options.gpu is not None and ":" in options.gpu:
            yield (
                ("gpu",),
                "--any-sizes plans for one type of GPU, and other sizes have other ranks",
            )


def _with_sizes(checked: CheckedPlan, sizes: JobSizes) -> CheckedPlan:
    options = checked.options
    if len(checked.gpus) > 1 and len(checked.gpus) != sizes.pp:
        raise ValueError(
            f"--gpu {options.gpu} names the GPUs of "
            f"{counted(len(checked.gpus), 'pipeline rank')}, and pp is {sizes.pp}; name as many "
            "as pp, or one kind for all"
        )
    schedules = options_of_sizes(checked.job.words, sizes, has_costs=options.costs is not None)
    return replace(checked, schedules=schedules)
