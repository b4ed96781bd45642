"""Programs of a run's steps, and their costs: the same on every rank of the job.

All pipelines run one program. Other groups' communication inside passes (experts' all-to-all,
parameter gathers) couples pipelines, and two that run different orders could wait for each other.

Only the first step of a training, and each new batch size of Megatron's ramp-up, waits for a
search: callers that form batches by tokens have another number of microbatches in each step. The
number that is searched for is the same on all ranks, as their programs would differ otherwise. One
rank searches for all ranks, and each rank proves the result. For other numbers each rank extends or
shortens the schedule that was found.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron_ext.adapter.compatibility import refuse_order
from megatron_ext.adapter.handled_settings.microbatch_groups import with_megatrons_group
from megatron_ext.adapter.job import Job, basis_of, job_costs, of_arguments, of_built
from megatron_ext.adapter.model_parts import chunk_size, is_trained
from megatron_ext.adapter.rank_settings.launch_facts import refuse_other_models
from megatron_ext.adapter.stock.stock_settings import stock_executor
from megatron_ext.adapter.training_globals import ramps_up_to, training_global
from megatron_ext.base.logger import logger, telling_of_long_work
from megatron_ext.base.progress import FIRST, duration
from megatron_ext.base.words import counted
from megatron_ext.compile.build import prove_built
from megatron_ext.compile.output_layer import better_of, place_output_layer
from megatron_ext.compile.program.unequal import median_makespan
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.measured.layer_costs import Basis
from megatron_ext.cost_model.measured.places import MeasuredPlaces
from megatron_ext.observe.program_summary import summarize
from megatron_ext.runtime.store.agreement import listed
from megatron_ext.runtime.store.leader import run_on_leader
from megatron_ext.runtime.store.lost_store import losing_the_store
from megatron_ext.runtime.world import gather_from_all, is_alone, store_of_all, told_by_rank_0
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import format_costs
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.extension import extended, has_middle
from megatron_ext.search.for_places import program_for_places

KEPT = 64  # largest number of programs that stay in memory

# Micro-batch size and sequence length of a step; None if they vary by microbatch.
BatchShape = tuple[int, int] | None
RequestedOptions = Callable[[Any, int], Mapping[str, Any]]


def log_program(program: Program) -> None:
    """Log the simulated times and memory of a new ``program``, and at level DEBUG its costs."""
    log_single_rank(logger, logging.INFO, summarize(program))
    costs = format_costs(program.problem.costs)
    log_single_rank(logger, logging.DEBUG, f"costs of each stage: {costs}")


@dataclass(frozen=True)
class StepKey:
    """Key of the program that a step runs; costs and memory limit are the same for the whole job.

    Attributes:
        schedule: text of the schedule's spec.
        shape: micro-batch size and sequence length.
        microbatches: number of microbatches.
        forward_only: whether the step is an evaluation.
        first_trained_stage: the first stage with backward passes.
        varies: whether sequences have different lengths.
    """

    schedule: str
    shape: BatchShape
    microbatches: int
    forward_only: bool
    first_trained_stage: int
    varies: bool


@dataclass(frozen=True)
class _Comparison:
    """Comparison of the ranks' programs by their digests.

    Attributes:
        key: name of the comparison in torch's store.
        fault: ranks that differ, in words.
        remedy: what a user does about ranks that differ.
    """

    key: str
    fault: str
    remedy: str

    def check(self, schedule: str, digests: Mapping[int, str]) -> None:
        """Raise RuntimeError unless all ``digests`` of programs, by global rank, are equal."""
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, digest in sorted(digests.items()):
            ranks[digest].append(rank)
        if len(ranks) > 1:
            made = "; ".join(f"{digest[:12]} on {listed(where)}" for digest, where in ranks.items())
            raise RuntimeError(
                f"{self.fault} from {schedule}: programs with the digest {made}; {self.remedy}"
            )


_WHEN_BUILT = _Comparison(
    "built",
    "ranks built different programs",
    "start all ranks with the same versions of megatron_ext and numpy, and the same schedule file",
)
_WHEN_RUN = _Comparison(
    "run",
    "ranks run different programs",
    "one of them swaps a step late: start again from the last checkpoint",
)


class Programs:
    """Programs of a training, built on first use for each shape and number of microbatches.

    Attributes:
        resolved_spec: the schedule that steps follow now.
        costs: seconds and bytes of passes, by shape of the microbatches.
        bases: on global rank 0 of a training that measures costs, the basis of the estimate for
            each shape; None if measured costs cannot be split by layer type.
        described: for each shape that this rank has seen, a function that makes the description of
            the job.
    """

    def __init__(
        self,
        config: PipelineConfig,
        requested_options: RequestedOptions,
        *,
        is_stock: bool = False,
    ) -> None:
        """Initialise the collection of programs; none is built yet.

        Args:
            requested_options: returns the schedule options that a config of Megatron's requests for
                a step.
            is_stock: Megatron's own pipeline functions run the programs.
        """
        self._config = config
        self._requested_options = requested_options
        self._is_stock = is_stock
        self.resolved_spec = config.resolved_spec
        self._programs: dict[StepKey, Program] = {}  # the program that was used last is at the end
        # Programs for unequal microbatches, which replace the programs in `_programs` with the same
        # key.
        self._for_places: dict[StepKey, Program] = {}
        self._first_trained_stage: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        # Number of microbatches for which the schedule was searched; None before the first training
        # step.
        self._searched_for: int | None = None
        # Schedules that searches found, by a key without the number of microbatches.
        self._found: dict[tuple[str, str], Schedule] = {}
        self._has_told_of_others = False
        self._run = ""  # prefix of this run's keys in torch's store, which no other run uses
        self._has_compared = False  # whether the programs were compared across all ranks
        self._measured: set[BatchShape] = set()  # shapes whose costs were measured
        # Shapes with new costs whose new program has not run yet.
        self._swapped: set[BatchShape] = set()
        # Number of times that costs were set for each shape of a batch.
        self._times_set: Counter[BatchShape] = Counter()
        self.costs: dict[BatchShape, Costs] = {}
        self.bases: dict[BatchShape, Basis | None] = {}
        self.described: dict[BatchShape, Callable[[], Job]] = {}

    def shape(self, config: Any, micro_batch: int, sequence: int) -> BatchShape:
        """Return the key under which steps share measured costs.

        The key is (micro-batch size, sequence length). None if costs are not measured, or if
        sequence lengths vary.
        """
        measures = self._config.costs.profile is not None
        return (micro_batch, sequence) if measures and not config.variable_seq_lengths else None

    def agree_on_costs(
        self,
        pipeline: dist.ProcessGroup,
        config: Any,
        models: list[torch.nn.Module],
        shape: BatchShape,
        *,
        sequence: int,
        micro_batch: int,
        microbatches: int,
        forward_only: bool,
    ) -> None:
        """Set the costs of ``shape``, which one rank reads or estimates for all ranks.

        In a training step this also fixes the number of microbatches for which the schedule is
        searched: global rank 0's ``microbatches``.

        Global rank 0 computes the costs in the first step, and in the first training step after
        evaluations, whose sequences may have had another length: these calls are collective over
        the world. A shape that rank 0 does not have may occur in a single pipeline, so its costs go
        through torch's store.
        """
        if shape in self.costs and (forward_only or self._searched_for is not None):
            return
        described = self._description(pipeline, config, models, sequence, micro_batch)
        self.described[shape] = described
        source, slices = self._config.costs, self._config.slices

        def work() -> Costs:
            tell = None if self.costs else logger.info
            return job_costs(source, described(), slices, tell, self._config.rank_speeds)

        if not self.costs:
            refuse_other_models(config, models[0])
        if not self.costs or not (forward_only or self._searched_for):
            size = shape, microbatches
            self._run, (of_rank_0, microbatches), costs = told_by_rank_0(
                lambda: (uuid.uuid4().hex, size, work())
            )
            self._set_costs(of_rank_0, costs)
        if shape not in self.costs:
            self._set_costs(shape, self._told_by_the_first(shape, work))
        if self._config.costs.profile is not None and dist.get_rank() == 0:
            # Rank 0 needs its own description of the job even if another rank has searched, as rank
            # 0 writes the file of measured costs.
            self.bases[shape] = basis_of(described())
        if not forward_only:
            self._searched_for = self._searched_for or microbatches

    def _description(
        self,
        pipeline: dist.ProcessGroup,
        config: Any,
        models: list[torch.nn.Module],
        sequence: int,
        micro_batch: int,
    ) -> Callable[[], Job]:
        """Return a function that describes the training job by the sizes of its stages.

        Collective over ``pipeline``. A rank that runs alone in a rehearsal knows the other stages
        by Megatron's arguments only.
        """
        placement = self.resolved_spec.place(pipeline.size())
        if is_alone():
            return partial(of_arguments, training_global("_GLOBAL_ARGS"), placement)
        sizes = gather(pipeline, [chunk_size(chunk) for chunk in models])
        per_stage = [
            sizes[rank][placement.stages_of[rank].index(stage)]
            for stage, rank in enumerate(placement.rank_of)
        ]
        ranks = dist.get_process_group_ranks(pipeline)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        return partial(
            of_built,
            *(config, placement, per_stage, sequence, micro_batch),
            *(dist.get_world_size(), stride),
        )

    def _told_by_the_first(self, shape: BatchShape, work: Callable[[], Costs]) -> Costs:
        """Return the costs that ``work`` computes on the first rank that needs them."""
        store = store_of_all()
        if store is None:
            return work()
        costs_store = dist.PrefixStore(f"megatron_ext/costs/{self._run}/{shape}", store)
        return run_on_leader(costs_store, dist.get_rank(), f"the costs of shape {shape}", work)

    def _set_costs(self, shape: BatchShape, costs: Costs) -> None:
        """Set the costs of ``shape``, and drop its programs, which were built with other costs."""
        self.costs[shape] = costs
        self._times_set[shape] += 1
        for programs in (self._programs, self._for_places):
            for key in [key for key in programs if key.shape == shape]:
                del programs[key]

    def first_trained_stage(
        self, pipeline: dist.ProcessGroup, models: list[torch.nn.Module]
    ) -> int:
        """Return the number of the first stage with trained parameters; 0 if there is none.

        Collective over ``pipeline`` the first time that ``models``, this rank's chunks, take a
        training step. A rank that runs alone rehearses models that are trained as a whole.

        Raises:
            ValueError: parameters that were frozen in the first step are trained now.
        """
        stages = self.resolved_spec.place(pipeline.size()).stages_of
        if is_alone():
            return 0
        if models[0] not in self._first_trained_stage:
            of_ranks = gather(pipeline, [is_trained(chunk) for chunk in models])
            trained = (
                stage
                for numbers, chunks in zip(stages, of_ranks, strict=True)
                for stage, has_any in zip(numbers, chunks, strict=True)
                if has_any
            )
            self._first_trained_stage[models[0]] = min(trained, default=0)
        first = self._first_trained_stage[models[0]]
        for stage, chunk in zip(stages[pipeline.rank()], models, strict=True):
            if stage < first and is_trained(chunk):
                raise ValueError(
                    f"stage {stage} has parameters that require a gradient now, but in the first "
                    f"step no stage before stage {first} had any, so the schedule runs no "
                    f"backward pass on stage {stage}: let some parameter of stage 0 require a "
                    "gradient from the first step on, or start a new training"
                )
        return first

    def key(
        self,
        config: Any,
        shape: BatchShape,
        microbatches: int,
        *,
        forward_only: bool = False,
        first_trained_stage: int = 0,
    ) -> StepKey:
        """Return the key of the program for a step with these properties and the present schedule.

        ``config`` is Megatron's config of the model.
        """
        return StepKey(
            self.resolved_spec.spec,
            shape,
            microbatches,
            forward_only,
            first_trained_stage,
            config.variable_seq_lengths,
        )

    def known(self, key: StepKey) -> Program | None:
        """Return the program for the step ``key``; None if it is not built yet."""
        if key in self._for_places:
            return self._for_places[key]
        program = self._programs.pop(key, None)
        if program is not None:
            self._programs[key] = program
        return program

    def are_measured(self, shape: BatchShape) -> bool:
        """Return whether the costs of microbatches of ``shape`` were measured in this training."""
        return shape in self._measured

    def make(
        self,
        pipeline: dist.ProcessGroup,
        config: Any,
        key: StepKey,
        before: Program | None = None,
    ) -> Program:
        """Build the program of the step ``key``, for the schedule that steps follow now.

        The first call is collective over the world. ``config`` is Megatron's. ``before`` is a
        program with other costs, whose order of passes is retained if it is better.

        Raises:
            InvalidSchedule: no program fits the memory limit.
            RuntimeError: the ranks have built different programs.
        """
        placement = self.resolved_spec.place(pipeline.size())
        problem = replace(
            self._config.problem(
                placement,
                key.microbatches,
                self.costs[key.shape],
                key.forward_only,
                self._requested_options(config, key.microbatches),
            ),
            first_trained_stage=key.first_trained_stage,
            stock=stock_executor(config) if self._is_stock else None,
        )
        with telling_of_long_work(dist.get_rank()):
            resolved = self.resolved_spec
            if before is None:
                resolved = self._spec_for(key)
            resolved = with_megatrons_group(resolved, config)
            program = self._placed(resolved, problem)
            if before is not None:
                program = better_of(program, before, resolved, problem)
        refuse_order(config, program.schedule)
        self._compare(program.digest, key, pipeline)
        self._programs[key] = program
        if len(self._programs) > KEPT:
            del self._programs[next(iter(self._programs))]
        return program

    def forget(self, program: Program) -> None:
        """Drop ``program``.

        It is rebuilt and compared between ranks if a step needs it later.
        """
        for programs in (self._programs, self._for_places):
            for key in [key for key, known in programs.items() if known is program]:
                del programs[key]

    def _spec_for(self, key: StepKey) -> ResolvedSpec:
        """Return the resolved spec for the step ``key``, with or without a search.

        Without a search, the family is replaced by one that makes a program at once. That is done
        for evaluations, which gain nothing by a search, and for steps with another number of
        microbatches than the one that was searched for.
        """
        microbatches = key.microbatches
        if key.forward_only:
            return self.resolved_spec.without_search
        if microbatches == self._searched_for or ramps_up_to(microbatches):
            return self.resolved_spec
        if self.resolved_spec.at_once and not self._has_told_of_others:
            self._has_told_of_others = True
            assert self._searched_for is not None
            log_single_rank(
                logger,
                logging.INFO,
                f"{self.resolved_spec.spec} was searched for "
                f"{counted(self._searched_for, 'microbatch')} a step, and one has come with "
                f"{microbatches}: no step waits for a search, and other numbers run what was "
                f"found, made longer or shorter, or where it is too short for that, the best "
                f"that is built at once within the same limit",
            )
        return self._made_longer_or_shorter(self.resolved_spec.without_search)

    def _made_longer_or_shorter(self, resolved: ResolvedSpec) -> ResolvedSpec:
        """Return ``resolved``, made to reuse an earlier search for another number of microbatches.

        The schedule found is extended or shortened if it has enough microbatches. All ranks derive
        the same schedule from it.
        """

        def build(problem: Problem) -> Schedule:
            known = self._found.get(_but_for_length(resolved, problem))
            return resolved.build(problem) if known is None else extended(known, problem)

        return replace(resolved, build=build)

    def _placed(self, resolved: ResolvedSpec, problem: Problem) -> Program:
        """Return the program of ``resolved`` for ``problem``, with its output layer placed.

        If ``resolved`` needs a search, one rank of the job searches for all ranks with the same
        problem, and each other rank proves the result.
        """
        if not resolved.takes_long:
            return place_output_layer(resolved, problem)
        found_here: list[Program] = []

        def search() -> _Result:
            program, passes = _search(resolved, problem)
            found_here.append(program)
            return _Result(program.schedule, program.problem, passes)

        store = store_of_all()
        if store is None:
            result = search()
        else:
            request = hashlib.sha256(f"{resolved.spec}\n{problem!r}".encode()).hexdigest()
            searches = dist.PrefixStore(f"megatron_ext/searches/{self._run}/{request}", store)
            result = run_on_leader(
                searches, dist.get_rank(), f"the search for {resolved.spec}", search
            )
        self._found |= result.passes
        return found_here[0] if found_here else prove_built(result.schedule, result.problem)

    def check_swap(self, pipeline: dist.ProcessGroup, key: StepKey, program: Program) -> None:
        """Compare ``program`` with other ranks' in the first step after programs were swapped.

        ``key`` is the key of that step. A rank that swaps programs a step later than its neighbours
        would run passes in another order than they do, and could wait forever.

        Raises:
            RuntimeError: another rank runs a different program.
        """
        if key.shape not in self._swapped:
            return
        self._swapped.discard(key.shape)
        self._compare(program.digest, key, pipeline, _WHEN_RUN)

    def _compare(
        self,
        digest: str,
        key: StepKey,
        pipeline: dist.ProcessGroup,
        comparison: _Comparison = _WHEN_BUILT,
    ) -> None:
        """Raise RuntimeError if another rank has a different program for the step ``key``.

        The first call is a collective of all ranks, in which ranks with the same shape are
        compared. Later digests go through torch's store: separate pipelines may have different
        numbers of microbatches, and a collective would wait for a pipeline that does not come.
        Without a store only the ranks of ``pipeline`` are compared.
        """
        store = store_of_all()
        if not self._has_compared:
            self._has_compared = True
            of_all = enumerate(gather_from_all((key.shape, digest)))
            comparison.check(key.schedule, {rank: d for rank, (of, d) in of_all if of == key.shape})
            return
        if store is None:
            ranks = dist.get_process_group_ranks(pipeline)
            digests = zip(ranks, gather(pipeline, digest), strict=True)
            comparison.check(key.schedule, dict(digests))
            return
        step = key.shape, key.microbatches, key.forward_only, key.first_trained_stage
        where = "/".join(map(str, [comparison.key, *step]))
        # In a race of several schedules the key names the schedule, so that two ranks which run
        # different schedules are noticed.
        if len(self._config.resolved_specs) > 1:
            where += f"/{key.schedule}"
        name = f"megatron_ext/programs/{self._run}/{self._times_set[key.shape]}/{where}"
        here = dist.get_rank()
        with losing_the_store(f"global rank {here} was to compare its program"):
            rank, first = store.compare_set(name, "", f"{here} {digest}").decode().split()
        comparison.check(key.schedule, {int(rank): first, here: digest})

    def rebuild(
        self,
        pipeline: dist.ProcessGroup,
        config: Any,
        shape: BatchShape,
        costs: Costs,
        before: Program,
    ) -> Program:
        """Rebuild the program of training steps with new ``costs`` of ``shape``.

        All ranks call this before the same step. ``before`` is the program so far; its order of
        passes is retained if it is better. Raises as `make`.
        """
        self._set_costs(shape, costs)
        self._measured.add(shape)
        self._swapped.add(shape)
        return self.make(pipeline, config, self._key_of(before, config, shape), before)

    def _key_of(self, program: Program, config: Any, shape: BatchShape) -> StepKey:
        """Return the key of the training steps that run ``program``."""
        problem = program.problem
        return self.key(
            config,
            shape,
            problem.microbatches,
            first_trained_stage=problem.first_trained_stage,
        )

    def make_for_places(
        self,
        pipeline: dist.ProcessGroup,
        config: Any,
        shape: BatchShape,
        measured: MeasuredPlaces,
        now: Program,
    ) -> ForPlaces | None:
        """Make a program for microbatches whose cost depends on their place in the step.

        All ranks call this before the same step. The program is run from then on if it takes less
        time than ``now`` in the steps ``measured``. Steps with another number of microbatches, and
        evaluations, keep their programs.

        Args:
            now: the program of the training steps of ``shape``, for equal microbatches.

        Returns:
            The simulated times under both programs; None if there is nothing to search for
                (`program_for_places`).

        Raises:
            RuntimeError: the ranks have built different programs.
        """
        made_here: list[Program] = []

        def work() -> tuple[Schedule, Problem, ForPlaces] | None:
            made = program_for_places(now, measured.at_places)
            if made is None:
                return None
            made_here.append(made)
            equal, places = (median_makespan(one, measured.steps) for one in (now, made))
            return made.schedule, made.problem, ForPlaces(equal, places)

        store = store_of_all()
        if store is None:
            result = work()
        else:
            where = f"megatron_ext/places/{self._run}/{self._times_set[shape]}/{shape}"
            what = "the search for a program for the places of microbatches"
            searches = dist.PrefixStore(where, store)
            result = run_on_leader(searches, dist.get_rank(), what, work)
        if result is None:
            return None
        schedule, problem, judged = result
        if not judged.is_better:
            return judged
        program = made_here[0] if made_here else prove_built(schedule, problem)
        refuse_order(config, program.schedule)
        key = self._key_of(program, config, shape)
        # The count is part of the key under which ranks compare digests, so each new program of a
        # shape gets a new key.
        self._times_set[shape] += 1
        self._compare(program.digest, key, pipeline)
        self._for_places[key] = program
        return judged


@dataclass(frozen=True)
class ForPlaces:
    """Median of the simulated seconds of measured steps, under two programs.

    ``equal``: the program for equal microbatches. ``places``: the program for microbatches whose
    cost depends on their place in the step.
    """

    equal: float
    places: float

    @property
    def is_better(self) -> bool:
        """Whether the program for unequal microbatches takes less time than that for equal ones."""
        return self.places < self.equal


@dataclass(frozen=True)
class _Result:
    """Result of a search for a schedule, sent to the ranks that have not searched.

    Attributes:
        schedule: schedule of the program, including its messages.
        problem: the problem that ``schedule`` solves.
        passes: schedules from which those for other numbers of microbatches are derived.
    """

    schedule: Schedule
    problem: Problem
    passes: dict[tuple[str, str], Schedule]


def _search(
    resolved: ResolvedSpec, problem: Problem
) -> tuple[Program, dict[tuple[str, str], Schedule]]:
    """Return the program of ``resolved``, and the passes from which other lengths can be derived.

    If the search takes long, a log line says how to avoid it.
    """
    passes: dict[tuple[str, str], Schedule] = {}

    def build(problem: Problem) -> Schedule:
        schedule = resolved.build(problem)
        if resolved.traits.splits_backward and has_middle(problem):
            passes[_but_for_length(resolved, problem)] = schedule
        return schedule

    start = time.perf_counter()
    program = place_output_layer(replace(resolved, build=build), problem)
    seconds = time.perf_counter() - start
    if seconds > FIRST:
        logger.info(
            f"{resolved.spec} took {duration(seconds)}, on this rank for all. A job that starts "
            f"without it: on a login node `megatron-ext simulate {resolved.spec} --pp "
            f"{problem.ranks} -m {problem.microbatches} --csv FILE` with the job's --costs and "
            f"--memory-limit, then --pipeline-schedule FILE"
        )
    return program, passes


def _but_for_length(resolved: ResolvedSpec, problem: Problem) -> tuple[str, str]:
    """Return a key of ``resolved`` and ``problem`` that ignores the number of microbatches."""
    return resolved.spec, repr(replace(problem, microbatches=1))


def gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the ``value`` of every rank of ``group``. Collective over ``group``."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
