"""A launch described by a recipe of Megatron-Bridge: a function that returns its ConfigContainer.

The recipe is called, and its config read into the flags that a launch of pretrain_gpt.py with the
same model, sizes, precision and batch would have. Bridge itself is imported by the recipe alone:
parts of a config are known by their names.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.adapter.layout_arguments import CHUNKS, CHUNKS_IN_CONFIGS, LAYOUT, PATTERN
from megatron_ext.base.words import meant_by
from megatron_ext.config import PLAN
from megatron_ext.launch.command.importing import as_on, quickly, silently
from megatron_ext.launch.command.launch_words import BridgeRecipe, Launch
from megatron_ext.patches.engine import PatchError
from megatron_ext.written_settings import given_in

# Parts of a Bridge config whose fields are also Megatron's arguments; a later part overrides an
# earlier one.
_PARTS = ("dist", "scheduler", "validation", "train", "optimizer", "ddp")
# Megatron's arguments for fields of a Bridge config that have other names.
_NAMES = {
    "average_in_collective": "ddp_average_in_collective",
    "bucket_size": "ddp_bucket_size",
    "num_buckets": "ddp_num_buckets",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
}
# Fields of a Bridge config that have the name of a Megatron argument, but mean something else, or
# mean nothing without another field.
_IGNORED = frozenset({"attention_backend", "max_position_embeddings", "vocab_size"})
_WITHOUT_FP8 = ("fp8", "num_layers_at_", "first_last_layers_bf16")
# Bridge pads a tokenizer's vocabulary to a multiple of this number times the tensor-parallel size.
_PADDED_TO = 128
_MISSING = object()
_FROZEN = ("freeze_language_model", "freeze_vision_model", "freeze_vision_projection")


@dataclass
class _Arguments:
    """Megatron's arguments for a Bridge config: their values, and the config field of each."""

    values: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)

    def take(self, part: str, settings: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Add the ``settings`` of a part of a Bridge config.

        None does not replace another part's value.
        """
        for name, value in settings.items():
            argument = names.get(name, name)
            if name not in _IGNORED and (value is not None or argument not in self.values):
                self.values[argument] = value
                self.fields[argument] = f"{part}.{name}"


def launch_from_recipe(recipe: str, words: Sequence[str]) -> Launch:
    """Return the launch of the Megatron-Bridge config that ``recipe``, MODULE:FUNCTION, returns.

    ``words`` are flags of ours, and of Megatron's, in addition to the config.

    Raises:
        ValueError: ``recipe`` cannot be called, or returns no config of Megatron-Bridge.
        PatchError: Megatron, whose flags are written, is not installed.
    """
    with silently(), as_on(Path.cwd(), {}):
        try:
            with quickly():
                from megatron_ext.launch.command.log.unparse import unparsed_flags
        except ImportError as error:
            raise PatchError(
                f"recipe {recipe}: Megatron is needed to read a Megatron-Bridge recipe, and "
                f"cannot be imported here: {error}"
            ) from error
        config = _called(recipe)
        try:
            arguments = _arguments(config)
            settings = _beside_arguments(config)
            environment = _environment(config)
            remarks = tuple(_remarks(recipe, config, settings))
        except Exception as error:  # the fields of a config may have any type
            raise ValueError(
                f"recipe {recipe}: Megatron-Bridge cannot train the recipe's config: "
                f"{type(error).__name__}: {error}"
            ) from error
        # The schedule's placement replaces the recipe's virtual stages.
        if given_in(words).get("schedule", PLAN) != PLAN:
            arguments.values |= dict.fromkeys([CHUNKS, CHUNKS_IN_CONFIGS])
        try:
            flags = unparsed_flags({name: str(value) for name, value in arguments.values.items()})
        except ValueError as error:
            raise ValueError(f"recipe {recipe}: {error}") from error
    return Launch(
        recipe,
        is_module=False,
        arguments=(*flags, *words),
        installs=True,
        environment=environment,
        remarks=remarks,
        recipe=BridgeRecipe(config, arguments.fields, settings),
    )


def _environment(config: Any) -> dict[str, str]:
    variables = getattr(config, "env_vars", None) or {}
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"env_vars of the config is a {type(variables).__name__}; it must be a dict"
        )
    return {str(name): str(value) for name, value in variables.items()}


def _called(recipe: str) -> Any:
    """Return the Megatron-Bridge config that the function ``recipe`` makes."""
    module, colon, function = recipe.partition(":")
    if not (module and colon and function):
        raise ValueError(
            f"recipe {recipe} is not of the form MODULE:FUNCTION; write it as in "
            f"megatron.bridge.recipes.gpt.vanilla_gpt:vanilla_gpt_pretrain_config"
        )
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"recipe {recipe}: {module} cannot be imported here: {error}; run this where "
            f"Megatron-Bridge runs"
        ) from error
    make = getattr(imported, function, None)
    if not callable(make):
        meant = " or ".join(meant_by(function, vars(imported)))
        raise ValueError(
            f"recipe {recipe}: {module} has no function {function}"
            + (f": did you mean {meant}?" if meant else "")
        )
    try:
        config = make()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"recipe {recipe}: calling the function without arguments fails: "
            f"{type(error).__name__}: {error}"
        ) from error
    if any(getattr(config, part, None) is None for part in ("model", "train")):
        raise ValueError(
            f"recipe {recipe} returns a {type(config).__name__}: write a function that returns "
            "the config for Megatron-Bridge's pretrain or finetune"
        )
    return config


def _arguments(config: Any) -> _Arguments:
    """Return Megatron's arguments for the Bridge ``config``, after Bridge has applied its parts."""
    import torch

    from megatron_ext.launch.command import megatron_arguments

    arguments = _Arguments()
    for part in _PARTS:
        if (settings := getattr(config, part, None)) is not None:
            arguments.take(part, vars(settings), _NAMES)
    # A recipe may give each of these two settings in one of its parts, optimizer or ddp.
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        parts = (config.optimizer, config.ddp)
        arguments.values[name] = any(getattr(part, name, False) for part in parts)
    path, model = "model", config.model
    if (transformer := getattr(model, "transformer", None)) is not None:
        arguments.take(path, vars(model), megatron_arguments.NAMES_OF_CONFIGS)
        path, model = "model.transformer", transformer
    arguments.take(path, vars(model), megatron_arguments.NAMES_OF_CONFIGS)
    _take_precision(arguments, config)
    _take_overlap(arguments, config.comm_overlap)
    values = arguments.values
    if values.get(LAYOUT) is not None:
        values[LAYOUT] = _layout_text(values[LAYOUT])
        values[CHUNKS] = None  # the layout gives the number of chunks
    virtual = values.get(CHUNKS)
    values[CHUNKS_IN_CONFIGS] = virtual  # `unparse` recognises virtual stages by this argument
    if values.get(PATTERN) is not None:
        values["num_layers"] = None  # Megatron counts the layers in the hybrid pattern
    if values.get("cuda_graph_impl") in (None, "none"):
        values.pop("cuda_graph_modules", None)
    values |= _derived(config, values)
    # Without a GPU Bridge switches off the fusion of gradient accumulation, whose kernels are
    # missing, so the recipe's value says nothing about a launch on GPUs.
    if not torch.cuda.is_available():
        values.pop("gradient_accumulation_fusion", None)
    if values.get("cross_entropy_fusion_impl") == "te":
        # The value te (Transformer Engine's fused cross entropy), which pretrain_gpt.py refuses, is
        # replaced: Megatron's native fusion computes the same in as much memory.
        values["cross_entropy_fusion_impl"] = "native"
    parser = megatron_arguments.parser()
    known = {action.dest: action for action in parser._actions}
    known |= {CHUNKS_IN_CONFIGS: None}  # type: ignore[dict-item]
    arguments.values = {
        name: _typed(known[name], value) for name, value in values.items() if name in known
    }
    arguments.fields = {name: dotted for name, dotted in arguments.fields.items() if name in known}
    return arguments


def _typed(action: Any, value: Any) -> Any:
    """Return ``value`` in the form in which the parser's ``action`` takes its argument."""
    if isinstance(value, float) and action is not None and action.type is int:
        return int(value)
    return list(value) if isinstance(value, tuple) and action.nargs is not None else value


def _take_precision(arguments: _Arguments, config: Any) -> None:
    """Add the mixed precision of the Bridge ``config``, which overrides its model and optimizer."""
    precision = getattr(config, "mixed_precision", None)
    if isinstance(precision, str):
        named: Any = importlib.import_module("megatron.bridge.training.mixed_precision")
        precision = named.get_mixed_precision_config(precision)
    if precision is not None:
        arguments.take("mixed_precision", vars(precision), {})
    if not arguments.values.get("fp8"):
        for name in [name for name in arguments.values if name.startswith(_WITHOUT_FP8)]:
            del arguments.values[name]


def _take_overlap(arguments: _Arguments, overlap: Any) -> None:
    """Add ``comm_overlap`` of a Bridge config, which overrides its model and gradient reduction."""
    if overlap is None:
        return
    values = arguments.values
    if values.get("use_distributed_optimizer"):
        values["overlap_grad_reduce"] = values["overlap_param_gather"] = True
    chunks = values.get(CHUNKS) or 1
    values["align_param_gather"] = values["overlap_p2p_comm"] = chunks > 1
    given = {name: value for name, value in vars(overlap).items() if value is not None}
    arguments.take("comm_overlap", given, _NAMES)
    for name in vars(overlap):
        arguments.fields[_NAMES.get(name, name)] = f"comm_overlap.{name}"
    if values.get("tensor_model_parallel_size", 1) < 2 or not values.get("sequence_parallel"):
        values["tp_comm_overlap"] = False
    # Megatron's argument tp_comm_overlap_cfg is the path of a file, which Bridge's field of the
    # same name is not.
    values.pop("tp_comm_overlap_cfg", None)


def _derived(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments that follow from Bridge fields with other names.

    The fields are those of ``config``.
    """
    model = config.model
    transformer = getattr(model, "transformer", model)

    def of_model(name: str, default: Any = None) -> Any:
        found = getattr(model, name, _MISSING)
        return getattr(transformer, name, default) if found is _MISSING else found

    activation = getattr(of_model("activation_func"), "__name__", "")
    reduces_in_fp32 = getattr(config.ddp, "grad_reduce_in_fp32", True)
    if values.get("grad_reduce_in_fp32") is not None:
        reduces_in_fp32 = values["grad_reduce_in_fp32"]
    return {
        "group_query_attention": bool(
            of_model("num_query_groups") and not of_model("multi_latent_attention", False)
        ),
        "grad_reduce_in_bf16": bool(values.get("bf16") and not reduces_in_fp32),
        "max_position_embeddings": of_model("max_position_embeddings") or of_model("seq_length"),
        "padded_vocab_size": _padded_vocabulary(config, of_model),
        "squared_relu": activation == "squared_relu",
        "untie_embeddings_and_output_weights": not of_model(
            "share_embeddings_and_output_weights", True
        ),
    }


def _padded_vocabulary(config: Any, of_model: Any) -> int | None:
    """Return the padded vocabulary size of a Bridge config; None if only the tokenizer knows it."""
    tokens, is_padded = of_model("vocab_size"), of_model("should_pad_vocab", False)
    if tokens is None:
        tokens, is_padded = getattr(config.tokenizer, "vocab_size", None), True
    if tokens is None or not is_padded:
        return tokens
    multiple = of_model("make_vocab_size_divisible_by", _PADDED_TO)
    multiple *= of_model("tensor_model_parallel_size", 1)
    return int(-(-tokens // multiple) * multiple)


def _layout_text(layout: Any) -> str:
    """Return the pipeline ``layout`` as Megatron's flag has it, such as ``Ett|ttL``.

    ``layout`` is such a text, or a list with a text or a list of layers for each stage.
    """
    if isinstance(layout, str):
        return layout
    symbols = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    stages = list(getattr(layout, "input_data", layout))
    for layer in (layer for stage in stages if not isinstance(stage, str) for layer in stage):
        if layer not in symbols:
            raise ValueError(
                f"the layout has a layer {layer!r}, and the layers of a layout are "
                f"{', '.join(symbols)}"
            )
    return "|".join(
        stage if isinstance(stage, str) else "".join(symbols[layer] for layer in stage)
        for stage in stages
    )


def _beside_arguments(config: Any) -> dict[str, Any]:
    """Return settings of a Bridge config that no argument of Megatron's has, by name.

    They are the sizes of a vision tower, and which weights are frozen.
    """
    settings: dict[str, Any] = {
        name: True for name in _FROZEN if getattr(config.model, name, False)
    }
    if getattr(config, "peft", None) is not None:
        settings |= dict.fromkeys(_FROZEN, True)
    if sizes := _tower(config.model):
        settings["vision"] = sizes
    return settings


def _tower(model: Any) -> dict[str, Any]:
    """Return the sizes of the vision tower of ``model``, by the names of `parse_tower`.

    Empty without a tower, or if its config does not tell the sizes.
    """
    vision = getattr(model, "vision_config", None)

    def of_vision(*names: str) -> Any:
        return next((value for name in names if (value := getattr(vision, name, None))), None)

    sizes = {
        "layers": of_vision("depth", "num_hidden_layers"),
        "hidden": of_vision("hidden_size"),  # plain words: the hidden size
        "heads": of_vision("num_heads", "num_attention_heads"),
        "ffn": of_vision("intermediate_size"),
    }
    if None in sizes.values():
        return {}
    if (side := of_vision("spatial_merge_size")) is not None:
        sizes["merged"] = side**2
    if (stages := of_vision("deepstack_visual_indexes")) is not None:
        sizes["deepstack_mergers"] = len(stages)
    sizes["gated"] = of_vision("hidden_act") == "silu"
    sizes["out_hidden"] = of_vision("out_hidden_size")
    return sizes


def _remarks(recipe: str, config: Any, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield remarks on what was read of a recipe, and on parts of its config that are ignored."""
    yield f"read from the config of {recipe}; data, tokenizer and checkpoints are not looked at"
    if getattr(config, "peft", None) is not None:
        yield (
            "config.peft: the model's own weights are frozen; time and memory of the adapters are "
            "not counted"
        )
    if getattr(config.model, "vision_config", None) is not None and "vision" not in settings:
        yield "config.model.vision_config is not counted: name the tower with --vision"
