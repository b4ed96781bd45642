"""``megatron-ext plan``: what a training job should run, and everything that was compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_ext.base.text_file import LARGEST_JSON, parse_json, read_text_file
from megatron_ext.base.words import counted, shown
from megatron_ext.commands.options import (
    UNIT,
    Bridge,
    HtmlPage,
    InPairs,
    Json,
    Limit,
    MegatronArgs,
    PostValidationOption,
    SliceCount,
    SliceLengthsOption,
    Speeds,
    Vision,
    VisionTokens,
)
from megatron_ext.commands.output import fail
from megatron_ext.commands.plan_pictures import PlanPictures
from megatron_ext.commands.plan_tables import print_refusals, print_tables
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.commands.sizes_text import compared_line, sizes_lines
from megatron_ext.commands.verdict_text import verdict_lines
from megatron_ext.config import ESTIMATE, CostsSource, flag
from megatron_ext.cost_model.execution import Precision
from megatron_ext.cost_model.gpus import (
    USABLE,
    FreeMemory,
    Gpu,
    assumed_rates,
    free_memory,
    parse_gpus,
    short_name,
)
from megatron_ext.cost_model.measured.file import measured_reserve
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks, least_lasting
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.cost_model.tower import parse_tower, tower_of
from megatron_ext.observe.slow_ranks import speeds_in
from megatron_ext.observe.trace import read_trace, reserved_in
from megatron_ext.patches.engine import PatchError
from megatron_ext.planner.figures import as_data
from megatron_ext.planner.job_plan import JobPlan, plan_job
from megatron_ext.planner.layouts.layout import evenly
from megatron_ext.planner.mixed_gpus import (
    ASSUMED_GPU,
    product_of,
    reference_of,
    speeds_of_gpus,
)
from megatron_ext.planner.planning_time import planning
from megatron_ext.planner.sizes.sizes_plan import SizesPlan
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.planner.training_job import TrainingJob, training_job_of
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.rank_speeds import RankSpeeds, parse_rank_speeds
from megatron_ext.schedule.slices import Lengths, Slices, parse_lengths

if TYPE_CHECKING:
    from megatron_ext.launch.planner.parsed_launch import LaunchRequest

_WORLD_SIZE = "world_size"  # in a file of arguments
_MOST_RANKS = 10_000_000


def plan(
    context: typer.Context,
    pp: Annotated[int | None, typer.Option(help="Number of pipeline ranks.")] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            "-m", "--microbatches", help="Number of microbatches of one pipeline in a step."
        ),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            help=(
                "Costs of passes, as --costs of simulate takes them. Default: estimated for a "
                "model or a launch command, otherwise f=1,i=1,w=1,comm=0. The JSON file of "
                "--pipeline-costs profile has measured costs for a model or a launch command."
            )
        ),
    ] = None,
    memory_limit: Limit = None,
    rank_speeds: Speeds = None,
    as_json: Json = False,
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
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number of equal layers of the model. Also compares ways to distribute the layers "
                "over the stages, and stages with fewer layers next to the embedding and the "
                "output layer if the costs have output_layer=. Default: layers are not moved."
            ),
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "Sizes of a model: "
                "layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000, and optionally "
                "micro-batch=1,ffn=,kv-heads=,head-width=,gated=true,tied=true,recompute=true,"
                "precision=fp8. Times and memory are estimated."
            )
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU to plan for: a name such as h100 (an unknown name lists all), or its "
            "achieved rates: operations=400e12,bytes=40e9,memory=80GiB are operations a second, "
            "bytes of messages a second, and its memory. With h100:6,a100:2 the first six ranks "
            "have H100s, and the last two A100s. A rank's tensors, CUDA, NCCL and the allocator's "
            f"reserve may take {USABLE:.0%} of the memory."
        ),
    ] = None,
    vision: Vision = None,
    vision_tokens: VisionTokens = None,
    tp: Annotated[int, typer.Option(min=1, help="Number of tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Number of data-parallel ranks.")] = 1,
    distributed_optimizer: Annotated[
        bool,
        typer.Option(
            "--distributed-optimizer",
            help="Partition the optimizer states over the data-parallel ranks.",
        ),
    ] = False,
    post_validation: PostValidationOption = False,
    slices: SliceCount = 1,
    slice_lengths: SliceLengthsOption = Lengths.EVEN.value,
    pairs: InPairs = False,
    any_sizes: Annotated[
        bool,
        typer.Option(
            "--any-sizes",
            help=(
                "Also compare other parallel sizes, micro-batches and recompute of a launch "
                "command, on the same GPUs with the same global batch, sequence, precision and "
                "model."
            ),
        ),
    ] = False,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of unequal microbatches, one line each, in the order of training: the "
            "lengths of its documents in tokens; with --costs, its cost. The plan gives the "
            "gain of three changes: microbatches of a step in another order, distributed to "
            "data-parallel replicas by cost, and a schedule for the mean cost of each position.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON object of Megatron's arguments, in place of a launch command."
        ),
    ] = None,
    megatron_args: MegatronArgs = None,
    bridge: Bridge = None,
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
        int | None,
        typer.Option(
            help="Number of ranks. Default: the number in the launcher's flags, or the ranks of "
            "one copy of the model."
        ),
    ] = None,
) -> None:
    """Recommend the schedule and flags of a model or a launch command, or no change.

    Only stable schedules are recommended; megatron-ext schedules lists their maturity.
    """
    pictures = PlanPictures(plot, page)
    sizes = _Sizes(pp, microbatches, model, layers, tp, dp, distributed_optimizer)
    source = _Source(context.args, config, megatron_args, bridge, world_size)
    try:
        pictures.check()
        options = ScheduleOptions(
            steps_overlap=post_validation,
            slices=Slices(slices, parse_lengths(slice_lengths, "--slice-lengths")),
            pairs=pairs,
        )
        traced = _Traced() if trace is None else _traced_in(trace)
        settings = _Settings(
            costs,
            memory_limit,
            rank_speeds,
            gpu,
            vision,
            vision_tokens,
            options,
            traced,
        )
        if any_sizes:
            _refuse_with_sizes(pictures, show_all=show_all, lengths=lengths)
            _show_sizes(source, sizes, settings, as_json=as_json)
            return
        make = (_of_launch if source.is_given else _of_sizes)(source, sizes, settings)
        with showing_progress(), planning() as time:
            made = make(with_curves=pictures.plot is not None, lengths=lengths)
        pictures.draw(made.plan, made.curves, in_seconds=made.in_seconds)
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
    elif made.verdict.taken is None and not _has_one_rank(made):
        print_refusals(made.plan)


def _has_one_rank(made: JobPlan) -> bool:
    """Whether all schedules are refused for the one reason that a remark says."""
    from megatron_ext.launch.planner.parsed_launch import ONE_RANK

    return ONE_RANK in made.remarks


def _echo(made: JobPlan | SizesPlan) -> None:
    typer.echo(json.dumps(as_data(made) | {"spread": as_data(made.spread)}, indent=2))


def _refuse_with_sizes(pictures: PlanPictures, *, show_all: bool, lengths: Path | None) -> None:
    """Raise ValueError for options that do not go with ``--any-sizes``."""
    options = {
        "--all": show_all,
        "--plot": pictures.plot is not None,
        "--html": pictures.page is not None,
        "--lengths": lengths is not None,
    }
    _refuse(options, "--any-sizes prints its verdict alone")


def _show_sizes(source: _Source, sizes: _Sizes, settings: _Settings, *, as_json: bool) -> None:
    """Print the verdict on other parallel sizes.

    Raises:
        ValueError, PatchError: the job is not a launch command, or nothing fits.
    """
    if not source.is_given:
        raise ValueError(
            "--any-sizes is for a launch command, whose model and sizes Megatron's arguments tell: "
            "give the command behind --"
        )
    from megatron_ext.launch.planner.any_sizes import LIMIT, plan_sizes

    request = _launch_request(source, sizes, settings)
    with showing_progress(), planning(LIMIT) as time:
        made = plan_sizes(request)
    if as_json:
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
        raise ValueError("no sizes fit, as estimated: take more GPUs, or GPUs with more memory")


def _why_nothing_fits(made: JobPlan) -> str:
    if made.fallbacks:
        return f"no schedule fits, for the reasons above. With {'; with '.join(made.fallbacks)}"
    return made.nothing_fits


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise ValueError if any of ``options`` has a value."""
    given = [name for name, value in options.items() if value]
    if given:
        names = ", ".join(given)
        raise ValueError(f"{names}: {why}; drop {names}")


