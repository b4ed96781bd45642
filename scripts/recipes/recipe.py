"""A recipe's settings, resolved: with what its name, its model and Megatron-Bridge say besides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.recipes.feature import Feature, Value
from scripts.recipes.vocabulary import OTHER_NAMES, WHOLE_LAYERS, features, setting

HERE = Path(__file__).parent
RECIPES = HERE / "recipes.json"
MODELS = HERE / "models.json"

Settings = Mapping[str, Value]

# The configs that a recipe is made of, by the first word of its keys.
_CONFIGS = ("checkpoint", "comm_overlap", "dataset", "ddp", "model", "optimizer", "peft", "train")

_PRECISIONS = {  # as names of recipes have them
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8cs": "fp8_cs",
    "fp8ds": "fp8_delayed",
    "fp8mx": "fp8_mx",
    "fp8sc": "fp8_sc",
    "nvfp4": "nvfp4",
}
_MIXED_PRECISIONS = {  # Megatron-Bridge's names; all of these add gradients up in fp32
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8_delayed",
    "bf16_with_fp8_current_scaling_mixed": "fp8_cs",
    "bf16_with_mxfp8_mixed": "fp8_mx",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8_sc",
    "bf16_with_nvfp4_mixed": "nvfp4",
}

# What a model brings along, where its recipe says nothing.
_OF_MODELS = (
    *("untie_embeddings_and_output_weights", "group_query_attention", "qk_layernorm"),
    *("multi_latent_attention", "window_size", "softmax_type", "attention_output_gate"),
    *("head_wise_attn_gate", "experimental_attention_variant", "enable_hyper_connections"),
    *("hybrid_layer_pattern", "num_experts", "moe_layer_freq", "moe_shared_expert_gate"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_n_hash_layers"),
    *("moe_router_num_groups", "mtp_use_repeated_layer", "cp_comm_type"),
)
# Megatron-Bridge's own, where a recipe says nothing.
_DEFAULTS: Settings = {
    "transformer_impl": "transformer_engine",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}
_OF_PRECISION_AWARE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True)
class Recipe:
    """A recipe of Megatron-Bridge's, understood.

    Attributes:
        settings: by the vocabulary's names, as they take effect.
        model: the name of its model, and ``dimensions`` by Megatron's arguments' names.
        gpus, gpu: how many and which, of its name; None where it has none.
    """

    name: str
    settings: Settings
    model: str
    dimensions: Settings
    gpus: int | None
    gpu: str | None

    @property
    def ranks(self) -> int:
        """Of a pipeline."""
        return int(self.settings["pipeline_model_parallel_size"])

    @property
    def layout(self) -> str | None:
        return self.settings.get("pipeline_model_parallel_layout")

    @cached_property
    def chunks(self) -> int:
        """On a rank: as it says, or as many as its layout has."""
        if self.layout is not None:
            return max(len(expanded(self.layout).split("|")) // self.ranks, 1)
        return int(self.settings.get("virtual_pipeline_model_parallel_size") or 1)

    @property
    def schedule(self) -> str:
        """The schedule that takes the place of stock's: that with the same stages."""
        if self.chunks == 1:
            return "zb-h1"
        group = self.settings.get("microbatch_group_size_per_vp_stage")
        return f"interleaved-zb:vpp={self.chunks}" + (f",group={group}" if group else "")

    @property
    def kind(self) -> str:
        return "line" if self.chunks == 1 else "loop"

    @cached_property
    def features(self) -> frozenset[Feature]:
        """What it switches on, and a test has to show."""
        return features(self.settings)

    @property
    def parallel_copies(self) -> int | None:
        """Its data-parallel size; None where that is not known or no whole number."""
        names = ("tensor", "pipeline", "context")
        of_a_copy = 1
        for name in names:
            key = "context_parallel_size" if name == "context" else f"{name}_model_parallel_size"
            of_a_copy *= int(self.settings.get(key) or 1)
        copies, rest = divmod(self.gpus or 0, of_a_copy)
        return None if rest else copies or None

    @property
    def bubble(self) -> float | None:
        """The share of a step that stock's schedule waits at equal stage times; None where the
        number of microbatches is not known."""
        if self.parallel_copies is None:
            return None
        at_once = self.parallel_copies * self.settings["micro_batch_size"]
        microbatches = self.settings["global_batch_size"] / at_once
        waits = (self.ranks - 1) / (self.chunks * microbatches)
        return float(waits / (1 + waits))


def expanded(layout: str) -> str:
    """A layout without its short forms: ``Et*2|(t|)*2L`` is ``Ett|t|t|L``. Commas part nothing."""
    text = layout.replace(",", "").replace(" ", "")
    while short := re.search(r"\(([^()]*)\)\*(\d+)", text):
        text = text.replace(short[0], short[1] * int(short[2]))
    while short := re.search(r"([A-Za-z|])\*(\d+)", text):
        text = text.replace(short[0], short[1] * int(short[2]), 1)
    return text


