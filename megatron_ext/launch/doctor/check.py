"""Check of a launch command on a login node: one process, no GPU, and the script is not run.

A launch passes many checks on its way: the launcher's, Megatron's, ours, the files'. Here they run
in the same order as in a launch, but go on after a failure where they can, so that one run reports
all mistakes.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext import bridge
from megatron_ext.adapter.arguments import check_files, remarks_on
from megatron_ext.adapter.dimensions import hidden_in_pairs
from megatron_ext.adapter.document_masks import REMEDY, why_documents_mix
from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.adapter.untried import untried
from megatron_ext.base.secrets import masked
from megatron_ext.base.text_file import LARGEST_SCRIPT
from megatron_ext.base.words import bytes_text, counted
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.cost_model.assumptions import assumptions
from megatron_ext.cost_model.gpus import GPUS, USABLE, FreeMemory, Gpu, free_memory
from megatron_ext.cost_model.measured.file import measured_reserve
from megatron_ext.cost_model.model_memory import least_lasting
from megatron_ext.launch.command.importing import as_on, quickly, silently
from megatron_ext.launch.command.launch_words import BridgeRecipe, Launch
from megatron_ext.launch.command.other_programs import why_not_megatrons
from megatron_ext.launch.command.our_flags import (
    installation,
    settings_of,
    with_variables,
    without_flags_of_script,
)
from megatron_ext.launch.command.script_texts import read_script_texts
from megatron_ext.launch.doctor.communicator_share import check_communicators
from megatron_ext.launch.doctor.doctor import diagnose
from megatron_ext.launch.doctor.environment.dataset_helpers import check_dataset_helpers
from megatron_ext.launch.doctor.flags import check_words, finding_of
from megatron_ext.launch.doctor.launch_report import (
    Finding,
    Prediction,
    RankPrediction,
    Report,
    Severity,
)
from megatron_ext.launch.doctor.paths import check_checkpoints, check_data, check_tokenizer_files
from megatron_ext.launch.doctor.rank_variables import check_rank_variables
from megatron_ext.launch.doctor.scale_limits import scale_limits
from megatron_ext.observe.features import FEATURES
from megatron_ext.observe.launch_remark import JudgedLaunch
from megatron_ext.observe.program_summary import stock_1f1b
from megatron_ext.patches.engine import PatchError
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.schedule.problem import Offload, VocabularyParallel
from megatron_ext.written_settings import from_argv

if TYPE_CHECKING:
    from megatron_ext.adapter.checkpoints.loading import LoadJudgement
    from megatron_ext.launch.command.judgement import Judgement

_LOW_PRECISION = "docs/compatibility.md#low-precision compares schedules and recipes"


def check_launch(launch: Launch, world_size: int | None, gpu: Gpu | None) -> Report:
    """Check the command ``launch`` as far as it can be on this machine, and return the report.

    Args:
        world_size: number of ranks. None takes the launcher's number, or the smallest possible one,
            and reports which.
        gpu: GPU of the launch; None takes the one that a log names, or assumes the rates of an H100
            and leaves the prediction of memory unjudged.

    Raises:
        PatchError: Megatron is not installed.
    """
    if gpu is None and launch.gpu is not None:
        gpu = GPUS[launch.gpu]
    report = Report()
    _report_remarks(report, launch)
    folder = Path(launch.script).parent if launch.installs is False else Path()
    folder = Path() if launch.is_module else folder
    # HF_HUB_OFFLINE keeps a check from fetching anything over the network.
    environment = {"HF_HUB_OFFLINE": "1"} | dict(launch.environment)
    with silently(), as_on(None if launch.log else folder.absolute(), environment):
        script = _check_script(report, launch)
        if (why := why_not_megatrons(launch, script)) is not None:
            report.unchecked = why
            return report
        launch, words = without_flags_of_script(launch, script)
        report.findings += [finding_of(word, "flags") for word in words]
        with_flags = report.attempt("flags", lambda: with_variables(launch, script))
        if with_flags is not None:
            launch = with_flags[0]
            report.findings += [finding_of(word, "flags") for word in with_flags[1]]
        word = installation(launch, script)
        if word is not None:
            report.findings.append(finding_of(word, "script"))
        _check(report, launch, script, world_size, gpu)
    return report


def _report_remarks(report: Report, launch: Launch) -> None:
    for remark in launch.remarks:
        source = "log" if launch.recipe is None else "recipe"
        if launch.log is not None and launch.log.suffix == ".json":
            source = "arguments file"
        report.add(Severity.REMARK, source, remark)
    if launch.ignored:
        text = f"ignored, and not looked at: {masked(launch.ignored)}"
        report.add(Severity.REMARK, "launch command", text)
    if launch.environment:
        names = ", ".join(launch.environment)
        text = f"set during the check: {names}"
        report.add(Severity.RIGHT, "launch command", text)
    words = [word for word in launch.arguments if "$" in word]
    if words:
        text = f"nothing is expanded: {masked(words)} is taken as it stands"
        fix = "write what the shell would put there"
        report.add(Severity.REMARK, "launch command", text, fix)


def _check_script(report: Report, launch: Launch) -> str | None:
    """Report whether the script of the launch can be read, and return its text or None."""
    if launch.log is not None or launch.recipe is not None:
        return None
    path = Path(launch.script)
    if launch.is_module:
        path = Path(*launch.script.split(".")).with_suffix(".py")
        if not path.is_file():
            text = f"module {launch.script} is not in this folder, and not looked for elsewhere"
            report.add(Severity.REMARK, "script", text)
            return None
    try:
        with path.open() as file:
            text = file.read(LARGEST_SCRIPT)
    except (OSError, UnicodeDecodeError) as error:
        report.add(Severity.WRONG, "script", str(error), "correct the path of the script")
        return None
    report.add(Severity.RIGHT, "script", f"{path} is there; it is not run")
    return text


def _check(
    report: Report,
    launch: Launch,
    script: str | None,
    world_size: int | None,
    gpu: Gpu | None,
) -> None:
    try:
        with quickly():
            from megatron_ext.launch.command import megatron_arguments
    except (ImportError, OSError) as error:  # an OSError: the package's libraries are not found
        raise PatchError(
            f"doctor needs Megatron to check a launch, and cannot import it here: {error}"
        ) from error

    config = report.attempt("flags", lambda: settings_of(launch, script)) or PipelineConfig()
    if not config.is_chosen_later:  # if a plan chooses the schedule, its patches are checked later
        _check_patches(report, config)
    args = _parsed(report, launch, script, megatron_arguments)
    if args is None:
        return
    if world_size is not None and launch.world_size not in (None, world_size):
        text = f"--world-size {world_size} counts, not {launch.world_size}, which the launch has"
        report.add(Severity.REMARK, "world size", text)
    ranks = _check_world_size(report, args, world_size or launch.world_size, megatron_arguments)
    report.findings += check_rank_variables(launch, script)
    if (source := _other_source(args)) is not None:
        _check_partly(report, args, ranks, source, megatron_arguments)
        return
    _say_what_is_assumed(report, args, megatron_arguments)
    if config.is_chosen_later:
        with megatron_arguments.on_gpus(args, None if gpu is None else gpu.rates):
            memory = None if gpu is None else gpu.memory
            argv = report.attempt("plan", lambda: _planned(report, launch, config, ranks, memory))
        if argv is None:
            return
        config, args = from_argv(argv), _arguments(launch, argv, megatron_arguments).args
        _check_patches(report, config)
    needed, judge = _check_arguments(report, launch, args, config, ranks, gpu, megatron_arguments)
    if launch.recipe is None:  # the data of a recipe are not in Megatron's arguments
        _check_datasets(report, args, megatron_arguments)
    report.attempt("microbatches", lambda: check_files(args, config))
    report.findings += check_dataset_helpers()
    report.findings += check_checkpoints(args, needed, judge)
    report.findings += _check_restarts(args, launch.max_restarts)


def _check_datasets(report: Report, args: Any, megatron_arguments: Any) -> None:
    prefixes = report.attempt("datasets", lambda: megatron_arguments.data_prefixes(args))
    if prefixes is not None:
        report.findings += check_data(args, prefixes)


def _other_source(args: Any) -> str | None:
    """Return the flag that brings arguments from elsewhere, such as --yaml-cfg.

    Return None without one.
    """
    if args.yaml_cfg is not None:
        return "--yaml-cfg"
    return "--use-checkpoint-args" if args.use_checkpoint_args else None


def _check_partly(
    report: Report, args: Any, ranks: int, source: str, megatron_arguments: Any
) -> None:
    """Check the parts of a command that do not depend on arguments that ``source`` brings.

    A checkpoint brings no parallel sizes, batches or files, unless more is requested.
    """
    takes_sizes = getattr(args, "use_mp_args_from_checkpoint_args", False)
    if source != "--yaml-cfg" and not takes_sizes:
        report.attempt("batch size", lambda: _check_batches(args, ranks))
    if source != "--yaml-cfg":
        report.findings += check_tokenizer_files(args)
        _check_datasets(report, args, megatron_arguments)
        report.findings += check_checkpoints(args, None, None)
    report.findings += check_dataset_helpers()
    report.unchecked = (
        f"{source} brings further arguments, and what depends on them is not checked; write the "
        f"arguments on the command line to check the whole"
    )


def _check_batches(args: Any, ranks: int) -> None:
    """Raise ValueError if the ranks or the global batch of ``args`` cannot be split evenly."""
    parts = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    copy_of_model = parts[0] * parts[1] * parts[2]
    if ranks % copy_of_model:
        raise ValueError(
            f"{counted(ranks, 'rank')} cannot be divided into models of tensor x pipeline x "
            f"context parallel sizes {' x '.join(map(str, parts))} = {copy_of_model}"
        )
    replicas, samples = ranks // copy_of_model, args.micro_batch_size
    if args.global_batch_size and samples and args.global_batch_size % (samples * replicas):
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} cannot be divided into microbatches of "
            f"{samples} on {replicas} data-parallel replicas"
        )


def _check_restarts(args: Any, max_restarts: int) -> list[Finding]:
    """Return a finding on whether restarted ranks continue from a checkpoint.

    The launcher restarts ranks up to ``max_restarts`` times, as new processes, which have nothing
    of the old ones but their checkpoints.
    """
    if not max_restarts:
        return []
    text = f"up to {max_restarts}, each with new processes on all ranks"
    if args.save is None:
        text += ": without --save each begins at iteration 0"
        fix = "add --save FOLDER --save-interval N --load FOLDER"
        return [Finding(Severity.REMARK, "restarts", text, fix)]
    if args.load != args.save:
        begins = "at iteration 0" if args.load is None else f"from {args.load}"
        text += f": each begins {begins}, not from what this run has saved"
        return [Finding(Severity.REMARK, "restarts", text, f"write --load {args.save}")]
    return [Finding(Severity.RIGHT, "restarts", f"{text}, from the last checkpoint in {args.save}")]


def _arguments(launch: Launch, words: Sequence[str], megatron_arguments: Any) -> Any:
    """Return Megatron's arguments in ``words``, with a recipe's settings that have no flags."""
    parsed = megatron_arguments.parse_arguments(words)
    if launch.recipe is not None:
        vars(parsed.args).update(launch.recipe.settings)
    return parsed


def _parsed(report: Report, launch: Launch, script: str | None, megatron_arguments: Any) -> Any:
    """Return Megatron's arguments of the launch, and report unknown words.

    Return None if they do not parse.
    """
    from megatron_ext.launch.command.judgement import STOPS

    parsed = report.attempt(
        "flags", lambda: _arguments(launch, launch.arguments, megatron_arguments), STOPS
    )
    if parsed is None:
        return None
    texts = read_script_texts(launch, script) if parsed.unknown else None
    words = check_words(launch.arguments, parsed.unknown, parsed.flags, texts)
    if any((one.verdict, one.subject) == (Severity.WRONG, "flags") for one in report.findings):
        words = [word for word in words if word.verdict is not Severity.RIGHT]
    report.findings += words
    return parsed.args


def _check_arguments(
    report: Report,
    launch: Launch,
    args: Any,
    config: PipelineConfig,
    ranks: int,
    gpu: Gpu | None,
    megatron_arguments: Any,
) -> tuple[float | None, Callable[[str], LoadJudgement] | None]:
    """Check ``args`` by Megatron's own validation, and what follows from them.

    Returns:
        The bytes of a checkpoint, if known, and a function that judges the loaded checkpoint, if
            the arguments are valid.
    """
    from megatron_ext.launch.command.judgement import judge
    from megatron_ext.launch.planner.parsed_launch import ASSUMED_TOKENS

    parsed, recipe = copy.deepcopy(args), launch.recipe
    check_recipe = None if recipe is None else _check_of_recipe(recipe, args, config)
    with megatron_arguments.on_gpus(args, None if gpu is None else gpu.rates):
        tokens = _count_tokens(report, args, megatron_arguments)
        is_assumed = tokens is None and args.padded_vocab_size is None and args.vocab_size is None
        if is_assumed:
            tokens = ASSUMED_TOKENS
        made = judge(args, config, ranks, tokens, report.attempt, check_recipe)
        report.findings += check_tokenizer_files(args)
        if made is None:
            return None, None
        if is_assumed:
            report.add(
                Severity.REMARK,
                "tokenizer",
                f"its vocabulary is not known here: {ASSUMED_TOKENS:,} tokens are assumed, as in a "
                f"plan",
                "add --padded-vocab-size N to the checked command",
            )
        needed = _check_training(report, made, parsed, config, gpu, megatron_arguments)
        if config.schedule is not None:
            _say_what_is_untried(report, args)
            for text in scale_limits(args, made.program):
                report.add(Severity.REMARK, "low precision", text, _LOW_PRECISION)
        for remark in remarks_on(args, config):
            report.add(Severity.REMARK, remark.subject, remark.text, remark.fix)
        if getattr(args, "rampup_batch_size", None):
            text = "--rampup-batch-size: Megatron ignores it, and all steps have one batch size"
            report.add(Severity.REMARK, "batch size", text, "write --step-batch-size-schedule")
        is_stocks = config.schedule is None or config.resolved_spec.example.chunks == 1
        # This remark is for Megatron's own schedule. With a schedule of megatron_ext, a launch
        # whose tokens attend to other documents is refused.
        if is_stocks and (why := why_documents_mix(args)) is not None:
            report.add(Severity.REMARK, "masks", why, REMEDY)
        if is_assumed:
            # The assumed vocabulary size is dropped, so that no checkpoint is judged by it.
            args.padded_vocab_size = None
        return needed, partial(megatron_arguments.judge_checkpoint, args, config)


def _planned(
    report: Report, launch: Launch, config: PipelineConfig, world_size: int, memory: float | None
) -> tuple[str, ...]:
    """Return the arguments of ``launch`` with flags that ``--pipeline-schedule plan`` chooses."""
    from megatron_ext.launch.planner.launch_choice import choose_for

    chosen = choose_for(
        launch.arguments, config, world_size, memory, may_run_code=launch.log is None
    )
    replaced = f" in place of {' '.join(chosen.dropped)}" if chosen.dropped else ""
    text = f"takes {shlex.join(chosen.flags)}{replaced}: {chosen.why}"
    report.add(Severity.RIGHT, "plan", text)
    return tuple(chosen.in_place_of(launch.arguments))


def _check_patches(report: Report, config: PipelineConfig) -> None:
    if not config.changes_launch:
        text = f"without {flag('schedule')} nothing is patched: this is Megatron's own pipeline"
        report.add(Severity.RIGHT, "patches", text)
        return
    diagnosis = diagnose(config)
    for patch in diagnosis.misfits:
        fix = "docs/compatibility.md names the versions that fit"
        if patch.unknown is not None:
            command = "megatron-ext doctor"
            if config.schedule is not None:
                command += f" {flag('schedule')} {config.schedule}"
            fix = f"read what has changed; {command} prints how to allow it"
        report.add(Severity.WRONG, "patches", patch.why, fix)
    if not diagnosis.misfits:
        count = sum(patch.is_required for patch in diagnosis.patches)
        megatron = diagnosis.environment["megatron-core"]
        text = f"{count} are needed, and fit Megatron {megatron}"
        report.add(Severity.RIGHT, "patches", text)


def _check_world_size(
    report: Report, args: Any, world_size: int | None, megatron_arguments: Any
) -> int:
    if world_size is not None:
        report.add(Severity.RIGHT, "world size", counted(world_size, "rank"))
        return world_size
    assumed: int = megatron_arguments.least_world_size(args)
    report.add(
        Severity.REMARK,
        "world size",
        f"{counted(assumed, 'rank')} assumed: one copy of the model",
        "write --world-size N before the --, or a launcher with its sizes in numbers, as in "
        "srun -n 16",
    )
    return assumed


def _say_what_is_assumed(report: Report, args: Any, megatron_arguments: Any) -> None:
    import torch

    if torch.cuda.is_available():
        return
    major, minor = megatron_arguments.CAPABILITY
    text = f"none is here: one of compute capability {major}.{minor} is assumed"
    if args.transformer_impl == "transformer_engine" and not can_split():
        text += ", with the newest Transformer Engine, which is not here either"
    report.add(Severity.REMARK, "GPU", text, "run this check on a node with GPUs to ask them")
    name = megatron_arguments.CONNECTIONS
    if megatron_arguments.wants_one_connection(args) and name not in os.environ:
        text = f"{name} is not set here; Megatron demands 1 on GPUs before Blackwell with TP or CP"
        report.add(Severity.REMARK, "environment", text, f"export {name}=1 in the batch script")


def _say_what_is_untried(report: Report, args: Any) -> None:
    for entry in untried(args):
        text = f"{entry.setting}={getattr(args, entry.setting)}: {entry.text}"
        fix = "compare the first losses with a run without our flags"
        report.add(Severity.REMARK, "untried", text, fix)


def _count_tokens(report: Report, args: Any, megatron_arguments: Any) -> int | None:
    """Return the size of the tokenizer's vocabulary; None if the tokenizer cannot be loaded here.

    If its files are here, that is reported as a mistake.
    """
    files = [path for path in (args.tokenizer_model, args.vocab_file, args.merge_file) if path]
    is_null = args.tokenizer_type in ("NullTokenizer", "NullMultimodalTokenizer")
    is_here = bool(files) and all(Path(path).exists() for path in files)
    may_load = args.tokenizer_type is not None and not args.trust_remote_code
    if not may_load or not (is_null or is_here):
        return megatron_arguments.count_tokens(args, may_run_code=False)
    return report.attempt("tokenizer", lambda: megatron_arguments.load_tokenizer(args))


def _check_training(
    report: Report,
    made: Judgement,
    parsed: Any,
    config: PipelineConfig,
    gpu: Gpu | None,
    megatron_arguments: Any,
) -> float | None:
    """Report what the command of ``made`` runs: its bubbles, memory and communicators.

    Returns the bytes of a checkpoint, if known. ``parsed`` are the command's arguments before
    Megatron validated them.
    """
    args, program = made.args, made.program
    if config.schedule is None:
        _check_watching(report, args, config)
    free = None
    if gpu is not None and gpu.memory is not None:
        reserved = measured_reserve(config.costs.file)
        free = free_memory(gpu.memory, reserved, lasting=least_lasting(made.model))
    needed = _predict(report, made, config, free)
    launch = JudgedLaunch(config, program, made.contenders, args.train_iters)
    for remark in (remark for remarks in FEATURES for remark in remarks(launch)):
        severity = Severity.REMARK if remark.fix else Severity.RIGHT
        report.add(severity, remark.subject, remark.text, remark.fix)
    if len(config.specs) < 2 and config.slices == 1:
        _say_what_slices_give(
            report, made, parsed, config, None if free is None else free.allocated
        )
    if config.schedule is not None:
        _check_communicators(report, args, config, program, free, megatron_arguments)
    return needed


def _say_what_slices_give(
    report: Report, made: Judgement, parsed: Any, config: PipelineConfig, gpu_bytes: float | None
) -> None:
    """Report the gain of slices of sequences, if there are few microbatches or too little memory.

    Few microbatches are fewer than pipeline ranks.
    """
    from megatron_ext.launch.planner.alternatives.long_sequences import what_slices_give
    from megatron_ext.launch.planner.variants import LaunchVariants

    predicted, args = report.prediction, made.args
    # Slices of sequences do not go with vocabulary parallelism.
    is_divided = config.options.vocab_parallel is not VocabularyParallel.NONE
    if predicted is None or not predicted.ranks or is_divided:
        return
    if made.program.problem.costs.no_estimate:
        return
    is_full = (
        gpu_bytes is not None and max(rank.total_bytes for rank in predicted.ranks) > gpu_bytes
    )
    problem = made.program.problem
    if not is_full and problem.microbatches >= problem.ranks:
        return
    parsed.padded_vocab_size = args.padded_vocab_size
    methods = frozenset([VocabMethod.NAIVE])
    variants = LaunchVariants(parsed, config, args.world_size, methods, None, made.resolved.spec)
    text = what_slices_give(variants, made.candidate(), gpu_bytes)
    if text is not None:
        fix = "megatron-ext plan -- COMMAND compares them with recompute and context parallelism"
        report.add(Severity.REMARK, "slices", text, fix)


def _check_communicators(
    report: Report,
    args: Any,
    config: PipelineConfig,
    program: Program,
    free: FreeMemory | None,
    megatron_arguments: Any,
) -> None:
    fix = "correct the path, or what is in the file"
    nccl_settings = report.attempt(
        "communicators", lambda: megatron_arguments.pipeline_communicator(args), fix
    )
    if nccl_settings is None:
        return
    left = None
    if free is not None and report.prediction is not None and report.prediction.ranks:
        left = free.allocated - max(rank.total_bytes for rank in report.prediction.ranks)
    report.findings.append(
        check_communicators(
            config,
            program,
            megatron_arguments.multiprocessors(),
            nccl_settings,
            left,
            args.variable_seq_lengths,
        )
    )


def _check_of_recipe(recipe: BridgeRecipe, args: Any, config: PipelineConfig) -> Callable[[], None]:
    """Return a check that `megatron_ext.bridge.use` accepts the config of ``recipe``.

    It checks nothing if the launch does not call `use`.
    """
    from megatron_ext.launch.planner.stage_arguments import stock_schedule

    if config.schedule is None and not config.arranges_microbatches:
        return lambda: None
    settings = replace(config, schedule=config.schedule or stock_schedule(args))
    return lambda: bridge.check(recipe.config, settings)


def _check_watching(report: Report, args: Any, config: PipelineConfig) -> None:
    """Report if a trace or metrics of Megatron's own step would record nothing."""
    from megatron_ext.adapter.stock.stock_order import why_unseen

    if not config.watches_stock:
        return
    why = why_unseen(args.pipeline_model_parallel_size, args)
    if why is not None:
        report.add(Severity.REMARK, "watching", f"nothing of Megatron's step will be seen: {why}")


