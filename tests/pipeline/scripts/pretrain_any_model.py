"""Training script of tests: scripts/pretrain_gpt.py on the CPU, for models that need GPUs or that
no flag of that script builds.

Attention over packed sequences, multi-latent attention and linear attention are replaced by torch's
operations; --hybrid-layer-pattern builds a HybridModel. The variable TRAINED is "adapters" for
low-rank adapters of frozen layers, or "upper-layers" for trained layers above frozen ones. Matrices
are drawn by their names, so the model starts with the same weights wherever its stages lie.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec as linear_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args

from scripts import pretrain_gpt
from tests.helpers.adapters import above_frozen_layers, adapt, is_adapter
from tests.helpers.callers import draw_by_name, named_parameters
from tests.helpers.hybrid import hybrid_model, stub_kernels
from tests.helpers.latent_attention import take_local_attention
from tests.helpers.packed import packed_on_the_cpu

IS_TRAINED = {"adapters": is_adapter, "upper-layers": above_frozen_layers}

gpt_model = pretrain_gpt.model_provider


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: Any = None,
) -> Any:
    args, trained = get_args(), os.environ.get("TRAINED")
    make = gpt_model if args.hybrid_layer_pattern is None else of_pattern
    config = config or core_transformer_config_from_args(args)
    model: Any = make(pre_process, post_process, vp_stage, config, pg_collection)
    if trained == "adapters":
        adapt(model)
    draw(model)
    if trained:
        for name, weight in named_parameters(model):
            weight.requires_grad = IS_TRAINED[trained](name)
    return model


def of_pattern(
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    config: TransformerConfig,
    pg_collection: Any,
) -> Any:
    args = get_args()
    return hybrid_model(
        config,
        args.hybrid_layer_pattern,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def draw(model: Any) -> None:
    """Draw the model's matrices by name, so both copies of a tied embedding get the same
    numbers."""
    tied = {"output_layer.weight": "embedding.word_embeddings.weight"}
    names = tied if model.share_embeddings_and_output_weights else {}
    draw_by_name(
        (names.get(name, name), parameter)
        for name, parameter in named_parameters(model)
        if parameter.dim() > 1
    )


def linear_block(config: Any, *_: Any, vp_stage: int | None = None, **norms: Any) -> Any:
    return linear_block_spec(config, vp_stage=vp_stage)


def main() -> None:
    torch.compiler.set_stance("force_eager")
    take_local_attention()
    if "--experimental-attention-variant" in sys.argv:
        stub_kernels()
        pretrain_gpt.get_gpt_decoder_block_spec = linear_block
    pretrain_gpt.gpt_config_from_args = None  # so that Megatron takes the provider
    pretrain_gpt.model_provider = model_provider
    with packed_on_the_cpu() if "--sft" in sys.argv else contextlib.nullcontext():
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
