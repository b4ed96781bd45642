"""``megatron-ext plan``: every schedule for one model, and which to take."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_ext.commands.half_pipeline import show_halves
from megatron_ext.commands.line_plan import halves_of_line, plan_of_line
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
)
from megatron_ext.commands.output import fail
from megatron_ext.commands.plan_pictures import PlanPictures
from megatron_ext.commands.plan_tables import (
    print_full_recompute,
    print_long_sequences,
    print_plan,
    print_recommended,
    print_short_slices,
    print_unit,
    print_vocabulary,
    print_waits,
)
from megatron_ext.commands.progress import showing_progress
from megatron_ext.config import CostsSource
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.model.assumptions import not_checked
from megatron_ext.schedule.model.execution import Precision
from megatron_ext.schedule.model.gpus import (
    USABLE,
    FreeMemory,
    assumed_rates,
    free_memory,
    parse_gpu,
)
from megatron_ext.schedule.model.measured.file import load_measured
from megatron_ext.schedule.model.model_memory import TrainingState
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.model.short_form import parse_model
from megatron_ext.schedule.plan.candidate import Plan
from megatron_ext.schedule.plan.curves import Curves, curves_of
from megatron_ext.schedule.plan.full_recompute import FullRecompute, compare_full_recompute
from megatron_ext.schedule.plan.half_pipeline import (
    Division,
    Halves,
    compare_halves,
    compare_halves_of_costs,
)
from megatron_ext.schedule.plan.long_sequences import LongSequences, long_sequences
from megatron_ext.schedule.plan.model_plan import Training
from megatron_ext.schedule.plan.plan_report import PlanReport, plan_report
from megatron_ext.schedule.plan.planner import VariantOf, make_plan
from megatron_ext.schedule.plan.vocabulary_plan import variants_of
from megatron_ext.schedule.slices import Lengths, Slices, parse_lengths


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
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time against memory, as .svg or .png.")
    ] = None,
    page: HtmlPage = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of the model: compare with Megatron's redistribution, where costs have a head.",
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
            f"A rank's tensors and its allocator's reserve may take {USABLE:.0%} of the memory."
        ),
    ] = None,
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
    config: Annotated[
        Path | None,
        typer.Option(help="A JSON object of Megatron's arguments, in place of a launch line."),
    ] = None,
    megatron_args: MegatronArgs = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Of a launch line: what --pipeline-trace wrote on GPUs. Room is left for what "
            "their allocators reserve.",
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of a launch line, if torchrun's words are not there.")
    ] = None,
) -> None:
    """Compare every schedule for one model or a launch line, and say which to take.

    Stable schedules are recommended, and the others shown apart: megatron-ext schedules has the
    marks.
    """
    pictures = PlanPictures(plot, page)
    if context.args or config is not None or megatron_args is not None:
        of_model = (pp, microbatches, model, layers, distributed_optimizer, tp > 1, dp > 1)
        if any((*of_model, slices > 1, pairs)):
            fail(ValueError(_BESIDE_A_LINE))
        settings = {
            "costs": costs,
            "memory_limit": memory_limit,
            "post_validation": post_validation,
        }
        of_line = halves_of_line if half_pipeline else plan_of_line
        of_line(
            context.args,
            config,
            megatron_args,
            world_size,
            gpu,
            trace,
            settings,
            as_json,
            pictures,
        )
        return
    if pp is None or microbatches is None or trace is not None:
        fail(ValueError(_NEEDED if trace is None else _OF_A_LINE))
    try:
        pictures.check()
        limit = None if memory_limit is None else parse_limit(memory_limit, pp, microbatches)
        cut = Slices(slices, parse_lengths(slice_lengths, "--slice-lengths"))
        if half_pipeline and (slices > 1 or pairs):
            raise ValueError(_HALVES_ARE_WHOLE)
        if model is None:
            if any((gpu, tp > 1, dp > 1, distributed_optimizer)):
                raise ValueError(_WITHOUT_MODEL)
            asked = _of_costs(
                costs or UNIT, pp, microbatches, limit, layers, post_validation, cut, pairs
            )
        else:
            training, free = _training(model, gpu, costs, tp, dp, distributed_optimizer, pairs)
            training = replace(
                training,
                ranks=pp,
                microbatches=microbatches,
                limit=limit,
                post_validation=post_validation,
                slices=cut,
                pairs=pairs,
            )
            asked = _Asked(
                training.variant,
                partial(compare_halves, training, None if free is None else free.allocated),
                training,
                free,
            )
            layers = len(training.model.layers)
        if half_pipeline:
            show_halves(asked.compare_halves, pictures, as_json, is_estimate=asked.is_estimate)
            return
        plan_made, beside = asked.plan()
        curves = asked.curves_of(plan_made) if pictures.plot is not None else None
        pictures.draw(plan_made, curves, is_estimate=asked.is_estimate)
    except (ValueError, OSError) as error:
        fail(error)
    report = plan_report(plan_made, layers)
    if as_json:
        _echo(report.as_data() | beside.as_data())
    else:
        _print(plan_made, report, asked.training if asked.is_estimate else None, beside)
    if report.recommended is None:
        fail(ValueError(_NOTHING_FITS if model else _NOTHING_FITS_THE_LIMIT))


def _echo(data: dict[str, object]) -> None:
    typer.echo(json.dumps(data, indent=2))


def _print(
    plan_made: Plan, report: PlanReport, estimated: Training | None, beside: _Beside
) -> None:
    """``estimated``: what times were estimated of."""
    print_plan(plan_made)
    print_unit(is_estimate=estimated is not None)
    if estimated is not None and (unchecked := not_checked(estimated.execution)):
        typer.echo(unchecked)
    if estimated is not None and plan_made.best is not None:
        problem = plan_made.best.variant.problem
        print_short_slices([problem], estimated.execution.sequence)
    if estimated is not None and estimated.execution.tensor_parallel > 1:
        print_waits(estimated.model, estimated.execution, estimated.rates)
    print_vocabulary(report.vocabulary)
    if beside.again is not None:
        print_full_recompute(beside.again)
    if report.recommended is not None:
        print_recommended(report.recommended, beside.free)
    if beside.long_sequences is not None:
        print_long_sequences(beside.long_sequences)


@dataclass(frozen=True)
class _Beside:
    """Facts beside a plan: of full recompute, long sequences and the memory that it had."""

    again: FullRecompute | None = None
    long_sequences: LongSequences | None = None
    free: FreeMemory | None = None

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "full_recompute": self.again and self.again.as_data(),
            "long_sequences": self.long_sequences and self.long_sequences.as_data(),
            "reserved": self.free and self.free.reserved,
            "is_reserve_modelled": self.free is not None and self.free.is_modelled,
        }


@dataclass(frozen=True)
class _Asked:
    """What is to be compared.

    Attributes:
        training: None where only times are known.
        free: memory that a rank may take; None: not known.
    """

    variant: VariantOf
    compare_halves: Callable[[], Halves]
    training: Training | None = None
    free: FreeMemory | None = None

    @property
    def room(self) -> float | None:
        """Bytes that tensors of a rank may take; None: not known."""
        return None if self.free is None else self.free.allocated

    @property
    def is_estimate(self) -> bool:
        """Whether times are."""
        return self.training is not None and self.training.measured is None

    def plan(self) -> tuple[Plan, _Beside]:
        """The plan, and what there is to say beside it."""
        with showing_progress():
            if self.training is None:
                return make_plan(self.variant), _Beside()
            made = make_plan(self.variant, self.room, may_offload=True)
            return made, _Beside(
                compare_full_recompute(self.training, self.room),
                long_sequences(self.training, made, self.room),
                self.free,
            )

    def curves_of(self, made: Plan) -> Curves:
        """What the picture of ``made`` shows beside it."""
        with showing_progress():
            return curves_of(made, self.variant, self.room)


def _of_costs(
    costs: str,
    ranks: int,
    microbatches: int,
    limit: MemoryLimit | None,
    layers: int | None,
    post_validation: bool,
    slices: Slices,
    pairs: bool,
) -> _Asked:
    costs_on = partial(parse_costs, costs)
    whole = Division(ranks, 1, microbatches)
    return _Asked(
        variants_of(ranks, microbatches, costs_on, limit, layers, post_validation, slices, pairs),
        partial(compare_halves_of_costs, whole, costs_on, limit, layers, post_validation),
    )


def _training(
    model: str,
    gpu: str | None,
    costs: str | None,
    tp: int,
    dp: int,
    distributed_optimizer: bool,
    pairs: bool,
) -> tuple[Training, FreeMemory | None]:
    """Return what is trained, on one pipeline rank as yet, and the memory that a rank may take.

    Raises:
        ValueError: the model or the GPU is not understood, or nothing tells its speed.
    """
    if pairs and costs is None:
        raise ValueError(
            "a model of --model has no experts, whose messages pairs hide: add --costs with "
            "hidden=, give a launch line, or leave --pairs out"
        )
    if gpu is None and costs is None:
        raise ValueError("--model does not say how fast it runs: add --gpu, or --costs")
    described = parse_model(model)
    state = TrainingState(
        distributed=distributed_optimizer, data_parallel=dp, expert_data_parallel=dp
    )
    execution = described.execution(tp)
    rates, free = _machine(gpu, execution.precision, costs)
    measured = None if costs is None else partial(parse_costs, costs)
    training = Training(described.model, execution, state, 1, 1, rates, measured=measured)
    return training, free


def _machine(
    gpu: str | None, precision: Precision, costs: str | None
) -> tuple[Rates, FreeMemory | None]:
    """Return the rates of a rank, and the memory that it may take. Raises ValueError."""
    if gpu is None:
        return assumed_rates(precision), None
    machine = parse_gpu(gpu)
    free = None
    if machine.memory is not None:
        file = None if costs is None else CostsSource(costs).file
        measured = None if file is None else load_measured(file)
        free = free_memory(machine.memory, None if measured is None else measured.reserved)
    return machine.rates(precision), free


_HALVES_ARE_WHOLE = (
    "--half-pipeline compares whole microbatches, one pass after the other: leave --slices and "
    "--pairs out"
)
_WITHOUT_MODEL = (
    "--gpu, --tp, --dp and --distributed-optimizer say how a model is trained: add --model"
)
_NEEDED = (
    "--pp and -m say how large a pipeline is: add them, or give a launch line behind --, as in "
    "megatron-ext plan --gpu h100 -- torchrun ... pretrain_gpt.py ARGS"
)
_OF_A_LINE = (
    "--trace is of a launch line, which its GPUs have run: give that behind --, or leave it out"
)
_BESIDE_A_LINE = (
    "a launch line, --megatron-args or --config says by itself what --pp, -m, --model, --layers, "
    "--tp, --dp and --distributed-optimizer would: leave these, --slices and --pairs out"
)
_NOTHING_FITS = (
    "no schedule fits, for the reasons above. A rank holds less with more --tp or --pp, with "
    "--distributed-optimizer and more --dp, with recompute=true or a smaller micro-batch in --model"
)
_NOTHING_FITS_THE_LIMIT = (
    "no schedule fits into --memory-limit, for the reasons above: raise it to the least that they "
    "name"
)
