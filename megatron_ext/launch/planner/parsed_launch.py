"""A launch command with the settings for its plan, parsed and validated.

A plan is as right as what it understood of the command. Words that may be mistakes, files that are
missing here and variables that replace flags are remarked on or refused, before anything is
compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.base.words import counted
from megatron_ext.compile.registry import Maturity, choose
from megatron_ext.config import (
    ESTIMATE,
    PLAN,
    VARIABLES,
    CostsSource,
    PipelineConfig,
    flag,
    variable,
)
from megatron_ext.cost_model.assumptions import assumptions
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.gpus import FreeMemory, Gpu, free_memory, short_name
from megatron_ext.cost_model.measured.file import MeasuredFile, load_measured
from megatron_ext.cost_model.model_memory import least_lasting
from megatron_ext.launch.command.importing import as_on, quickly, silently
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.command.other_programs import why_not_megatrons
from megatron_ext.launch.command.our_flags import (
    flags_of_script,
    installation,
    settings_of,
    with_variables,
)
from megatron_ext.launch.command.script_texts import read_script_texts
from megatron_ext.launch.command.unknown_words import unknown_words
from megatron_ext.launch.planner.command_line import text_of_script
from megatron_ext.launch.planner.vision import take_vision, vision_of_launch
from megatron_ext.patches.engine import PatchError
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.mixed_gpus import ASSUMED_GPU, product_of, speeds_of_gpus
from megatron_ext.schedule.rank_speeds import RankSpeeds
from megatron_ext.written_settings import flag_taken, from_argv, given_in, says

if TYPE_CHECKING:
    from megatron_ext.launch.command.megatron_arguments import ParsedArguments, RatesOf
    from megatron_ext.launch.planner.variants import LaunchVariants

ONE_RANK = (
    "there is one pipeline rank, so no schedule can be chosen: --any-sizes compares other sizes, "
    "or write --pipeline-model-parallel-size 2 or more"
)
# Number of tokens to assume for an unknown vocabulary, about that of tokenizers since 2024, and the
# smallest and largest usual numbers.
ASSUMED_TOKENS, USUAL_TOKENS = 128_000, (32_000, 256_000)
_METHODS = frozenset([VocabMethod.NAIVE, VocabMethod.ONE, VocabMethod.TWO])


@dataclass(frozen=True)
class LaunchRequest:
    """Request for a plan: a launch command, or Megatron's arguments by name, and settings.

    Attributes:
        values: values of arguments, in place of a launch command's words.
        config: the file that has ``values``.
        world_size: ranks of the launch; None takes the command's number, or the least that is
            possible.
        gpu: GPU of the launch; None assumes an H100's costs, and compares nothing with its memory.
        settings: words for flags of ours given to the plan command, such as ``--pipeline-costs
            FILE``.
        reserved: bytes that a rank's allocator reserves beyond its allocations; None takes those in
            the file of costs.
        gpus: GPUs of the pipeline ranks, if of several types; ``gpu`` is then their reference.
        seen_speeds: speeds of the ranks that a trace has shown; None if no rank is slow.
        vision: sizes of a vision tower on the first stage, as text; None takes those of the launch.
    """

    launch: Launch | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    config: Path | None = None
    world_size: int | None = None
    gpu: Gpu | None = None
    settings: tuple[str, ...] = ()
    reserved: float | None = None
    gpus: tuple[Gpu, ...] = ()
    seen_speeds: RankSpeeds | None = None
    vision: str | None = None

    @property
    def file(self) -> Path | None:
        """File that the arguments were read from, for errors; None for a command or a recipe."""
        return self.config if self.launch is None else self.launch.log


@dataclass(frozen=True)
class ParsedLaunch:
    """Launch command that was parsed and validated, with the facts that a plan needs.

    Attributes:
        variants: the command under each schedule.
        validated: validated arguments of the unchanged command.
        free: memory that a rank may take; None if not known.
        remarks: assumptions, a sentence each.
        measured: measured costs per layer type, for the estimate; None if they are not measured.
        costs: words for the file of measured costs, if the command does not name it.
        untold: settings of a vision tower and of a recipe, which no words of the command give.
        assumes_tokens: whether the number of tokens in the vocabulary is `ASSUMED_TOKENS`, since
            the tokenizer is not here.
    """

    variants: LaunchVariants
    validated: Any
    free: FreeMemory | None
    remarks: tuple[str, ...]
    measured: MeasuredFile | None = None
    costs: tuple[str, ...] = ()
    untold: Mapping[str, Any] = field(default_factory=dict)
    assumes_tokens: bool = False

    @property
    def allowed_bytes(self) -> float | None:
        """Bytes that tensors of a rank may take; None if not known."""
        return None if self.free is None else self.free.allocated

    @property
    def has_pipeline(self) -> bool:
        """Whether there is more than one pipeline rank, so that schedules differ."""
        return bool(self.validated.pipeline_model_parallel_size > 1)

    @property
    def facts(self) -> str:
        """Model, ranks and microbatches of the launch, in words."""
        return _facts(self.validated, self.variants.world_size)

    def require_costs(self) -> None:
        """Raise ValueError if costs are neither given nor measured, and there is no estimate."""
        is_estimate = self.measured is None and self.variants.config.costs.is_estimate
        why = describe(self.validated).why_no_estimate
        if is_estimate and why is not None:
            raise ValueError(
                f"no estimate: {why}; write --costs FILE, a file of costs that a training with "
                f"--pipeline-costs profile or megatron-ext rehearse has measured, or times such as "
                f"--costs f=10,i=12,w=8,comm=1"
            )


def with_launch[T](request: LaunchRequest, work: Callable[[ParsedLaunch], T]) -> T:
    """Return the result of ``work`` on the parsed launch of ``request``.

    ``work`` runs with the environment, folder and GPU of the launch's machine.

    Raises:
        ValueError, PatchError: as `plan_launch`.
    """
    launch = request.launch
    folder: Path | None = Path.cwd()
    if launch is not None and launch.log is not None:
        folder = None
    elif launch is not None and launch.installs is False and not launch.is_module:
        folder = Path(launch.script).parent.absolute()
    environment = {} if launch is None else launch.environment
    with silently(), as_on(folder, {"HF_HUB_OFFLINE": "1", **environment}):
        try:
            with quickly():
                from megatron_ext.launch.command import megatron_arguments
        except (ImportError, OSError) as error:  # an OSError: the package's libraries are not found
            raise PatchError(
                f"plan needs Megatron to read a launch, and cannot import it here: {error}"
            ) from error
        script = None
        if launch is not None:
            is_data = launch.log is not None or launch.recipe is not None
            script = None if is_data else text_of_script(launch)
            _refuse_other_programs(launch, script)
            remarks = (*launch.remarks, *_on_our_flags(launch, script))
            request = replace(request, launch=replace(launch, remarks=remarks))
        values = dict(request.values)
        given = take_vision(values)
        if launch is not None and launch.recipe is not None:
            given |= launch.recipe.settings
        with _naming(request.file):
            parsed = (
                megatron_arguments.parse_values(values)
                if launch is None
                else megatron_arguments.parse_arguments(launch.arguments)
            )
        of_tower = vision_of_launch(parsed.args, parsed.unknown, given, request.vision)
        if request.launch is not None:
            on_words = (*request.launch.remarks, *_on_words(request.launch, parsed, script))
            request = replace(request, launch=replace(request.launch, remarks=on_words))
        vars(parsed.args).update(of_tower)
        rates = _rates(request)
        with megatron_arguments.on_gpus(parsed.args, rates):
            return work(_read(request, parsed.args, of_tower, megatron_arguments))


def _refuse_other_programs(launch: Launch, script: str | None) -> None:
    """Raise ValueError if ``launch`` is no command of Megatron's, so that it cannot be planned.

    Also raised if its ``script`` has a flag with the name of one of ours, which the written command
    would add.
    """
    if (why := why_not_megatrons(launch, script)) is not None:
        raise ValueError(f"this command cannot be planned: {why}")
    for name in flags_of_script(script):
        raise ValueError(flag_taken(name))


def _on_our_flags(launch: Launch, script: str | None) -> Iterator[str]:
    """Yield a remark if the command lacks what our flags need; the written command will have it.

    Raises ValueError if variables give settings, as a plan reads flags alone.
    """
    found = installation(launch, script)
    if found is not None and found.verdict == "wrong":
        yield f"{found.text}; {found.fix}"
    counting, _ = with_variables(launch, script)
    if settings_of(counting, script) != from_argv(launch.arguments):
        raise ValueError(
            f"{VARIABLES}* variables are set, which change the launch, and a plan reads flags "
            f"only: write --pipeline-x into the command in place of {variable('x')}"
        )


def _on_words(launch: Launch, parsed: ParsedArguments, script: str | None) -> Iterator[str]:
    """Yield a remark on each word of the command that may be the script's own.

    Raises ValueError for a word that is surely a mistake: its intended effect could not be timed.
    """
    texts = read_script_texts(launch, script) if parsed.unknown else None
    words = unknown_words(launch.arguments, parsed.unknown, parsed.flags, texts)
    for word in words:
        text = f"{word.text}; {word.fix}" if word.fix else word.text
        if word.verdict == "wrong":
            raise ValueError(text)
        if word.verdict == "remark":
            yield text


def _absent(launch: Launch | None, args: Any, megatron_arguments: Any) -> Iterator[str]:
    """Yield a remark on files of the command that are not here.

    A plan needs none of these files.
    """
    if launch is None or launch.log is not None or launch.recipe is not None:
        return
    prefixes: list[str] = []
    # The file with the list of datasets may be missing on this machine, too.
    with contextlib.suppress(ValueError):
        prefixes = [name for name in megatron_arguments.data_prefixes(args) if "://" not in name]
    names = [] if launch.is_module else [launch.script]
    names += prefixes if args.sft else [f"{prefix}.bin" for prefix in prefixes]
    absent = [name for name in names if not Path(name).exists()]
    if absent:
        yield (
            f"not on this machine, and not needed for a plan: {', '.join(absent)}; doctor looks "
            f"for them where the training will run"
        )


@contextlib.contextmanager
def _naming(file: Path | None) -> Iterator[None]:
    """Context in which a ValueError's text begins with the name of ``file``, if there is one."""
    try:
        yield
    except ValueError as error:
        if file is None:
            raise
        raise ValueError(f"{file}: {error}") from error


