"""A training loop of one's own on megatron.core alone, under zb-v.

    torchrun --nproc-per-node 2 examples/plain_loop.py
    torchrun --nproc-per-node 2 -m megatron_ext examples/plain_loop.py  # without a GPU

The two lines with megatron_ext are ours. Without them the same script trains under Megatron's 1F1B.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_ext

VOCABULARY, SEQUENCE, MICRO_BATCH, MICROBATCHES, STEPS = 32, 16, 2, 8, 10


def build_model(config):
    """This rank's chunks of the model: a V has two, each with its own stage."""
    chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(False, number),
            post_process=parallel_state.is_pipeline_last_stage(False, number),
            share_embeddings_and_output_weights=False,
            vp_stage=number,
        ).cuda()
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(), chunk))
    return chunks


def batches(seed):
    """Sequences that count up in steps of 1 to 3."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=generator)
        step = torch.randint(1, 4, (MICRO_BATCH, 1), generator=generator)
        yield ((first + step * torch.arange(SEQUENCE + 1)) % VOCABULARY).cuda()


def mean_loss(losses):
    return losses.mean(), {"loss": losses.mean().detach()}


def forward_step(data, model):
    tokens = next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICRO_BATCH, -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), mean_loss


def main():
    megatron_ext.install(schedule="zb-v")  # install before process groups and model are made
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        transformer_impl="local",
        attention_dropout=0,
        hidden_dropout=0,
        finalize_model_grads_func=finalize,
    )
    model = build_model(config)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=0), model)
    data_rank = parallel_state.get_data_parallel_rank()
    iterators = [batches(seed=data_rank) for _ in model]  # each chunk reads the same batches
    for step in range(STEPS):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
        )
        optimizer.step()
        if losses and data_rank == 0:  # the last pipeline rank has the losses
            print("step", step, "loss", sum(loss["loss"].item() for loss in losses) / MICROBATCHES)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
