"""A recipe's settings, resolved: with what its name, its model and Megatron-Bridge add to them.

A published recipe is a dump of configs: it omits what its model or Bridge's defaults say, and some
switches take effect only with others. All that schedules depend on is resolved here, from names,
models and defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from scripts.evaluation.recipes.public_form import (
    Settings,
    Value,
    flat,
    layout_text,
    read_recipes,
)
from scripts.evaluation.recipes.settings import NAMES, OTHER_NAMES, WHOLE_LAYERS

RECIPES = Path(__file__).parents[1] / "recipes.json"

# Configs of a recipe that do not change its schedule, except for their settings in `NAMES`.
_NOT_OF_SCHEDULES = (
    *("checkpoint", "dataset", "env_vars", "logger", "profiling", "scheduler", "straggler"),
    *("tokenizer", "validation"),
)
# Last words of keys whose value names the model.
_MODEL = ("HF", "hf_path", "hf_model_id", "model")
# Settings that every recipe must give, as they have no default.
_NEEDED = ("seq_length", "micro_batch_size", "global_batch_size")
# Settings that give a model's dimensions in the recipe itself, if it names no model.
_DIMENSIONS = ("num_layers", "hidden_size", "num_attention_heads")

_PRECISIONS = {  # precisions as recipes' names contain them
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8cs": "fp8_cs",
    "fp8ds": "fp8_delayed",
    "fp8mx": "fp8_mx",
    "fp8sc": "fp8_sc",
    "nvfp4": "nvfp4",
}
# Megatron-Bridge's names of mixed precisions; all of these sum gradients in fp32.
_MIXED_PRECISIONS = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8_delayed",
    "bf16_with_fp8_current_scaling_mixed": "fp8_cs",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "fp8_cs",
    "nanov2_bf16_with_fp8_current_scaling_mixed": "fp8_sc",
    "bf16_with_mxfp8_mixed": "fp8_mx",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8_sc",
    "bf16_with_nvfp4_mixed": "nvfp4",
    "nemotron_3_super_bf16_with_nvfp4_mixed": "nvfp4",
}
# Settings of those mixed precisions that store the layers' matrices in quantised form only. The key
# is the precision, or the name of the mixed precision if its settings differ from others of the
# same precision. The settings are those of src/megatron/bridge/training/mixed_precision.py in
# NVIDIA-NeMo/Megatron-Bridge@067f987.
_OF_MIXED_PRECISIONS: Mapping[str, Settings] = {
    "fp8_delayed": {"fp8_param_gather": True},
    "fp8_cs": {"fp8_param_gather": True},
    "fp8_mx": {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
    "nanov2_bf16_with_fp8_current_scaling_mixed": {"fp8_param_gather": True},
    "nvfp4": {"fp4_param_gather": True},
}
_FP8_RECIPES = {  # names of FP8 recipes, with Megatron's names
    "delayed": "fp8_delayed",
    "tensorwise": "fp8_cs",
    "mxfp8": "fp8_mx",
    "blockwise": "fp8_sc",
}

# Settings that come from the model if its recipe does not give them.
_OF_MODELS = (
    *("untie_embeddings_and_output_weights", "group_query_attention", "qk_layernorm"),
    *("multi_latent_attention", "window_size", "softmax_type", "attention_output_gate"),
    *("head_wise_attn_gate", "experimental_attention_variant", "enable_hyper_connections"),
    *("hybrid_layer_pattern", "num_experts", "moe_layer_freq", "moe_shared_expert_gate"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_n_hash_layers"),
    *("moe_router_num_groups", "mtp_use_repeated_layer", "cp_comm_type"),
)
# Megatron-Bridge's defaults for settings that a recipe does not give.
_DEFAULTS: Settings = {
    "transformer_impl": "transformer_engine",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}
_OF_PRECISION_AWARE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True)
class Recipe:
    """A recipe of Megatron-Bridge with all its settings, from wherever they come.

    Attributes:
        settings: settings that take effect, by the names in `NAMES` or in Megatron. Settings that
            are not in `NAMES` are there only if they differ from Megatron's defaults.
        model: the name of its model.
        dimensions: sizes of the model, by the names of Megatron's arguments.
        gpus, gpu: number and type of the GPUs that its name contains; None if it contains none.
    """

    name: str
    settings: Settings
    model: str
    dimensions: Settings
    gpus: int | None
    gpu: str | None

    @property
    def short_name(self) -> str:
        """Name of the function that makes the recipe, without its usual ending."""
        return self.name.partition(":")[2].removesuffix("_config") or self.name

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return int(self.settings["pipeline_model_parallel_size"])

    @property
    def layout(self) -> str | None:
        return self.settings.get("pipeline_model_parallel_layout")

    @cached_property
    def chunks(self) -> int:
        """Number of chunks of a rank, as the recipe or its layout has it."""
        if self.layout is not None:
            return max(len(expanded(self.layout).split("|")) // self.ranks, 1)
        return int(self.settings.get("virtual_pipeline_model_parallel_size") or 1)

    @property
    def schedule(self) -> str:
        """Our schedule that replaces Megatron's and keeps the stages."""
        if self.chunks == 1:
            return "zb-h1"
        group = self.settings.get("microbatch_group_size_per_vp_stage")
        return f"interleaved-zb:vpp={self.chunks}" + (f",group={group}" if group else "")

    @property
    def parallel_copies(self) -> int | None:
        """Data-parallel size of the recipe; None if that is not known, or is no whole number."""
        names = ("tensor", "pipeline", "context")
        of_a_copy = 1
        for name in names:
            key = "context_parallel_size" if name == "context" else f"{name}_model_parallel_size"
            of_a_copy *= int(self.settings.get(key) or 1)
        copies, rest = divmod(self.gpus or 0, of_a_copy)
        return None if rest else copies or None

    @property
    def bubble(self) -> float | None:
        """The share of a step that ranks wait under Megatron's schedule, with equal stage times.

        It is None where the number of microbatches is not known.
        """
        if self.parallel_copies is None:
            return None
        at_once = self.parallel_copies * self.settings["micro_batch_size"]
        microbatches = self.settings["global_batch_size"] / at_once
        waits = (self.ranks - 1) / (self.chunks * microbatches)
        return float(waits / (1 + waits))


