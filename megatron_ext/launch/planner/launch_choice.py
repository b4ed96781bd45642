"""``--pipeline-schedule plan`` and ``auto``: the schedule of a launch, chosen before it starts.

``plan`` compares all stable schedules. ``auto`` compares the searches of all placements, and leaves
the vocabulary alone. Patches depend on the schedule, and Megatron builds the model for it, so the
choice comes first: from the arguments and the GPU's memory, which are the same on all ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ext.adapter.arguments import search_for_first
from megatron_ext.adapter.launch_checks import check_batches, check_schedule
from megatron_ext.base.words import argument_flag, bytes_text, counted
from megatron_ext.compile.auto_spec import auto_searches
from megatron_ext.compile.registry import choose, entry_of
from megatron_ext.config import PLAN, PipelineConfig, flag
from megatron_ext.cost_model.description import why_no_estimate
from megatron_ext.cost_model.gpus import FreeMemory, free_memory
from megatron_ext.cost_model.measured.file import measured_reserve
from megatron_ext.cost_model.model_memory import least_lasting
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.importing import silently
from megatron_ext.launch.planner.alternatives.first_answer import is_long
from megatron_ext.launch.planner.alternatives.written import alternative_of
from megatron_ext.launch.planner.stage_arguments import chunks_of, names_stages, stock_schedule
from megatron_ext.launch.planner.variants import LaunchVariants
from megatron_ext.launch.script import Chosen
from megatron_ext.planner.candidate import ALIKE, Candidate, Plan, Variant, VocabMethod
from megatron_ext.planner.confirmation import with_whole_step
from megatron_ext.planner.figures import recompute_phrase
from megatron_ext.planner.fitting import caching_candidates, consider
from megatron_ext.planner.job_plan import JobPlan, PlannedJob, plan_job
from megatron_ext.planner.planner import SpecWithMethod, make_plan, without_figures
from megatron_ext.planner.shortest_search import AS_1F1B, nothing_left, schedules_not_compared
from megatron_ext.planner.verdict import (
    WORTH,
    Alternative,
    Written,
    is_stock,
    shortest_of_others,
)
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.written_settings import says

# Flags of Megatron that only save time, and that some schedules refuse. Without them the training
# computes the same.
FOR_SPEED = (
    "fp8_output_proj",
    "moe_single_grouped_bias",
    "moe_single_grouped_weight",
    "use_grouped_gemm_for_shared_expert",
    "use_transformer_engine_op_fuser",
)
WORTH_A_WORD = 0.005  # least gain that the text mentions, as a share of a step


def choose_for(
    argv: Sequence[str],
    config: PipelineConfig,
    world_size: int,
    gpu_memory: float | None = None,
    *,
    may_run_code: bool = True,
) -> Chosen:
    """Return the flags of the schedule that is chosen for the launch with the arguments ``argv``.

    By the rules of `verdict`, the choice is Megatron's own schedule as ``argv`` has it, a stable
    schedule, or one that an ``auto`` leaves open. Without a memory limit in ``config``, a rank gets
    no more memory than the unchanged launch takes on its fullest rank. It gets no more than
    `free_memory` of a GPU, if a schedule fits into that.

    Args:
        world_size: ranks of the launch.
        gpu_memory: bytes of a GPU; None takes those of the GPU here, if there is one.
        may_run_code: whether a tokenizer may run code of its own, if ``argv`` allows it.

    Raises:
        ValueError: no schedule can run under these flags, or there is no estimate to compare them.
    """
    args = megatron_arguments.parse_arguments(argv).args
    if args.yaml_cfg is not None or args.use_checkpoint_args:
        raise ValueError(
            f"{flag('schedule')} {config.schedule} chooses a schedule for the arguments of the "
            "launch command, and --yaml-cfg and --use-checkpoint-args replace them: write the "
            "name of a schedule"
        )
    why = why_no_estimate(args)
    if why is not None and config.costs.is_estimate:
        raise ValueError(
            f"{flag('schedule')} {config.schedule} compares times of schedules, and there is no "
            f"estimate: {why}; write the name of a schedule, or {flag('costs')} FILE, a "
            f"file of costs that a training with {flag('costs')} profile has measured"
        )
    is_plan = config.schedule == PLAN
    given = not is_plan or says(argv, "vocab_parallel")
    methods = {VocabMethod.NAIVE, VocabMethod.ONE, VocabMethod.TWO}
    if given:
        methods = {method for method in methods if method.vocabulary is config.vocab_parallel}
    with silently():  # Megatron repeats its messages when arguments are validated again
        tokens = megatron_arguments.count_tokens(args, may_run_code=may_run_code)
        if not given and tokens is None and args.padded_vocab_size is None:
            # The number of tokens in the vocabulary is unknown, so nothing tells whether vocabulary
            # parallelism saves time.
            methods &= {VocabMethod.NAIVE}
        variants = LaunchVariants(
            args,
            config,
            world_size,
            frozenset(methods),
            tokens,
            tries_recompute=is_plan and not says(argv, "recompute"),
        )
        specs = None if is_plan else (stock_schedule(args), *_searches(args, config))
        whys: dict[str, None] = {}
        with caching_candidates():
            for job in _jobs(variants, specs, gpu_memory or _memory_here()):
                made = plan_job(job)
                if made.verdict.taken is not None:
                    why = f"{job.reason(made)}{job.hidden_by_flags(made)}"
                    return Chosen(made.written.added, why, made.written.dropped)
                whys |= dict.fromkeys(job.refusals(made.plan))
    raise ValueError(
        f"{flag('schedule')} {config.schedule} finds no schedule {job.within}: {'; '.join(whys)}"
    )


def _searches(args: Any, config: PipelineConfig) -> tuple[str, ...]:
    """Return the searched schedules that an ``auto`` leaves open to choose from.

    If the launch command names a number of chunks, they have as many.

    Raises:
        ValueError: there is no such schedule.
    """
    requested = str(config.schedule)
    searches = auto_searches(requested) or ()
    if not names_stages(args):
        return searches
    ranks, chunks = args.pipeline_model_parallel_size, chunks_of(args)
    fitting = tuple(spec for spec in searches if choose(spec).place(ranks).chunks == chunks)
    if not fitting:
        raise ValueError(
            f"{flag('schedule')} {requested} searches no schedule with {counted(chunks, 'stage')} "
            "on each rank, as the launch command's virtual stages, layout or pattern require: "
            "remove these settings; those of the chosen schedule are added"
        )
    return fitting


def _memory_here() -> float | None:
    """Return the bytes of the GPU here, rounded down to a GiB; None without a GPU.

    GPUs of one job may differ by a little.
    """
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory >> 30 << 30)


@dataclass(frozen=True, kw_only=True)
class LaunchChoice(PlannedJob):
    """Launch that is about to start, for which a schedule is chosen within a bound on its memory.

    Attributes:
        variants: the launch under each schedule.
        within: the bound on memory, in words.
        bound: bytes that a rank may take; None for no bound.
        limit: memory limit of activations that is written with any schedule; None for none, or the
            user's own.
        specs: schedules to choose from; None for all.
        refused: schedules that an earlier comparison refused. Of these, the ones that do not search
            are compared, if they take less time than ``better_than``. None compares all schedules.
    """

    variants: LaunchVariants
    within: str = ""
    bound: float | None = None
    limit: str | None = None
    specs: tuple[str, ...] | None = None
    refused: frozenset[SpecWithMethod] | None = None
    better_than: Candidate | None = None

    @property
    def allowed_bytes(self) -> float | None:
        return self.bound

    @property
    def _limited(self) -> LaunchVariants:
        limit = self.limit or self.variants.config.memory_limit
        return replace(self.variants, config=replace(self.variants.config, memory_limit=limit))

    def variant(self, spec: str, method: VocabMethod) -> Variant | None:
        is_known = self.refused is not None and (spec, method) not in self.refused
        if is_known or (self.refused is not None and entry_of(spec).traits.searches):
            return None
        return self._limited.variant(spec, method)

    def compare(self) -> Plan:
        return make_plan(
            self.variant,
            self.allowed_bytes,
            only_promising=True,
            better_than=self.better_than,
            specs=self.specs,
            is_long=self.specs is None and self._is_long,
        )

    @property
    def _is_long(self) -> bool:
        """Whether steps are so long that searches for schedules take minutes, by the same rule as
        in `plan`."""
        try:
            args, _ = self.variants.validated(stock_schedule(self.variants.args), VocabMethod.NAIVE)
        except ValueError:
            return False
        return is_long(args)

    def baseline(self, plan: Plan) -> Alternative | None:
        spec = stock_schedule(self.variants.args)
        candidates = (one for one in plan.candidates if one.schedule == spec and is_stock(one))
        return next(map(self.alternative, candidates), None)

    def alternative(self, made: Candidate) -> Alternative:
        args, _ = self._validated(made)
        return alternative_of(args, made, lambda: self._written(made))

    def judged(self, one: Alternative) -> Alternative:
        """Return the alternative ``one``, with its program built and checked as at the launch.

        Raises:
            ValueError: a rank would refuse it: Transformer Engine may refuse an order, and steps of
                other batch sizes may be impossible.
        """
        args, config = self._validated(one.candidate)
        config = replace(config, recompute=one.candidate.recompute)
        # The size of the vocabulary is known by now, so nothing pads it later.
        check_batches(args, config, lambda: None)
        check_schedule(args, config, search_for_first)
        return with_whole_step(one, self.allowed_bytes)

    def _limit_of(self, made: Candidate) -> str | None:
        """Return the memory limit that was set to make ``made``; None if the flags have a limit
        already."""
        has_limit = self._limited.config.memory_limit is not None
        return None if has_limit or made.limit is None else made.limit.written

    def _validated(self, made: Candidate) -> tuple[Any, PipelineConfig]:
        return self._limited.validated(made.schedule, made.method, self._limit_of(made))

    def _written(self, made: Candidate) -> Written:
        limit = self.limit or self._limit_of(made)
        words = () if limit is None else (flag("memory_limit"), limit)
        written = self.variants.written(replace(made, limit=None))
        return Written((*written.added, *words), written.dropped)

    def reason(self, made: JobPlan) -> str:
        """Return, in one line, the reason for the choice in ``made``, the plan of this launch."""
        found, plan = made.verdict, made.plan
        assert found.taken is not None
        compared = counted(len(plan.best_of_each), "schedule")
        if found.keeps:
            text = f"it is kept: of {compared} {self.within}, none saves {WORTH:.0%} of a step"
            text += shortest_of_others(found)
        else:
            text = f"the best of {compared} {self.within}"
            if found.baseline is not None:
                schedule = found.baseline.candidate.schedule
                text = f"a step {found.gain:.1%} shorter than {schedule}'s, {text}"
            text += recompute_phrase(found.taken.candidate)
            tie = dict.fromkeys(one.candidate.schedule for one in found.tie)
            if tie:
                text += f"; {', '.join(tie)} as long within {ALIKE:.0%}, in no less memory"
        is_told = self.specs is not None and plan.refusals
        return f"{text}; not compared: {schedules_not_compared(plan)}" if is_told else text

    def refusals(self, plan: Plan) -> list[str]:
        """Return the reasons why no schedule in ``plan`` can be chosen for this launch."""
        if self.specs is not None:
            return [nothing_left(plan)]
        return list(map(without_figures, plan.refusals.values()))

    def hidden_by_flags(self, made: JobPlan) -> str:
        """Return, in words, a better choice that only flags for speed prevent; "" if there is none.

        ``made`` is the plan of this launch. The flags are Megatron's, and do not change the
        training.
        """
        given = [name for name in FOR_SPEED if getattr(self.variants.args, name, False)]
        if not given or made.verdict.taken is None:
            return ""
        taken = made.verdict.taken
        found = plan_job(
            replace(
                self,
                variants=self._without(given),
                refused=frozenset(made.plan.refusals),
                better_than=taken.candidate,
            )
        )
        better = found.verdict.taken
        if better is None or better.seconds > (1 - WORTH_A_WORD) * taken.seconds:
            return ""
        needed = [
            argument_flag(name)
            for name in given
            if self._is_refused(better.candidate, [other for other in given if other != name])
        ]
        bubbles = [f"{one.candidate.report.bubble_share_makespan:.1%}" for one in (better, taken)]
        return (
            f". Without {' and '.join(needed)}: {shlex.join(found.written.added[1:])}, a step "
            f"{1 - better.seconds / taken.seconds:.1%} shorter (bubble {bubbles[0]}, not "
            f"{bubbles[1]}; what the flag itself saves is not counted)"
        )

    def _without(self, names: Sequence[str]) -> LaunchVariants:
        """Return the launch without the switches ``names`` of Megatron's."""
        return self.variants.with_values(dict.fromkeys(names, False))

    def _is_refused(self, made: Candidate, dropped: Sequence[str]) -> bool:
        """Return whether the launch cannot run ``made``, even without the switches ``dropped``."""
        try:
            self._without(dropped).variant(made.family, made.method)
        except ValueError:
            return True
        return False


