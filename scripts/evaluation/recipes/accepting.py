"""Check whether a recipe may be trained under our schedules, by everything that can refuse it.

Megatron's own validation of arguments, its model's config, the schedule's refusals and its proved
program are checked by the same functions as ``megatron-ext doctor`` uses for a launch command.
Nothing is started and no flag is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron_ext.adapter.layout_arguments import (
    CHUNKS_IN_CONFIGS,
    LAYOUT,
    LAYOUT_FIELDS,
    NAMES_IN_CONFIGS,
    PATTERN,
)
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec, choose
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.command.importing import quickly, silently
from megatron_ext.patches import engine
from megatron_ext.schedule.problem import Problem
from scripts.evaluation.recipes.public_form import Value
from scripts.evaluation.recipes.recipe import Recipe, in_effect
from scripts.evaluation.recipes.settings import WHOLE_LAYERS
from scripts.evaluation.recipes.verdict import Verdict

with quickly():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_ext.adapter import arguments
    from megatron_ext.adapter.dimensions import equal_costs
    from megatron_ext.adapter.layers import layout_of
    from megatron_ext.adapter.step_sizes import count_microbatches
    from megatron_ext.launch.command import megatron_arguments

# Flags of a launch command that no recipe contains.
_FLAGS = (
    *("--train-iters", "1000", "--lr", "1e-4", "--eval-interval", "1000", "--eval-iters", "0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--save", "checkpoints"),
    *("--save-interval", "500"),
)

_PRECISIONS: Mapping[str, Mapping[str, Value]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp8_delayed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8_cs": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8_mx": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "fp8_sc": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "blockwise"},
    "nvfp4": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}

# Settings that only fit the recipe's own pipeline.
OF_PIPELINE = (CHUNKS_IN_CONFIGS, "microbatch_group_size_per_vp_stage", *LAYOUT_FIELDS)

# Megatron's arguments for those settings of a recipe that have other names.
_ARGUMENTS = {
    **NAMES_IN_CONFIGS,
    "cuda_graph_scope": "cuda_graph_modules",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "average_in_collective": "ddp_average_in_collective",
    "packed": "sft",
}

# Defaults of Megatron-Bridge that differ from those of Megatron's arguments.
_DEFAULTS: Mapping[str, Value] = {
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "check_for_nan_in_grad": False,
}

# Settings that pretrain_gpt.py's validation refuses but Megatron-Bridge, which does not validate,
# accepts: Transformer Engine's cross entropy, parameters gathered during the step with any
# checkpoint, Bridge's own packed data sets, and, without the distributed optimizer, matrices stored
# only in 8 or 4 bits. They are set after the validation, so that the refusals of megatron_ext see
# them.
_NOT_VALIDATED = (
    *("cross_entropy_loss_fusion", "overlap_param_gather_with_optimizer_step", "sft"),
    *("fp8_param_gather", "fp4_param_gather"),
)

# Settings for which Megatron looks for a GPU or for kernels, and which are dropped.
_OF_GPUS = ("dsa_kernel_backend", "attention_backend")

# Settings with which Megatron cannot run a pipeline, although no check of its arguments says so.
_STOCK_CANNOT = {
    "enable_hyper_connections": (
        "hyper-connections have no pipeline: 0.20 raises NotImplementedError, 0.19 has none"
    ),
}


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Answer Megatron's queries of a GPU in this context, to judge recipes without one."""
    parallel = SimpleNamespace(
        tensor_model_parallel_size=2,
        context_parallel_size=1,
        use_megatron_fsdp=False,
        use_torch_fsdp2=False,
    )
    # Megatron requires this variable if activations are offloaded with Transformer Engine.
    offloads = mock.patch.dict(os.environ, {"NVTE_CPU_OFFLOAD_V1": "1"})
    # Only modules of megatron_ext are searched for references: others refer to nothing that is
    # patched, and the search would take most of a verdict's time.
    look = engine.modules_with
    quickly = mock.patch.object(
        engine,
        "modules_with",
        lambda ids: look(
            ids,
            [module for name, module in sys.modules.items() if name.startswith("megatron")],
        ),
    )
    with silently(), offloads, megatron_arguments.on_gpus(parallel), quickly:
        yield


def judge(recipe: Recipe) -> Verdict:
    """Return the verdict on ``recipe`` under our schedule that keeps the recipe's stages."""
    return _judge(recipe, recipe.schedule, recipe.settings)