def _read(
    request: LaunchRequest, args: Any, untold: Mapping[str, Any], megatron_arguments: Any
) -> ParsedLaunch:
    from megatron_ext.launch.planner.stage_arguments import stock_schedule
    from megatron_ext.launch.planner.variants import LaunchVariants

    if args.yaml_cfg is not None or args.use_checkpoint_args:
        raise ValueError(
            "--yaml-cfg and --use-checkpoint-args replace arguments of the command: write the "
            "arguments on the command line"
        )
    words = () if request.launch is None else request.launch.arguments
    config = given = _settings(request)
    ranks = request.world_size
    if ranks is None and request.launch is not None:
        ranks = request.launch.world_size
    measured = _measured_layers(config, request)
    remarks = [] if request.launch is None else list(request.launch.remarks)
    remarks += _assumed(request, ranks, is_measured=measured is not None)
    ranks = ranks or megatron_arguments.least_world_size(args)
    # This launch was given as data (a log or a file of arguments), for which no code is run.
    is_data = request.launch is None or request.launch.log is not None
    tokens = megatron_arguments.count_tokens(args, may_run_code=not is_data) or args.vocab_size
    is_assumed = tokens is None and args.padded_vocab_size is None
    if is_assumed:
        tokens = ASSUMED_TOKENS
    # With the schedule `plan` the settings are read as with Megatron's own schedule.
    if config.schedule == PLAN:
        config = replace(config, schedule=None)
    with _naming(request.file):
        launch_schedule = config.schedule or stock_schedule(args)
    # The factors from the times in the log apply to the estimates of all layouts.
    if measured is not None:
        config = replace(config, costs=CostsSource(ESTIMATE))
    variants = LaunchVariants(
        args,
        config,
        ranks,
        _METHODS,
        tokens,
        launch_schedule,
        frozenset(Maturity),
        tries_recompute=not says(words, "recompute"),
        describes_training=request.launch is not None,
    )
    reserved = request.reserved
    if reserved is None and measured is not None:
        reserved = measured.reserved
    with _naming(request.file):
        validated = variants.checked()  # raises ValueError if the launch runs under no schedule
    free = _free(request, validated, launch_schedule, reserved)
    remarks += _on_costs(validated, given, measured)
    remarks += _absent(request.launch, validated, megatron_arguments)
    is_written = measured is None or str(given.costs) in words
    costs: tuple[str, ...] = () if is_written else (flag("costs"), str(given.costs))
    speeds = _speeds(request, validated, config)
    if speeds is not None:
        variants = replace(variants, config=replace(config, rank_speeds=speeds))
        costs += (flag("rank_speeds"), str(speeds))
        remarks.append(f"speeds of the pipeline ranks are taken as {speeds}")
    return ParsedLaunch(
        variants,
        validated,
        free,
        tuple(remarks),
        measured,
        costs,
        untold,
        is_assumed,
    )