def read_recipes(path: Path) -> dict[str, Settings]:
    """The recipes of a file, by name, as they stand.

    Raises:
        ValueError: it is no such file.
    """
    try:
        recipes = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(recipes, dict) or not all(isinstance(r, dict) for r in recipes.values()):
        raise ValueError(f"{path} is not a mapping of recipes to their settings")
    return recipes


def read_models() -> dict[str, Settings]:
    """The models by name. A ``recipe`` is that of a model which its recipe does not name."""
    return json.loads(MODELS.read_text())


def resolve(name: str, raw: Settings, models: Mapping[str, Settings]) -> Recipe:
    """The recipe ``name`` with the settings ``raw``, understood.

    Raises:
        ValueError: a key, a value or the model is unknown.
    """
    settings = _by_name(raw)
    mixed = raw.get("mixed_precision")
    model = _model_of(name, settings.pop("HF", None), models)
    dimensions = models[model]
    for key in _OF_MODELS:
        if key in dimensions or key == "untie_embeddings_and_output_weights":
            settings.setdefault(key, dimensions.get(key, False))
    if "_peft_" in name:  # whatever of its adapters is not Bridge's default
        settings["peft"] = "lora"
    if "vision" in dimensions:
        settings["vision"] = True
    settings["precision"] = _precision(name, mixed, settings)
    settings.setdefault("grad_reduce_in_fp32", mixed in _MIXED_PRECISIONS)
    for key, value in _DEFAULTS.items():
        settings.setdefault(key, value)
    settings["mtp_num_layers"] = _depths(name, settings, dimensions)
    settings = in_effect(settings)
    gpus = re.search(r"_(\d+)gpu_([a-z]+\d+)", name)
    number, gpu = (int(gpus[1]), gpus[2]) if gpus else (None, None)
    recipe = Recipe(name, settings, model, dimensions, number, gpu)
    recipe.features  # noqa: B018  names and values are understood here, and not later
    return recipe


def _by_name(raw: Settings) -> dict[str, Value]:
    """``raw`` by the last word of its keys; a switch that two configs have is on if one is."""
    settings: dict[str, Value] = {}
    for key, value in raw.items():
        config, _, name = key.partition(".")
        name = name.rpartition(".")[2]
        if key == "mixed_precision":
            continue
        if config not in _CONFIGS:
            raise ValueError(f"{key} is unknown: its config is none of {', '.join(_CONFIGS)}")
        if config == "peft":
            settings["peft"] = "lora"
            continue
        name = OTHER_NAMES.get(name, name)
        if name != "HF":
            try:
                setting(name)
            except ValueError as error:
                raise ValueError(f"{key} is unknown: {error}") from None
        value = _as_list(value)
        if settings.get(name, value) != value:
            raise ValueError(f"{key}={value!r} and {name}={settings[name]!r}: which is it?")
        settings[name] = value
    return settings


def _as_list(value: Value) -> Value:
    """Lists stand as text in a recipe."""
    if isinstance(value, str) and re.fullmatch(r"\[('[\w.]*'(, )?)*\]", value):
        return re.findall(r"'([\w.]*)'", value)
    return value


def _model_of(name: str, given: str | None, models: Mapping[str, Settings]) -> str:
    if given in models:
        return str(given)
    for model, dimensions in models.items():
        if name == dimensions.get("recipe"):
            return model
    raise ValueError(f"the model {given} is unknown: scripts/recipes/models.json has it not")


def _precision(name: str, mixed: str | None, settings: Settings) -> str:
    words = re.findall("|".join(_PRECISIONS), name.partition(":")[2])
    if mixed is not None and mixed not in _MIXED_PRECISIONS:
        raise ValueError(f"mixed_precision={mixed!r} is unknown")
    if words:
        return _PRECISIONS[words[-1]]
    if mixed is not None:
        return _MIXED_PRECISIONS[mixed]
    if settings.get("pipeline_dtype") == "torch.bfloat16":
        return "bf16"
    raise ValueError("its precision is unknown: neither its name nor mixed_precision has it")


def _depths(name: str, settings: Settings, dimensions: Settings) -> int | None:
    """Of multi-token prediction: its own; its layout's; its model's, as Bridge has it of that."""
    if settings.get("mtp_num_layers") or "_no_mtp_" in name:
        return settings.get("mtp_num_layers")
    layout = settings.get("pipeline_model_parallel_layout")
    if layout is not None:
        return expanded(layout).count("m") or None
    return dimensions.get("mtp_num_layers") or None


def in_effect(given: Settings) -> dict[str, Value]:
    """``given`` as Megatron and Bridge have them take effect: some switches need others."""
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
    if on("overlap_param_gather"):  # of which Bridge makes both by default
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