def judge_on_v(recipe: Recipe, schedule: str = "v-auto") -> Verdict:
    """Return the verdict on ``recipe`` on a V, where each rank has two stages that a V connects.

    The layers are distributed over these stages anew. The program is that of zb-v, which has the
    same placement and needs no search.
    """
    settings = dict(recipe.settings)
    for name in OF_PIPELINE:
        settings.pop(name, None)
    pattern = settings.get(PATTERN)
    stages = 2 * recipe.ranks
    if pattern is not None:
        settings[PATTERN] = _cut(str(pattern), stages)
    else:
        layers = int(settings.get("num_layers") or recipe.dimensions["num_layers"])
        depths = int(settings.get("mtp_num_layers") or 0)
        settings[LAYOUT] = layout_of(_evenly(layers, stages), depths)
    return _judge(recipe, schedule, settings)


def _judge(recipe: Recipe, schedule: str, settings: Mapping[str, Value]) -> Verdict:
    config = PipelineConfig(schedule=schedule)
    why_stock = _refused_by_megatron(recipe)
    try:
        microbatches = _check(recipe, settings, config)
    except ValueError as error:
        why = _in_a_line(error)
        without = () if why_stock else _without(recipe, settings, config, why)
        return Verdict(schedule, why_stock, why, without)
    return Verdict(schedule, why_stock, microbatches=microbatches)


def why_no_slices(recipe: Recipe) -> str | None:
    """Return why ``recipe`` cannot train in slices under our schedule that keeps its stages.

    It is None if it can.
    """
    config = PipelineConfig(schedule=recipe.schedule, slices=2)
    try:
        _check_settings(recipe, recipe.settings, config)
    except ValueError as error:
        return _in_a_line(error)
    return None


def _refused_by_megatron(recipe: Recipe) -> str | None:
    """Return why Megatron cannot run ``recipe`` under the recipe's own schedule; None if it can."""
    for name, why in _STOCK_CANNOT.items():
        if recipe.settings.get(name):
            return why
    try:
        stock_arguments(recipe)
    except ValueError as error:
        return _in_a_line(error)
    return None


def stock_arguments(recipe: Recipe) -> Any:
    """Return Megatron's validated arguments for ``recipe`` under the recipe's own schedule.

    Raises:
        ValueError: Megatron refuses them.
    """
    args = _arguments(recipe, recipe.settings)
    model = _validate(recipe, args, recipe.settings, PipelineConfig())
    _divide_layers(model, args)
    return args


def _divide_layers(model: Any, args: Any) -> None:
    """Check that the layers can be split over the stages, as Megatron does to build the ``model``.

    Its validation of arguments does not check this.

    Raises:
        ValueError: Megatron asserts that they can be split, and they cannot.
    """
    if args.hybrid_layer_pattern is not None or model.pipeline_model_parallel_layout is not None:
        return  # patterns and layouts are validated as a whole
    try:
        for rank in range(args.pipeline_model_parallel_size):
            for chunk in range(args.virtual_pipeline_model_parallel_size or 1):
                transformer_block.get_num_layers_to_build(model, chunk, rank)
    except AssertionError as error:
        raise ValueError(f"Megatron asserts where it builds the model: {error}") from error


def _check(recipe: Recipe, settings: Mapping[str, Value], config: PipelineConfig) -> int:
    """Return the microbatches of a step of ``recipe``, with ``settings`` in place of its own.

    Raises:
        ValueError: the settings are refused.
    """
    args = _arguments(recipe, settings)
    _validate(recipe, args, settings, config)
    (program,) = arguments.check_parsed_arguments(args, config, _all_proved)
    return program.problem.microbatches


def _check_settings(recipe: Recipe, settings: Mapping[str, Value], config: PipelineConfig) -> None:
    """Check the settings as `_check` does, without making a program."""
    args = _arguments(recipe, settings)
    _validate(recipe, args, settings, config)
    arguments.check_settings(args, config)


def _without(
    recipe: Recipe, settings: Mapping[str, Value], config: PipelineConfig, why: str
) -> tuple[str, ...]:
    """Return the settings without which ``recipe`` would be accepted; () if that is not enough.

    ``why`` is the reason of the refusal, which names a setting.
    """
    left = dict(settings)
    dropped: list[str] = []
    names = {argument: name for name, argument in _ARGUMENTS.items()}
    while named := re.search(r"does not go with (\w+)=", why):
        name = names.get(named[1], named[1])
        if left.pop(name, None) is None:
            break
        dropped.append(name)
        try:
            _check_settings(recipe, in_effect(left), config)
        except ValueError as error:
            why = _in_a_line(error)
        else:
            return tuple(dropped)
    return ()


def _validate(
    recipe: Recipe, args: Any, settings: Mapping[str, Value], config: PipelineConfig
) -> Any:
    """Let Megatron validate ``args``, and return the model's config."""
    megatron_arguments.validate(
        args, config, recipe.gpus or megatron_arguments.least_world_size(args)
    )
    for name, value in settings.items():
        name = _ARGUMENTS.get(name, name)
        # Settings that are no arguments of Megatron are set without validation.
        if name in _NOT_VALIDATED or not hasattr(args, name):
            setattr(args, name, value)
    count_microbatches(args)
    return megatron_arguments.check_model(args, config)