@dataclass(frozen=True)
class _Traced:
    """Bytes that allocators reserved and speeds of ranks, as in a trace."""

    reserved: float | None = None
    speeds: RankSpeeds | None = None


def _traced_in(trace: Path) -> _Traced:
    """Return the reserved bytes and speeds of ``trace``. Raises ValueError if it has none."""
    steps = read_trace(trace)
    speeds, of_medians = speeds_in(steps)
    traced = _Traced(reserved_in(steps), speeds)
    if of_medians != speeds:
        typer.echo(
            f"--trace {trace}: its {counted(len(steps), 'step')} differ by more than ranks do, so "
            f"the plan does not take {of_medians} as the speeds of the ranks; if a longer trace "
            f"shows the same, add --rank-speeds {of_medians}",
            err=True,
        )
    elif traced == _Traced():
        raise ValueError(
            f"--trace {trace} has nothing that a plan uses: no rank is slow, and only a trace of "
            f"GPUs has the memory that their allocators reserved"
        )
    return traced


@dataclass(frozen=True)
class _Sizes:
    """Options that describe a job without a launch."""

    pp: int | None
    microbatches: int | None
    model: str | None
    layers: int | None
    tp: int
    dp: int
    distributed_optimizer: bool

    @property
    def of_model(self) -> dict[str, object]:
        """Options, by name, that describe the training of a model."""
        return {
            "--tp": self.tp > 1,
            "--dp": self.dp > 1,
            "--distributed-optimizer": self.distributed_optimizer,
        }


