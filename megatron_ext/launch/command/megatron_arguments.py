"""A launch command, parsed and validated by Megatron itself, in one process and without a GPU.

Megatron's questions about the GPU are answered by `on_gpus` if there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from megatron.core import num_microbatches_calculator
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import arguments, global_vars, training
from packaging.version import Version

from megatron_ext.adapter.checkpoints.loading import LoadJudgement, command_of, judge_loading
from megatron_ext.adapter.launch_checks import validated
from megatron_ext.adapter.layout_arguments import NAMES_IN_CONFIGS
from megatron_ext.adapter.transformer_engine import installed
from megatron_ext.base.text_file import LARGEST_JSON, parse_json
from megatron_ext.base.words import argument_flag, meant_by, shown
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.execution import Precision
from megatron_ext.cost_model.gpus import assumed_rates
from megatron_ext.cost_model.rates import Rates
from megatron_ext.launch.command.list_expressions import bounded
from megatron_ext.patches.engine import Patch, apply, replace
from megatron_ext.patches.megatron.core.transformer import transformer_config
from megatron_ext.written_settings import add_flags

# Fusions for which Megatron looks for kernels in Transformer Engine.
_LOOKED_FOR = ("apply_rope_fusion", "moe_permute_fusion")

# Types of arguments whose text Megatron evaluates as a Python expression.
_LISTS = {f"{name}_freq_type" for name in ("moe", "la", "no_rope")}

_MOST = 1e30  # largest number that a file of arguments may contain
# Function that returns the rates which a rank reaches in a precision.
RatesOf = Callable[[Precision], Rates]

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Compute capability of the assumed GPU: Hopper, which has the most requirements.
CAPABILITY = (9, 0)
MULTIPROCESSORS = 132  # multiprocessors of an H100


@dataclass(frozen=True)
class ParsedArguments:
    """Launch command as Megatron's parser has read it.

    Attributes:
        args: Megatron's arguments, not validated.
        unknown: words that are neither Megatron's flags nor ours, in order.
        flags: all flags that Megatron and we know.
    """

    args: Any
    unknown: tuple[str, ...]
    flags: tuple[str, ...]


@contextlib.contextmanager
def on_gpus(args: Any, rates: RatesOf | None = None) -> Iterator[None]:
    """Context that, without a GPU, answers Megatron's questions as a GPU would.

    The GPU has compute capability `CAPABILITY` and the newest Transformer Engine. The variable
    `CONNECTIONS` is 1 meanwhile if it is not set and ``args`` require it. With ``rates`` costs are
    those of a GPU with these rates.
    """
    if torch.cuda.is_available():
        with apply(_reached(rates) if rates else ()):
            yield
        return
    with one_connection(args), apply([*_gpu_patches(), *_reached(rates or assumed_rates)]):
        yield


@contextlib.contextmanager
def one_connection(args: Any) -> Iterator[None]:
    """Context in which the variable `CONNECTIONS` is 1 if it is not set and ``args`` need it."""
    is_ours = wants_one_connection(args) and CONNECTIONS not in os.environ
    if is_ours:
        os.environ[CONNECTIONS] = "1"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[CONNECTIONS]


def wants_one_connection(args: Any) -> bool:
    """Return whether Megatron requires `CONNECTIONS` to be 1 on GPUs before Blackwell.

    `CONNECTIONS` names an environment variable.
    """
    overlaps = max(args.tensor_model_parallel_size, args.context_parallel_size) > 1
    return overlaps and not (args.use_megatron_fsdp or args.use_torch_fsdp2)


def _gpu_patches() -> list[Patch]:
    reason = "doctor and plan assume a GPU even if there is none here"
    answers = [
        replace(
            "megatron.training.utils.common_utils:get_device_arch_version",
            lambda: CAPABILITY[0],
            reason=reason,
        ),
        replace("torch.cuda:get_device_capability", lambda device=None: CAPABILITY, reason=reason),
    ]
    if not installed.can_split():
        answers += [
            replace(
                target,
                answer,
                reason="doctor and plan assume Transformer Engine even if it is not installed here",
            )
            for target, answer in (
                ("megatron_ext.adapter.transformer_engine.installed:can_split", lambda: True),
                ("megatron.core.utils:get_te_version", lambda: Version("999")),
            )
        ]
    return answers


def _reached(rates: RatesOf) -> list[Patch]:
    reason = "costs are to be those of a GPU that is not here"
    return [replace("megatron_ext.adapter.dimensions:rates", rates, reason=reason)]


def parse_arguments(argv: Sequence[str]) -> ParsedArguments:
    """Parse the words after the script with Megatron's own parser and our flags.

    Raises:
        ValueError: a value is refused; the text is argparse's.
    """
    args, unknown, parser = _parsed(argv)
    return ParsedArguments(args, tuple(unknown), tuple(parser._option_string_actions))


def parser() -> argparse.ArgumentParser:
    """Return Megatron's own parser, with our flags added."""
    return _parsed(())[2]


