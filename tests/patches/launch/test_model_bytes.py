"""Tests that the bytes of parameters, gradients and optimizer states on each rank are exactly
Megatron's.

Megatron builds its models on the meta device, with groups that have no other processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core import num_microbatches_calculator
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_ext.adapter import model_bytes
from megatron_ext.adapter.arguments import settle_vocabulary
from megatron_ext.adapter.dimensions import execution
from megatron_ext.adapter.layers import depths_of_stages, layers_of_stages
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.parameters import parameters_of_stage
from megatron_ext.launch.command import megatron_arguments
from scripts.evaluation.recipes.recipe import read_models
from tests.helpers import meta_models
from tests.helpers.combinations import at_night, nightly
from tests.helpers.latent_attention import take_local_attention
from tests.helpers.megatron_runs import model_flags

Setting = dict[str, Any]
BASE: Setting = {
    "pipeline_model_parallel_size": 2,
    "num_layers": 4,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "transformer_impl": "local",
    "bf16": True,
    "train_iters": 1,
}
LLAMA: Setting = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 32,
    "ffn_hidden_size": 320,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
EXPERTS: Setting = LLAMA | {
    "num_experts": 8,
    "moe_ffn_hidden_size": 160,
    "moe_router_topk": 2,
    "moe_layer_freq": "[0,1,1,1]",
    "moe_shared_expert_intermediate_size": 96,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
}
LATENT: Setting = {
    "multi_latent_attention": True,
    "group_query_attention": None,
    "num_query_groups": None,
    "kv_channels": None,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24,
    "qk_layernorm": True,
}
SHARED: Setting = {"use_distributed_optimizer": True}
SETTINGS: dict[str, Setting] = {
    "GPT, tied, biases and learned positions": {},
    "Llama, TP 2": LLAMA | {"tensor_model_parallel_size": 2},
    "experts, EP 2, distributed optimizer": EXPERTS | SHARED,
    "latent attention, multi-token prediction": LATENT
    | EXPERTS
    | LATENT
    | {"mtp_num_layers": 1}
    | SHARED,
    "multi-token prediction on a stage before the loss": LLAMA
    | SHARED
    | {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tt|tm|L"},
}
MORE: dict[str, Setting] = {
    "GPT, buckets": SHARED | {"overlap_grad_reduce": True, "ddp_bucket_size": 90_000},
    "tied, padded buckets": LLAMA
    | SHARED
    | {
        "untie_embeddings_and_output_weights": None,
        "ddp_pad_buckets_for_high_nccl_busbw": True,
        "qk_layernorm": True,
        "add_qkv_bias": True,
    },
    "experts, ETP 1 of TP 2": EXPERTS
    | SHARED
    | {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    },
    "experts with biases, no EP": EXPERTS
    | SHARED
    | {
        "disable_bias_linear": None,
        "moe_shared_expert_intermediate_size": None,
        "expert_model_parallel_size": None,
    },
    "virtual stages and a layout": LLAMA
    | SHARED
    | {"pipeline_model_parallel_layout": "E|tt|t|tL", "num_query_groups": 4},
    "tied multi-token prediction, CP 2": LLAMA
    | SHARED
    | {
        "untie_embeddings_and_output_weights": None,
        "mtp_num_layers": 2,
        "context_parallel_size": 2,
    },
    "tied multi-token prediction on a stage of its own": LLAMA
    | SHARED
    | {
        "untie_embeddings_and_output_weights": None,
        "mtp_num_layers": 2,
        "pipeline_model_parallel_layout": "Et|ttt|mm|L",
    },
    "one latent query, fp32": LLAMA
    | LATENT
    | {"q_lora_rank": None, "qk_layernorm": None, "bf16": None}
    | SHARED,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from megatron.core.models import backends

    monkeypatch.setattr(backends, "DotProductAttention", backends.DotProductAttention)
    take_local_attention()
    yield
    num_microbatches_calculator.unset_num_microbatches_calculator()


def validated(parsed: megatron_arguments.ParsedArguments, world_size: int, tokens: int) -> Any:
    args = parsed.args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, PipelineConfig(), world_size)
        settle_vocabulary(args, PipelineConfig(), tokens)
    return args


def assert_to_the_byte(args: Any) -> None:
    """Assert that each stage's parameters, in Megatron's order, and each rank's bytes equal the
    estimate."""
    chunks = args.virtual_pipeline_model_parallel_size
    spec = "1f1b" if chunks is None else f"interleaved:vpp={chunks}"
    placement = choose(spec).place(args.pipeline_model_parallel_size)
    model = describe(args)
    stages = stages_of(model, layers_of_stages(args, placement), depths_of_stages(args))
    run, state = execution(args, args.seq_length, args.micro_batch_size), model_bytes.state_of(args)
    counted = model_bytes.model_bytes_of_ranks(args, placement)
    assert counted is not None
    for rank, own in enumerate(placement.stages_of):
        weights = gradients = optimizer = 0.0
        with meta_models.fake_ranks(args, rank):
            for stage, chunk in zip(own, meta_models.chunks_of(args), strict=True):
                built = [(p.numel(), meta_models.of_experts(p)) for p in chunk.parameters()]
                parameters = list(parameters_of_stage(model, stages[stage], run))
                assert [(p.elements, p.of_experts) for p in parameters] == built, stage
                bucket = state.bucket if stage == 0 else None
                in_buffers, shared = meta_models.elements_kept(args, chunk, bucket or None)
                weights += in_buffers * args.params_dtype.itemsize
                gradients += in_buffers * 4
                optimizer += shared * (12 if args.params_dtype.itemsize == 2 else 8)
        held = counted[rank]
        assert (held.weights, held.gradients, held.optimizer) == (weights, gradients, optimizer)


@pytest.mark.parametrize("name", [*SETTINGS, *at_night(*MORE)])
def test_to_the_byte(name: str) -> None:
    flags = BASE | (SETTINGS | MORE)[name]
    assert_to_the_byte(validated(megatron_arguments.parse_arguments(model_flags(**flags)), 8, 1000))


def test_models_leave_no_streams_behind() -> None:
    """Building models on the meta device leaves no mocked streams in Megatron's classes, which
    store a stream for all later models of the process. A test's mocks used to stay there, and
    disturbed trainings on emulated streams that were forked later."""
    flags = BASE | EXPERTS | {"moe_shared_expert_overlap": True}
    args = validated(megatron_arguments.parse_arguments(model_flags(**flags)), 8, 1000)
    with meta_models.fake_ranks(args, 0):
        assert meta_models.chunks_of(args)
    assert MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None
    assert SharedExpertMLP.stream is None


# Models of real dimensions, with their pipeline, tensor- and expert-parallel ranks.
REAL = {
    "meta-llama/Meta-Llama-3-70B": (4, 4, 1),
    "meta-llama/Meta-Llama-3.1-405B": (6, 8, 1),
    "Qwen/Qwen3-235B-A22B": (2, 4, 16),
    "deepseek-ai/DeepSeek-V3": (4, 2, 32),
    "moonshotai/Kimi-K2-Instruct": (4, 2, 32),
}
_NO_ARGUMENTS = re.compile(r"parameters_|published_|source|.*_note|vocab_size|vision")


@nightly("by day small ones")
@pytest.mark.parametrize("name", REAL)
def test_real_models_to_the_byte(name: str) -> None:
    models = read_models()
    values = {k: v for k, v in models[name].items() if not _NO_ARGUMENTS.match(k)}
    values.setdefault("add_bias_linear", False)
    pipeline, tensor, experts = REAL[name]
    ranks = pipeline * tensor * max(2, experts // tensor * 2)
    if values["num_layers"] == 61:
        values["decoder_last_pipeline_num_layers"] = 13
    values |= {
        "pipeline_model_parallel_size": pipeline,
        "tensor_model_parallel_size": tensor,
        "expert_model_parallel_size": experts,
        "expert_tensor_parallel_size": 1 if experts > 1 else None,
        "transformer_impl": "local",
        "bf16": True,
        "use_distributed_optimizer": True,
        "sequence_parallel": True,
        "seq_length": 4096,
        "micro_batch_size": 1,
        "global_batch_size": ranks,
        "train_iters": 1,
        "lr": 1e-4,
        "rope_type": None,
        "position_embedding_type": "rope",
    }
    assert_to_the_byte(validated(megatron_arguments.parse_values(values), ranks, 0))
