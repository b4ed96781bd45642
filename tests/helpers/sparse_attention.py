"""Sparse attention (DSA) on the CPU, whose layers are otherwise Transformer Engine's."""

from __future__ import annotations

from typing import Any
from unittest import mock

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

# Settings of sparse attention in a small model. The indexer does not rotate, as its rotation is a
# kernel that no CPU runs. Weights are large, as its loss would otherwise depend on rounding.
# Scores get no ReLU: with few heads it makes many scores 0, among which torch.topk chooses any.
SPARSE = {
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 3,
    "dsa_indexer_loss_coeff": 0.1,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_scoring_relu": False,
    "init_method_std": 0.3,
}


class Duplicated(ColumnParallelLinear):
    """Stand-in for Transformer Engine's duplicated linear layer, which every tensor-parallel rank
    has whole. Here there is only one such rank."""

    def __init__(self, *args: Any, parallel_mode: str, **more: Any) -> None:
        assert parallel_mode == "duplicated"
        super().__init__(*args, gather_output=False, **more)


class Backend(LocalSpecProvider):
    """Megatron's local layers, and the replicated linear layer that they lack."""

    def linear(self) -> type[Duplicated]:
        return Duplicated


def sparse_layers(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of a stage."""
    with mock.patch.object(specs, "_get_backend_spec_provider", lambda config: Backend()):
        block = specs.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage
        )
    for layer in block.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.linear_q_down_proj = parts.linear_kv_down_proj = ColumnParallelLinear
    return block
