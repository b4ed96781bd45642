"""Hybrid models and linear attention on the CPU.

Megatron's own hybrid models have Transformer Engine's layers, and gated delta nets the kernels of
`fla`. This module has local layers, and Megatron's delta rule for deterministic_mode, which uses
torch's operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayerSubmodules,
)

# Sizes of a gated delta net. With deterministic_mode it runs on torch's own operations.
DELTA_NET: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
}


class _LocalBackend(LocalSpecProvider):
    """A backend whose linear layers contain no norm, unlike Transformer Engine's."""

    def column_parallel_layer_norm_linear(self) -> type:
        return ColumnParallelLinear


def stub_kernels() -> None:
    """Replace names of Megatron that only exist with GPU packages by versions for the CPU, in this
    process."""
    torch.compiler.set_stance("force_eager")
    common.HAVE_FLA = True
    common.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    hybrid_block.TENorm = WrappedTorchNorm
    variants._get_backend_spec_provider = lambda config: _LocalBackend()
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = lambda **settings: (
        gpt_layer_specs.get_gpt_layer_local_spec()
    )


def _layer(module: type, **submodules: Any) -> ModuleSpec:
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**submodules))


def local_spec(experts: int | None) -> ModuleSpec:
    """Return Megatron's hybrid_stack_spec with local layers: ``*``, ``-``, ``E`` and ``G``."""
    before: dict[str, Any] = {"input_layernorm": WrappedTorchNorm}
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    mlp = partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    of_mlp: dict[str, Any] = {
        "pre_mlp_layernorm": WrappedTorchNorm,
        "mlp_bda": get_bias_dropout_add,
    }
    of_attention: dict[str, Any] = {**before, "self_attn_bda": get_bias_dropout_add}
    moe = get_moe_module_spec(use_te=False, num_experts=experts or 1)
    prediction = ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[
                ModuleSpec(
                    module=MultiTokenPredictionLayer,
                    submodules=MultiTokenPredictionLayerSubmodules(
                        enorm=WrappedTorchNorm,
                        hnorm=WrappedTorchNorm,
                        eh_proj=ColumnParallelLinear,
                        mtp_model_layer=None,  # the hybrid pattern decides which layer this is
                        layer_norm=WrappedTorchNorm,
                    ),
                )
            ]
        ),
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=_layer(TransformerLayer, self_attention=attention, **of_attention),
            gdn_layer=_layer(TransformerLayer, self_attention=delta_net, **of_attention),
            mlp_layer=_layer(MLPLayer, mlp=mlp, **of_mlp),
            moe_layer=_layer(MoETransformerLayer, mlp=moe, **of_mlp),
            mtp_block_spec=prediction,
        ),
    )


def hybrid_model(config: TransformerConfig, pattern: str, **model: Any) -> HybridModel:
    """Return a chunk of the hybrid model of ``pattern``, with local layers."""
    stub_kernels()
    return HybridModel(
        config, local_spec(config.num_moe_experts), hybrid_layer_pattern=pattern, **model
    )