def expanded(layout: str) -> str:
    """Return a layout without its short forms: ``Et*2|(t|)*2L`` becomes ``Ett|t|t|L``.

    Commas have no effect.
    """
    text = layout.replace(",", "").replace(" ", "")
    while short := re.search(r"\(([^()]*)\)\*(\d+)", text):
        text = text.replace(short[0], short[1] * int(short[2]))
    while short := re.search(r"([A-Za-z|])\*(\d+)", text):
        text = text.replace(short[0], short[1] * int(short[2]), 1)
    return text


def read_models(path: Path = RECIPES) -> dict[str, Settings]:
    """Return the models of a file of recipes by name; they are empty if the file has none.

    A model's key ``recipe`` names a recipe that does not name its model.
    """
    content = json.loads(path.read_text())
    models: dict[str, Settings] = content.get("models", {}) if isinstance(content, dict) else {}
    return models


def resolve(
    name: str, raw: Any, models: Mapping[str, Settings], others: Settings | None = None
) -> Recipe:
    """Return the recipe ``name`` with the settings ``raw``: a nested config, dotted names or flags.

    Args:
        models: sizes of models, by name.
        others: the defaults of Megatron's settings that are not in `NAMES`.
    Raises:
        ValueError: a key, a value or the model is unknown, or something is missing.
    """
    settings = _by_name(flat(raw), others or {})
    mixed = settings.pop("mixed_precision", None)
    mixed = None if mixed is None else str(mixed).replace("-", "_")
    model, dimensions = _model_of(name, settings, models)
    for key in _OF_MODELS:
        if key in dimensions or key == "untie_embeddings_and_output_weights":
            settings.setdefault(key, dimensions.get(key, False))
    # A recipe with "_peft_" in its name gives only those adapter settings that differ from Bridge's
    # defaults.
    if "_peft_" in name:
        settings.setdefault("peft", "lora")
    if "vision" in dimensions:
        settings["vision"] = True
    is_mixed = not any(settings.get(field) for field in ("fp8", "fp4"))
    settings["precision"] = precision = _precision(name, mixed, settings)
    if is_mixed:
        alike = _OF_MIXED_PRECISIONS.get(precision, {})
        settings = {**_OF_MIXED_PRECISIONS.get(mixed or precision, alike), **settings}
    settings.setdefault("grad_reduce_in_fp32", mixed in _MIXED_PRECISIONS)
    for key, value in _DEFAULTS.items():
        settings.setdefault(key, value)
    settings["mtp_num_layers"] = _depths(name, settings, dimensions)
    settings = in_effect(settings)
    _check_sizes(settings)
    gpus = re.search(r"_(\d+)gpu_([a-z]+\d+)", name)
    number, gpu = (int(gpus[1]), gpus[2]) if gpus else (None, None)
    given = {
        key: value
        for key, value in settings.items()
        if _is_named(key) or value != (others or {}).get(key)
    }
    return Recipe(name, given, model, dimensions, number, gpu)


