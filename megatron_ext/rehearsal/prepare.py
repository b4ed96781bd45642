"""Launch command made ready to be rehearsed: under each schedule its programs, costs and arguments.

Nothing here runs a rank. Programs and costs are those by which ``plan`` judges the launch command.
Costs, and the passes that a search has found, travel to the ranks in files, so that no rank
searches or asks another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.base.text_file import write_text_file
from megatron_ext.base.words import shown
from megatron_ext.compile.output_layer import output_layer_waits, place_output_layer
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.config import CostsSource, flag
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.estimate import waiting_shares
from megatron_ext.cost_model.measured.layer_costs import Basis
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, ParsedLaunch, with_launch
from megatron_ext.launch.script import without
from megatron_ext.planner.candidate import RankMemory, VocabMethod
from megatron_ext.planner.outside_passes import rank_passes, seconds_outside_passes
from megatron_ext.planner.verdict import Written
from megatron_ext.rehearsal.classes import RankClass, classes_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import save_costs
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule, is_compute
from megatron_ext.schedule.schedule_csv import to_csv
from megatron_ext.written_settings import given_in, words_of

if TYPE_CHECKING:
    from megatron_ext.adapter.job import Job
    from megatron_ext.launch.command.judgement import Judgement

STOCK = "stock"
ESTIMATE = "estimate.json"  # file of the programs' costs in the folder of a schedule
PASSES = "schedule.csv"  # file of the passes that a search has found
_EXAMPLE = 'write names separated by spaces, such as --schedules "stock zb-h1 zb-v"'


@dataclass(frozen=True)
class EstimatedStep:
    """Estimated seconds of a step of a schedule.

    Attributes:
        seconds: seconds of the whole step, as ``megatron-ext plan`` estimates them.
        messages: seconds by which messages between pipeline ranks make the step longer.
        waiting: the most seconds that a rank's passes wait for its tensor- and expert-parallel
            ranks, by the name of the group.
        reductions: seconds of the data-parallel reductions and gathers that no pass hides.
    """

    seconds: float
    messages: float
    waiting: Mapping[str, float]
    reductions: float


@dataclass(frozen=True)
class PreparedSchedule:
    """Schedule of a rehearsal, with all that is known of it before a rank runs.

    Attributes:
        name: name of the schedule, as the user wrote it.
        spec: the same name with the number of chunks of the launch, where the schedule needs one.
        is_stock: whether Megatron's own functions run the schedule.
        program: program of the steps with most samples.
        costs: estimated costs, with the links of the launch.
        classes: classes of ranks with equal stages, in the order in which they run.
        arguments: words of the launch command after its script, which name the schedule. Words that
            let a rank run alone are not among them.
        estimate: estimated seconds of a step.
        memory: predicted bytes of each pipeline rank; None if they are not known.
        basis: basis of the estimated costs by layer type; None if the layers are not known.
    """

    name: str
    spec: str
    is_stock: bool
    program: Program
    costs: Costs
    classes: tuple[RankClass, ...]
    arguments: tuple[str, ...]
    estimate: EstimatedStep
    memory: tuple[RankMemory, ...] | None
    basis: Basis | None

    def work(self, rank: int) -> float:
        """Return the estimated seconds that all passes of pipeline ``rank`` take in a step."""
        row = self.program.schedule.rows[rank]
        return sum(self.costs.of(action) for action in row if is_compute(action))


@dataclass(frozen=True)
class Preparation:
    """Launch command that is ready to be rehearsed.

    Attributes:
        facts: model, ranks and microbatches in words.
        world_size: number of ranks of the launch.
        stride: distance in global ranks from one pipeline rank to the next.
        data_parallel, tensor_parallel, context_parallel, expert_parallel: sizes of these groups.
        leaves_node: whether the ranks of a pipeline are on several nodes.
        has_experts: whether the model has experts.
        balances_experts: whether the rehearsal gives each expert equally many tokens: the model has
            experts, and no flag of the command decides which tokens they get.
        train_iterations: number of iterations of the training; None if it is given in samples.
        loads: flags of the command for data and checkpoints, which a rehearsal replaces.
        remarks: assumptions of the estimate, a sentence each.
        schedules: schedules to rehearse, in the order of the request.
    """

    facts: str
    world_size: int
    stride: int
    data_parallel: int
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    leaves_node: bool
    has_experts: bool
    balances_experts: bool
    train_iterations: int | None
    loads: tuple[str, ...]
    remarks: tuple[str, ...]
    schedules: tuple[PreparedSchedule, ...]


def schedules_of(text: str) -> tuple[str, ...]:
    """Return the names of schedules in ``text``, the value of --schedules.

    The name ``stock`` stands for the schedule that the launch command runs without our flags.

    Raises:
        ValueError: ``text`` is empty, has a name twice, or a name is no schedule.
    """
    names = tuple(text.split())
    if not names:
        raise ValueError(f"--schedules {shown(text)!r} names no schedule; {_EXAMPLE}")
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"--schedules {shown(text)!r} names {name} twice; {_EXAMPLE}")
        if name in ("plan", "auto"):
            raise ValueError(
                f"--schedules: {name} does not name a schedule but chooses one, and a rehearsal "
                f"needs names; {_EXAMPLE}"
            )
        if name != STOCK:
            try:
                choose(name)
            except ValueError as error:
                raise ValueError(f"--schedules: {error}") from None
    return names


def folder_of(folder: Path, name: str) -> Path:
    """Return the folder for files of the schedule ``name``, within ``folder``."""
    return folder / "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def prepare(request: LaunchRequest, names: Sequence[str], folder: Path) -> Preparation:
    """Make the launch of ``request`` ready to be rehearsed under the schedules ``names``.

    The files of costs that the ranks read are written below ``folder``.

    Raises:
        ValueError: a training with such a schedule would be refused, or a rehearsal cannot run it
            yet.
        PatchError: Megatron, which parses the command's arguments, is not installed.
    """
    return with_launch(request, partial(_prepared, request, names, folder))


def _prepared(
    request: LaunchRequest, names: Sequence[str], folder: Path, parsed: ParsedLaunch
) -> Preparation:
    from megatron_ext.adapter.job import of_arguments
    from megatron_ext.rehearsal.rank_command import BALANCED, BIASED, replaced_flags

    assert request.launch is not None
    words = request.launch.arguments
    made = []
    for name in names:
        try:
            made.append(_schedule(request, parsed, name, folder_of(folder, name)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    args = parsed.validated
    stride = of_arguments(args, choose("1f1b").place(args.pipeline_model_parallel_size)).stride
    routed = {BALANCED, BIASED} & {word.split("=")[0] for word in words}
    return Preparation(
        facts=parsed.facts,
        world_size=parsed.variants.world_size,
        stride=stride,
        data_parallel=args.data_parallel_size,
        tensor_parallel=args.tensor_model_parallel_size,
        context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size if args.num_experts else 1,
        leaves_node=_leaves_node(args, stride),
        has_experts=bool(args.num_experts),
        balances_experts=bool(args.num_experts) and not routed,
        train_iterations=args.train_iters,
        loads=replaced_flags(words),
        remarks=parsed.remarks,
        schedules=tuple(made),
    )


def _leaves_node(args: Any, stride: int) -> bool:
    from megatron_ext.adapter.dimensions import execution, rates

    run = execution(args, args.seq_length, args.micro_batch_size)
    last = (args.pipeline_model_parallel_size - 1) * stride
    return last >= rates(run.precision).ranks_of_node


def _schedule(
    request: LaunchRequest, parsed: ParsedLaunch, name: str, folder: Path
) -> PreparedSchedule:
    from megatron_ext.launch.planner.command_line import arguments_with
    from megatron_ext.launch.planner.launch_job import judgement_of
    from megatron_ext.launch.planner.stage_arguments import with_chunks

    assert request.launch is not None
    is_stock, variants = name == STOCK, parsed.variants
    spec = name if is_stock else with_chunks(variants.args, name)
    written = _written(request, parsed, spec)
    if not is_stock:
        path = folder / ESTIMATE
        path.parent.mkdir(parents=True, exist_ok=True)
        save_costs(_costs_of(parsed, spec), path)
        # The costs file has rounded costs, so the program is made with costs from the file, as each
        # rank makes it.
        source = CostsSource(str(path))
        parsed = replace(
            parsed, variants=replace(variants, config=replace(variants.config, costs=source))
        )
    judged = judgement_of(request, parsed, written)
    words = arguments_with(request.launch, written)
    if judged.resolved.takes_long and _has_table(judged, folder / PASSES):
        schedule = flag("schedule")
        words = (*without(words, (schedule,)), schedule, str(folder / PASSES))
    return _of_judgement(name, judged, words, is_stock=is_stock)


def _has_table(judged: Judgement, path: Path) -> bool:
    """Write the passes that a search has found for a schedule to ``path``, for the ranks to read.

    Return whether a rank that reads the file makes the program of ``judged`` from it.
    """
    program = judged.program
    for passes in _tables(judged):
        write_text_file(path, to_csv(passes))
        with contextlib.suppress(ValueError):
            made = place_output_layer(choose(str(path)), judged.problem)
            if made.digest == program.digest:
                return output_layer_waits(made) == output_layer_waits(program)
    return False


def _tables(judged: Judgement) -> Iterator[Schedule]:
    """Yield tables of passes from which a rank may be able to make the program of ``judged``."""
    if judged.problem.options.vocab_parallel is VocabularyParallel.NONE:
        yield judged.program.schedule
        return
    # The passes of vocabulary parallelism have moved the program's other passes, so the family
    # builds the schedule anew.
    made: list[Schedule] = []

    def build(problem: Problem) -> Schedule:
        made.append(judged.resolved.build(problem))
        return made[-1]

    place_output_layer(replace(judged.resolved, build=build), judged.problem)
    yield from reversed(made)


def _written(request: LaunchRequest, parsed: ParsedLaunch, spec: str) -> Written:
    """Return the changes of the launch's arguments that make it run the schedule ``spec``.

    Options that the launch command sets for its own schedule are kept.
    """
    from megatron_ext.launch.planner.stage_arguments import rewritten

    assert request.launch is not None
    if spec == STOCK:
        return Written(dropped=(flag("schedule"),))
    given = given_in(request.launch.arguments)
    options = {key: given[key] for key in _OPTIONS if key in given}
    changed = rewritten(parsed.variants.args, spec)
    return Written((flag("schedule"), spec, *words_of(options), *changed.added), changed.dropped)


# Options of the launch command's schedule that every rehearsed schedule keeps.
_OPTIONS = (
    *("memory_limit", "vocab_parallel", "activation_offload", "recompute"),
    *("slices", "slice_lengths", "join_slice_weights", "post_validation"),
)


def _costs_of(parsed: ParsedLaunch, spec: str) -> Costs:
    """Return the costs with which the ranks of the launch compile the schedule ``spec``."""
    from megatron_ext.adapter.arguments import problems

    variants = parsed.variants
    method = VocabMethod.of(variants.config.vocab_parallel)
    if method not in variants.methods:
        raise ValueError(
            f"{flag('vocab_parallel')} {method} needs the size of the vocabulary: add "
            f"--padded-vocab-size N"
        )
    return problems(*variants.validated(spec, method))[0].costs


def _of_judgement(
    name: str, judged: Judgement, words: tuple[str, ...], *, is_stock: bool
) -> PreparedSchedule:
    from megatron_ext.adapter.job import basis_of, of_arguments
    from megatron_ext.rehearsal.rank_command import refuse_untried
    from megatron_ext.written_settings import from_argv

    args, program = judged.args, judged.program
    config = from_argv(words)
    refuse_untried(args, config)
    placement = program.schedule.placement
    job = of_arguments(args, placement)
    candidate = judged.candidate()
    memory = candidate.memory
    peaks = [rank.total for rank in memory] if memory else list(range(placement.ranks, 0, -1))
    return PreparedSchedule(
        name=name,
        spec=judged.resolved.spec,
        is_stock=is_stock,
        program=program,
        costs=program.problem.costs,
        classes=classes_of(program.schedule, _descriptions(job), peaks),
        arguments=words,
        estimate=_estimate(judged, job),
        memory=memory,
        basis=basis_of(job),
    )


def _descriptions(job: Job) -> list[Any]:
    """Return a description of each stage, equal for stages of equal layers.

    If the layers are not known, all descriptions differ.
    """
    if job.layers is None:
        return list(range(job.placement.stages))
    return list(job.layers.stages)


def _estimate(judged: Judgement, job: Job) -> EstimatedStep:
    from megatron_ext.adapter.dimensions import execution, rates
    from megatron_ext.adapter.model_bytes import state_of
    from megatron_ext.launch.planner.alternatives.written import alternative_of
    from megatron_ext.planner.verdict import NOTHING

    args, program = judged.args, judged.program
    costs = program.problem.costs
    with_messages = simulate(program, costs).makespan
    without = simulate(program, costs.without_messages()).makespan
    run, state = execution(args, args.seq_length, args.micro_batch_size), state_of(args)
    reached = rates(run.precision)
    alone = replace(state, data_parallel=1, expert_data_parallel=1)
    passes = rank_passes(describe(args), run, reached, program.schedule.placement.ranks)
    reductions = [
        seconds_outside_passes(model, state, run, reached, passes)
        - seconds_outside_passes(model, alone, run, reached, passes)
        for model in judged.model or ()
    ]
    waiting: dict[str, float] = {}
    if job.layers is not None:
        shares = waiting_shares(job.layers.model, job.layers.execution, reached)
        waiting = {group.value: _most_waiting(program, of) for group, of in shares.items()}
    return EstimatedStep(
        seconds=alternative_of(args, judged.candidate(), lambda: NOTHING).seconds,
        messages=with_messages - without,
        waiting=waiting,
        reductions=max(reductions, default=0.0),
    )


def _most_waiting(program: Program, shares: Mapping[str, float]) -> float:
    """Return the seconds that a rank's passes wait for other ranks of its group; the most of any.

    Args:
        shares: by kind of pass, the share of the seconds of layers for which such passes wait.
    """
    layers = program.problem.costs.layers_alone

    def of_row(row: Sequence[Any]) -> float:
        return (
            sum(
                shares.get(part.value, 0.0) * layers.seconds[part][action.stage]
                for action in row
                if is_compute(action)
                for part in RULES[action.kind].covers or (action.kind,)
                if part in layers.seconds
            )
            / program.problem.slices.count
        )

    return max(map(of_row, program.schedule.rows))
