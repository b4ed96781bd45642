"""verl's way of calling: modules that the environment names, sequences of any length.

    export VERL_USE_EXTERNAL_MODULES=megatron_ext.auto MEGATRON_EXT_SCHEDULE=zb-h1
    torchrun --nproc-per-node 2 examples/verl_loop.py
    torchrun --nproc-per-node 2 -m megatron_ext examples/verl_loop.py  # without a GPU

`import verl` imports the modules in that variable, in every process, before anything of Megatron
is made. So does this script, which has no line of ours for that. Then it does what verl's actor
does: it evaluates the log-probabilities of sampled sequences, and trains on them with PPO's clipped
loss.
Without the variables it trains under Megatron's 1F1B.

ORDER=1 orders the microbatches of each training step by their tokens, which takes two lines. verl's
own trainers have ordered theirs already.
"""

import importlib
import os
from functools import partial

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

ORDER = bool(os.environ.get("ORDER"))
VOCABULARY, LONGEST, MICRO_BATCH, STEPS, EPOCHS = 32, 16, 2, 5, 2


def build_model(config):
    """This rank's chunks of the model: one, or those that a schedule brings."""
    chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LONGEST,
            pre_process=parallel_state.is_pipeline_first_stage(False, number),
            post_process=parallel_state.is_pipeline_last_stage(False, number),
            share_embeddings_and_output_weights=False,
            vp_stage=number,
        ).cuda()
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(), chunk))
    return chunks


def sample(generator):
    """Microbatches of random sequences, each with a length of its own; small tokens are rewarded.

    How many there are differs from step to step, as with verl's dynamic batch sizes.
    """
    microbatches = []
    for _ in range(torch.randint(4, 9, (), generator=generator)):
        length = int(torch.randint(4, LONGEST + 1, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH, length + 1), generator=generator)
        advantages = torch.where(tokens[:, 1:] < VOCABULARY // 2, 1.0, -1.0)
        microbatches.append({"tokens": tokens.cuda(), "advantages": advantages.cuda()})
    return microbatches


def log_probs_of(losses, batch):
    return losses.sum(), {"log_probs": -losses.detach()}


def tokens_of(batch):
    return batch["tokens"].numel()


def ppo_loss(losses, batch):
    ratio = torch.exp(-losses - batch["log_probs"])
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"]).mean()
    return loss, {"loss": loss.detach()}


def forward_backward(model, microbatches, loss_function, forward_only):
    def forward_step(data, chunk):
        batch = next(data)
        tokens = batch["tokens"]
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(MICRO_BATCH, -1)
        losses = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, partial(loss_function, batch=batch)

    schedule = get_forward_backward_func()
    schedule = megatron_ext.order_microbatches(schedule, tokens_of) if ORDER else schedule
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in model],
        model=model,
        num_microbatches=len(microbatches),
        seq_length=LONGEST,  # Megatron ignores this length, since the lengths vary
        micro_batch_size=MICRO_BATCH,
        forward_only=forward_only,
    )


def main():
    for module in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(module)
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
        variable_seq_lengths=True,
        # Megatron requires this dispatcher if lengths vary, also without MoE.
        moe_token_dispatcher_type="alltoall",
        transformer_impl="local",
        attention_dropout=0,
        hidden_dropout=0,
        finalize_model_grads_func=finalize,
    )
    model = build_model(config)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=0), model)
    data_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(data_rank)
    for step in range(STEPS):
        microbatches = sample(generator)
        before = forward_backward(model, microbatches, log_probs_of, forward_only=True)
        for microbatch, result in zip(microbatches, before, strict=False):  # on the last rank
            microbatch.update(result)
        for _ in range(EPOCHS):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses = forward_backward(model, microbatches, ppo_loss, forward_only=False)
            optimizer.step()
        if losses and data_rank == 0:
            print("step", step, "loss", sum(loss["loss"].item() for loss in losses) / len(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