# Megatron's and Megatron-Bridge's configs have other names for some of the arguments.
NAMES_OF_CONFIGS = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    **NAMES_IN_CONFIGS,
}


def parse_values(values: Mapping[str, Any]) -> ParsedArguments:
    """Return Megatron's arguments from ``values`` by name, as in a JSON file.

    An argument that is missing or None has its default.

    Raises:
        ValueError: there is no such argument, or a value is not understood.
    """
    args, _, parser = _parsed(())
    actions = {action.dest: action for action in parser._actions}
    for given, value in values.items():
        name = NAMES_OF_CONFIGS.get(given, given)
        if name not in actions:
            meant = " or ".join(meant_by(name, actions))
            raise ValueError(
                f"Megatron has no argument {given}" + (f": did you mean {meant}?" if meant else "")
            )
        if value is not None:
            setattr(args, name, _converted(actions[name], value))
    if values.get("num_query_groups") and "group_query_attention" not in values:
        # A Bridge config has no field group_query_attention, so the argument is set here if the
        # config has query groups.
        args.group_query_attention = not args.multi_latent_attention
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    return ParsedArguments(args, (), tuple(parser._option_string_actions))


def _converted(action: argparse.Action, value: Any) -> Any:
    kind = None if isinstance(value, str) and callable(action.type) else _kind(action)
    if kind is not None and not kind.takes(value):
        raise ValueError(f"{action.dest} {shown(value)!r} is not understood: write {kind.name}")
    if action.type is int and isinstance(value, float):
        return int(value)
    if not isinstance(value, str) or not callable(action.type):
        return value
    try:
        return action.type(value)
    except (argparse.ArgumentTypeError, KeyError, ValueError) as error:
        raise ValueError(f"{action.dest} {value!r} is not understood: {error}") from None


@dataclass(frozen=True)
class _Kind:
    """Kind of JSON values that an argument accepts: its name, and a test for values."""

    name: str
    takes: Callable[[Any], bool]


_SWITCH = _Kind("true or false", lambda value: isinstance(value, bool))
_NUMBERS = {
    int: _Kind("a whole number", lambda value: _is_number(value) and value == int(value)),
    float: _Kind("a number", lambda value: _is_number(value)),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _kind(action: argparse.Action) -> _Kind | None:
    """Return the kind of JSON values that the parser's ``action`` accepts.

    Return None if only Megatron checks.
    """
    if action.nargs == 0 and isinstance(action.const, bool):
        return _SWITCH
    return _NUMBERS.get(action.type) if action.nargs is None else None  # type: ignore[call-overload]


def _parsed(argv: Sequence[str]) -> tuple[Any, list[str], argparse.ArgumentParser]:
    """Return Megatron's arguments, the unknown words, and the parser with our flags."""
    parsers: list[argparse.ArgumentParser] = []
    unknown: list[str] = []

    def ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        def refuse(message: str) -> None:
            raise ValueError(message)

        parser.error = refuse  # type: ignore[assignment, method-assign]
        add_flags(parser)
        for action in parser._actions:
            if getattr(action.type, "__name__", "") in _LISTS:
                action.type = bounded(action.type)  # type: ignore[arg-type]
        read = parser.parse_known_args

        def parse_known_args() -> tuple[Any, list[str]]:
            args, words = read(list(argv))
            unknown.extend(words)
            return args, words

        parser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]
        parsers.append(parser)
        return parser

    args = arguments.parse_args(ours, ignore_unknown_args=True)
    return args, unknown, parsers[0]


