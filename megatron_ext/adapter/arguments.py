"""Checks of our settings against Megatron's parsed arguments, and the programs of the schedule.

A launch whose settings do not work together must end before process groups exist and GPUs are
taken. So all settings are checked as soon as Megatron has parsed its arguments. The schedule is
also proved valid then, by a program for each number of microbatches that steps will have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.adapter.compatibility import refuse, refuse_order
from megatron_ext.adapter.features import features_of, requested_options
from megatron_ext.adapter.handled_settings.microbatch_groups import with_megatrons_group
from megatron_ext.adapter.job import job_costs, of_arguments
from megatron_ext.adapter.layers import (
    SEGMENT_END,
    refuse_prediction_on_first_rank,
    segments_of_stages,
)
from megatron_ext.adapter.layout_arguments import ENDS, PATTERN, VIRTUAL_STAGES
from megatron_ext.adapter.step_sizes import evaluated_microbatches, step_sizes
from megatron_ext.base.logger import telling_of_long_work
from megatron_ext.base.words import argument_flag, counted
from megatron_ext.compile.output_layer import place_output_layer
from megatron_ext.compile.overlap import check_overlaps
from megatron_ext.compile.program.memory import check_one_microbatch
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.observe.launch_remark import LaunchRemark
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import StockExecutor

_PATTERNS = (PATTERN, "hybrid_override_pattern")


def add_virtual_stages(args: Any, config: PipelineConfig) -> None:
    """Set the schedule's virtual stages in ``args``, which Megatron has not validated yet.

    Virtual stages that ``args`` set already stay. A hybrid model has its virtual stages in its
    layer pattern.

    Raises:
        ValueError: the layer pattern has another number of stages than the schedule.
    """
    ranks = args.pipeline_model_parallel_size
    if ranks < 2:
        return
    chunks = config.resolved_spec.place(ranks).chunks
    if chunks > 1:
        # With several chunks Megatron requires overlap_p2p_comm. The setting is for Megatron's own
        # messages, which the schedule's messages replace.
        args.overlap_p2p_comm = True
    patterns = [name for name in _PATTERNS if getattr(args, name, None) is not None]
    if patterns:
        for name in patterns:
            setattr(args, name, _divided(getattr(args, name), args, config.resolved_spec))
    elif chunks > 1 and all(getattr(args, name) is None for name in VIRTUAL_STAGES):
        args.num_virtual_stages_per_pipeline_rank = chunks


def _divided(pattern: str, args: Any, resolved: ResolvedSpec) -> str:
    """Return the hybrid layer ``pattern`` with a separator after each stage of the schedule.

    A pattern without separators is returned unchanged if each rank has one stage: Megatron itself
    splits it over ranks.
    """
    placement = resolved.place(args.pipeline_model_parallel_size)
    if placement.chunks == 1 and SEGMENT_END not in pattern:
        return pattern
    main, slash, depths = pattern.partition("/")
    divided = SEGMENT_END.join(segments_of_stages(main, placement, resolved.spec))
    for name in ENDS:
        if getattr(args, name) is not None:
            raise ValueError(
                f"{argument_flag(name)}: --pipeline-schedule {resolved.spec} takes the ends of "
                f"stages from --hybrid-layer-pattern alone; drop {argument_flag(name)}, and mark "
                f"the ends of stages by {SEGMENT_END}, as in --hybrid-layer-pattern '{divided}'"
            )
    return divided + slash + depths


Prove = Callable[[ResolvedSpec, Sequence[Problem]], list[Program]]


def check_parsed_arguments(args: Any, config: PipelineConfig, prove: Prove) -> list[Program]:
    """Refuse settings of ``config`` that do not work with Megatron's parsed ``args``.

    Args:
        prove: proves a program for each problem.

    Returns:
        The programs of the schedule, one for each number of microbatches that steps will have.

    Raises:
        ValueError: a setting conflicts with the schedule, or no program exists for these sizes and
            limits and some number of microbatches that steps will have.
    """
    check_settings(args, config)
    made = programs(args, config, prove)
    for program in made:
        refuse_order(args, program.schedule)
        for feature in features_of(config, args):
            feature.check_program(args, program)
    _check_evaluation(args, config)
    return made


def _check_evaluation(args: Any, config: PipelineConfig) -> None:
    """Refuse evaluations if the schedule has no program for their number of microbatches."""
    microbatches = evaluated_microbatches(args)
    if microbatches is None or microbatches in [size.microbatches for size in step_sizes(args)]:
        return
    resolved = with_megatrons_group(config.resolved_spec.without_search, args)
    training = problems(args, config)[0]
    evaluation = replace(training, microbatches=microbatches, forward_only=True)
    try:
        place_output_layer(resolved, evaluation)
    except ValueError as error:
        raise ValueError(
            f"--eval-global-batch-size {args.eval_global_batch_size}: the schedule cannot run "
            f"evaluations of {counted(microbatches, 'microbatch')}: {error}"
        ) from error


def prove_without_search(resolved: ResolvedSpec, problems: Sequence[Problem]) -> list[Program]:
    """Return programs of ``resolved`` that can be proved for ``problems`` without a search.

    If ``resolved`` needs a search, the programs are those of its substitute that needs none. A
    problem that the substitute cannot solve is omitted, because the search may still solve it.

    Raises:
        ValueError: as `place_output_layer`, if ``resolved`` needs no search; a memory limit is too
            low for any schedule.
    """
    if not resolved.takes_long:
        return [place_output_layer(resolved, problem) for problem in problems]
    for problem in problems:
        check_one_microbatch(problem)
    proved: list[Program] = []
    for problem in problems if resolved.at_once is not None else ():
        with contextlib.suppress(ValueError):
            program = place_output_layer(resolved.without_search, problem)
            if problem.options.steps_overlap:
                check_overlaps(program)
            proved.append(program)
    return proved


def search_for_first(resolved: ResolvedSpec, problems: Sequence[Problem]) -> list[Program]:
    """Return a program of ``resolved`` for each of ``problems``; only the first may be searched.

    The first program is the one that will run, even if it needs a search: callers report its
    simulated times and memory. The others are made without a search.

    Raises:
        ValueError: as `place_output_layer`.
    """
    first, *others = problems
    return [place_output_layer(resolved, first), *prove_without_search(resolved, others)]


def other_programs(args: Any, config: PipelineConfig, prove: Prove) -> dict[str, list[Program]]:
    """Return the programs of further schedules under which steps may run, by schedule.

    Called after `check_parsed_arguments`. ``prove`` makes the programs.

    Raises:
        ValueError: a schedule has no program for these sizes and limits, or would change results.
    """
    made: dict[str, list[Program]] = {}
    for feature in features_of(config, args):
        made |= feature.other_programs(
            args, config, lambda resolved: _programs_of(resolved, args, config, prove)
        )
    return made


def check_settings(args: Any, config: PipelineConfig) -> None:
    """Refuse Megatron's settings that conflict with the schedule, before any program is made.

    Raises:
        ValueError: a setting conflicts with the schedule.
    """
    resolved = config.resolved_spec
    ranks = args.pipeline_model_parallel_size
    if ranks < 2:
        raise ValueError(
            f"--pipeline-schedule {config.schedule} needs a pipeline, but "
            f"--pipeline-model-parallel-size is {ranks}: set --pipeline-model-parallel-size to 2 "
            "or more, or drop --pipeline-schedule"
        )
    for contender in config.resolved_specs:
        refuse(args, contender, config.options)
        refuse_prediction_on_first_rank(args, contender.place(ranks))
    _refuse_saving_tied_prediction(args)
    check_features(args, config)
    _refuse_checkpoints_of_one_placement(args, resolved.place(ranks))


def check_features(args: Any, config: PipelineConfig) -> None:
    """Refuse Megatron's settings that conflict with a feature, before any program is made.

    Raises:
        ValueError: a setting conflicts with a feature.
    """
    for feature in features_of(config, args):
        feature.check_arguments(args, config)


def check_microbatches(args: Any, config: PipelineConfig) -> None:
    """Refuse training data that do not work with a feature, as far as Megatron's ``args`` tell.

    Raises:
        ValueError: the data do not work with a feature.
    """
    for feature in features_of(config, args):
        feature.check_microbatches(args, config)


def check_files(args: Any, config: PipelineConfig) -> None:
    """Refuse files of our flags that a launch with ``args`` cannot read.

    Raises:
        ValueError: a file is missing, or not what a feature needs.
    """
    for feature in features_of(config, args):
        feature.check_files(config)


def remarks_on(args: Any, config: PipelineConfig) -> list[LaunchRemark]:
    """Return remarks of all features for a user who launches with validated ``args``."""
    return [remark for feature in features_of(config, args) for remark in feature.remarks(args)]


def complete_arguments(args: Any, config: PipelineConfig) -> list[str]:
    """Set the values that the features of ``config`` need in Megatron's validated ``args``.

    Returns:
        What the log of a training says of the changes.

    Raises:
        ValueError: ``args`` do not work with a feature.
    """
    changes = [feature.complete_arguments(args, config) for feature in features_of(config, args)]
    return [change for change in changes if change is not None]


def programs(
    args: Any,
    config: PipelineConfig,
    prove: Prove = search_for_first,
    stock: StockExecutor | None = None,
) -> list[Program]:
    """Return the schedule's programs, one for each number of microbatches that steps will have.

    Args:
        prove: proves a program for each problem.
        stock: how Megatron runs the schedule, if Megatron itself runs it.

    Raises:
        ValueError: the schedule cannot be made for these sizes and limits.
    """
    return _programs_of(config.resolved_spec, args, config, prove, stock)


def _programs_of(
    resolved: ResolvedSpec,
    args: Any,
    config: PipelineConfig,
    prove: Prove,
    stock: StockExecutor | None = None,
) -> list[Program]:
    with telling_of_long_work(args.rank):
        return prove(with_megatrons_group(resolved, args), problems(args, config, stock))


def problems(
    args: Any, config: PipelineConfig, stock: StockExecutor | None = None
) -> list[Problem]:
    """Return a problem for each number of microbatches that steps will have.

    The problem of the steps with most samples comes first.

    Args:
        stock: how Megatron runs the schedule, if Megatron itself runs it.

    Raises:
        ValueError: the schedule cannot be made for these sizes, as far as that is known without a
            program.
    """
    placement = config.resolved_spec.place(args.pipeline_model_parallel_size)
    job, speeds = of_arguments(args, placement), config.rank_speeds
    costs = job_costs(config.costs, job, config.slices, speeds=speeds)
    requested = requested_options(config, args)
    return [
        replace(
            config.problem(placement, size.microbatches, costs, requested=requested), stock=stock
        )
        for size in step_sizes(args)
    ]


def _refuse_saving_tied_prediction(args: Any) -> None:
    is_tied = args.mtp_num_layers and not args.untie_embeddings_and_output_weights
    if is_tied and args.save and args.ckpt_format == "torch_dist":
        raise ValueError(
            "--save: Megatron cannot write a torch_dist checkpoint of multi-token prediction with "
            "tied embeddings (--mtp-num-layers) from a pipeline, under any schedule: write "
            "--untie-embeddings-and-output-weights, or drop --save"
        )


def settle_vocabulary(args: Any, config: PipelineConfig, tokens: int | None = None) -> None:
    """Set the padded vocabulary size of validated ``args``, as Megatron would pad ``tokens``.

    ``tokens`` is the tokenizer's number of tokens; if it is None, ``--vocab-size`` counts, and
    without that flag the size stays unknown.

    Raises:
        ValueError: the vocabulary cannot be split over the ranks as ``config`` requires.
    """
    complete_arguments(args, config)
    tokens = args.vocab_size if tokens is None else tokens
    if args.padded_vocab_size is None and tokens is not None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-tokens // multiple) * multiple


def _refuse_checkpoints_of_one_placement(args: Any, placement: Placement) -> None:
    """Refuse to save optimizer states that Megatron without us would load into other stages.

    If the first stage is not on rank 0, nothing is refused: the states have other sizes than under
    Megatron's own placement, and Megatron itself reports the mismatch when it loads them.
    """
    if placement.in_turn or placement.rank_of[0] != 0:
        return
    saves = args.use_distributed_optimizer and args.save and not args.no_save_optim
    if saves and not args.dist_ckpt_optim_fully_reshardable:
        raise ValueError(
            "--use-distributed-optimizer: this schedule puts stages on ranks "
            f"{list(placement.rank_of)}, and optimizer states of its checkpoints would go to the "
            "wrong stages under a schedule that puts stages on other ranks: add "
            "--dist-ckpt-optim-fully-reshardable"
        )