def _by_name(raw: Settings, others: Container[str]) -> dict[str, Value]:
    """Return the settings ``raw`` by the last word of their keys.

    Configs that have the same setting have to agree on its value.
    """
    settings: dict[str, Value] = {}
    for key, value in raw.items():
        config, name = _named(key, value, others)
        if name is None:
            continue
        if config == "peft":
            value = value if name == "peft" else settings.get("peft", "lora")
            name = "peft"
        if name == "pipeline_model_parallel_layout":
            value = layout_text(value)
        if settings.get(name, value) != value:
            raise ValueError(
                f"two names of one setting differ, {key}={value!r} and {name}={settings[name]!r}: "
                "write one of the two"
            )
        settings[name] = value
    return settings


def _named(key: str, value: Value, others: Container[str]) -> tuple[str, str | None]:
    """Return the config and the name of the setting ``key``.

    The name is None if no schedule depends on it.

    Raises:
        ValueError: there is no such setting.
    """
    config, _, name = key.rpartition(".")
    config = config.partition(".")[0]
    if name in _MODEL and isinstance(value, str):
        return config, "HF"
    if config == "peft" or name == "peft":
        kind = name in ("peft", "scheme", "type") and isinstance(value, str)
        return "peft", "peft" if kind else name
    if name in _OF_PRECISION and config in ("", "mixed_precision", "model"):
        return config, name
    name = OTHER_NAMES.get(name, name)
    if name == "mixed_precision" or _is_named(name):
        return config, name
    if config in _NOT_OF_SCHEDULES and not ("pack" in name and value):
        return config, None
    if name in others:
        return config, name
    raise ValueError(
        f"the setting {key} is unknown: neither `NAMES` of the recipes nor Megatron has it"
    )


def _is_named(name: str) -> bool:
    """Return whether schedules may depend on the setting ``name``, or on one that it stands for."""
    return OTHER_NAMES.get(name, name) in NAMES


def _check_sizes(settings: Settings) -> None:
    """Check that the settings without a default are there, and are sizes.

    Raises:
        ValueError: one is missing, or is no size.
    """
    for name in ("pipeline_model_parallel_size", *_NEEDED):
        size = settings.get(name)
        if size is None and name in _NEEDED:
            raise ValueError(f"the setting {name} is missing")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"the setting {name}={size!r} must be a whole number of at least 1")
    if settings.get("pipeline_model_parallel_size", 1) == 1:
        raise ValueError("the recipe has no pipeline: pipeline_model_parallel_size is 1")


def _model_of(
    name: str, settings: dict[str, Value], models: Mapping[str, Settings]
) -> tuple[str, Settings]:
    """Return the name of a recipe's model and its dimensions.

    The name is removed from ``settings``. A recipe that names no model has the model of other
    recipes whose names begin alike; or its own settings are the dimensions.
    """
    given = settings.pop("HF", None)
    known = _models_of_recipes() if given is None else {_without_variant(m): m for m in models}
    for model, dimensions in models.items():
        if given == model or (given is None and name == dimensions.get("recipe")):
            return model, dimensions
    found = known.get(_stem(name) if given is None else _without_variant(str(given)))
    if found is not None and found in models:
        return found, models[found]
    if all(settings.get(key) for key in _DIMENSIONS):
        return str(given or "its own dimensions"), {}
    if given is None:
        raise ValueError(
            "the recipe's model is unknown: the recipe names none, and lacks the sizes "
            f"{', '.join(_DIMENSIONS)}"
        )
    raise ValueError(f"the recipe's model {given} is unknown: recipes.json does not have it")


# Suffixes in names of fine-tuned and quantised models, which have the dimensions of the model
# without the suffix.
_VARIANT = re.compile(
    r"-(base|instruct|chat|thinking|reasoning|it|pt|hf|bf16|fp8|nvfp4|\d{4})(?=-|$)", re.IGNORECASE
)


def _without_variant(model: str) -> str:
    """Return the name ``model`` without its owner and without words on its training.

    The latter include words on quantisation.
    """
    return _VARIANT.sub("", model.rpartition("/")[2]).lower().removeprefix("meta-")


def _stem(name: str) -> str:
    """Return the model's name in the name of a recipe.

    It is ``llama3_70b`` in ``...:llama3_70b_pretrain_..``.
    """
    return re.split(r"_(?:pretrain|sft|peft|no_mtp)(?:_|$)", name.rpartition(":")[2])[0]


