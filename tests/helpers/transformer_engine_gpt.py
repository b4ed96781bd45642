"""A small GPT of Transformer Engine's linear layers on the CPU, for forked ranks.

Layers are Megatron's own TE classes, built on the real Python sources and torch's GEMMs
(`transformer_engine_on_cpu`). Attention, the embedding and the output layer are local ones.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import fp4_utils, fp8_utils, utils
from megatron.core.extensions import transformer_engine as extension
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.models.gpt import GPTModel, gpt_model, moe_module_specs
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer import multi_token_prediction, transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers.callers import draw_by_name, named_parameters


def spec(experts: int | None, grouped: bool) -> ModuleSpec:
    """Return a layer whose linear layers are Transformer Engine's, with the norms before them; only
    the norm before experts is a local one."""
    made = get_gpt_layer_local_spec()
    parts, attention = made.submodules, made.submodules.self_attention.submodules
    parts.input_layernorm = IdentityOp
    attention.linear_qkv = extension.TELayerNormColumnParallelLinear
    attention.linear_proj = extension.TERowParallelLinear
    if experts is not None:
        parts.mlp = moe_module_specs.get_moe_module_spec_for_backend(
            provider.TESpecProvider(), num_experts=experts, moe_grouped_gemm=grouped
        )
        return made
    parts.pre_mlp_layernorm = IdentityOp
    parts.mlp = functools.partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(
            linear_fc1=extension.TELayerNormColumnParallelLinear,
            linear_fc2=extension.TERowParallelLinear,
        ),
    )
    return made


def provide(
    fused: bool,
    grouped: bool,
    precision: Mapping[str, object],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Return a stage. ``precision`` is set on the config, as its flags require a GPU."""
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    layer = spec(config.num_moe_experts, grouped)
    prediction = None
    if config.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(config, layer, False, vp_stage=vp_stage)
    config.gradient_accumulation_fusion = fused
    for name, value in precision.items():
        setattr(config, name, value)
    # The modules to recompute are set here, as their flag needs --moe-grouped-gemm, which is
    # refused without a GPU.
    if grouped:
        config.recompute_modules = ["moe_act"]
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        chunk = GPTModel(
            config,
            layer,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            position_embedding_type=args.position_embedding_type,
            mtp_block_spec=prediction,
        )
    # weights drawn by name are the same on whichever ranks the stages are
    if args.untie_embeddings_and_output_weights:
        draw_by_name(item for item in named_parameters(chunk) if item[1].dim() > 1)
    return chunk


def add_product(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    main_grad.add_(dy.t().matmul(x))


def use_transformer_engine(version: str, capability: tuple[int, int] = (8, 0)) -> None:
    """Let Megatron, which was imported without Transformer Engine, find it; in a forked process
    only."""
    on_cpu.load(on_cpu.fetch(version), capability)
    # torch must not report a GPU, or ranks would look for NCCL; Transformer Engine's stand-in makes
    # it report one.
    torch.cuda.is_available = lambda: False
    utils._te_version = None
    importlib.reload(extension)
    importlib.reload(provider)
    for quantization, name in ((fp8_utils, "get_fp8_context"), (fp4_utils, "get_fp4_context")):
        importlib.reload(quantization)
        for module in (transformer_block, multi_token_prediction):
            if hasattr(module, name):
                setattr(module, name, getattr(quantization, name))
    gpt_model.TELMHeadColumnParallelLinear = extension.TELMHeadColumnParallelLinear
    gpt_model.is_mxfp8_output_proj_active = fp8_utils.is_mxfp8_output_proj_active
    for owner, name in (
        ("distributed", "activation_recompute_forward"),
        ("fp8", "FP8GlobalStateManager"),
        ("fp8", "fp8_autocast"),
    ):
        attribute = getattr(importlib.import_module(f"transformer_engine.pytorch.{owner}"), name)
        setattr(random, name, attribute)
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product)
    layers.fused_weight_gradient_mlp_cuda = kernels
    layers._grad_accum_fusion_available = True
    moe_layer.HAVE_TE, moe_layer.TELinear = True, extension.TELinear