def _free(
    request: LaunchRequest, args: Any, spec: str, reserved: float | None
) -> FreeMemory | None:
    """Return the memory that a rank of the launch may take under ``spec``; None if not known.

    ``args`` are validated. ``reserved``: as in `free_memory`.
    """
    from megatron_ext.adapter.model_bytes import model_bytes_of_ranks

    if request.gpu is None or request.gpu.memory is None:
        return None
    placement = choose(spec).place(args.pipeline_model_parallel_size)
    lasting = least_lasting(model_bytes_of_ranks(args, placement))
    return free_memory(request.gpu.memory, reserved, lasting=lasting)


def _speeds(request: LaunchRequest, args: Any, config: PipelineConfig) -> RankSpeeds | None:
    """Return the relative speeds of the pipeline ranks of validated ``args``.

    Return None if all ranks are equally fast. The speeds are the product of those that are given,
    seen in a trace, and known of the ranks' GPUs.
    """
    of_gpus = None
    ranks = args.pipeline_model_parallel_size
    if request.gpus:
        if len(request.gpus) != ranks:
            raise ValueError(
                f"--gpu names the GPUs of {counted(len(request.gpus), 'pipeline rank')}, and the "
                f"launch has {ranks}"
            )
        from megatron_ext.adapter.dimensions import execution

        run = execution(args, args.seq_length, args.micro_batch_size)
        of_gpus = speeds_of_gpus(request.gpus, describe(args), run)
    return product_of([config.rank_speeds, request.seen_speeds, of_gpus], ranks)