@dataclass(frozen=True)
class _Settings:
    """Options with the same meaning for a launch command and for a model."""

    costs: str | None
    memory_limit: str | None
    rank_speeds: str | None
    gpu: str | None
    vision: str | None
    vision_tokens: int | None
    options: ScheduleOptions
    traced: _Traced

    @property
    def words(self) -> tuple[str, ...]:
        """Flags of a launch."""
        words = [flag("post_validation")] if self.options.steps_overlap else []
        for name in ("costs", "memory_limit", "rank_speeds"):
            value = getattr(self, name)
            words += [] if value is None else [flag(name), value]
        return tuple(words)

    @property
    def in_parts(self) -> dict[str, object]:
        """Options, by their names, that split or pair passes."""
        return {"--slices": self.options.slices.count > 1, "--pairs": self.options.pairs}


@dataclass(frozen=True)
class _Source:
    """Source of a launch: the words of a command, a file of arguments, a log, or a recipe."""

    words: Sequence[str]
    config: Path | None
    log: Path | None
    recipe: str | None
    world_size: int | None

    @property
    def is_given(self) -> bool:
        return bool(self.words) or any(
            source is not None for source in (self.config, self.log, self.recipe)
        )


_MakePlan = Callable[..., JobPlan]


def _of_launch(source: _Source, sizes: _Sizes, settings: _Settings) -> _MakePlan:
    """Raises ValueError or OSError if the source or a value is not understood."""
    from megatron_ext.launch.planner.launch_plan import plan_launch

    return partial(plan_launch, _launch_request(source, sizes, settings))


def _launch_request(source: _Source, sizes: _Sizes, settings: _Settings) -> LaunchRequest:
    """Raises ValueError or OSError if the source or a value is not understood."""
    from megatron_ext.launch.command.log.megatron_log import launch_from
    from megatron_ext.launch.planner.parsed_launch import LaunchRequest

    said = {"--pp": sizes.pp, "-m": sizes.microbatches, "--model": sizes.model}
    said |= {"--layers": sizes.layers}
    _refuse({**said, **sizes.of_model, **settings.in_parts}, _SAID_BY_LAUNCH)
    values, launch, gpu = {}, None, settings.gpu
    if source.config is None:
        launch = launch_from(source.words, source.log, source.recipe)
        gpu = gpu or launch.gpu
    elif source.words or source.log is not None or source.recipe is not None:
        raise ValueError(
            "--config replaces a launch command, --megatron-args and --bridge: give only one of "
            "the four"
        )
    else:
        values = _values(source.config)
    gpus = None if gpu is None else parse_gpus(gpu)
    return LaunchRequest(
        launch=launch,
        values=values,
        config=source.config,
        world_size=source.world_size or _ranks(source.config, values.pop(_WORLD_SIZE, None)),
        gpu=None if gpus is None else reference_of(gpus),
        settings=settings.words,
        reserved=settings.traced.reserved,
        gpus=() if gpus is None or len(gpus) == 1 else gpus,
        seen_speeds=settings.traced.speeds,
        vision=settings.vision,
        vision_tokens=settings.vision_tokens,
    )


def _values(path: Path) -> dict[str, Any]:
    text = read_text_file(path, "--config", LARGEST_JSON)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"--config {path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"--config {path}: the file has to contain one JSON object of Megatron's arguments"
        )
    return values


def _ranks(path: Path | None, world_size: Any) -> int | None:
    """Return the number of ranks that the file ``path`` tells, if it does. Raises ValueError."""
    is_count = isinstance(world_size, int) and not isinstance(world_size, bool)
    if world_size is not None and not (is_count and 0 < world_size <= _MOST_RANKS):
        raise ValueError(
            f"--config {path}: {_WORLD_SIZE} {shown(world_size)!r} is no number of ranks; write a "
            f"number from 1 to {_MOST_RANKS:,}"
        )
    return world_size


