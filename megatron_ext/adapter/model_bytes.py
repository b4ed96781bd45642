"""What a rank's share of the model takes, by Megatron's own estimate."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from megatron_ext.adapter.layers import prediction_depths
from megatron_ext.schedule.model.model_memory import ModelBytes
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

_WEIGHT, _GRADIENT, _BYTES = 2, 4, 18  # of a parameter: the optimizer has the rest of 18


def bytes_of_ranks(
    args: Any,
    placement: Placement,
    layers: Sequence[int],
    vocabulary: VocabularyParallel = VocabularyParallel.NONE,
) -> list[ModelBytes]:
    """Bytes of parameters, gradients and optimizer states on each pipeline rank.

    Megatron counts for bf16 training with fp32 gradients and AdamW: 18 bytes a parameter, of which
    the distributed optimizer shares 12 among data-parallel ranks. It knows the most loaded rank of
    its own placement only, so each rank is put to it as a model without a pipeline; and the sum
    only, so each is put to it a second time without the distributed optimizer, to be divided.

    Args:
        args: validated arguments, with their padded vocabulary (None counts as no vocabulary).
        layers: transformer layers of each stage.
    """
    first_layer = [0, *accumulate(layers)]
    rank_bytes = []
    for stages in placement.stages_of:
        of_rank = [range(*first_layer[s : s + 2]) for s in stages]
        model = _model_of(args, placement, stages, of_rank)
        if vocabulary is not VocabularyParallel.NONE:
            model.padded_vocab_size = (args.padded_vocab_size or 0) // placement.ranks
            model.untie_embeddings_and_output_weights = args.untie_embeddings_and_output_weights
        together = float(compute_weight_and_optimizer_memory(model))
        model.use_distributed_optimizer = False
        parameters = float(compute_weight_and_optimizer_memory(model)) / _BYTES
        rank_bytes.append(
            ModelBytes(
                weights=_WEIGHT * parameters,
                gradients=_GRADIENT * parameters,
                optimizer=together - (_WEIGHT + _GRADIENT) * parameters,
            )
        )
    return rank_bytes


def checkpoint_bytes(args: Any, placement: Placement, layers: Sequence[int]) -> float | None:
    """What a checkpoint takes on disk, about; None with experts, whose copies are not counted."""
    if args.num_experts is not None:
        return None
    whole = copy.copy(args)
    whole.use_distributed_optimizer = False
    ranks = bytes_of_ranks(whole, placement, layers)
    saved = sum(rank.weights + (0 if args.no_save_optim else rank.optimizer) for rank in ranks)
    size: int = args.tensor_model_parallel_size
    return saved * size


def _model_of(
    args: Any, placement: Placement, stages: Sequence[int], layers: Sequence[range]
) -> Any:
    """``args`` of a model that is what a rank with ``stages`` has."""
    embedding, head = 0 in stages, placement.last in stages
    model = copy.copy(args)
    model.world_size = args.world_size // args.pipeline_model_parallel_size
    model.pipeline_model_parallel_size = 1
    # What shares optimizer states: Megatron's estimate leaves context-parallel ranks out.
    model.data_parallel_size = args.data_parallel_size * args.context_parallel_size
    depths = prediction_depths(args) if head else 0
    # Megatron counts those of multi-token prediction by the last of the layers, of which there may
    # be none here.
    more = min(depths, 1) if args.mtp_use_repeated_layer else depths
    model.mtp_num_layers = None
    model.num_layers = sum(map(len, layers)) + more
    # A pipeline's ends each have a table, tied or not, and multi-token prediction has one to look
    # up in; on one rank without a pipeline they share it.
    tables = embedding + head + (depths > 0)
    if placement.stages == 1:
        tables = 1 + args.untie_embeddings_and_output_weights
    model.padded_vocab_size = tables * (args.padded_vocab_size or 0)
    model.untie_embeddings_and_output_weights = False
    if args.num_experts is not None:
        own = [layer for part in layers for layer in part] + more * [args.num_layers - 1]
        model.moe_layer_freq = [_is_moe(args, layer) for layer in own]
    return model


def _is_moe(args: Any, layer: int) -> int:
    frequency = args.moe_layer_freq
    return int(layer % frequency == 0) if isinstance(frequency, int) else int(frequency[layer])