def _jobs(
    variants: LaunchVariants, specs: tuple[str, ...] | None, gpu_memory: float | None
) -> Iterator[LaunchChoice]:
    """Yield the launch within each bound on its memory.

    The first bound within which any schedule is possible is used.
    """
    usable, on_gpu, too_large = None, "", ""
    # The planning of a launch that is starting has no time limit.
    job = LaunchChoice(variants=variants, specs=specs, confirms_all=False)
    spec, is_limited = stock_schedule(variants.args), variants.config.memory_limit is not None
    baseline = None if is_limited and gpu_memory is None else _as_it_is(variants, spec)
    if gpu_memory is not None:
        lasting = least_lasting(None if baseline is None else baseline.variant.model)
        free = free_memory(
            gpu_memory, measured_reserve(variants.config.costs.file), lasting=lasting
        )
        usable, on_gpu = free.allocated, _on_gpu(free, gpu_memory)
        too_large = f"; a GPU has {bytes_text(gpu_memory)}, and none is predicted to fit"
    if is_limited:
        text = f"within {flag('memory_limit')} {variants.config.memory_limit}"
        if usable is not None:
            yield replace(job, within=f"{text} and {on_gpu}", bound=usable)
        yield replace(job, within=text + too_large)
        return
    text = f"in no more memory than {spec}"
    baseline_bytes = None if baseline is None else baseline.fullest
    if baseline_bytes is None:
        is_more = baseline is not None and baseline.report.peak > baseline.report.pp
        limit = (
            MemoryLimit(microbatches=baseline.report.peak).written
            if baseline and is_more
            else AS_1F1B
        )
        yield replace(job, within=text, bound=usable, limit=limit)
    elif usable is None or baseline_bytes <= usable:
        yield replace(job, within=text, bound=baseline_bytes)
    else:
        yield replace(job, within=on_gpu, bound=usable)
        yield replace(job, within=text + too_large, bound=baseline_bytes)


def _as_it_is(variants: LaunchVariants, spec: str) -> Candidate | None:
    """Return Megatron's own schedule ``spec`` as a candidate, whatever memory it takes.

    None if it cannot run.
    """
    try:
        naive = replace(variants, methods=frozenset([VocabMethod.NAIVE]))
        variant = naive.variant(spec, VocabMethod.NAIVE)
        return None if variant is None else consider(variant, VocabMethod.NAIVE)
    except ValueError:
        return None


def _on_gpu(free: FreeMemory, memory: float) -> str:
    by = ", not measured here" if free.is_modelled else " by measurement"
    return (
        f"in {bytes_text(free.allocated)} of a GPU's {bytes_text(memory)}, in addition to which "
        f"its allocator reserves {bytes_text(free.reserved)}{by}"
    )