@cache
def _defaults() -> Any:
    return megatron_arguments.parse_arguments(_FLAGS).args


@cache
def others() -> Mapping[str, Value]:
    """Return Megatron's arguments, and the fields of its configs, with their defaults.

    A recipe may have these settings even if they are not in `NAMES`. All checks apply to them as to
    any other setting.
    """
    configs = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    of_configs = {field.name: field.default for config in configs for field in fields(config)}
    return {**of_configs, **vars(_defaults())}


def _arguments(recipe: Recipe, settings: Mapping[str, Value]) -> Any:
    """Return Megatron's arguments for ``recipe`` with ``settings``, before validation."""
    args = copy.deepcopy(_defaults())
    given = {**_DEFAULTS, **recipe.dimensions, **settings}
    for name, value in given.items():
        name = _ARGUMENTS.get(name, name)
        if hasattr(args, name) and name not in (*_NOT_VALIDATED, *_OF_GPUS):
            setattr(args, name, _chosen(name, _as_argument(name, value)))
    for name, value in _PRECISIONS[settings["precision"]].items():
        setattr(args, name, value)
    args.grad_reduce_in_bf16 = settings["grad_reduce_in_fp32"] is False
    args.max_position_embeddings = args.seq_length
    if args.pipeline_model_parallel_layout is not None:
        args.num_virtual_stages_per_pipeline_rank = None
    if args.position_embedding_type == "mrope":  # schedules do not depend on the sections of mrope
        args.position_embedding_type = "rope"
    if args.hybrid_layer_pattern is not None:
        args.num_layers = None
    return args


def argument_values(recipe: Recipe) -> dict[str, Value]:
    """Return Megatron's arguments for ``recipe`` that differ from their defaults.

    They are under the recipe's own schedule, in the form that ``megatron-ext plan FILE.json``
    takes.
    """
    args, defaults = vars(_arguments(recipe, recipe.settings)), vars(_defaults())
    values = {name: args[name] for name, value in defaults.items() if args[name] != value}
    vocabulary = recipe.dimensions.get("vocab_size")
    return values | ({"padded_vocab_size": -(-vocabulary // 1024) * 1024} if vocabulary else {})


@cache
def _choices() -> Mapping[str, Sequence[Value]]:
    """Return, by argument, the values that Megatron's parser allows."""
    actions = megatron_arguments.parser()._actions
    return {action.dest: [*action.choices] for action in actions if action.choices}


def _chosen(name: str, value: Value) -> Value:
    """Return ``value``. Raises ValueError if Megatron's parser does not allow it."""
    choices = _choices().get(name)
    given = value if isinstance(value, list) else [value]
    wrong = [one for one in given if choices and one not in (*choices, None, False)]
    if wrong:
        words = ", ".join(map(str, choices or ()))
        raise ValueError(f"{name} is {wrong[0]!r}, and Megatron's parser accepts only {words}")
    return value


_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def _as_argument(name: str, value: Value) -> Value:
    if name == "cp_comm_type":
        return [value]
    if name == "cuda_graph_modules":
        return [module for module in value if module != WHOLE_LAYERS]
    if name == "window_size":
        return (value, 0) if isinstance(value, int) else tuple(value)
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _evenly(layers: int, stages: int) -> list[int]:
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _cut(pattern: str, stages: int) -> str:
    """Return the layer ``pattern`` of a hybrid model, cut into ``stages`` even segments."""
    main, slash, depths = pattern.partition("/")
    symbols = main.replace("|", "")
    segments, start = [], 0
    for layers in _evenly(len(symbols), stages):
        segments.append(symbols[start : start + layers])
        start += layers
    return "|".join(segments) + slash + depths


_AS_SEARCHED = "zb-v"
_PROVED: dict[tuple[object, ...], Program] = {}


def _all_proved(resolved: ResolvedSpec, problems: Sequence[Problem]) -> list[Program]:
    return [_proved(resolved, problem) for problem in problems]


def _proved(resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the program of ``resolved``, proved once for its ranks, chunks and microbatches.

    It is proved at equal costs, whatever layers the stages have. (Other costs may change the order
    of W passes. Such a program is proved where it runs.) A search would take minutes, so a schedule
    with the same placement stands for it.
    """
    key = resolved.spec, problem.placement, problem.microbatches
    if key not in _PROVED:
        equal = replace(problem, costs=equal_costs(problem.placement))
        _PROVED[key] = build_program(
            choose(_AS_SEARCHED) if resolved.traits.searches else resolved, equal
        )
    return _PROVED[key]
