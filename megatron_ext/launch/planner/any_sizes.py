"""``megatron-ext plan --any-sizes -- LAUNCH COMMAND``: the same training with other sizes.

Sizes are estimated from a description of the launch. Schedules and layouts of the best sizes are
compared by Megatron's validated arguments. What is recommended has passed Megatron's validation and
our refusals.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.adapter.layout_arguments import PATTERN, PLACING
from megatron_ext.base.words import argument_flag
from megatron_ext.cost_model.assumptions import unchecked_parts
from megatron_ext.cost_model.description import why_no_estimate
from megatron_ext.launch.planner.command_line import command_with
from megatron_ext.launch.planner.parsed_launch import (
    ASSUMED_TOKENS,
    LaunchRequest,
    ParsedLaunch,
    with_launch,
)
from megatron_ext.planner.candidate import Plan, VocabMethod
from megatron_ext.planner.confirmation import confirmed_verdict, without_idle_limit
from megatron_ext.planner.fitting import caching_candidates
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Evaluated
from megatron_ext.planner.planning_time import start_planning_time
from megatron_ext.planner.sizes.described_job import SizedJob
from megatron_ext.planner.sizes.search import (
    Found,
    SizedStep,
    SizedWorks,
    search_sizes,
)
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.planner.sizes.sizes_plan import SizedAlternative, SizesPlan, is_tie
from megatron_ext.planner.verdict import NOTHING, Alternative, Written
from megatron_ext.schedule.problem import Offload, Recompute

if TYPE_CHECKING:
    from megatron_ext.launch.planner.variants import LaunchVariants

LIMIT = 60.0  # CPU seconds from the validated command to the final result

_NAMES = {  # Megatron's arguments for the fields of `Sizes`
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
    "micro_batch_size": "micro_batch",
    "sequence_parallel": "sequence_parallel",
}
# Arguments that only fit the pipeline-parallel or tensor-parallel size of the launch.
_OF_PIPELINE = (*PLACING, "microbatch_group_size_per_vp_stage")
_OF_TENSOR = ("tp_comm_overlap",)


def plan_sizes(request: LaunchRequest) -> SizesPlan:
    """Compare parallel sizes, schedules, layouts and recompute for a launch command.

    The command is that of ``request``. GPUs, global batch, sequence length, precision and model
    stay the same.

    Raises:
        ValueError: the command or a setting for the plan is not understood, or Megatron refuses it.
        PatchError: there is no Megatron to ask.
    """
    with caching_candidates():
        return with_launch(request, partial(_plan, request))


def _plan(request: LaunchRequest, parsed: ParsedLaunch) -> SizesPlan:
    from megatron_ext.launch.planner.launch_job import (
        judged_alternative,
        judgement_of,
        on_loading,
    )

    if (why := why_no_estimate(parsed.validated)) is not None:
        raise ValueError(
            "--any-sizes estimates times with other parallel sizes, and there is no estimate: "
            f"{why}; drop --any-sizes, and write --costs FILE, a file of costs that a training "
            "with --pipeline-costs profile or megatron-ext rehearse has measured"
        )
    _check(request, parsed)
    job = sized_job_of(request, parsed)
    launch = SizedLaunch(parsed, job)
    baseline_step = launch.baseline()
    start_planning_time()
    found = search_sizes(job, launch.works_of)
    free = parsed.allowed_bytes

    def judged(one: Alternative) -> Alternative:
        """Return the alternative ``one`` with time and memory of the launch changed to it."""
        if one.write() == NOTHING:  # the launch's own settings were judged before
            return one
        one = without_idle_limit(one)
        made = judged_alternative(judgement_of(request, parsed, one.write()), one.write)
        return replace(one, candidate=made.candidate, seconds=made.seconds)

    baseline = (
        None if baseline_step is None else launch.alternative(baseline_step, is_baseline=True)
    )
    excess = 0.0
    if baseline_step is not None and free is not None:
        excess = max(baseline_step.made.fullest - free, 0.0)

    def best_of(steps: Sequence[SizedStep]) -> SizedAlternative | None:
        pool = [launch.alternative(step) for step in steps]
        # If sizes put more of the model on a rank, its passes have less memory, so the allocator
        # reserves less.
        limits = [job.memory_of(step.made.candidate.variant.model or ()) for step in steps]
        widest = free if excess else max(filter(None, [free, *limits]), default=None)
        verdict, _ = confirmed_verdict(Plan((), {}), baseline, pool, judged, widest)
        taken = verdict.taken
        assert taken is None or isinstance(taken, SizedAlternative)
        return taken

    control = best_of([step for step in found.steps if step.is_stock])
    same_sizes = best_of([step for step in found.steps if step.sizes == job.sizes])
    best = best_of(found.steps)
    checked = None
    if best is not None and best.adds_unchecked:
        checked = best_of([step for step in found.steps if not step.adds_unchecked(job)])
        if checked is not None and is_tie(checked, best):
            best, checked = checked, None
    made = SizesPlan(
        f"{parsed.facts}, under {parsed.variants.launch_schedule}",
        baseline,
        same_sizes,
        control,
        best,
        checked,
        compared=found.compared,
        excess=excess,
        remarks=(*parsed.remarks, *_on_vocabulary(parsed), *_on_refused(found)),
    )
    if checked is not None and not made.keeps:
        made = replace(
            made, remarks=(*made.remarks, f"for the checked one write {checked.write()}")
        )
    if made.best is None or made.keeps:
        return made
    written = made.best.write()
    return replace(
        made,
        written=written,
        command="" if request.launch is None else command_with(request.launch, written),
        remarks=(
            *made.remarks,
            *on_loading(request, parsed, written),
            *_on_connections(parsed, made.best.sizes),
        ),
    )


def _on_vocabulary(parsed: ParsedLaunch) -> Iterator[str]:
    if parsed.assumes_tokens:
        yield (
            f"assumed: a vocabulary of {ASSUMED_TOKENS:,} tokens, since its tokenizer is not here: "
            f"add --padded-vocab-size N"
        )


def _check(request: LaunchRequest, parsed: ParsedLaunch) -> None:
    """Raise ValueError if the launch has settings that other parallel sizes would not keep."""
    from megatron_ext.adapter.pairs.overlap_setting import requests_pairs

    args, config = parsed.validated, parsed.variants.config
    if parsed.free is None:
        raise ValueError(
            "--any-sizes compares what fits into a GPU's memory: name the GPU, as in --gpu h100"
        )
    if parsed.measured is not None or not config.costs.is_estimate:
        raise ValueError(
            "--any-sizes: costs in a file were measured with the launch's own parallel sizes, "
            "and do not hold for others: drop --costs and --pipeline-costs"
        )
    if config.rank_speeds is not None or request.gpus:
        raise ValueError(
            "--any-sizes: speeds and types of GPUs are given for the pipeline ranks of the "
            "launch, and other parallel sizes have other ranks: name one type of GPU with --gpu, "
            "and drop --rank-speeds"
        )
    options = config.options
    is_plain = options.recompute == Recompute() and options.activation_offload is Offload.NONE
    has_plain_steps = config.slices == 1 and not config.options.steps_overlap
    if not (is_plain and has_plain_steps) or config.memory_limit is not None:
        raise ValueError(
            "--any-sizes compares only schedules of whole microbatches that fit into the GPU's "
            "memory: drop --pipeline-slices, --pipeline-memory-limit, "
            "--pipeline-post-validation, --pipeline-recompute and --pipeline-activation-offload"
        )
    if requests_pairs(args):
        raise ValueError(
            "--any-sizes: --overlap-moe-expert-parallel-comm requires virtual stages, and "
            "parallel sizes without them are compared too: drop "
            "--overlap-moe-expert-parallel-comm, and add it to the recommended command"
        )
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, name, False):
            flag = argument_flag(name)
            raise ValueError(
                f"--any-sizes: the memory of a training with {flag} cannot be estimated; drop "
                f"{flag}"
            )


def sized_job_of(request: LaunchRequest, parsed: ParsedLaunch) -> SizedJob:
    """Return the description of the launch by which other parallel sizes are estimated."""
    from megatron_ext.adapter import dimensions
    from megatron_ext.adapter.model_bytes import state_of
    from megatron_ext.adapter.step_sizes import main_size
    from megatron_ext.cost_model.description import describe
    from megatron_ext.launch.planner.alternatives.recompute import recompute_of_launch

    args, variants = parsed.validated, parsed.variants
    run = dimensions.execution(args, args.seq_length, args.micro_batch_size)
    return SizedJob(
        describe(args),
        run,
        state_of(args),
        dimensions.rates(run.precision),
        sizes=_sizes_of(args),
        gpus=args.world_size,
        global_batch=main_size(args).batch,
        recompute=tuple(recompute_of_launch(variants, args)),
        memory=None if request.gpu is None else request.gpu.memory,
        reserved=request.reserved,
        tokens=None if variants.args.padded_vocab_size is not None else variants.tokens,
        multiple=args.make_vocab_size_divisible_by,
        instances=args.num_distributed_optimizer_instances,
        has_default_buckets=args.ddp_bucket_size is None,
        pipeline_inside=args.use_tp_pp_dp_mapping,
    )


def _sizes_of(args: Any) -> Sizes:
    """Return the parallel sizes and the micro-batch size of validated ``args``."""
    has_experts = bool(args.num_experts)
    return Sizes(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size if has_experts else 1,
        expert_tensor=args.expert_tensor_parallel_size if has_experts else 1,
        micro_batch=args.micro_batch_size,
        sequence_parallel=bool(args.sequence_parallel),
    )


class SizedLaunch:
    """Launch command with other parallel sizes."""

    def __init__(self, parsed: ParsedLaunch, job: SizedJob) -> None:
        self._parsed, self._job = parsed, job

    def baseline(self) -> SizedStep | None:
        """Return the unchanged launch with its time and memory, as `judge` has them.

        Return None if it cannot run.
        """
        from megatron_ext.launch.planner.alternatives.layouts import own_layout
        from megatron_ext.launch.planner.launch_job import judged_alternative

        variants, job = self._parsed.variants, self._job
        try:
            made = judged_alternative(variants.judgement(), lambda: NOTHING)
        except ValueError:
            return None
        _, layout = own_layout(self._parsed.validated, str(variants.launch_schedule))
        return SizedStep(
            job.sizes, Evaluated(layout, made.candidate, made.seconds, job.recompute[0])
        )

    def variants(self, sizes: Sizes) -> LaunchVariants:
        """Return the launch with parallel ``sizes``, one stage a rank, and layers split evenly."""
        from megatron_ext.adapter.layers import SEGMENT_END, even_layout_text, prediction_depths

        variants = self._parsed.variants
        if sizes == self._job.sizes:
            return variants
        args = copy.deepcopy(variants.args)
        for name in _OF_PIPELINE:
            if getattr(args, name, None):
                setattr(args, name, False if isinstance(getattr(args, name), bool) else None)
        for name in self._dropped_of_tensor(sizes):
            setattr(args, name, False)
        for name, field in _NAMES.items():
            if field.startswith("expert") and not args.num_experts:
                continue
            setattr(args, name, getattr(sizes, field))
        pattern = getattr(args, PATTERN, None)
        if pattern is not None:
            args.hybrid_layer_pattern = pattern.replace(SEGMENT_END, "")
        elif args.num_layers % sizes.pipeline:
            depths = prediction_depths(args)
            args.pipeline_model_parallel_layout = even_layout_text(
                args.num_layers, sizes.pipeline, depths
            )
        return replace(variants, args=args, launch_schedule="1f1b")

    def works_of(self, sizes: Sizes) -> SizedWorks:
        """Return the training with the parallel ``sizes``, from Megatron's validated arguments.

        Raises:
            ValueError: Megatron refuses the sizes.
        """
        from megatron_ext.launch.command import megatron_arguments
        from megatron_ext.launch.planner.alternatives.layouts import permits_of, rule_of, work_of
        from megatron_ext.launch.planner.alternatives.recompute import with_recompute

        variants = self.variants(sizes)
        if sizes == self._job.sizes:
            args = self._parsed.validated
        else:
            args, config = variants.validated("1f1b", VocabMethod.NAIVE)
            megatron_arguments.check_model(args, replace(config, schedule=None))
        works = [
            work_of(with_recompute(args, option), variants.config) for option in self._job.recompute
        ]
        return SizedWorks(works, rule_of(args), permits_of(variants))

    def alternative(self, step: SizedStep, *, is_baseline: bool = False) -> SizedAlternative:
        """Return ``step``, the launch with other sizes, as an alternative that a plan compares."""
        made, sizes = step.made, step.sizes
        report = made.candidate.report
        execution = self._job.execution_of(sizes, made.recompute)
        return SizedAlternative(
            made.candidate,
            made.seconds,
            (lambda: NOTHING) if is_baseline else partial(self.written, step),
            made.layout.text(),
            sizes=sizes,
            title=sizes.text(self._job.gpus),
            recompute=str(made.recompute),
            passes=report.work * self._job.microbatches(sizes) / report.microbatches,
            not_checked=(*unchecked_parts(execution), *step.unchecked),
            adds_unchecked=step.adds_unchecked(self._job),
        )

    def written(self, step: SizedStep) -> Written:
        """Return the flags that turn the launch into ``step``, the launch with other sizes."""
        from megatron_ext.launch.planner.alternatives.layouts import own_layout
        from megatron_ext.launch.planner.alternatives.recompute import recompute_flags
        from megatron_ext.launch.planner.alternatives.written import written_for

        variants, sizes, made = self._parsed.variants, step.sizes, step.made
        args = variants.args
        added: list[str] = []
        dropped: list[str] = []
        if sizes == self._job.sizes:
            before = own_layout(self._parsed.validated, str(variants.launch_schedule))
        else:
            # A layout for another pipeline size differs from the launch's in all stages, so it is
            # written as a whole.
            before = "1f1b", Layout(())
            added += self._size_words(sizes)
            if self._job.sizes.sequence_parallel and not sizes.sequence_parallel:
                dropped.append("--sequence-parallel")
            gone = (*_OF_PIPELINE, *self._dropped_of_tensor(sizes))
            dropped += [argument_flag(name) for name in gone if getattr(args, name, None)]
        of_schedule = written_for(args, before, made.candidate, made.layout)
        added += of_schedule.added
        dropped += of_schedule.dropped
        if made.recompute != self._job.recompute[0]:
            added += made.recompute.words
            dropped += recompute_flags(args)
        return Written(tuple(added), tuple(dict.fromkeys(dropped)))

    def _size_words(self, sizes: Sizes) -> Iterator[str]:
        args, job_sizes = self._parsed.variants.args, self._job.sizes
        for name, field in _NAMES.items():
            size = getattr(sizes, field)
            # Megatron's default of expert tensor parallelism is the tensor-parallel size.
            follows = field == "expert_tensor" and args.expert_tensor_parallel_size is None
            before = sizes.tensor if follows else getattr(job_sizes, field)
            if size == before:
                continue
            if field == "sequence_parallel":
                yield from [argument_flag(name)] if size else []
            elif not (field.startswith("expert") and not args.num_experts):
                yield from (argument_flag(name), str(size))

    def _dropped_of_tensor(self, sizes: Sizes) -> Sequence[str]:
        """Return the arguments to drop if ``sizes`` have no tensor parallelism."""
        return _OF_TENSOR if sizes.tensor == 1 else ()


def _on_refused(found: Found) -> Iterator[str]:
    """Yield a remark with the number of sizes that Megatron refuses, and the first reason."""
    if found.refused:
        (sizes, why), *_ = found.refused.items()
        yield (
            f"Megatron refuses {len(found.refused)} of the sizes that were simulated, as TP "
            f"{sizes.tensor} x PP {sizes.pipeline}: {why}"
        )


def _on_connections(parsed: ParsedLaunch, sizes: Sizes) -> Iterator[str]:
    """Yield a remark if ``sizes`` need an environment variable that the given sizes do not need."""
    from megatron_ext.launch.command.megatron_arguments import CONNECTIONS, wants_one_connection

    overlaps = max(sizes.tensor, sizes.context) > 1
    if overlaps and not wants_one_connection(parsed.validated) and CONNECTIONS not in os.environ:
        yield (
            f"{CONNECTIONS} is not set, and Megatron demands 1 with these sizes on GPUs before "
            f"Blackwell: export {CONNECTIONS}=1 in the batch script"
        )
