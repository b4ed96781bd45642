"""verl's GRPO step in which the answers to a prompt share it.

    export VERL_USE_EXTERNAL_MODULES=megatron_ext.auto,verl_shared_prompts PYTHONPATH=examples
    export MEGATRON_EXT_SHARED_PROMPTS=exact MEGATRON_EXT_SCHEDULE=zb-h1 ANSWERS=8
    python -m verl.trainer.main_ppo ... actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.actor.use_prefix_grouper=true

`import verl` imports both modules in every process. ANSWERS consecutive sequences, the answers to
one prompt, then stay in one microbatch of verl 0.9's Megatron engine, and the model computes their
prompt once. use_prefix_grouper, a setting of verl's, keeps groups together when a batch is dealt to
data-parallel replicas; each replica needs as many prompts as the others, and a mini-batch whole
groups. verl counts every prompt n times when it fills microbatches, so raise
ppo_max_token_len_per_gpu.
"""

import functools
import os

import torch
import verl.models.mcore as models
from megatron.core import parallel_state
from verl.utils import tensordict_utils
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron import transformer_impl

import megatron_ext

ANSWERS = int(os.environ["ANSWERS"])


def in_whole_groups(prepare):
    """verl's function that divides a batch into microbatches, which keeps groups together by verl's
    ``force_group_size``."""

    @functools.wraps(prepare)
    def prepare_micro_batches(data, *args, **kwargs):
        if len(data) % ANSWERS:
            raise ValueError(
                f"ANSWERS={ANSWERS}: a mini-batch of {len(data)} sequences on a replica is not "
                f"whole groups; write ANSWERS=n of rollout.n, and a batch that divides"
            )
        tensordict_utils.assign_non_tensor(data, force_group_size=ANSWERS)
        return prepare(data, *args, **kwargs)

    return prepare_micro_batches


def forward(model, input_ids, images, logits_processor, logits_processor_args, **settings):
    """The model's outputs for sequences, which are nested tensors as verl gives and takes them.

    Sequences are packed (``use_remove_padding``), without context parallelism, fused kernels,
    images and multi-token prediction.
    """
    if images or settings["data_format"] != "thd" or settings["mtp_enable_train"]:
        raise ValueError("shared prompts need packed text, without multi-token prediction")
    batch = logits_processor.keywords["batch"]
    ends = input_ids.offsets()
    lengths = ends.diff().tolist()
    prompt = batch["attention_mask"].shape[1] - batch["responses"].shape[1]
    shared = megatron_ext.share_prompts(
        lengths,
        prompts=batch["attention_mask"][:, :prompt].sum(1).tolist(),
        groups=[number // ANSWERS for number in range(len(lengths))],
        multiple=parallel_state.get_tensor_model_parallel_world_size(),
        device=input_ids.device,
    )
    output = model(
        input_ids=shared.once(input_ids.values()[None]),
        attention_mask=None,
        position_ids=shared.position_ids,
        packed_seq_params=shared.packed_seq_params,
    )
    if not unwrap_model(model).post_process:
        return output
    label = logits_processor_args["label"]
    following = torch.cat([one.roll(-1) for one in label.unbind()])  # the next token
    temperature = logits_processor_args["temperature"].values()
    made = logits_processor(
        output, label=shared.once(following[None]), temperature=shared.once(temperature[None])
    )
    return {
        name: torch.nested.nested_tensor_from_jagged(shared.in_sequences(of_row)[0], ends)
        for name, of_row in made.items()
    }


transformer_impl.prepare_micro_batches = in_whole_groups(transformer_impl.prepare_micro_batches)
models.get_mcore_engine_forward_fn = lambda hf_config: forward
