"""Tests of Transformer Engine's real kernels, in BF16, FP8 and FP4. Trainings, which need two GPUs,
have not run yet.

pytest tests/gpu            # layers on one GPU, trainings on two or more
"""

from __future__ import annotations

import importlib.util

import pytest
from megatron.core.transformer.moe import fused_a2a

from megatron_ext.adapter.transformer_engine.installed import can_split
from tests.gpu.runs import GPUS, losses, needs_four_gpus, needs_two_gpus
from tests.gpu.te_layers import LAYERS, RECIPES, differences, missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a GPU"),
    pytest.mark.skipif(not can_split(), reason="needs Transformer Engine 2.8 or later"),
]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("precision", ["bf16", *RECIPES])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_stocks(name: str, precision: str, fused: bool) -> None:
    if lack := missing(precision):
        pytest.skip(lack)
    assert differences(name, precision, fused) == []


# Each token has one expert, so that no sum depends on the order of atomic additions.
EXPERTS: dict[str, str | int | bool | None] = {
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_ffn_hidden_size": 128,
    "moe_token_dispatcher_type": "alltoall",
    "disable_bias_linear": True,
}
EXPERT_PARALLEL: dict[str, str | int | bool | None] = {
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}
FLEX: dict[str, str | int | bool | None] = {
    **EXPERTS,
    **EXPERT_PARALLEL,
    # Kernels of the flex dispatchers copy whole lines of memory, which this hidden size fills.
    "hidden_size": 512,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "flex",
    "moe_router_dtype": "fp32",
}
TRAININGS: dict[str, dict[str, str | int | bool | None]] = {
    "bf16": {},
    "bf16, overlapped": {"overlap_grad_reduce": True},
    "bf16, fused": {"no_gradient_accumulation_fusion": None},
    "bf16, packed documents": {  # Megatron's mock documents have up to 4096 tokens
        "dataloader_inter_document_masking": True,
        "calculate_per_token_loss": True,
        "position_embedding_type": "rope",
        "seq_length": 8192,
        "max_position_embeddings": 8192,
    },
    "fp8 current": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8 delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "experts one by one": EXPERTS,
    "experts, grouped": EXPERTS | {"moe_grouped_gemm": True},
    "experts, grouped, fp8 current": {
        **EXPERTS,
        "moe_grouped_gemm": True,
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
    },
    "experts, grouped, expert parallel": {
        **EXPERTS,
        "moe_grouped_gemm": True,
        **EXPERT_PARALLEL,
    },
    "experts, grouped, expert parallel, shared beside": {
        **EXPERTS,
        **EXPERT_PARALLEL,
        "moe_grouped_gemm": True,
        "moe_shared_expert_intermediate_size": 128,
        "moe_shared_expert_overlap": True,
    },
    "experts, grouped, expert parallel, DeepEP": FLEX | {"moe_flex_dispatcher_backend": "deepep"},
    "experts, grouped, expert parallel, HybridEP": FLEX
    | {"moe_flex_dispatcher_backend": "hybridep"},
}


@needs_two_gpus
@pytest.mark.parametrize("setting", TRAININGS)
def test_losses_are_stocks(setting: str) -> None:
    """Transformer Engine's layers under Megatron's own 1F1B have Megatron's losses. There is one
    stage on each rank, so both start from the same weights."""
    if "fused" in setting and not importlib.util.find_spec("fused_weight_gradient_mlp_cuda"):
        pytest.skip("the output layer's fused accumulation needs NVIDIA apex")
    if "expert parallel" in setting and GPUS < 4:
        pytest.skip(f"a pipeline of two with expert parallelism needs four GPUs, here are {GPUS}")
    if setting.endswith("DeepEP") and not fused_a2a.HAVE_DEEP_EP:
        pytest.skip("needs DeepEP")
    if setting.endswith("HybridEP") and not fused_a2a.HAVE_HYBRIDEP:
        pytest.skip("needs DeepEP with HybridEP, of its branch hybrid-ep")
    flags: dict[str, str | int | bool | None] = {
        "transformer_impl": "transformer_engine",
        "bf16": True,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        "max_position_embeddings": 64,
        **TRAININGS[setting],
    }
    assert losses("zb-h1", **flags) == losses(None, **flags)


@needs_two_gpus
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_slices_train_as_whole_sequences_do(schedule: str) -> None:
    """Slices train as whole sequences do, with any of Transformer Engine's attention kernels that
    accepts fewer queries than keys. If masks were aligned to the top left, they would hide most
    tokens. Weight gradients are fused, and those of all slices must be added."""
    flags: dict[str, str | int | bool | None] = {
        "transformer_impl": "transformer_engine",
        "no_gradient_accumulation_fusion": None,
        "bf16": True,
        "hidden_size": 128,
        "seq_length": 512,
        "max_position_embeddings": 512,
    }
    sliced = losses(schedule, pipeline_slices=4, pipeline_slice_lengths="balanced", **flags)
    whole = [float(loss) for loss in losses(None, **flags)]
    assert [float(loss) for loss in sliced] == pytest.approx(whole, rel=5e-3)


@needs_four_gpus
def test_slices_are_shared_by_ranks() -> None:
    """Context-parallel ranks share each slice of a sequence: keys and values of slices are
    gathered, in place of Transformer Engine's ring."""
    flags: dict[str, str | int | bool | None] = {
        "transformer_impl": "transformer_engine",
        "bf16": True,
        "hidden_size": 128,
        "seq_length": 512,
        "max_position_embeddings": 512,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    sliced = losses("zb-h1", pipeline_slices=4, pipeline_slice_lengths="balanced", **flags)
    whole = [float(loss) for loss in losses(None, **flags)]
    assert [float(loss) for loss in sliced] == pytest.approx(whole, rel=5e-3)