def least_world_size(args: Any) -> int:
    """Return the number of ranks that one copy of the model takes (data-parallel size 1)."""
    dense = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    if args.num_experts is None:
        return int(dense)
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return int(-(-experts // dense) * dense)


def validate(args: Any, config: PipelineConfig, world_size: int) -> Any:
    """Validate and complete ``args`` by Megatron's own validation, and return them.

    Raises:
        ValueError: Megatron refuses the arguments; the text is Megatron's, or its assertion's line
            if that has no text.
    """
    args.rank, args.world_size = 0, world_size
    with _as_value_error():
        return validated(args, config, lambda args: arguments.validate_args(args, {}))


def check_course(args: Any) -> tuple[int, int, int]:
    """Check a training's numbers of samples and its learning-rate schedule; return the numbers.

    They are the samples to train, to validate and to test on. A rank of a training checks these
    after it has built the model, and ends if one is wrong.

    Raises:
        ValueError: as `validate`.
    """
    if not (args.eval_interval or args.full_validation or args.skip_train):
        raise ValueError(
            "--eval-interval is missing, and Megatron divides --train-iters by it: add "
            "--eval-interval 1000, and --eval-iters 0 if nothing is to be evaluated"
        )
    with _counting_course(args):
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
        train, validation, test = training.get_train_valid_test_num_samples()
        return train, validation or 0, test


def judge_checkpoint(args: Any, config: PipelineConfig, flag: str = "--load") -> LoadJudgement:
    """Return whether the checkpoint that ``flag`` of validated ``args`` names would load.

    Its learning-rate schedule is compared if that of ``args`` is valid.
    """
    scheduler = None
    with contextlib.suppress(ValueError), _counting_course(args):
        made = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
        scheduler = made.state_dict()
    return judge_loading(command_of(args, config, scheduler), flag=flag)


@contextlib.contextmanager
def _counting_course(args: Any) -> Iterator[None]:
    """Context in which Megatron's functions that count samples use a copy of ``args``."""
    before = global_vars._GLOBAL_ARGS
    args = copy.copy(args)
    global_vars.set_args(args)
    try:
        with _as_value_error(), _counting_microbatches(args):
            yield
    finally:
        global_vars.set_args(before)


@contextlib.contextmanager
def _counting_microbatches(args: Any) -> Iterator[None]:
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank=1,  # with rank 0 Megatron would log
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    try:
        yield
    finally:
        num_microbatches_calculator.unset_num_microbatches_calculator()


def check_model(args: Any, config: PipelineConfig) -> Any:
    """Return the model's config that a rank would make of ``args``, with a schedule's stages.

    The arguments are validated.

    Raises:
        ValueError: as `validate`.
        PatchError: a patch does not fit.
    """
    model = copy.copy(args)
    if not torch.cuda.is_available():
        for fusion in _LOOKED_FOR:
            setattr(model, fusion, False)
    brings_stages = config.schedule is not None and config.resolved_spec.example.chunks > 1
    with apply(transformer_config.patches(config) if brings_stages else ()), _as_value_error():
        return arguments.core_transformer_config_from_args(model)


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU here, or of the assumed GPU without one."""
    if not torch.cuda.is_available():
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(0).multi_processor_count


def pipeline_communicator(args: Any) -> dict[str, int]:
    """Return the user's NCCL settings for the pipeline's communicators (``pp``).

    They are in the file of --nccl-communicator-config-path.

    Raises:
        ValueError: the file cannot be read.
    """
    path = args.nccl_communicator_config_path
    if path is None:
        return {}
    try:
        settings = yaml.safe_load(_text(path))
        return dict(settings.get("pp", {}))
    except (
        OSError,
        ValueError,
        RecursionError,
        yaml.YAMLError,
        AttributeError,
        TypeError,
    ) as error:
        raise ValueError(
            f"--nccl-communicator-config-path {path}: the file cannot be read: {error}"
        ) from None


def load_tokenizer(args: Any) -> int:
    """Return the number of tokens of the tokenizer that ``args`` name, not padded.

    ``args`` stay unchanged.

    Raises:
        ValueError: the tokenizer cannot be built.
    """
    args = copy.copy(args)
    args.rank = 0
    with _as_value_error():
        return int(build_tokenizer(args).vocab_size)


def count_tokens(args: Any, *, may_run_code: bool = True) -> int | None:
    """Return the number of tokens of the tokenizer that ``args`` name, not padded.

    None if the tokenizer cannot be built, or only by code of its own that must not run.
    """
    args = copy.copy(args)
    args.trust_remote_code = args.trust_remote_code and may_run_code
    try:
        return load_tokenizer(args)
    except ValueError:
        return None


def data_prefixes(args: Any) -> list[str]:
    """Return the datasets that ``args`` name, as paths of .bin and .idx files without the ending.

    Raises:
        ValueError: a file of --data-args-path cannot be read.
    """
    lists = [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]
    try:
        if args.data_args_path is not None:
            lists.append(_text(args.data_args_path).split())
        if args.per_split_data_args_path is not None:
            lists += parse_json(_text(args.per_split_data_args_path)).values()
    except (AttributeError, OSError, ValueError) as error:
        raise ValueError(f"the list of datasets cannot be read: {error}") from None
    blends = [get_blend_from_list(words) for words in lists if words]
    return list(dict.fromkeys(prefix for prefixes, _ in blends for prefix in prefixes))


def _text(path: str) -> str:
    with open(path) as file:
        return file.read(LARGEST_JSON)


_MISSING = re.compile(r"assert args\.(\w+) is not None")


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    """Context in which an error or exit of Megatron becomes a ValueError, without output."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except SystemExit:
        raise ValueError(printed.getvalue().strip().splitlines()[-1]) from None
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        text = str(error).strip()
        if not text:
            text = f"Megatron asserts: {line}"
            if missing := _MISSING.fullmatch(line or ""):
                text = f"{argument_flag(missing[1])} is missing, add it with its value: {text}"
        elif not isinstance(error, AssertionError | ValueError | RuntimeError):
            # A TypeError, for example, is not meant for users and names no setting, so its source
            # line is shown.
            text = f"{text}, in: {line}"
        raise ValueError(text) from error
