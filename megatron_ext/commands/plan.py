"""``megatron-ext plan``: what a training job should run, and everything that was compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from megatron_ext.commands.half_tables import NOTHING_FITS_HALVES, print_halves
from megatron_ext.commands.options import (
    UNIT,
    HtmlPage,
    InPairs,
    Json,
    Limit,
    MegatronArgs,
    PostValidation,
    SliceCount,
    SliceLengths,
    Speeds,
    Vision,
    VisionTokens,
)
from megatron_ext.commands.output import fail
from megatron_ext.commands.plan_pictures import PlanPictures
from megatron_ext.commands.plan_tables import print_refusals, print_tables
from megatron_ext.commands.progress import showing_progress
from megatron_ext.commands.sizes_text import compared_line, sizes_lines
from megatron_ext.commands.verdict_text import verdict_lines
from megatron_ext.config import CostsSource, flag
from megatron_ext.cost_model.execution import Precision
from megatron_ext.cost_model.gpus import (
    USABLE,
    FreeMemory,
    Gpu,
    assumed_rates,
    free_memory,
    parse_gpus,
)
from megatron_ext.cost_model.measured.file import load_measured
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.short_form import Described, parse_model
from megatron_ext.cost_model.tower import parse_tower, tower_of
from megatron_ext.patches.engine import PatchError
from megatron_ext.planner.figures import as_data
from megatron_ext.planner.half_pipeline import Halves, compare_halves
from megatron_ext.planner.job_plan import JobPlan, plan_training
from megatron_ext.planner.mixed_gpus import product_of, reference_of, speeds_of_gpus
from megatron_ext.planner.planning_time import planning
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import Extras
from megatron_ext.schedule.rank_speeds import RankSpeeds, parse_rank_speeds
from megatron_ext.schedule.slices import Lengths, Slices, parse_lengths
from megatron_ext.text_file import parse_json, read_text_file
from megatron_ext.viz.slow_ranks import speeds_in
from megatron_ext.viz.trace import read_trace, reserved_in
from megatron_ext.words import counted

if TYPE_CHECKING:
    from megatron_ext.launch_planner.parsed_launch import LaunchRequest

_WORLD_SIZE = "world_size"  # in a file of arguments


def plan(
    context: typer.Context,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("-m", "--microbatches", help="Microbatches of one step.")
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(help="As of simulate. With --model they are its times, as measured."),
    ] = None,
    memory_limit: Limit = None,
    rank_speeds: Speeds = None,
    as_json: Json = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print every schedule that was compared, in tables.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time against memory, as .svg or .png.")
    ] = None,
    page: HtmlPage = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layers of the model, all equal, to compare layouts, and Megatron's "
            "redistribution if costs have a head.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000 and, where they "
            "differ, micro-batch=1,ffn=,kv-heads=,head-width=,gated=true,tied=true,recompute=true,"
            "precision=fp8: "
            "estimate times and count memory."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Name of a GPU whose data sheet is known, such as h100 (an unknown name is "
            "answered with all), or operations=400e12,bytes=40e9,memory=80GiB, as achieved. "
            "h100:6,a100:2 has six pipeline ranks of one type, and the last two of another. "
            f"A rank's tensors and its allocator's reserve may take {USABLE:.0%} of the memory."
        ),
    ] = None,
    vision: Vision = None,
    vision_tokens: VisionTokens = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    distributed_optimizer: Annotated[
        bool,
        typer.Option(
            "--distributed-optimizer", help="Its states are shared by the data-parallel ranks."
        ),
    ] = False,
    post_validation: PostValidation = False,
    slices: SliceCount = 1,
    slice_lengths: SliceLengths = Lengths.EVEN.value,
    pairs: InPairs = False,
    half_pipeline: Annotated[
        bool,
        typer.Option(
            "--half-pipeline",
            help="Compare with half the pipeline ranks and twice the data parallelism instead: the "
            "same GPUs and global batch.",
        ),
    ] = False,
    any_sizes: Annotated[
        bool,
        typer.Option(
            "--any-sizes",
            help="Compare other parallel sizes, micro-batches and recompute of a launch line too: "
            "the same GPUs, global batch, sequence, precision and model.",
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="A JSON object of Megatron's arguments, in place of a launch line."),
    ] = None,
    megatron_args: MegatronArgs = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory written by --pipeline-trace under this launch command. The plan "
            "reserves as much memory as allocators of GPUs reserved there beyond their "
            "allocations, and takes ranks that were slow there as slow.",
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of a launch line, if torchrun's words are not there.")
    ] = None,
) -> None:
    """Say what a model or a launch command should run: keep what it has, or the change to write.

    Stable schedules are recommended: megatron-ext schedules has the marks.
    """
    pictures = PlanPictures(plot, page)
    sizes = (pp, microbatches, model, layers, distributed_optimizer, tp > 1, dp > 1)
    try:
        pictures.check()
        extras = Extras(
            post_validation=post_validation,
            slices=Slices(slices, parse_lengths(slice_lengths, "--slice-lengths")),
            pairs=pairs,
        )
        job: _Job
        if context.args or config is not None or megatron_args is not None:
            if any((*sizes, slices > 1, pairs)):
                raise ValueError(_BESIDE_A_LINE)
            settings = {"costs": costs, "memory_limit": memory_limit, "rank_speeds": rank_speeds}
            source = _source(context.args, config, megatron_args)
            tower = vision, vision_tokens
            job = _of_launch(source, world_size, gpu, trace, _words(extras, settings), tower)
        else:
            if half_pipeline and (slices > 1 or pairs or rank_speeds is not None):
                raise ValueError(_HALVES_ARE_WHOLE)
            if trace is not None:
                raise ValueError(_OF_A_LINE)
            training = _training(pp, microbatches, memory_limit, extras, layers, rank_speeds)
            state = TrainingState(
                distributed=distributed_optimizer, data_parallel=dp, expert_data_parallel=dp
            )
            job = _of_model(training, model, state, tp, gpu, costs, (vision, vision_tokens))
        if any_sizes or half_pipeline:
            pictures.refuse("--any-sizes" if any_sizes else "--half-pipeline")
            show = partial(_show_sizes, beside=_given(half_pipeline, show_all))
            (show if any_sizes else _show_halves)(job, as_json)
            return
        with showing_progress(), planning() as time:
            made = job.plan(with_curves=pictures.plot is not None)
        pictures.draw(made.plan, made.curves, is_estimate=made.is_estimate)
    except (ValueError, OSError, PatchError) as error:
        fail(error)
    if as_json:
        _echo(made)
    else:
        _print(made, show_all)
    if time.is_short:
        typer.echo(f"{time.why_short}: some alternatives were not compared", err=True)
    if made.verdict.taken is None:
        fail(ValueError(_why_nothing_fits(made, job)))


def _print(made: JobPlan, show_all: bool) -> None:
    for text in (*verdict_lines(made), *made.remarks):
        typer.echo(text)
    if show_all:
        print_tables(made)
    elif made.verdict.taken is None:
        print_refusals(made.plan)


def _echo(data: object) -> None:
    typer.echo(json.dumps(as_data(data), indent=2))


def _show_halves(job: _Job, as_json: bool) -> None:
    """Raises ValueError or PatchError if there is no half, or nothing fits."""
    with showing_progress():
        halves = job.halves()
    if as_json:
        _echo(halves)
    else:
        print_halves(halves)
    if not halves.fits:
        raise ValueError(NOTHING_FITS_HALVES)


def _given(half_pipeline: bool, show_all: bool) -> str:
    """Return the options that do not go with ``--any-sizes``, in words."""
    return " and ".join(["--half-pipeline"] * half_pipeline + ["--all"] * show_all)


def _show_sizes(job: _Job, as_json: bool, *, beside: str) -> None:
    """Raises ValueError or PatchError if the job is not a launch line, nothing fits, or ``beside``
    names options that were given too."""
    if beside:
        raise ValueError(f"--any-sizes has a verdict of its own, without tables: drop {beside}")
    if not isinstance(job, _OfLaunch):
        raise ValueError(
            "--any-sizes is for a launch line, whose model and sizes Megatron's arguments tell: "
            "give the line behind --"
        )
    from megatron_ext.launch_planner.any_sizes import LIMIT, plan_sizes

    with showing_progress(), planning(LIMIT) as time:
        made = plan_sizes(job.request)
    if as_json:
        _echo(made)
    else:
        for text in (*sizes_lines(made), compared_line(made), *made.remarks):
            typer.echo(text)
    if time.is_short:
        typer.echo(f"{time.why_short}: some alternatives were not compared", err=True)
    if made.best is None and time.is_short:
        raise ValueError("nothing was compared in that time")
    if made.best is None:
        raise ValueError("no sizes fit, as estimated: more GPUs, or a GPU with more memory, would")


def _why_nothing_fits(made: JobPlan, job: _Job) -> str:
    if made.fallbacks:
        return f"no schedule fits, for the reasons above. With {'; with '.join(made.fallbacks)}"
    return job.nothing_fits


class _Job(Protocol):
    """A described training job. Both methods raise ValueError, and PatchError without Megatron.

    ``nothing_fits``: what to say where nothing does.
    """

    @property
    def nothing_fits(self) -> str: ...

    def plan(self, *, with_curves: bool) -> JobPlan: ...

    def halves(self) -> Halves: ...


@dataclass(frozen=True)
class _OfTraining:
    training: Training
    free: FreeMemory | None = None

    @property
    def nothing_fits(self) -> str:
        return _NOTHING_FITS if self.training.trained else _NOTHING_FITS_THE_LIMIT

    def plan(self, *, with_curves: bool) -> JobPlan:
        return plan_training(self.training, self.free, with_curves=with_curves)

    def halves(self) -> Halves:
        return compare_halves(self.training, None if self.free is None else self.free.allocated)


@dataclass(frozen=True)
class _OfLaunch:
    request: LaunchRequest
    nothing_fits: str = "no schedule fits, for the reasons above"

    def plan(self, *, with_curves: bool) -> JobPlan:
        from megatron_ext.launch_planner.launch_plan import plan_line

        return plan_line(replace(self.request, with_curves=with_curves))

    def halves(self) -> Halves:
        from megatron_ext.launch_planner.launch_plan import plan_halves

        return plan_halves(self.request)


@dataclass(frozen=True)
class _Source:
    """Source of a launch: the words of a command, a file of arguments, or a log."""

    words: Sequence[str]
    config: Path | None
    log: Path | None


def _source(words: Sequence[str], config: Path | None, log: Path | None) -> _Source:
    if config is not None and (words or log is not None):
        raise ValueError(
            "--config stands in place of a launch line and of --megatron-args: give one of them"
        )
    return _Source(words, config, log)


def _of_launch(
    source: _Source,
    world_size: int | None,
    gpu: str | None,
    trace: Path | None,
    settings: Sequence[str],
    tower: tuple[str | None, int | None],
) -> _OfLaunch:
    """Raises ValueError or OSError where that is not understood."""
    from megatron_ext.doctor.log.megatron_log import launch_from
    from megatron_ext.launch_planner.parsed_launch import LaunchRequest

    values = {} if source.config is None else _values(source.config)
    world_size = world_size or values.pop(_WORLD_SIZE, None)
    launch = launch_from(source.words, source.log) if source.config is None else None
    if launch is not None:
        gpu = gpu or launch.gpu
    gpus = None if gpu is None else parse_gpus(gpu)
    reserved, seen_speeds = (None, None) if trace is None else _seen_in(trace)
    return _OfLaunch(
        LaunchRequest(
            launch=launch,
            values=values,
            world_size=world_size,
            gpu=None if gpus is None else reference_of(gpus),
            settings=tuple(settings),
            reserved=reserved,
            gpus=() if gpus is None or len(gpus) == 1 else gpus,
            seen_speeds=seen_speeds,
            vision=tower[0],
            vision_tokens=tower[1],
        )
    )


def _seen_in(trace: Path) -> tuple[float | None, RankSpeeds | None]:
    """Return the bytes that allocators reserve and the speeds of ranks in ``trace``. Raises
    ValueError if it tells neither."""
    steps = read_trace(trace)
    reserved, speeds = reserved_in(steps), speeds_in(steps)
    if reserved is None and speeds is None:
        raise ValueError(
            f"--trace {trace} tells nothing for a plan: no rank is slow there, and only a trace "
            f"that is made on GPUs says what an allocator reserves"
        )
    return reserved, speeds


def _words(extras: Extras, settings: Mapping[str, str | None]) -> list[str]:
    """Return flags of a launch for what the command asks."""
    words = [flag("post_validation")] if extras.post_validation else []
    for name, value in settings.items():
        words += [] if value is None else [flag(name), value]
    return words


def _values(path: Path) -> dict[str, Any]:
    text = read_text_file(path, "--config")
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"--config {path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: it is to be one object of Megatron's arguments")
    return values


def _training(
    ranks: int | None,
    microbatches: int | None,
    limit: str | None,
    extras: Extras,
    layers: int | None,
    speeds: str | None,
) -> Training:
    """Raises ValueError if it is not told how large the pipeline is, or for speeds of other
    ranks."""
    if ranks is None or microbatches is None:
        raise ValueError(_NEEDED)
    within = None if limit is None else parse_limit(limit, ranks, microbatches)
    of_ranks = None if speeds is None else parse_rank_speeds(speeds)
    training = Training(
        ranks, microbatches, limit=within, extras=extras, layers=layers, speeds=of_ranks
    )
    _ = training.rank_speeds
    return training


def _of_model(
    training: Training,
    model: str | None,
    state: TrainingState,
    tp: int,
    gpu: str | None,
    costs: str | None,
    tower: tuple[str | None, int | None],
) -> _OfTraining:
    """Return ``training`` of the ``model``, or by its ``costs`` alone.

    Raises:
        ValueError: the model or the GPU is not understood, or nothing tells its speed.
    """
    if model is None:
        if tower != (None, None):
            raise ValueError(_TOWER_WITHOUT_MODEL)
        if gpu is not None or tp > 1 or state != TrainingState():
            raise ValueError(_WITHOUT_MODEL)
        return _OfTraining(replace(training, costs=partial(parse_costs, costs or UNIT)))
    if training.extras.pairs and costs is None:
        raise ValueError(
            "a model of --model has no experts, whose messages pairs hide: add --costs with "
            "hidden=, give a launch line, or leave --pairs out"
        )
    if gpu is None and costs is None:
        raise ValueError("--model does not say how fast it runs: add --gpu, or --costs")
    described = parse_model(model)
    described_model = _with_tower(described, *tower)
    execution = described.execution(tp)
    gpus = () if gpu is None else parse_gpus(gpu)
    rates, free = _machine(gpus, execution.precision, costs)
    if len(gpus) > 1:
        if len(gpus) != training.ranks:
            raise ValueError(
                f"--gpu {gpu} names {counted(len(gpus), 'pipeline rank')}, and --pp is "
                f"{training.ranks}"
            )
        of_gpus = speeds_of_gpus(gpus, described_model, execution)
        speeds = product_of([training.speeds, of_gpus], training.ranks)
        training = replace(training, speeds=speeds)
    trained = TrainedModel(described_model, execution, state, rates)
    given = None if costs is None else partial(parse_costs, costs)
    return _OfTraining(replace(training, trained=trained, costs=given), free)


def _with_tower(described: Described, text: str | None, tokens: int | None) -> Model:
    """Return the model, with the vision tower that ``text`` names. Raises ValueError."""
    if text is None:
        if tokens is not None:
            raise ValueError("--vision-tokens is for a vision tower: name it with --vision")
        return described.model
    tower = tower_of(parse_tower(text), described.hidden, tokens or described.sequence)
    return replace(described.model, tower=tower)


def _machine(
    gpus: Sequence[Gpu], precision: Precision, costs: str | None
) -> tuple[Rates, FreeMemory | None]:
    """Return the rates of a rank, and the memory that it may take. Raises ValueError."""
    if not gpus:
        return assumed_rates(precision), None
    machine = reference_of(gpus)
    free = None
    if machine.memory is not None:
        file = None if costs is None else CostsSource(costs).file
        measured = None if file is None else load_measured(file)
        free = free_memory(machine.memory, None if measured is None else measured.reserved)
    return machine.rates(precision), free


_HALVES_ARE_WHOLE = (
    "--half-pipeline compares whole microbatches, one pass after the other, on ranks that are all "
    "alike: drop --slices, --pairs and --rank-speeds"
)
_TOWER_WITHOUT_MODEL = (
    "--vision names the tower of a model: add --model, give a launch line behind --, or write what "
    "the tower takes into --costs as tower=F/I/W"
)
_WITHOUT_MODEL = (
    "--gpu, --tp, --dp and --distributed-optimizer say how a model is trained: add --model"
)
_NEEDED = (
    "--pp and -m say how large a pipeline is: add them, or give a launch line behind --, as in "
    "megatron-ext plan --gpu h100 -- torchrun ... pretrain_gpt.py ARGS"
)
_OF_A_LINE = (
    "--trace is for a launch line, which its GPUs have run: give the line behind --, or drop "
    "--trace"
)
_BESIDE_A_LINE = (
    "a launch line, --megatron-args or --config says by itself what --pp, -m, --model, --layers, "
    "--tp, --dp and --distributed-optimizer would: drop these, --slices and --pairs"
)
_NOTHING_FITS = (
    "no schedule fits, for the reasons above. A rank holds less with more --tp or --pp, with "
    "--distributed-optimizer and more --dp, with recompute=true or a smaller micro-batch in --model"
)
_NOTHING_FITS_THE_LIMIT = (
    "no schedule fits into --memory-limit, for the reasons above: raise it to the least that they "
    "name"
)
