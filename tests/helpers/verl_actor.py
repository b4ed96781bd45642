"""PPO steps of verl's own trainer and workers, as a script on ranks without a GPU.

verl's classes run as in their package. `RayPPOTrainer` computes log-probabilities and those of a
reference model, and updates the actor; `ActorRolloutRefWorker` and its Megatron engine do the work;
a batch is split into microbatches by its tokens. Other parts have stand-ins:

- Ray: the workers are called in this process, with verl's split of a batch over replicas and its
  collection of their answers;
- vLLM: sequences and advantages are random;
- CUDA: a platform in verl's registry of platforms;
- Transformer Engine: a model in each bridge's registry with Megatron's own layers, whose attention
  runs over the sequences one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from megatron.core.transformer.dot_product_attention import DotProductAttention
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    _concat_data_proto_or_future,
    _split_args_kwargs_data_proto,
)

from megatron_ext.features.shared_prompts.adapter import shared_model_call
from tests.helpers.packed import by_segment, by_sequence

PIPELINE, BATCH, PROMPT, RESPONSE, VOCABULARY = 2, 16, 6, 10, 64
STEPS = 2
SETTINGS: dict[str, Any] = json.loads(os.environ["VERL_ACTOR"])

# Settings of Megatron without Transformer Engine, and without fusions that need a GPU.
LOCAL = {
    "transformer_impl": "local",
    "attention_backend": "auto",
    **dict.fromkeys(
        (
            "masked_softmax_fusion",
            "gradient_accumulation_fusion",
            "persist_layer_norm",
            "apply_rope_fusion",
            "bias_activation_fusion",
            "bias_dropout_fusion",
        ),
        "false",
    ),
}

# Megatron's own layers keep their norms outside their linear layers.
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}


def register_with_mbridge() -> None:
    from mbridge.core import register_model
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.enums import ModelType

    # mbridge 0.15.1 compares with this member of ModelType, which Megatron dropped before 0.17.
    ModelType.encoder_and_decoder = None
    norms = {
        f"{ours}.weight": [f"model.layers.{{layer_number}}.{theirs}.weight"]
        for ours, theirs in NORMS.items()
    }

    @register_model("qwen2")
    class LocalQwen2(Qwen2Bridge):
        _OTHER_MAPPING = norms
        _MLP_MAPPING = Qwen2Bridge._MLP_MAPPING | norms

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return get_gpt_decoder_block_spec(self.config, False, vp_stage=vp_stage)


def register_with_megatron_bridge() -> None:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
    from megatron.core.models.gpt.gpt_model import GPTModel
    from transformers import Qwen2ForCausalLM, Qwen3MoeForCausalLM

    class Local:
        def provider_bridge(self, hf_pretrained: Any) -> Any:
            provider = super().provider_bridge(hf_pretrained)  # type: ignore[misc]
            provider.transformer_layer_spec = local_layer_spec
            provider.moe_grouped_gemm = provider.moe_permute_fusion = False
            return provider

        def mapping_registry(self) -> Any:
            norms = (
                AutoMapping(f"decoder.layers.*.{ours}.weight", f"model.layers.*.{theirs}.weight")
                for ours, theirs in NORMS.items()
            )
            mappings = super().mapping_registry().mappings  # type: ignore[misc]
            return MegatronMappingRegistry(*mappings, *norms)

    for source, model_type, bridge in (
        (Qwen2ForCausalLM, "qwen2", Qwen2Bridge),
        (Qwen3MoeForCausalLM, "qwen3_moe", Qwen3MoEBridge),
    ):
        register = MegatronModelBridge.register_bridge(
            source=source, target=GPTModel, model_type=model_type
        )
        register(type(f"Local{bridge.__name__}", (Local, bridge), {}))


def trainer_config() -> Any:
    """Return verl's default configuration of PPO, with a small model and a pipeline of two
    ranks."""
    vanilla = str(SETTINGS["bridge"] == "mbridge").lower()
    common = {
        "pipeline_model_parallel_size": PIPELINE,
        "vanilla_mbridge": vanilla,
        "sequence_parallel": "false",
        **{f"override_transformer_config.{name}": value for name, value in LOCAL.items()},
    }
    overrides = [
        "model_engine=megatron",
        "critic.enable=false",
        f"actor_rollout_ref.model.path={SETTINGS['model']}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        # Gradients are not clipped: their norm is summed over the parameters of a rank, and a V
        # placement puts other parameters on a rank.
        "actor_rollout_ref.actor.optim.clip_grad=0",
        *(
            f"++actor_rollout_ref.{role}.megatron.{name}={value}"
            for role in ("actor", "ref")
            for name, value in common.items()
        ),
        *SETTINGS["overrides"],
    ]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=overrides)


class Workers:
    """A group of workers as verl's trainer calls it: the workers of each replica get their part of
    a batch, and all get the answers of those workers whose answers verl collects."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        if not (modes := getattr(method, MAGIC_ATTR, None)) or name.endswith("_checkpoint"):
            return method
        (mesh,) = modes["dispatch_mode"]["dispatch_fn"].args

        def call(data: Any) -> Any:
            ranks = gathered(self._worker._query_dispatch_info(mesh))
            ((parts,), _) = _split_args_kwargs_data_proto(max(ranks) + 1, data)
            # The batch is unlocked, as the copy that Ray makes would be.
            answer = method(parts[ranks[dist.get_rank()]].unlock_())
            answers = gathered((self._worker._query_collect_info(mesh), answer))
            return _concat_data_proto_or_future([one for collected, one in answers if collected])

        return call


