"""``megatron-ext plan -- LINE``: every schedule for a launch line, and what to write on it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config import ESTIMATE, PLAN, CostsSource, PipelineConfig, flag
from megatron_ext.launch_check.alternatives.first_answer import first_answer, whole_plan
from megatron_ext.launch_check.alternatives.less_memory import what_would_fit
from megatron_ext.launch_check.alternatives.pairs import OtherPairs, flags_beside, other_pairs
from megatron_ext.launch_check.alternatives.without_full_recompute import (
    Instead,
    without_full_recompute,
)
from megatron_ext.launch_check.importing import as_on, quickly, silently
from megatron_ext.launch_check.words import Launch
from megatron_ext.patches.engine import PatchError
from megatron_ext.schedule.build.registry import Mark
from megatron_ext.schedule.model.assumptions import assumptions
from megatron_ext.schedule.model.description import describe
from megatron_ext.schedule.model.gpus import Gpu, free_memory
from megatron_ext.schedule.model.measured.file import MeasuredFile, load_measured
from megatron_ext.schedule.plan.candidate import Candidate, Plan, VocabMethod
from megatron_ext.schedule.plan.curves import Curves, curves_of
from megatron_ext.schedule.plan.fitting import consider, keeping_candidates
from megatron_ext.schedule.plan.long_sequences import LongSequences
from megatron_ext.schedule.plan.planner import confirmed
from megatron_ext.schedule.planning_time import begin, until_end, within
from megatron_ext.schedule.problem import Extras
from megatron_ext.schedule.words import bytes_text, counted
from megatron_ext.written_settings import from_argv, says

if TYPE_CHECKING:
    from megatron_ext.launch_check.alternatives.half_pipeline import LineHalves
    from megatron_ext.launch_check.alternatives.layouts import LaidOut
    from megatron_ext.launch_check.line import RatesOf
    from megatron_ext.launch_check.variants import LineVariants

_METHODS = frozenset([VocabMethod.NAIVE, VocabMethod.ONE, VocabMethod.TWO])
_NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Asked:
    """A line, or Megatron's arguments by their names, and what the command says of them.

    Attributes:
        values: of arguments, in place of a launch line's words.
        world_size: ranks of the launch; None: as the line says, or the least there can be.
        gpu: None: the costs are an H100's, and nothing is compared with its memory.
        settings: words for flags of ours that the command gives, as ``--pipeline-costs FILE``.
        with_curves: whether the plan is drawn, and so what less memory and other microbatches do.
        reserved: bytes that the allocator of a rank reserves beyond what it hands out; None: as the
            file of costs has it.
    """

    launch: Launch | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    gpu: Gpu | None = None
    settings: tuple[str, ...] = ()
    with_curves: bool = False
    reserved: float | None = None


@dataclass(frozen=True)
class LinePlan:
    """A plan for a line.

    Attributes:
        facts: what the line trains, in words.
        own: the schedule that it trains under.
        extras: what it asks of that.
        remarks: what was assumed, and what else there is to know.
        dropped: Megatron's flags that go from the line, by the schedule that is taken.
        flags: that are written on it.
        gives: where nothing fits, what would make the leanest schedule fit.
        why_not: why it cannot be taken as it stands, if its schedule cannot be without more.
        instead: None where the line does not ask for full recompute, or nothing fits without.
        layouts: what others than the line's would gain; None where that cannot be told.
        is_measured: whether costs are measured ones, per layer type.
        reserved: bytes that the allocator reserves beyond what is allocated, for which room is
            left; None: not known.
        is_reserve_modelled: whether ``reserved`` is a model's figure, and not measured.
        curves: None where nobody asked for them, or nothing fits.
        other_pairs: the line with its passes in pairs, or without; None where experts send nothing.
        long_sequences: what can be done about sequences; None where they are short.
    """

    plan: Plan
    facts: str
    own: str
    remarks: tuple[str, ...]
    extras: Extras = _NO_EXTRAS
    flags: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    why_not: str = ""
    instead: Instead | None = None
    layouts: LaidOut | None = None
    is_measured: bool = False
    reserved: float | None = None
    is_reserve_modelled: bool = False
    curves: Curves | None = None
    other_pairs: OtherPairs | None = None
    long_sequences: LongSequences | None = None

    @property
    def of_line(self) -> Candidate | None:
        """The line as it stands; None if nothing is known of that."""
        asked = (
            self.own,
            VocabMethod.NAIVE,
            self.extras.activation_offload,
            str(self.extras.recompute),
        )
        for candidate in self.plan.candidates:
            made = candidate.report
            if (made.schedule, candidate.method, made.offload, made.recompute) == asked:
                return candidate
        return None

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        step = None if self.of_line is None else self.of_line.step
        return {
            "trains": self.facts,
            "schedule": self.own,
            "step": step,
            "flags": self.flags,
            "dropped": self.dropped,
            "remarks": self.remarks,
            "would_fit": self.gives,
            "without_full_recompute": self.instead and self.instead.as_data(),
            "layouts": self.layouts and self.layouts.as_data(),
            "is_measured": self.is_measured,
            "reserved": self.reserved,
            "is_reserve_modelled": self.is_reserve_modelled,
            "other_pairs": self.other_pairs and self.other_pairs.as_data(),
            "long_sequences": self.long_sequences and self.long_sequences.as_data(),
        }


@dataclass(frozen=True)
class ReadLine:
    """A line that is understood.

    Attributes:
        variants: what schedules would have to solve on it.
        validated: its arguments, as it stands.
        room: bytes that a rank may take; None: not known.
        remarks: what was assumed.
        measured: costs per layer type, by which it is estimated; None: they are not measured.
        reserved, is_reserve_modelled: as of `LinePlan`.
        costs: words for the file of these, where the line does not name it.
    """

    variants: LineVariants
    validated: Any
    room: float | None
    remarks: tuple[str, ...]
    measured: MeasuredFile | None = None
    reserved: float | None = None
    is_reserve_modelled: bool = False
    costs: tuple[str, ...] = ()

    @property
    def facts(self) -> str:
        """What the line trains, in words."""
        return _facts(self.validated, self.variants.world_size)


def plan_line(asked: Asked) -> LinePlan:
    """Compare the schedules that ``asked`` could train under.

    Raises:
        ValueError: the line, or what is asked beside it, is not understood, or Megatron refuses it.
        PatchError: there is no Megatron to ask.
    """
    with keeping_candidates():
        return with_line(asked, partial(_plan, with_curves=asked.with_curves))


def plan_halves(asked: Asked) -> LineHalves:
    """The line of ``asked``, and the same on half of its pipeline ranks.

    Raises:
        ValueError, PatchError: as `plan_line`.
    """

    def halves(read: ReadLine) -> LineHalves:
        from megatron_ext.launch_check.alternatives.half_pipeline import halves_of

        return halves_of(read)

    return with_line(asked, halves)


def with_line[T](asked: Asked, work: Callable[[ReadLine], T]) -> T:
    """What ``work`` makes of the line, on a machine that answers as the launch's would.

    Raises:
        ValueError, PatchError: as `plan_line`.
    """
    launch = asked.launch
    folder = Path()
    if launch is not None and launch.installs is False and not launch.is_module:
        folder = Path(launch.script).parent
    environment = {} if launch is None else launch.environment
    with silently(), as_on(folder.absolute(), {"HF_HUB_OFFLINE": "1", **environment}):
        try:
            with quickly():
                from megatron_ext.launch_check import line as launch_line
        except ImportError as error:
            raise PatchError(f"no Megatron is here to plan with: {error}") from error
        line = (
            launch_line.parse_values(asked.values)
            if launch is None
            else launch_line.parse(launch.arguments)
        )
        rates = _rates(asked)
        with launch_line.on_gpus(line.args, rates):
            return work(_read(asked, line.args, launch_line))


def _read(asked: Asked, args: Any, launch_line: Any) -> ReadLine:
    from megatron_ext.launch_check.variants import LineVariants, chunks_of

    if args.yaml_cfg is not None or args.use_checkpoint_args:
        raise ValueError(
            "--yaml-cfg and --use-checkpoint-args bring other arguments than the line's: write "
            "them on the line"
        )
    words = () if asked.launch is None else asked.launch.arguments
    config = given = _settings(asked)
    ranks = asked.world_size
    if ranks is None and asked.launch is not None:
        ranks = asked.launch.world_size
    measured = _measured_layers(config)
    remarks = [] if asked.launch is None else list(asked.launch.remarks)
    remarks += _assumed(asked, ranks, is_measured=measured is not None)
    ranks = ranks or launch_line.least_world_size(args)
    tokens = launch_line.count_tokens(args) or args.vocab_size
    methods = _METHODS
    if tokens is None and args.padded_vocab_size is None:
        remarks.append("the vocabulary is not known: add --padded-vocab-size N, it counts")
        methods = frozenset([VocabMethod.NAIVE])
    chunks = chunks_of(args)
    own = config.schedule
    if own in (None, PLAN):
        own = "1f1b" if chunks == 1 else f"interleaved:vpp={chunks}"
    if measured is not None:  # by which all layouts are estimated
        config = replace(config, costs=CostsSource(ESTIMATE))
    variants = LineVariants(
        args,
        config,
        ranks,
        methods,
        tokens,
        own,
        frozenset(Mark),
        tries_recompute=not says(words, "recompute"),
    )
    reserved = asked.reserved
    if reserved is None and measured is not None:
        reserved = measured.reserved
    room, is_reserve_modelled = None, False
    if asked.gpu is not None and asked.gpu.memory is not None:
        free = free_memory(asked.gpu.memory, reserved)
        room, reserved, is_reserve_modelled = free.allocated, free.reserved, free.is_modelled
    validated, _ = variants.validated(own, VocabMethod.NAIVE)  # Megatron's refusal comes alone
    remarks += _on_costs(validated, given, measured)
    is_written = measured is None or str(given.costs) in words
    costs = () if is_written else (flag("costs"), str(given.costs))
    return ReadLine(
        variants,
        validated,
        room,
        tuple(remarks),
        measured,
        reserved,
        is_reserve_modelled,
        costs,
    )


def _plan(read: ReadLine, *, with_curves: bool) -> LinePlan:
    line, room, measured = read.variants, read.room, read.measured
    assert line.own is not None
    begin()
    first = first_answer(read)
    with within(_OF_SCHEDULES):
        plan = confirmed(whole_plan(read, first))
    with within(_OF_LAYOUTS):
        layouts = until_end(partial(_layouts, read), None)
    layouts = _with_plan(layouts, read, plan)
    is_measured = measured is not None or not line.config.costs.is_estimate
    made = LinePlan(
        plan,
        read.facts,
        line.own,
        read.remarks,
        line.config.extras,
        instead=None
        if is_measured
        else until_end(partial(without_full_recompute, line, plan, room), None),
        other_pairs=None
        if is_measured
        else until_end(partial(other_pairs, line, plan, room, is_long=first is not None), None),
        layouts=layouts,
        is_measured=measured is not None,
        reserved=read.reserved,
        is_reserve_modelled=read.is_reserve_modelled,
    )
    made = replace(made, long_sequences=until_end(partial(_long_sequences, read, made), None))
    if plan.best is None:
        nothing: tuple[str, ...] = ()
        fitting = until_end(lambda: tuple(what_would_fit(line, room)), nothing)
        gives = *_what_slices_would(made.long_sequences), *fitting
        return replace(made, gives=gives)
    rewritten = line.rewritten(plan.best.schedule)
    remarks = (*read.remarks, *_on_loading(read.validated, plan.best, made.own))
    if made.of_line is None:
        made = replace(made, why_not=_why_not_as_it_is(line, room))
    flags, gone = flags_beside(line.args, plan.best)
    flags = () if plan.best is made.of_line else (*flags, *rewritten.added)
    curves = curves_of(plan, line.variant, room) if with_curves else None
    if flags:
        flags += read.costs
    dropped = (*rewritten.dropped, *gone)
    return replace(made, remarks=remarks, flags=flags, dropped=dropped, curves=curves)


_OF_SCHEDULES, _OF_LAYOUTS = 0.5, 0.8  # of the time: by when schedules, and layouts, are compared


def _layouts(read: ReadLine) -> LaidOut | None:
    """What other layouts would gain; None where nothing is known of single layers."""
    from megatron_ext.launch_check.alternatives.layouts import lay_out

    line = read.variants
    if not line.config.costs.is_estimate:
        return None
    assert line.own is not None
    try:
        return lay_out(
            line,
            read.validated,
            line.own,
            read.room,
            tries_recompute=read.measured is None,
            costs=read.costs,
        )
    except ValueError:  # the line itself cannot be trained, as its own row says
        return None


def _long_sequences(read: ReadLine, made: LinePlan) -> LongSequences | None:
    from megatron_ext.launch_check.alternatives.long_sequences import long_sequences

    return long_sequences(read, made.plan, made.of_line)


def _what_slices_would(made: LongSequences | None) -> Iterator[str]:
    """Where the line fits with slices alone, what to write for it."""
    if made is not None and made.best is not None and made.best.fullest is not None:
        fullest = bytes_text(made.best.fullest)
        yield f"{shlex.join(made.flags)}: the fullest rank would take {fullest}, which fits"


def _with_plan(layouts: LaidOut | None, read: ReadLine, plan: Plan) -> LaidOut | None:
    from megatron_ext.launch_check.alternatives.layouts import with_plan

    return layouts and with_plan(layouts, read.variants, read.validated, plan, read.costs)


def _settings(asked: Asked) -> PipelineConfig:
    """Those of the line, and of the command: these count for all schedules, and so beside a line
    that names none, too.

    Raises:
        ValueError: they are not understood, or do not go together.
    """
    words = () if asked.launch is None else asked.launch.arguments
    config = from_argv(words)
    if not asked.settings:
        return config
    chosen = () if config.schedule else (flag("schedule"), PLAN)
    return from_argv((*words, *chosen, *asked.settings))


def _rates(asked: Asked) -> RatesOf | None:
    """What a rank reaches: as it was measured, or as the GPU's data sheet has it; None: as an H100
    does."""
    measured = _measured_layers(_settings(asked))
    if measured is not None:
        return lambda precision: measured.rates
    return None if asked.gpu is None else asked.gpu.rates


def _assumed(asked: Asked, ranks: int | None, *, is_measured: bool) -> Iterator[str]:
    if ranks is None:
        yield (
            "the world size is not known, and one copy of the model assumed: --world-size N counts "
            "in optimizer states and microbatches"
        )
    if asked.gpu is None and not is_measured:
        yield "times are an H100's, and its memory is not compared: --gpu names yours"


def _measured_layers(config: PipelineConfig) -> MeasuredFile | None:
    """Costs per layer type of the file that ``config`` names, if it names one that has them."""
    return None if config.costs.file is None else load_measured(config.costs.file)


def _on_costs(args: Any, config: PipelineConfig, measured: MeasuredFile | None) -> Iterator[str]:
    """What is not known of times and memory, and what was measured of them."""
    unknown = assumptions(args)
    if unknown is not None:
        yield unknown
    if measured is not None:
        yield from measured.remarks(describe(args))
    elif config.costs.file is not None:
        yield (
            f"{config.costs.file} has costs per stage alone, which fit schedules with as many "
            f"stages: measured anew, it has them per layer type too"
        )


def _facts(args: Any, ranks: int) -> str:
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "CP": args.context_parallel_size,
        "EP": args.expert_model_parallel_size if args.num_experts else 1,
        "ETP": args.expert_tensor_parallel_size if args.num_experts else 1,
        "PP": args.pipeline_model_parallel_size,
        "DP": args.data_parallel_size,
    }
    parts = " x ".join(f"{name} {size}" for name, size in sizes.items() if size and size > 1)
    at_once = args.micro_batch_size * args.data_parallel_size
    microbatches = counted(args.global_batch_size // at_once, "microbatch")
    return (
        f"{counted(args.num_layers, 'layer')} on {counted(ranks, 'rank')} ({parts}), "
        f"{microbatches} of {args.micro_batch_size} x {args.seq_length} tokens"
    )


def _on_loading(args: Any, best: Candidate, own: str) -> Iterator[str]:
    """Whether the line's checkpoint can be loaded under what is taken."""
    from megatron_ext.launch_check.loading import on_loading
    from megatron_ext.schedule.build.registry import choose

    if args.load is None or best.schedule == own:
        return
    ranks = args.pipeline_model_parallel_size
    before, after = (choose(spec).place(ranks).rank_of for spec in (own, best.schedule))
    divided = best.method.vocabulary.value != "none"
    yield on_loading(args, stages_move=before != after or divided)


def _why_not_as_it_is(line: LineVariants, room: float | None) -> str:
    """Why the schedule of the line cannot be taken without more, if that is why."""
    assert line.own is not None
    try:
        variant = line.variant(line.own, VocabMethod.NAIVE)
        assert variant is not None
        consider(replace(variant, may_recompute=False), VocabMethod.NAIVE, room)
    except ValueError as error:
        return str(error)
    return ""
