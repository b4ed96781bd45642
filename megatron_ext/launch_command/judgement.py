"""One judgement of a launch command, for doctor, for plan, and for each command that plan writes.

Checks run in one order and refuse with one sentence. Doctor notes all of them, plan ends with the
first. The launch itself runs Megatron's and, in `adapter.arguments`, ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_ext.adapter import arguments
from megatron_ext.adapter.batches.refusals import check_arrangement
from megatron_ext.adapter.handled_settings.groups import with_megatrons_group
from megatron_ext.adapter.impossible_sizes import refuse_stock_steps
from megatron_ext.adapter.model_bytes import model_bytes_of_ranks
from megatron_ext.compile.long_step import simulated
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import Choice
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.model_memory import ModelBytes
from megatron_ext.launch_command import megatron_arguments
from megatron_ext.planner.candidate import Candidate, Variant, VocabMethod
from megatron_ext.planner.fitting import candidate_of
from megatron_ext.schedule.problem import Problem
from megatron_ext.words import counted

_STOPS = "Megatron stops here, and so does this check: correct it, then check again"


class Attempt(Protocol):
    """Runs a check of a command about ``subject``, and returns its result.

    ``fix`` says what to do if the check refuses with a ValueError. ``right`` words the result; ""
    is not worth a word.
    """

    def __call__[T](
        self,
        subject: str,
        work: Callable[[], T],
        fix: str = "",
        right: Callable[[T], str] | None = None,
    ) -> T | None: ...


def raising[T](
    subject: str, work: Callable[[], T], fix: str = "", right: Callable[[T], str] | None = None
) -> T | None:
    """Run a check, and let its refusal end the judgement."""
    return work()


@dataclass(frozen=True)
class Judgement:
    """Program, memory and arguments of a launch command.

    Attributes:
        args: validated, with the vocabulary.
        choice: the schedule, which is Megatron's own if the command names none.
        problem: the step with most samples, as the schedule's family takes it.
        programs: one for each size of a step, that of ``problem`` first.
        model: bytes of the model on each rank; None: not known.
        contenders: by schedule, the programs of a race's other schedules.
    """

    args: Any
    choice: Choice
    problem: Problem
    programs: Sequence[Program]
    model: Sequence[ModelBytes] | None
    contenders: Mapping[str, Sequence[Program]]

    @property
    def program(self) -> Program:
        """Program of the steps with most samples."""
        return self.programs[0]

    def candidate(self) -> Candidate:
        """Return the command as plans compare it."""
        step = simulated(self.choice, self.problem, lambda choice, problem: self.program)
        method = VocabMethod.of(self.problem.extras.vocab_parallel)
        return candidate_of(Variant(self.choice, self.problem, self.model), method, step)


def judge(
    args: Any,
    config: PipelineConfig,
    ranks: int,
    tokens: int | None,
    attempt: Attempt,
    check_recipe: Callable[[], object] | None = None,
    *,
    is_whole: bool = True,
) -> Judgement | None:
    """Return what the command with the parsed ``args`` and the settings ``config`` runs; None if
    ``attempt`` has noted why it cannot run.

    Args:
        args: are validated in place.
        ranks: world size.
        tokens: size of the tokenizer's vocabulary; None: not known.
        check_recipe: checks the config of Megatron-Bridge that ``args`` were read from; None for a
            command.
        is_whole: whether ``args`` describe the whole training, and not the model alone.

    Raises:
        ValueError: ``attempt`` lets a refusal end the judgement.
    """
    if not check_arguments(args, config, ranks, tokens, attempt, check_recipe, is_whole=is_whole):
        return None
    return _judged(args, config, attempt)


def judged(
    args: Any,
    config: PipelineConfig,
    ranks: int,
    tokens: int | None,
    check_recipe: Callable[[], object] | None = None,
    *,
    is_whole: bool = True,
) -> Judgement:
    """Return the judgement of a command. Arguments as in `judge`.

    Raises:
        ValueError: it cannot run, for this reason and perhaps others.
    """
    made = judge(args, config, ranks, tokens, raising, check_recipe, is_whole=is_whole)
    assert made is not None
    return made


def check_arguments(
    args: Any,
    config: PipelineConfig,
    ranks: int,
    tokens: int | None,
    attempt: Attempt = raising,
    check_recipe: Callable[[], object] | None = None,
    *,
    is_whole: bool = True,
) -> bool:
    """Check ``args`` without a program, and return whether the number of microbatches is known.
    Arguments as in `judge`."""
    valid = attempt(
        "arguments",
        lambda: megatron_arguments.validate(args, config, ranks),
        _STOPS,
        lambda valid: f"Megatron takes them: data-parallel size {valid.data_parallel_size}",
    )
    if valid is None:
        return False
    attempt(
        "tokenizer",
        lambda: megatron_arguments.settle_vocabulary(args, config, tokens),
        right=lambda settled: (
            f"{args.tokenizer_type} loads, {args.padded_vocab_size} tokens padded" if tokens else ""
        ),
    )
    if check_recipe is None:
        attempt("microbatches", lambda: check_arrangement(args, config))
    else:
        attempt("megatron_ext.bridge.use", check_recipe)
    microbatches = attempt(
        "batch size",
        lambda: megatron_arguments.count_microbatches(args),
        right=lambda number: f"{counted(number, 'microbatch')} in the first step",
    )
    if microbatches is not None and is_whole:
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
    return microbatches is not None


def _judged(args: Any, config: PipelineConfig, attempt: Attempt) -> Judgement | None:
    """Judge the schedule of a command whose arguments were checked."""
    is_ours = config.schedule is not None
    settings = config if is_ours else replace(config, schedule=_megatrons_own(args))
    prove = arguments.check if is_ours else _stock_programs
    programs = attempt("schedule", lambda: prove(args, settings, arguments.search_for_first))
    if programs is None:
        return None
    contenders: Mapping[str, Sequence[Program]] | None = {}
    if config.race is not None:
        contenders = attempt(
            "race", lambda: arguments.check_race(args, config, arguments.search_for_first)
        )
    return Judgement(
        args,
        with_megatrons_group(settings.choice, args),
        arguments.problems(args, settings)[0],
        programs,
        model_bytes_of_ranks(args, programs[0].problem.placement, settings.vocab_parallel),
        contenders or {},
    )


def _stock_programs(args: Any, config: PipelineConfig, prove: arguments.Prove) -> list[Program]:
    refuse_stock_steps(args)
    return arguments.programs(args, config, prove)


def _megatrons_own(args: Any) -> str:
    chunks = args.virtual_pipeline_model_parallel_size
    return "1f1b" if chunks is None else f"interleaved:vpp={chunks}"
