"""Sizes that Megatron's own validation lets through, or trips over with an error that names no
flag.

With such sizes ranks would end in the middle of the set-up or of a step, or loop forever, each with
an error of its own. Such sizes are refused earlier, by an error of one line that names the flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.adapter.layout_arguments import CHUNKS, ENDS, LAYERS_OF_CHUNK, LAYOUT, PATTERN
from megatron_ext.adapter.step_sizes import evaluated_microbatches, step_sizes
from megatron_ext.base.words import argument_flag, counted

_COUNTS = (  # arguments of Megatron that must be at least 1
    *("hidden_size", "num_attention_heads", "kv_channels"),
    *("seq_length", "encoder_seq_length", "decoder_seq_length", "max_position_embeddings"),
    *("micro_batch_size", "global_batch_size", "eval_micro_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *(CHUNKS, LAYERS_OF_CHUNK, *ENDS, "microbatch_group_size_per_vp_stage"),
    *("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
    "log_interval",  # Megatron divides by it after the first step
)
_FLAGS = {
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage"
}


def refuse_counts(args: Any) -> None:
    """Raise ValueError if a count in ``args``, which Megatron has not validated yet, is below 1."""
    counts = [*_COUNTS]
    # A hybrid model's number of layers comes from its pattern, not from --num-layers.
    if getattr(args, PATTERN, None) is None:
        counts += ["num_layers", "encoder_num_layers", "decoder_num_layers"]
    if getattr(args, "group_query_attention", False):
        counts.append("num_query_groups")
    if getattr(args, "num_experts", None):
        counts.append("moe_router_topk")
    if getattr(args, "eval_iters", None):
        counts.append("eval_global_batch_size")
    # With a size below 1 Megatron would loop forever.
    if getattr(args, "recompute_method", None) == "uniform":
        counts.append("recompute_num_layers")
    for name in counts:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            flag = _FLAGS.get(name, argument_flag(name))
            raise ValueError(f"{flag} {value}: there must be at least one; write 1 or more")


def refuse_sizes(args: Any) -> None:
    """Raise ValueError if sizes in ``args`` conflict that Megatron's validation has accepted."""
    _refuse_layout(args)
    for frequency in _FREQUENCIES:
        if frequency.matters(args):
            frequency.refuse(args)
    _refuse_heads(args)
    if args.num_experts:
        _refuse_experts(args)


def refuse_stock_steps(args: Any) -> None:
    """Raise ValueError if Megatron's own interleaved schedule refuses a number of microbatches.

    Checked are the training steps and the evaluations of validated ``args``.
    """
    ranks, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    if chunks is None:
        return
    group = args.microbatch_group_size_per_vp_stage or ranks
    # Later batch sizes of the ramp-up count only if the training reaches them.
    steps = [(size.microbatches, "a step") for size in step_sizes(args) if size.share]
    evaluated = evaluated_microbatches(args)
    if evaluated is not None:
        steps.append((evaluated, "an evaluation"))
    for microbatches, step in steps:
        if not ranks <= group <= microbatches:
            why = f"groups of {group} must have from {ranks} (pipeline ranks) to {microbatches}"
        elif 0 < microbatches % group < ranks:
            why = f"the last group has {microbatches % group}, which is less than {ranks} ranks"
        else:
            continue
        batch = "--eval-global-batch-size" if step == "an evaluation" else "--global-batch-size"
        raise ValueError(
            f"{batch} makes {step} of {counted(microbatches, 'microbatch')}, which Megatron's own "
            f"interleaved schedule refuses: {why}; write a batch with a multiple of {group} "
            f"microbatches, or --pipeline-schedule interleaved-zb:vpp={chunks}, which takes any "
            f"number"
        )


def refuse_layout(layout: str, ranks: int, layers: int, depths: int | None) -> None:
    """Raise ValueError, with Megatron's reason, if Megatron refuses the pipeline ``layout``.

    The layout must fit the pipeline ``ranks``, the ``layers`` and the ``depths`` of multi-token
    prediction.
    """
    try:
        PipelineParallelLayerLayout(layout, ranks).validate_layer_layout(layers, depths)
    except (AssertionError, IndexError, NotImplementedError) as error:
        reason = "it has no layers" if isinstance(error, IndexError) else error
        raise ValueError(f"{argument_flag(LAYOUT)} {layout}: {reason}") from None


def _refuse_layout(args: Any) -> None:
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        ranks = args.pipeline_model_parallel_size
        refuse_layout(layout, ranks, args.num_layers, args.mtp_num_layers)


@dataclass(frozen=True)
class _Frequency:
    """Argument that says which layers are of a kind: every n-th, or a list with a number a layer.

    Attributes:
        setting: name of the argument.
        matters: tells whether the layers of ``args`` depend on the argument.
        takes_more: whether a list may go on after the last layer.
    """

    setting: str
    matters: Callable[[Any], bool]
    takes_more: bool = False

    def refuse(self, args: Any) -> None:
        """Raise ValueError if the argument does not tell the kind of every layer."""
        value = getattr(args, self.setting)
        flag = argument_flag(self.setting)
        if value == 0:
            raise ValueError(
                f"{flag} 0: a frequency of N means one layer in every N, so N cannot be 0; write "
                "1 or more"
            )
        if not isinstance(value, list):
            return
        layers = args.num_layers
        if len(value) < layers or (len(value) > layers and not self.takes_more):
            raise ValueError(
                f"{flag} has {len(value)} numbers, and the model has {counted(layers, 'layer')}: "
                f"write one for each layer"
            )
        others = [number for number in value if number not in (0, 1)]
        if others and not self.takes_more:
            raise ValueError(f"{flag} has {others[0]!r} in its list: write 0 or 1 for each layer")


def _has_no_pattern(args: Any) -> bool:
    return getattr(args, PATTERN, None) is None


_FREQUENCIES = (
    _Frequency("moe_layer_freq", lambda args: args.num_experts and _has_no_pattern(args)),
    _Frequency(
        "linear_attention_freq",
        lambda args: args.experimental_attention_variant == "gated_delta_net",
    ),
    _Frequency("window_attn_skip_freq", lambda args: args.window_size is not None, takes_more=True),
)


def _refuse_heads(args: Any) -> None:
    groups, heads = args.num_query_groups, args.num_attention_heads
    if args.group_query_attention and not args.multi_latent_attention and heads % groups:
        raise ValueError(
            f"--num-query-groups {groups}: {heads} heads (--num-attention-heads) cannot share "
            f"{groups} keys evenly; write a divisor of {heads}"
        )


def _refuse_experts(args: Any) -> None:
    experts, chosen = args.num_experts, args.moe_router_topk
    if chosen > experts:
        raise ValueError(
            f"--moe-router-topk {chosen}: there are {counted(experts, 'expert')} to choose from "
            f"(--num-experts); write at most {experts}"
        )
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    tensor *= getattr(args, "expert_gtp_weight_remat_size", 1)
    parts = tensor, args.expert_model_parallel_size, args.pipeline_model_parallel_size
    copy = parts[0] * parts[1] * parts[2]
    if args.world_size % copy:
        raise ValueError(
            f"--expert-model-parallel-size {parts[1]}: the experts' tensor x expert x pipeline "
            f"parallel sizes are {' x '.join(map(str, parts))} = {copy}, which does not divide "
            f"{counted(args.world_size, 'rank')}; write sizes whose product divides the number of "
            f"ranks, or use a multiple of {copy} ranks"
        )