def _settings(request: LaunchRequest) -> PipelineConfig:
    """Return the settings of the launch together with those of the plan command.

    The plan command's settings apply to every schedule, even if the launch names no schedule.

    Raises:
        ValueError: the settings are not understood, or conflict.
    """
    words = () if request.launch is None else request.launch.arguments
    config = from_argv(words)
    if not request.settings:
        return config
    if config.schedule:
        return from_argv((*words, *request.settings))
    given = given_in((*words, flag("schedule"), PLAN, *request.settings))
    return PipelineConfig.parse(**given)


def _rates(request: LaunchRequest) -> RatesOf | None:
    """Return the rates of a rank's GPU, measured or from its data sheet; None if those of an H100
    are assumed.

    They depend on the precision.
    """
    measured = _measured_layers(_settings(request), request)
    if measured is not None:
        return lambda precision: measured.rates
    return None if request.gpu is None else request.gpu.rates


def _assumed(request: LaunchRequest, ranks: int | None, *, is_measured: bool) -> Iterator[str]:
    if ranks is None:
        yield (
            "the world size is not known, and one copy of the model assumed: --world-size N counts "
            "in optimizer states and microbatches"
        )
    if request.gpu is None and not is_measured:
        yield ASSUMED_GPU


def _measured_layers(config: PipelineConfig, request: LaunchRequest) -> MeasuredFile | None:
    """Return the costs per layer type in the file that ``config`` names.

    Return None without such costs.
    """
    if config.costs.file is None:
        return None
    return load_measured(config.costs.file, short_name(request.gpu))


def _on_costs(args: Any, config: PipelineConfig, measured: MeasuredFile | None) -> Iterator[str]:
    """Yield remarks on unknown or measured times and memory, and on a single pipeline rank."""
    if args.pipeline_model_parallel_size == 1:
        yield ONE_RANK
    tower = describe(args).tower
    if tower is not None:
        tokens = f"{tower.patches:,} vision tokens a sample in {counted(tower.images, 'image')}"
        assumed = "" if getattr(args, "vision_tokens", None) else ", as many as the model's own"
        yield f"vision tower on the first stage, {tower.trained}: {tokens}{assumed}"
    from megatron_ext.adapter.dimensions import hidden_in_pairs

    of_file = None if measured is None else measured.rates
    unknown = assumptions(args, partial(hidden_in_pairs, args, of_file))
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
    from megatron_ext.adapter.step_sizes import main_size

    sizes = {
        "TP": args.tensor_model_parallel_size,
        "CP": args.context_parallel_size,
        "EP": args.expert_model_parallel_size if args.num_experts else 1,
        "ETP": args.expert_tensor_parallel_size if args.num_experts else 1,
        "PP": args.pipeline_model_parallel_size,
        "DP": args.data_parallel_size,
    }
    parts = " x ".join(f"{name} {size}" for name, size in sizes.items() if size and size > 1)
    size = main_size(args)
    microbatches = counted(size.microbatches, "microbatch")
    of_all = f", the steps with {size.share:.0%} of the samples" if size.share < 1 else ""
    return (
        f"{counted(args.num_layers, 'layer')} on {counted(ranks, 'rank')} ({parts}), "
        f"{microbatches} of {args.micro_batch_size} x {args.seq_length} tokens{of_all}"
    )
