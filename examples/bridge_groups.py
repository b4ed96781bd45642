"""Megatron-Bridge's way of calling: groups of one's own, none in Megatron's global state.

    torchrun --nproc-per-node 2 examples/bridge_groups.py
    torchrun --nproc-per-node 2 -m megatron_ext examples/bridge_groups.py  # without a GPU

It is what Bridge does with `use_decentralized_pg`: every part of Megatron gets its process groups
from a pg_collection, the schedule a p2p_communicator too. It shards the optimizer, overlaps its
communication, and with several chunks a rank leaves it to the schedule to start the parameters'
gathers. With Bridge itself the line with install stands before `pretrain`. Without ours the same
script trains under Megatron's 1F1B.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_ext

VOCABULARY, SEQUENCE, MICRO_BATCH, MICROBATCHES, STEPS = 32, 16, 2, 8, 10
STAGES = 2


def make_groups():
    """All groups that Megatron asks a dense model's pg_collection for."""
    data = dist.get_world_size() // STAGES
    grid = HyperCommGrid([1, 1, 1, data, STAGES], ["tp", "cp", "ep", "dp", "pp"])
    groups = ProcessGroupCollection(
        **{name: grid.create_pg(name) for name in ("tp", "cp", "ep", "dp", "pp")},
        mp=grid.create_pg(["tp", "pp"]),
        tp_cp=grid.create_pg(["tp", "cp"]),
        dp_cp=grid.create_pg(["dp", "cp"]),
        tp_dp_cp=grid.create_pg(["tp", "dp", "cp"]),
        tp_ep=grid.create_pg(["tp", "ep"]),
        tp_ep_pp=grid.create_pg(["tp", "ep", "pp"]),
        intra_dist_opt=grid.create_pg(["tp", "cp", "ep", "dp", "pp"]),
        embd=None,  # no embedding group: no weight is shared between stages
        pos_embd=None,
    )
    groups.expt_tp = groups.tp
    groups.expt_dp = groups.intra_expt_dp = groups.dp
    groups.intra_dp_cp = groups.dp_cp
    return groups


def build_model(config, groups):
    """This rank's chunks of the model: one, or those that a schedule brings."""
    chunks = []
    number_of_chunks = config.virtual_pipeline_model_parallel_size or 1
    for number in range(number_of_chunks):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            SEQUENCE,
            pre_process=is_pp_first_stage(groups.pp) and number == 0,
            post_process=is_pp_last_stage(groups.pp) and number == number_of_chunks - 1,
            share_embeddings_and_output_weights=False,
            pg_collection=groups,
            vp_stage=number,
        ).cuda()
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            align_param_gather=number_of_chunks > 1,
        )
        chunks.append(DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups))
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
    megatron_ext.install(schedule="zb-h1")  # install before the model is made
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    groups = make_groups()
    # Megatron's global memory buffers, as Bridge sets them; no process groups.
    parallel_state._set_global_memory_buffer()
    model_parallel_cuda_manual_seed(1 + groups.pp.rank(), tp_rank=0, ep_rank=0, etp_rank=0)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float32,
        transformer_impl="local",
        attention_dropout=0,
        hidden_dropout=0,
        finalize_model_grads_func=finalize,
    )
    model = build_model(config, groups)
    config.no_sync_func = [chunk.no_sync for chunk in model]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    if len(model) == 1:
        config.no_sync_func, config.grad_sync_func = model[0].no_sync, model[0].start_grad_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, clip_grad=0, use_distributed_optimizer=True),
        model,
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    iterators = [batches(seed=groups.dp.rank()) for _ in model]
    run = get_forward_backward_func(
        pp_size=STAGES, vp_size=config.virtual_pipeline_model_parallel_size
    )
    communicator = P2PCommunicator(groups.pp, config)
    for step in range(STEPS):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        optimizer.step()
        if len(model) > 1:  # Bridge sets this virtual rank once a step has been trained
            config.param_sync_func = [chunk.start_param_sync for chunk in model]
        if losses and groups.dp.rank() == 0:  # the last pipeline rank has the losses
            print("step", step, "loss", sum(loss["loss"].item() for loss in losses) / MICROBATCHES)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