@cache
def _models_of_recipes() -> dict[str, str]:
    """Return the models of the recipes here, by the beginning of the recipes' names.

    Beginnings that belong to several models are omitted.
    """
    models: dict[str, set[str]] = {}
    for name, raw in read_recipes(RECIPES).items():
        if given := raw.get("model.HF"):
            models.setdefault(_stem(name), set()).add(given)
    for model, dimensions in read_models().items():
        if "recipe" in dimensions:
            models.setdefault(_stem(dimensions["recipe"]), set()).add(model)
    return {stem: next(iter(named)) for stem, named in models.items() if len(named) == 1}


# Settings that give a precision, besides the name of a mixed precision.
_OF_PRECISION = ("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe")


def _precision(name: str, mixed: str | None, settings: dict[str, Value]) -> str:
    fields = {field: settings.pop(field, None) for field in _OF_PRECISION}
    if mixed is not None and mixed not in _MIXED_PRECISIONS:
        raise ValueError(f"the recipe's setting mixed_precision={mixed!r} is unknown")
    if fields["fp4"]:
        return "nvfp4"
    if fields["fp8"]:
        recipe = fields["fp8_recipe"] or "tensorwise"  # Megatron-Bridge's default
        if recipe not in _FP8_RECIPES:
            raise ValueError(f"the recipe's setting fp8_recipe={recipe!r} is unknown")
        return _FP8_RECIPES[recipe]
    if words := re.findall("|".join(_PRECISIONS), name.partition(":")[2]):
        return _PRECISIONS[words[-1]]
    if mixed is not None:
        return _MIXED_PRECISIONS[mixed]
    for precision in ("fp16", "bf16"):
        if fields[precision]:
            return precision
    if settings.get("pipeline_dtype") in ("torch.bfloat16", "bf16"):
        return "bf16"
    raise ValueError(
        "the recipe's precision is unknown: neither its name nor mixed_precision states one"
    )


def _depths(name: str, settings: Settings, dimensions: Settings) -> int | None:
    """Return the number of layers for multi-token prediction.

    The number comes from the recipe's settings if they have one, else from its layout, else from
    its model, as in Megatron-Bridge.
    """
    if settings.get("mtp_num_layers") or "_no_mtp_" in name:
        return settings.get("mtp_num_layers")
    layout = settings.get("pipeline_model_parallel_layout")
    if layout is not None:
        return expanded(layout).count("m") or None
    return dimensions.get("mtp_num_layers") or None


def in_effect(given: Settings) -> dict[str, Value]:
    """Return the settings ``given`` as they take effect in Megatron and Megatron-Bridge.

    Settings without effect are removed, as some need others.
    """
    settings = dict(given)
    on = settings.get

    def without_effect(*names: str, unless: object) -> None:
        if not unless:
            for name in names:
                settings.pop(name, None)

    is_parallel = on("tensor_model_parallel_size", 1) > 1
    without_effect("sequence_parallel", "expert_tensor_parallel_size", unless=is_parallel)
    without_effect("tp_comm_overlap", unless=is_parallel and on("sequence_parallel"))
    without_effect("cross_entropy_fusion_impl", unless=on("cross_entropy_loss_fusion"))
    without_effect("mtp_use_repeated_layer", unless=on("mtp_num_layers"))
    experts = [name for name in settings if name.startswith("moe_")]
    without_effect(*experts, "expert_tensor_parallel_size", unless=on("num_experts"))
    is_flex = on("moe_token_dispatcher_type") == "flex"
    without_effect("moe_flex_dispatcher_backend", unless=is_flex)
    without_effect(*_OF_PRECISION_AWARE, unless=on("use_precision_aware_optimizer"))
    _say_what_is_captured(settings)
    # Megatron-Bridge by default switches on the overlap of gradient reductions, too.
    if on("overlap_param_gather"):
        settings["overlap_grad_reduce"] = True
    is_selective = on("recompute_granularity") == "selective"
    without_effect("recompute_modules", unless=is_selective)
    if is_selective:
        settings.setdefault("recompute_modules", ["core_attn"])
    if on("microbatch_group_size_per_vp_stage") == on("pipeline_model_parallel_size"):
        settings.pop("microbatch_group_size_per_vp_stage", None)
    return settings


def _say_what_is_captured(settings: dict[str, Value]) -> None:
    scope = settings.pop("cuda_graph_scope", "full")
    if settings.get("cuda_graph_impl") == "transformer_engine":
        settings["cuda_graph_scope"] = [WHOLE_LAYERS] if scope in ("full", []) else scope
