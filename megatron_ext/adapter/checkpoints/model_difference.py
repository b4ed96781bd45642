"""Differences between the tensors of a checkpoint's model and those of a launch command's model.

Megatron looks in a checkpoint for each tensor of its model. If a tensor is missing or has another
shape, the launch ends; tensors that only the checkpoint has are ignored.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.model import Model


class Change(enum.Enum):
    """Kinds of difference between a model and a checkpoint.

    ``SHAPE``: a tensor has another shape. ``MORE``: the model has more tensors. ``LESS``: the
    checkpoint has more tensors.
    """

    SHAPE = enum.auto()
    MORE = enum.auto()
    LESS = enum.auto()


@dataclass(frozen=True)
class ModelDifference:
    """Difference between a checkpoint's model and a command's: a flag, and its value in each."""

    flag: str
    change: Change
    saved: Any
    wanted: Any

    def __str__(self) -> str:
        if isinstance(self.wanted, bool):
            without, with_it = ("with it", "without") if self.saved else ("without it", "with it")
            return f"{self.flag}: the checkpoint's model is {without}, the command's {with_it}"
        return f"{self.flag}: {self.saved} in the checkpoint, {self.wanted} in the command"


# Sizes of a model: another value gives tensors another shape, and 0 means no such tensor.
_SIZES: tuple[tuple[str, Callable[[Model], Any]], ...] = (
    ("--hidden-size", lambda model: model.hidden_size),
    ("--ffn-hidden-size", lambda model: model.ffn_hidden_size * _has(model, "-")),
    ("--max-position-embeddings", lambda model: model.max_position_embeddings),
    ("--num-experts", lambda model: model.num_experts),
    ("--moe-ffn-hidden-size", lambda model: model.moe_ffn_hidden_size * _has(model, "E")),
    (
        "--moe-shared-expert-intermediate-size",
        lambda model: model.moe_shared_expert_intermediate_size * _has(model, "E"),
    ),
    ("--moe-latent-size", lambda model: model.moe_latent_size * _has(model, "E")),
    ("--q-lora-rank", lambda model: model.q_lora_rank),
    ("--kv-lora-rank", lambda model: model.kv_lora_rank),
    ("--qk-head-dim", lambda model: model.qk_head_dim),
    ("--qk-pos-emb-head-dim", lambda model: model.qk_pos_emb_head_dim),
    ("--v-head-dim", lambda model: model.v_head_dim),
)
# Choices of a model: another choice gives tensors another shape.
_CHOICES: tuple[tuple[str, Callable[[Model], Any]], ...] = (
    ("--multi-latent-attention", lambda model: model.multi_latent_attention),
    ("--swiglu", lambda model: model.gated_linear_unit),
    ("--attention-output-gate", lambda model: model.attention_output_gate),
)
# Parts of a model: whether the model has them, or how often.
_PARTS: tuple[tuple[str, Callable[[Model], Any]], ...] = (
    ("--normalization LayerNorm", lambda model: model.normalization == "LayerNorm"),
    ("biases (--disable-bias-linear)", lambda model: model.add_bias_linear),
    ("--add-qkv-bias", lambda model: model.add_bias_linear or model.add_qkv_bias),
    ("--qk-layernorm", lambda model: model.qk_layernorm),
    ("--softmax-type learnable", lambda model: model.softmax_type == "learnable"),
    (
        "--untie-embeddings-and-output-weights",
        lambda model: model.untie_embeddings_and_output_weights,
    ),
    ("--moe-shared-expert-gate", lambda model: model.moe_shared_expert_gate),
    ("--moe-router-enable-expert-bias", lambda model: model.moe_router_enable_expert_bias),
    ("--mtp-num-layers", lambda model: model.mtp_num_layers),
)


def model_differences(saved: Any, args: Any) -> Iterator[ModelDifference]:
    """Yield the differences between the tensors of two models, given by their arguments.

    ``saved`` are the checkpoint's arguments, ``args`` the command's. Megatron lets the vocabulary's
    shapes differ, so they are not compared.
    """
    before, now = describe(saved), describe(args)
    yield from _of_layers(saved, args, before, now)
    for flag, value in _SIZES:
        yield from _difference(flag, value(before), value(now), is_size=True)
    if not now.multi_latent_attention:
        for flag, widths in (
            ("--num-attention-heads", (before.query_width, now.query_width)),
            ("--num-query-groups", (before.key_value_width, now.key_value_width)),
        ):
            if widths[0] != widths[1]:
                text = (f"{width} wide" for width in widths)
                yield ModelDifference(flag, Change.SHAPE, *text)
    for flag, value in _CHOICES:
        if value(before) != value(now):
            yield ModelDifference(flag, Change.SHAPE, value(before), value(now))
    for flag, value in _PARTS:
        yield from _difference(flag, value(before), value(now), is_size=False)


def _difference(flag: str, saved: Any, wanted: Any, *, is_size: bool) -> Iterator[ModelDifference]:
    if saved == wanted:
        return
    if is_size and saved and wanted:
        yield ModelDifference(flag, Change.SHAPE, saved, wanted)
    else:
        change = Change.MORE if wanted > saved else Change.LESS
        yield ModelDifference(flag, change, saved, wanted)


def _of_layers(saved: Any, args: Any, before: Model, now: Model) -> Iterator[ModelDifference]:
    """Yield the difference between the layers of two models.

    If all layers are of one kind, Megatron saves them together in one tensor for each parameter.
    Otherwise it saves them layer by layer.
    """
    layers = [[layer.replace("w", "*") for layer in model.layers] for model in (before, now)]
    if len(layers[0]) != len(layers[1]):
        yield ModelDifference("--num-layers", Change.SHAPE, len(layers[0]), len(layers[1]))
    elif layers[0] != layers[1]:
        yield ModelDifference("the kinds of layers", Change.SHAPE, *map(_in_words, layers))
    elif _is_by_layer(saved) != _is_by_layer(args):
        frequencies = (getattr(one, "moe_layer_freq", 1) for one in (saved, args))
        yield ModelDifference("--moe-layer-freq", Change.SHAPE, *frequencies)


def _is_by_layer(settings: Any) -> bool:
    frequency = getattr(settings, "moe_layer_freq", 1)
    has_experts = bool(getattr(settings, "num_experts", None))
    return has_experts and frequency != 1


def _in_words(layers: list[str]) -> str:
    return " ".join(layers)


def _has(model: Model, symbol: str) -> bool:
    return any(symbol in layer for layer in model.layers)