def _predict(
    report: Report, made: Judgement, config: PipelineConfig, free: FreeMemory | None
) -> float | None:
    from megatron_ext.adapter.layers import layers_of_stages
    from megatron_ext.adapter.model_bytes import checkpoint_bytes
    from megatron_ext.runtime.host.host_memory import planned_bytes

    args, program, model = made.args, made.program, made.model
    problem = program.problem
    placement, costs = problem.placement, problem.costs
    layers = layers_of_stages(args, placement)
    bubble = bubble_1f1b = None
    predicted = f"no estimate of its bubble: {costs.no_estimate}"
    if not costs.no_estimate:
        bubble = simulate(program, costs).bubble_share_makespan
        bubble_1f1b = stock_1f1b(problem).bubble_share_makespan
        predicted = f"predicted bubble {bubble:.1%} (1f1b {bubble_1f1b:.1%}), costs {costs.origin}"
    name, number = program.schedule.name, problem.microbatches
    prediction = Prediction(name, number, costs.origin, bubble, bubble_1f1b)
    report.prediction = prediction
    text = f"{name}, {counted(number, 'microbatch')}: {predicted}"
    report.add(Severity.RIGHT, "schedule", text)
    unknown = None
    if config.costs.is_estimate:
        unknown = assumptions(args, partial(hidden_in_pairs, args))
    if unknown is not None:
        fix = "--pipeline-costs profile measures what passes take"
        report.add(Severity.REMARK, "estimate", unknown, fix)
    if model is None:
        text = "that of layers which are not Megatron's is not known"
        report.add(Severity.REMARK, "memory", text)
        return None
    held: list[float | None] = [None] * placement.ranks
    if costs.held_bytes is not None:
        held = [*peaks(program.schedule, in_bytes(costs))]
    microbatches = peaks(program.schedule, in_microbatches(program.schedule))
    ranks = tuple(
        RankPrediction(
            rank,
            sum(layers[stage] for stage in placement.stages_of[rank]),
            model[rank].stored,
            model[rank].temporary,
            model[rank].context,
            microbatches[rank],
            held[rank],
        )
        for rank in range(placement.ranks)
    )
    report.prediction = replace(prediction, ranks=ranks)
    _judge_memory(report, [rank.total_bytes for rank in ranks], free)
    if problem.options.activation_offload is not Offload.NONE and costs.held_bytes is not None:
        planned = [planned_bytes(row, costs) or 0.0 for row in program.schedule.rows]
        text = f"offload takes up to {bytes_text(max(planned))} per rank"
        report.add(Severity.RIGHT, "host memory", text, "add up the ranks of a node")
    return checkpoint_bytes(args, placement)


def _judge_memory(report: Report, totals: Sequence[float], free: FreeMemory | None) -> None:
    largest = max(totals)
    text = (
        f"pipeline rank {totals.index(largest)} takes the most, about {bytes_text(largest)} with "
        f"temporary tensors, CUDA's context and NCCL's buffers"
    )
    if free is None:
        report.add(Severity.RIGHT, "memory", text, "name the GPU to compare, as in --gpu h100")
        return
    text += (
        f"; it may take {bytes_text(free.allocated)}, as its allocator reserves "
        f"{bytes_text(free.reserved)} more: together {USABLE:.0%} of the GPU's memory"
    )
    if largest > free.allocated:
        fix = f"{flag('memory-limit')}, recompute, or more tensor or pipeline ranks"
        report.add(Severity.WRONG, "memory", text, fix)
    else:
        report.add(Severity.RIGHT, "memory", text)