def _of_sizes(source: _Source, sizes: _Sizes, settings: _Settings) -> _MakePlan:
    """Raises ValueError if a value is not understood, or the size of the pipeline is not given."""
    _refuse({"--world-size": source.world_size}, "only a launch command has a world size")
    ranks, microbatches, costs = sizes.pp, sizes.microbatches, settings.costs
    if ranks is None or microbatches is None:
        raise ValueError(_NEEDED)
    limit, speeds = settings.memory_limit, settings.rank_speeds
    of_ranks = None if speeds is None else parse_rank_speeds(speeds)
    training = Training(
        ranks,
        microbatches,
        None if costs is None else partial(parse_costs, costs),
        limit=None if limit is None else parse_limit(limit, ranks, microbatches),
        options=settings.options,
        layers=sizes.layers,
        speeds=product_of([of_ranks, settings.traced.speeds], ranks),
        in_seconds=CostsSource(costs or (UNIT if sizes.model is None else ESTIMATE)).in_seconds,
    )
    if sizes.model is not None:
        return partial(plan_job, _of_model(training, sizes.model, sizes, settings))
    _refuse({"--gpu": settings.gpu, **sizes.of_model}, _NO_MODEL)
    tower = {"--vision": settings.vision, "--vision-tokens": settings.vision_tokens}
    _refuse(tower, f"{_NO_MODEL}, or write the tower into --costs as tower=F/I/W")
    training = replace(training, costs=training.costs or partial(parse_costs, UNIT))
    return partial(plan_job, training_job_of(training))


def _of_model(training: Training, text: str, sizes: _Sizes, settings: _Settings) -> TrainingJob:
    """Return the job of the model that ``text`` describes.

    Raises:
        ValueError: the model or the GPU is not understood, or does not fit the job.
    """
    if training.options.pairs and training.costs is None:
        raise ValueError(
            "--pairs: a model of --model has no experts, whose messages pairs hide; add --costs "
            "with overlap_saving=, give a launch command, or drop --pairs"
        )
    described, tokens, gpu = parse_model(text), settings.vision_tokens, settings.gpu
    model, execution = described.model, described.execution(sizes.tp)
    if settings.vision is None:
        _refuse({"--vision-tokens": tokens}, "there is no vision tower without --vision")
    else:
        tower = parse_tower(settings.vision)
        model = replace(
            model, tower=tower_of(tower, described.hidden, tokens or described.sequence)
        )
    gpus = () if gpu is None else parse_gpus(gpu)
    if len(gpus) > 1:
        if len(gpus) != training.ranks:
            raise ValueError(
                f"--gpu {gpu} names {counted(len(gpus), 'pipeline rank')}, and --pp is "
                f"{training.ranks}"
            )
        of_gpus = speeds_of_gpus(gpus, model, execution)
        speeds = product_of([training.speeds, of_gpus], training.ranks)
        training = replace(training, speeds=speeds)
    state = TrainingState(
        distributed=sizes.distributed_optimizer,
        data_parallel=sizes.dp,
        expert_data_parallel=sizes.dp,
    )
    stages = evenly(len(model.layers), training.ranks).of(model)
    on_ranks = bytes_of_ranks(
        model, stages, execution, line(training.ranks), VocabularyParallel.NONE, state
    )
    lasting = least_lasting(on_ranks)
    rates, free = _machine(gpus, execution.precision, settings.costs, settings.traced, lasting)
    trained = TrainedModel(model, execution, state, rates)
    assumed = (ASSUMED_GPU,) if not gpus and training.costs is None else ()
    training = replace(training, trained=trained)
    return training_job_of(training, free, assumed)


def _machine(
    gpus: Sequence[Gpu], precision: Precision, costs: str | None, traced: _Traced, lasting: float
) -> tuple[Rates, FreeMemory | None]:
    """Return the rates of a rank, and the memory that it may take, of which ``lasting`` bytes are
    allocated once. Raises ValueError."""
    if not gpus:
        return assumed_rates(precision), None
    machine, reserved = reference_of(gpus), traced.reserved
    if reserved is None and costs is not None:
        reserved = measured_reserve(CostsSource(costs).file, short_name(machine))
    free = (
        None if machine.memory is None else free_memory(machine.memory, reserved, lasting=lasting)
    )
    return machine.rates(precision), free


_NO_MODEL = "costs alone have no model: add --model, or give a launch command behind --"
_NEEDED = (
    "--pp and -m say how large a pipeline is: add them, or give a launch command behind --, as in "
    "megatron-ext plan --gpu h100 -- torchrun ... pretrain_gpt.py ARGS"
)
_SAID_BY_LAUNCH = "a launch command, --megatron-args, --bridge or --config says that by itself"
