"""One judgement of a launch command, for doctor, for plan, and for each command that plan writes.

Its checks are those of the launch (`adapter.launch_checks`), in the same order and with the same
sentences, and after them those of Megatron's set-up. Doctor notes all refusals, plan ends with the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.adapter import arguments
from megatron_ext.adapter.handled_settings.microbatch_groups import with_megatrons_group
from megatron_ext.adapter.impossible_sizes import refuse_stock_steps
from megatron_ext.adapter.launch_checks import Attempt, check_batches, check_schedule, raising
from megatron_ext.adapter.model_bytes import model_bytes_of_ranks
from megatron_ext.adapter.stock.stock_settings import stock_executor
from megatron_ext.compile.long_step import simulated_in_full
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.model_memory import ModelBytes
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.planner.candidate import Candidate, Variant, VocabMethod
from megatron_ext.planner.fitting import candidate_of
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import StockExecutor

STOPS = "Megatron stops here, and so does this check: correct it, then check again"


@dataclass(frozen=True)
class Judgement:
    """Judgement of a launch command that can run: its arguments, programs and memory.

    Attributes:
        args: Megatron's arguments, validated, with the padded vocabulary.
        resolved: the schedule, which is Megatron's own if the command names none.
        problem: problem of the steps with most samples, for which the schedule is generated.
        programs: a program for each size of a step, that of ``problem`` first.
        model: bytes of the model on each pipeline rank; None if not known.
        contenders: by schedule, the programs of a race's other schedules.
    """

    args: Any
    resolved: ResolvedSpec
    problem: Problem
    programs: Sequence[Program]
    model: Sequence[ModelBytes] | None
    contenders: Mapping[str, Sequence[Program]]

    @property
    def program(self) -> Program:
        """Program of the steps with most samples of the training."""
        return self.programs[0]

    def candidate(self) -> Candidate:
        """Return the judged command as a candidate that a plan compares with others."""
        step = simulated_in_full(
            self.resolved, self.problem, lambda resolved, problem: self.program
        )
        method = VocabMethod.of(self.problem.options.vocab_parallel)
        return candidate_of(Variant(self.resolved, self.problem, self.model), method, step)


def judge(
    args: Any,
    config: PipelineConfig,
    ranks: int,
    tokens: int | None,
    attempt: Attempt,
    check_recipe: Callable[[], object] | None = None,
    *,
    describes_training: bool = True,
) -> Judgement | None:
    """Return what the checks of a launch find and derive.

    None if ``attempt`` has noted that the arguments are wrong, that the number of microbatches is
    unknown or that there is no program. Other errors that it notes leave a judgement.

    Args:
        args: Megatron's parsed arguments, which are validated in place.
        config: our settings.
        ranks: world size.
        tokens: size of the tokenizer's vocabulary; None if not known.
        attempt: runs each check; if one refuses the launch, it notes the error or raises it.
        check_recipe: checks the config of Megatron-Bridge that ``args`` were read from; None if
            they were read from a command line.
        describes_training: whether ``args`` describe the whole training, and not the model alone.

    Raises:
        ValueError: a check refuses the launch, and ``attempt`` raises the error.
    """
    if not _is_valid(args, config, ranks, attempt):
        return None
    is_known = _check_batches(args, config, tokens, attempt, check_recipe)
    made = _judged(args, config, attempt) if is_known else None
    _check_set_up(args, config, attempt, describes_training=describes_training and is_known)
    return made


def judged(
    args: Any,
    config: PipelineConfig,
    ranks: int,
    tokens: int | None,
    check_recipe: Callable[[], object] | None = None,
    *,
    describes_training: bool = True,
) -> Judgement:
    """Return the judgement of a launch command that can run. Arguments as in `judge`.

    Raises:
        ValueError: the command cannot run; the text is the first reason.
    """
    made = judge(
        args, config, ranks, tokens, raising, check_recipe, describes_training=describes_training
    )
    assert made is not None
    return made


def check_arguments(
    args: Any,
    config: PipelineConfig,
    ranks: int,
    tokens: int | None,
    *,
    describes_training: bool = True,
) -> None:
    """Raise ValueError if ``args`` cannot run under any schedule. Arguments as in `judge`."""
    _is_valid(args, config, ranks, raising)
    _check_batches(args, config, tokens, raising, None)
    _check_set_up(args, config, raising, describes_training=describes_training)


def _is_valid(args: Any, config: PipelineConfig, ranks: int, attempt: Attempt) -> bool:
    """Return whether Megatron's arguments ``args`` are valid; they are validated in place."""
    valid = attempt(
        "arguments",
        lambda: megatron_arguments.validate(args, config, ranks),
        STOPS,
        lambda valid: f"Megatron takes them: data-parallel size {valid.data_parallel_size}",
    )
    return valid is not None


def _check_batches(
    args: Any,
    config: PipelineConfig,
    tokens: int | None,
    attempt: Attempt,
    check_recipe: Callable[[], object] | None,
) -> bool:
    return check_batches(
        args,
        config,
        lambda: arguments.settle_vocabulary(args, config, tokens),
        attempt,
        check_recipe,
        lambda settled: (
            f"{args.tokenizer_type} loads, {args.padded_vocab_size} tokens padded" if tokens else ""
        ),
    )


def _check_set_up(
    args: Any, config: PipelineConfig, attempt: Attempt, *, describes_training: bool
) -> None:
    """Run the checks that Megatron makes when it builds the model and when it begins to train."""
    if describes_training:
        attempt(
            "training",
            lambda: megatron_arguments.check_course(args),
            right=lambda samples: "{} samples to train on, {} to validate on, {} to test on".format(
                *samples
            ),
        )
    attempt(
        "model",
        lambda: megatron_arguments.check_model(args, config),
        right=lambda model: f"{args.num_layers} layers can be split over the ranks",
    )


def _judged(args: Any, config: PipelineConfig, attempt: Attempt) -> Judgement | None:
    """Return the judgement of the schedule of a command whose arguments were checked.

    None if ``attempt`` has noted why there is no program.
    """
    checked = check_schedule(args, config, arguments.search_for_first, attempt)
    if checked is None:
        return None
    settings, stock, (programs, contenders) = config, None, checked
    if config.schedule is None:
        settings, stock = replace(config, schedule=_stock_spec(args)), stock_executor(args)
        programs = attempt("schedule", lambda: _stock_programs(args, settings, stock)) or []
        if not programs:
            return None
    return Judgement(
        args,
        with_megatrons_group(settings.resolved_spec, args),
        arguments.problems(args, settings, stock)[0],
        programs,
        model_bytes_of_ranks(args, programs[0].problem.placement, settings.options.vocab_parallel),
        contenders,
    )


def _stock_programs(args: Any, config: PipelineConfig, stock: StockExecutor) -> list[Program]:
    refuse_stock_steps(args)
    return arguments.programs(args, config, stock=stock)


def _stock_spec(args: Any) -> str:
    chunks = args.virtual_pipeline_model_parallel_size
    return "1f1b" if chunks is None else f"interleaved:vpp={chunks}"