def gathered(value: Any) -> list[Any]:
    """Return ``value`` of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def draw_batch(step: int) -> Any:
    """Return prompts padded on the left and responses padded on the right; small tokens are
    rewarded."""
    from verl.protocol import DataProto

    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (BATCH, PROMPT + RESPONSE), generator=draw)
    prompts = torch.randint(2, PROMPT + 1, (BATCH, 1), generator=draw)
    responses = torch.randint(2, RESPONSE + 1, (BATCH, 1), generator=draw)
    column = torch.arange(PROMPT + RESPONSE)
    mask = ((column >= PROMPT - prompts) & (column < PROMPT + responses)).long()
    if answers := SETTINGS["answers"]:  # consecutive sequences have the same prompt
        first = torch.arange(BATCH) // answers * answers
        ids[:, :PROMPT], mask[:, :PROMPT] = ids[first, :PROMPT], mask[first, :PROMPT]
    ids *= mask
    response_mask = mask[:, PROMPT:]
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": response_mask,
        "advantages": torch.where(ids[:, PROMPT:] < VOCABULARY // 2, 1.0, -1.0) * response_mask,
    }
    return DataProto.from_dict(
        tensors, meta_info={"temperature": 1.0, "global_token_num": mask.sum(1).tolist()}
    )


def digest(tensor: torch.Tensor) -> str:
    content = tensor.values() if tensor.is_nested else tensor
    return hashlib.sha256(content.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def parameters(worker: Any) -> dict[str, str]:
    """Return digests of the weights by name, as verl passes them to the engine that samples."""
    exported, _ = worker.actor.engine.get_per_tensor_param()
    return {name: digest(tensor) for name, tensor in exported}


def take_packed_attention() -> None:
    """Let Megatron's own attention run packed sequences, and rows with shared prompts. Rows with
    shared prompts add up in another order, so they are computed in float32, which verl's settings
    do not offer."""
    from verl.utils.torch_dtypes import PrecisionType

    DotProductAttention.forward = by_segment(by_sequence(DotProductAttention.forward))
    shared_model_call.known_attention = lambda: [DotProductAttention.forward]
    if SETTINGS["answers"]:
        PrecisionType.to_dtype = staticmethod(lambda precision: torch.float32)


def write(result: dict[str, Any], numbers: list[torch.Tensor]) -> None:
    """Write for the test ``result``, which has digests, and ``numbers``, the numbers themselves."""
    path = Path(SETTINGS["result"])
    path.write_text(json.dumps(result))
    torch.save(numbers, path.with_suffix(".pt"))


def main() -> None:
    dist.init_process_group("gloo")  # without this call verl would create a group of NCCL
    take_packed_attention()
    if SETTINGS["bridge"] == "mbridge":
        register_with_mbridge()
    else:
        register_with_megatron_bridge()
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.workers.engine.megatron import transformer_impl
    from verl.workers.engine_workers import ActorRolloutRefWorker

    microbatches: list[list[list[Any]]] = []
    postprocess = transformer_impl.postprocess_batch_func

    def noted(output_lst: list[dict[str, Any]], **kwargs: Any) -> Any:
        microbatches.append(
            [[output["loss"], digest(output["model_output"]["log_probs"])] for output in output_lst]
        )
        return postprocess(output_lst=output_lst, **kwargs)

    transformer_impl.postprocess_batch_func = noted
    config = trainer_config()
    actor, reference = (
        ActorRolloutRefWorker(config.actor_rollout_ref, role=role) for role in ("actor", "ref")
    )
    actor.init_model()
    reference.init_model()
    # The trainer is made without its constructor, which starts Ray.
    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.ref_in_actor = config, False
    trainer.actor_rollout_wg, trainer.ref_policy_wg = Workers(actor), Workers(reference)
    if SETTINGS["load"]:
        trainer.actor_rollout_wg.load_checkpoint(SETTINGS["load"])
    numbers: list[torch.Tensor] = []
    result: dict[str, Any] = {"before": parameters(actor), "log_probs": [], "metrics": []}
    for step in range(SETTINGS["first"], STEPS):
        batch = draw_batch(step)
        old, _ = trainer._compute_old_log_prob(batch)
        batch = batch.union(old)
        batch = batch.union(trainer._compute_ref_log_prob(batch))
        metrics = trainer._update_actor(batch).meta_info["metrics"]
        result["log_probs"].append(
            [digest(batch.batch[name]) for name in ("old_log_probs", "entropys", "ref_log_prob")]
        )
        numbers += [batch.batch[name] for name in ("old_log_probs", "entropys", "ref_log_prob")]
        names = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy_loss", "actor/lr")
        result["metrics"].append({name: [float(v) for v in metrics[name]] for name in names})
        if SETTINGS["save"] and step == 0:
            trainer.actor_rollout_wg.save_checkpoint(SETTINGS["save"], global_step=1)
    result |= {"after": parameters(actor), "microbatches": microbatches}
    if dist.get_rank() == dist.get_world_size() - 1:
        write(result, numbers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
