"""Models as Megatron builds them on each rank, on the meta device: real dimensions without
memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.arguments import core_transformer_config_from_args
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

# Settings that only Transformer Engine and Apex support, and that change no parameters.
_LOCAL = {
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
    "sequence_parallel": False,
    "context_parallel_size": 1,
}


@contextlib.contextmanager
def fake_ranks(args: Any, pipeline_rank: int) -> Iterator[None]:
    """Create Megatron's groups without other processes, as the first of the ranks with this
    ``pipeline_rank`` has them."""
    of_pipeline_rank = args.world_size // args.pipeline_model_parallel_size
    dist.init_process_group(
        "fake", store=FakeStore(), rank=pipeline_rank * of_pipeline_rank, world_size=args.world_size
    )
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def chunks_of(args: Any) -> list[GPTModel]:
    """Return the chunks of this rank for validated ``args``, with local layers."""
    config = core_transformer_config_from_args(SimpleNamespace(**vars(args) | _LOCAL))
    config.persist_layer_norm = False  # only Transformer Engine and Apex support this setting, too
    config.use_cpu_initialization, config.perform_initialization = True, False
    number = args.virtual_pipeline_model_parallel_size
    with (
        torch.device("meta"),
        mock.patch("torch.cuda.current_device", lambda: "meta"),
        mock.patch("torch.cuda.Stream"),
        # These classes store the first stream they get, and a mocked stream would outlive this
        # block.
        mock.patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None),
        mock.patch.object(SharedExpertMLP, "stream", None),
        mock.patch("torch.Tensor.cuda", lambda tensor: tensor),
    ):
        return [
            _chunk(args, config, None if number is None else chunk, number)
            for chunk in range(number or 1)
        ]


def _chunk(args: Any, config: Any, vp_stage: int | None, number: int | None) -> GPTModel:
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
    )
    mtp = None
    if args.mtp_num_layers:
        layer = get_gpt_decoder_layer_specs(config, False, args.normalization)[-1]
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)
    assert isinstance(block, TransformerBlockSubmodules)
    at = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        config,
        block,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    return model.to(args.params_dtype)  # Megatron's Float16Module converts a model in this way


def of_experts(parameter: nn.Parameter) -> bool:
    """Return whether only ranks with the same experts reduce the gradient of ``parameter``."""
    return not getattr(parameter, "allreduce", True)


def elements_kept(args: Any, chunk: nn.Module, bucket: int | None) -> tuple[int, int]:
    """Return how many elements the gradient buffers of ``chunk`` have, and for how many of them the
    first data-parallel rank stores optimizer states. Both follow from Megatron's own layout."""
    parameters = list(chunk.parameters())
    if not args.use_distributed_optimizer:
        whole = sum(parameter.numel() for parameter in parameters)
        return whole, whole
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    expert_ranks = parallel_state.get_expert_data_parallel_group().size()
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        pad_buckets_for_high_nccl_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
    )
    layouts = DistributedOptimizer.compute_full_param_layout(
        parameters, bucket, ranks, settings, expert_ranks
    ).layouts
    in_buffers = shared = 0
    for key, layout in layouts.items():
        in_buffers += layout.bucket_indices[-1][1]
        parts = expert_ranks if key.is_expert_parallel else ranks
        for start, end, bucket_number in layout.param_index_map.values():
            bucket_start, bucket_end = layout.bucket_indices[bucket_number]
            own_end = bucket_start + (bucket_end - bucket_start) // parts
            shared += max(0, min(end, own_end) - start)
    return in_buffers, shared
