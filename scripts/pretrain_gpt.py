"""Pretrain a GPT with Megatron's own trainer, where no Megatron-LM checkout is at hand.

    torchrun --nproc-per-node 4 -m megatron_ext scripts/pretrain_gpt.py FLAGS

FLAGS are Megatron's. What this script does not serve (`UNSERVED`) it refuses; the pretrain_gpt.py
of a Megatron-LM checkout serves it and takes the same flags.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

UNSERVED = {
    "fim_data": False,
    "hybrid_context_parallel": False,
    "logits_load_dir": None,
    "per_dataset_sequences_path": None,
}

try:
    from megatron.core.utils import flatten_batch_for_packed_sequences
    from megatron.training.argument_utils import gpt_config_from_args
except ImportError:  # Megatron 0.18 builds the model by `model_provider`
    gpt_config_from_args = None
    UNSERVED |= {
        "experimental_attention_variant": None,
        "heterogeneous_layers_config_path": None,
        "sft": False,
        "spec": None,
    }

# Tensors of a microbatch by field; None if the stage does not need the field.
Batch = dict[str, Any]


def refuse_unserved(args: Namespace) -> None:
    """Raise ValueError for a flag that this script would ignore."""
    for name, default in UNSERVED.items():
        value = getattr(args, name, default)
        if value != default:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: scripts/pretrain_gpt.py trains a GPT model "
                "without this option; use Megatron-LM's pretrain_gpt.py, or drop the option"
            )


def is_packed() -> bool:
    """Return whether a microbatch is a row of several sequences with their boundaries."""
    args = get_args()
    return args.sft or getattr(args, "dataloader_inter_document_masking", False)


def get_batch(data_iterator: Iterator[Batch], model: GPTModel) -> Batch:
    """Return the fields of the next microbatch that this stage needs; the others are None.

    An inner stage needs only the boundaries of packed sequences. With context parallelism a rank
    gets its part of each sequence.
    """
    args = get_args()
    boundaries = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    fields = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", *boundaries)
    predicts_further = get_attr_wrapped_model(model, "mtp_process")
    is_end = is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage"))
    is_inner = not (is_end or predicts_further)
    if is_inner and not is_packed():
        return dict.fromkeys(fields)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        for field in fields:
            tensor = sample.get(field)
            batch[field] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        is_packed(),  # the argument has_cu_seqlens, or is_sft in Megatron 0.18
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_further,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    cutting = {}
    if is_packed():
        batch = flatten_batch_for_packed_sequences(batch)
        # Documents may end anywhere in a packed row, except in a row for fine-tuning (SFT).
        cutting["use_per_sequence_balancing"] = not args.sft
    if is_inner:
        return dict.fromkeys(fields) | {name: batch.get(name) for name in boundaries}
    group = mpu.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group, **cutting)


def packed_sequences(batch: Batch) -> PackedSeqParams | None:
    """Return the boundaries of the sequences of a microbatch; None if it is not packed."""
    if batch.get("cu_seqlens") is None:
        return None
    cu_seqlens, padded = batch["cu_seqlens"].squeeze(0), batch.get("cu_seqlens_padded")
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)
    if padded is not None:
        cu_seqlens = padded = padded.squeeze(0)
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a microbatch, its number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = (output_tensor.view(-1).float() * mask).sum()
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            # The result is a copy, since Megatron may compare it with that of a second run, and the
            # schedule frees the loss.
            result=loss.detach().clone(),
            rejection_func=lambda loss: not torch.isfinite(loss),
            message="the loss of a microbatch is not finite",
            tolerance=0.0,
            fatal=True,
        )
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(
    data_iterator: Iterator[Batch], model: GPTModel, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], Any]]:
    """Run this rank's chunk on the next microbatch.

    It returns the output and the loss function, which the schedule calls on the last stage. With
    ``--overlap-moe-expert-parallel-comm`` the output is a plan of the chunk's parts, which the
    schedule runs.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, model)
    packed = packed_sequences(batch)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )
    return output, partial(loss_func, batch["loss_mask"])


def needs_data(vp_stage: int | None) -> bool:
    config = core_transformer_config_from_args(get_args())
    reads = (
        is_packed()
        or is_first_or_last_pipeline_stage(vp_stage)
        or mtp_on_this_rank(
            config.pipeline_model_parallel_layout,
            config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )
    return mpu.get_tensor_model_parallel_rank() == 0 and reads


def datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Return the datasets for training, validation and test; ``samples`` has the size of each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    masking = {}
    # Megatron 0.18 has no setting dataloader_inter_document_masking.
    if getattr(args, "dataloader_inter_document_masking", False):
        masking["inter_document_masking"] = True
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        **masking,
    )
    print_rank_0("> building the datasets ...")
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        SFTDataset if args.sft else kind, samples, partial(needs_data, vp_stage), config
    ).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it, not TP rank 0


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """Return a chunk of the model. It is for a Megatron that cannot build one from a config."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    transformer_engine = args.transformer_impl == "transformer_engine"
    norms = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    layers = get_gpt_decoder_block_spec(config, transformer_engine, **norms, vp_stage=vp_stage)
    mtp = None
    if config.mtp_num_layers is not None:
        last_layer = get_gpt_decoder_layer_specs(config, transformer_engine, **norms)[-1]
        mtp = get_gpt_mtp_block_spec(config, last_layer, transformer_engine, vp_stage=vp_stage)
    return GPTModel(
        config,
        layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def embedding_ranks(pipeline: list[int]) -> list[int]:
    """Return the ranks of ``pipeline`` that have the embedding, or a copy of it."""
    args = get_args()
    ranks = {pipeline[0], *get_mtp_ranks(pipeline, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pipeline[-1])
    return sorted(ranks)


def keep_compiled_helpers() -> None:
    """Skip the compilation of Megatron's dataset helpers if they are compiled and have no Makefile.

    This is so in Megatron's wheel. Megatron runs make at each start, and ends if that fails.
    """
    has_makefile = Path(dataset_utils.__file__).with_name("Makefile").exists()
    if not has_makefile and find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None


def main() -> None:
    keep_compiled_helpers()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_unserved(args)
    model = gpt_config_from_args(args) if gpt_config_from_args else None
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=model_provider,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    main()
