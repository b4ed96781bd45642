"""Megatron's settings, read into the description of a model and of its execution.

Settings are anything with the names of Megatron's arguments: parsed arguments, a TransformerConfig,
or the contents of a file. Missing settings have Megatron's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.model import SYMBOLS, Model, why_no_estimate_with
from megatron_ext.cost_model.tower import Tower, TowerTraining, tower_of

_Get = Callable[..., Any]
# Characters that separate parts of a hybrid model's pattern, such as its stages.
_BEFORE_DEPTHS, _SEGMENT_END = "/", "|"
_ROTARY = ("rope", "mrope", "yarn")
# Arguments for the sizes of multi-latent attention. Megatron gives them default values even if the
# attention is another one.
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
# Settings that change what a layer does but that the cost model does not know, each with a name to
# show users.
_NOT_DESCRIBED = {
    "enable_hyper_connections": "hyper connections",
    "head_wise_attn_gate": "gates of attention's heads",
    "sliding_attention_setting": "other heads in sliding windows",
}


def describe(settings: Any, vocabulary: int | None = None) -> Model:
    """Return the model that ``settings``, Megatron's arguments or a config, describe.

    Args:
        vocabulary: padded size; None takes ``padded_vocab_size``, or 0 if that is not known yet.
    """
    get = _reader(settings)
    hidden_size, heads = settings.hidden_size, settings.num_attention_heads
    ffn = get("ffn_hidden_size") or 4 * hidden_size
    # Megatron's arguments say 1 group even if the flag for query groups is missing and attention
    # has no groups. A TransformerConfig lacks the flag.
    grouped = get("group_query_attention", True)
    layers = layers_of(settings)
    number = get("num_experts") or get("num_moe_experts") or 0
    positions = get("position_embedding_type", "rope")
    is_latent = bool(get("multi_latent_attention")) or "+" in "".join(layers)
    return Model(
        layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=(get("num_query_groups") if grouped else None) or heads,
        kv_channels=get("kv_channels") or hidden_size // heads,
        ffn_hidden_size=ffn,
        vocabulary=(get("padded_vocab_size") or 0) if vocabulary is None else vocabulary,
        gated_linear_unit=bool(get("gated_linear_unit") or get("swiglu")),
        untie_embeddings_and_output_weights=bool(get("untie_embeddings_and_output_weights")),
        add_bias_linear=bool(get("add_bias_linear", True)),
        add_qkv_bias=bool(get("add_qkv_bias")),
        qk_layernorm=bool(get("qk_layernorm")),
        normalization=get("normalization", "LayerNorm"),
        softmax_type=get("softmax_type", "vanilla"),
        attention_output_gate=bool(get("attention_output_gate")),
        window_size=_window(get("window_size")),
        max_position_embeddings=(
            get("max_position_embeddings") or 0 if positions == "learned_absolute" else 0
        ),
        is_rotary=positions in _ROTARY,
        multi_latent_attention=is_latent,
        **_numbers(get, *(_LATENT if is_latent else ())),
        **_numbers(
            get,
            *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_num_key_heads", "linear_num_value_heads"),
            *("mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
            *("moe_router_topk", "moe_shared_expert_intermediate_size", "moe_latent_size"),
            *("moe_router_num_groups", "moe_router_group_topk"),
        ),
        mamba_num_heads=_mamba_heads(get, hidden_size),
        num_experts=number,
        moe_ffn_hidden_size=get("moe_ffn_hidden_size") or ffn,
        moe_shared_expert_gate=bool(get("moe_shared_expert_gate")),
        moe_router_enable_expert_bias=bool(get("moe_router_enable_expert_bias")),
        mtp_num_layers=_depths(get),
        mtp_use_repeated_layer=bool(get("mtp_use_repeated_layer")),
        mtp_layer=_layer_of_depths(get, layers),
        is_frozen=bool(get("freeze_language_model")),
        tower=_tower(get, hidden_size),
        sparse_attention=_sparse_attention(get) or "",
        unknown=_unknown(get, layers),
    )


def why_no_estimate(settings: Any) -> str | None:
    """Return why seconds of the model of ``settings`` cannot be estimated; None if they can.

    The sizes of the model need not be known.
    """
    return why_no_estimate_with(_sparse_attention(_reader(settings)) or "")


def layers_of(settings: Any) -> tuple[str, ...]:
    """Return the parts of each layer that ``settings`` describe, in the symbols of `Model`."""
    get = _reader(settings)
    if pattern := get("hybrid_layer_pattern"):
        return tuple(pattern.partition(_BEFORE_DEPTHS)[0].replace(_SEGMENT_END, ""))
    number = get("num_layers") or 0
    is_linear = [False] * number
    if get("experimental_attention_variant") == "gated_delta_net":
        is_linear = _by_layer(get("linear_attention_freq"), number, first=1)
    is_sliding = [False] * number
    if _window(get("window_size")):
        skipped = get("window_attn_skip_freq")
        is_sliding = [True] * number if skipped is None else _by_layer(skipped, number, first=1)
    has_experts = [False] * number
    if get("num_experts") or get("num_moe_experts"):
        every = get("moe_layer_freq", 1)
        if isinstance(every, int):
            has_experts = [layer % every == 0 for layer in range(number)]
        else:
            has_experts = _by_layer(every, number, first=0)
    return tuple(
        ("G" if linear else "w" if sliding else "*") + ("E" if experts else "-")
        for linear, sliding, experts in zip(is_linear, is_sliding, has_experts, strict=True)
    )


# Assumed share of the time of experts' messages that overlapped passes hide, unless the GPU reaches
# less (`Rates.overlap`). Published shares differ by a factor of three.
OVERLAP = 1 / 2


def execution_of(
    settings: Any,
    sequence: int,
    micro_batch: int,
    captured: frozenset[str] = frozenset(),
    pipeline_span: int = 0,
    has_one_queue: bool = False,
) -> Execution:
    """Return how a microbatch is executed under ``settings``, Megatron's arguments or a config.

    Args:
        sequence: tokens of a sample, on all context-parallel ranks together.
        captured, pipeline_span, has_one_queue: as in `Execution`.
    """
    get = _reader(settings)
    tensor_parallel = get("tensor_model_parallel_size") or 1
    granularity = get("recompute_granularity")
    exchange = get("cp_comm_type") or "p2p"
    return Execution(
        sequence=sequence,
        micro_batch=micro_batch,
        tensor_parallel=tensor_parallel,
        context_parallel=get("context_parallel_size") or 1,
        expert_parallel=get("expert_model_parallel_size") or 1,
        expert_tensor_parallel=get("expert_tensor_parallel_size") or tensor_parallel,
        sequence_parallel=bool(get("sequence_parallel")),
        precision=_precision(get),
        recompute=granularity == "full",
        recompute_method=get("recompute_method") or "uniform",
        recompute_num_layers=get("recompute_num_layers") or 0,
        recompute_modules=frozenset(
            (get("recompute_modules") or ["core_attn"]) if granularity == "selective" else []
        ),
        transformer_engine=get("transformer_impl", "") == "transformer_engine",
        hidden_dropout=get("hidden_dropout", 0.1),
        attention_dropout=get("attention_dropout", 0.1),
        captured=captured,
        gathered_for_w=frozenset(
            ["inputs"] if get("transformer_impl", "") == "local" else ["inputs", "gradients"]
        ),
        userbuffers=_whole_in_userbuffers(get),
        loss_fusion=bool(get("cross_entropy_loss_fusion")),
        dispatcher=get("moe_token_dispatcher_type") or "allgather",
        context_exchange=exchange if isinstance(exchange, str) else exchange[0],
        pipeline_span=pipeline_span,
        overlap=OVERLAP if get("overlap_moe_expert_parallel_comm") else 0.0,
        is_frozen=bool(get("freeze_language_model")),
        has_one_queue=has_one_queue,
    )


def _reader(settings: Any) -> _Get:
    """Return a function that reads a setting by its name, with a default if it is missing or
    None."""

    def get(name: str, default: Any = None) -> Any:
        value = getattr(settings, name, None)
        return default if value is None else value

    return get


def _tower(get: _Get, hidden_size: int) -> Tower | None:
    """Return the vision tower that the settings describe; None if its sizes or tokens are not
    known."""
    sizes, patches = get("vision"), get("vision_tokens") or get("seq_length")
    if not isinstance(sizes, Mapping) or not patches:
        return None
    tower = tower_of(sizes, hidden_size, patches)
    if not get("freeze_vision_model"):
        return tower
    is_frozen = bool(get("freeze_vision_projection"))
    trained = TowerTraining.NOTHING if is_frozen else TowerTraining.PROJECTOR
    return replace(tower, trained=trained)


def _numbers(get: _Get, *names: str) -> dict[str, Any]:
    return {name: get(name) or 0 for name in names}


def _by_layer(frequency: int | Sequence[int], number: int, first: int) -> list[bool]:
    """Return for each of ``number`` layers whether Megatron's ``frequency`` selects it.

    A list selects the layers marked 1, and may have more entries than there are layers; an integer
    n selects all layers but every n-th, counted from ``first``.
    """
    if isinstance(frequency, int):
        return [(layer + first) % frequency != 0 for layer in range(number)]
    return [bool(listed) for listed in frequency[:number]]


def _window(size: Any) -> int:
    """Return how many tokens back an attention window reaches; 0 without limit.

    It is the first of Megatron's two sizes, of which -1 means no limit.
    """
    back = size[0] if isinstance(size, Sequence) else size
    return max(back or 0, 0)


def _mamba_heads(get: _Get, hidden_size: int) -> int:
    width = get("mamba_head_dim") or 0
    return get("mamba_num_heads") or (2 * hidden_size // width if width else 0)


def _depths(get: _Get) -> int:
    pattern: str = get("hybrid_layer_pattern", "")
    return pattern.count(_BEFORE_DEPTHS) or get("mtp_num_layers") or 0


def _layer_of_depths(get: _Get, layers: Sequence[str]) -> str:
    """Return the type of a layer of multi-token prediction.

    A hybrid model's pattern names it; otherwise it is that of the last layer.
    """
    pattern: str = get("hybrid_layer_pattern", "")
    if _BEFORE_DEPTHS in pattern:
        return pattern.split(_BEFORE_DEPTHS)[1]
    last = layers[-1] if layers else "*-"
    return f"{last[0]}-" if get("mtp_layer_is_dense") else last


def _precision(get: _Get) -> Precision:
    if get("fp4"):
        return Precision.FP4
    if get("fp8"):
        return Precision.MXFP8 if get("fp8_recipe") == "mxfp8" else Precision.FP8
    return Precision.BF16 if get("bf16") or get("fp16") else Precision.FP32


def _whole_in_userbuffers(get: _Get) -> frozenset[str]:
    """Return which matrices, ``column``- or ``row``-parallel, have an unsplit backward pass.

    The operands of these matrices are in Userbuffers.
    """
    if not get("tp_comm_overlap"):
        return frozenset()
    of_columns = not get("tp_comm_overlap_rs_dgrad")
    return frozenset(["row", "column"] if of_columns else ["row"])


def _sparse_attention(get: _Get) -> str | None:
    """Return Megatron's name of a sparse attention; None without one."""
    variant: str | None = get("experimental_attention_variant")
    return None if variant == "gated_delta_net" else variant


def _unknown(get: _Get, layers: Sequence[str]) -> tuple[str, ...]:
    words = [word for name, word in _NOT_DESCRIBED.items() if get(name)]
    if get("vision") and not isinstance(get("vision"), Mapping):
        words.append("a vision tower")
    if variant := _sparse_attention(get):
        words.append(f"attention of the kind {variant}")
    others = sorted(set("".join(layers)) - SYMBOLS)
    return (*words, *(f"layers {symbol} of the pattern" for symbol in others))
