"""Megatron-Bridge's own ``pretrain`` on the CPU, on forked ranks.

Bridge runs as in its package. Packages that it imports and that need a GPU, or that no test uses,
have stand-ins: modules in which every name is an empty class. Calling such a class returns None.
Bridge's distillation function, which is one of them, returns None too if nothing is distilled.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ext.adapter.parity.named_tensors import NamedTensors
from megatron_ext.adapter.parity.result_recorder import digests, logged_loss
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.bridge_recipe import launch_from_recipe
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply, wrap
from tests.helpers.callers import draw_by_name, named_parameters
from tests.helpers.megatron_runs import Run, fork_checkpoint_manager
from tests.helpers.ranks import agent_store, run_ranks, torchrun_environment, values
from tests.helpers.stand_ins import OF_BRIDGE, stand_ins

VANILLA = "gpt.vanilla_gpt:vanilla_gpt_pretrain_config"
_TABLE = "embedding.word_embeddings.weight"


def import_bridge(folder: Path) -> None:
    """Import Megatron-Bridge from ``folder``, in a process that does nothing else: packages there
    replace those that were imported before."""
    names = {entry.name.partition(".")[0] for entry in folder.iterdir()} - {"megatron"}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    megatron: Any = importlib.import_module("megatron")
    assert any(str(folder) in path for path in megatron.__path__)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with stand_ins(*OF_BRIDGE):
        for name in ("recipes", "training.pretrain", "training.gpt_step"):
            importlib.import_module(f"megatron.bridge.{name}")


@dataclass(frozen=True)
class Job:
    """A training of one of Bridge's recipes.

    ``change`` makes a recipe's config small and runs on each rank. ``ours`` are the settings of
    `megatron_ext.bridge.use`; without any, Bridge trains without this project. If ``draws`` is
    false, the weights are Megatron's own, which depend on the ranks of the stages.
    """

    name: str
    change: Callable[[Any], None] = lambda config: None
    ours: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    values: Mapping[str, Any] = field(default_factory=dict)
    draws: bool = True
    recipe: str = VANILLA

    def but(self, name: str, ours: Mapping[str, Any] | None = None, **values: Any) -> Job:
        """Return this job under another name, with other settings and fields of the config."""
        return replace(
            self,
            name=name,
            ours=self.ours if ours is None else ours,
            values={**self.values, **{key.replace("__", "."): v for key, v in values.items()}},
        )


@dataclass
class BridgeRun(Run):
    """Record of a rank, with everything that the rank printed."""

    said: str = ""


# Sizes of the small models that replace those whose config.json a recipe reads from Hugging Face.
_DIMENSIONS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 1e-2,
    },
    "Qwen/Qwen3-VL-8B-Instruct": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            **_DIMENSIONS,
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 4,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "spatial_merge_size": 2,
            "deepstack_visual_indexes": [1],
        },
    },
}


@contextlib.contextmanager
def hub() -> Iterator[None]:
    """Change to a folder with a subfolder for each of `MODELS`, which Hugging Face reads before it
    tries the network."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, settings in MODELS.items():
            Path(name).mkdir(parents=True)
            Path(name, "config.json").write_text(json.dumps({**_DIMENSIONS, **settings}))
        yield


def small_recipe(name: str) -> Any:
    """Return the config of one of Bridge's recipes, made small: with 8 local layers, on mock data,
    in fp32.

    ``name`` is MODULE:FUNCTION within Bridge's recipes.
    """
    module, _, function = name.partition(":")
    provider: Any = importlib.import_module("megatron.bridge.models.gpt_provider")
    recipe = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), function)
    with hub():
        config = recipe()
    put(
        config,
        {
            "model.num_layers": 8,
            "model.hidden_size": 32,
            "model.num_attention_heads": 4,
            "model.ffn_hidden_size": 64,
            "model.seq_length": 16,
            "model.tensor_model_parallel_size": 1,
            "model.pipeline_model_parallel_size": 2,
            "model.expert_model_parallel_size": 1,
            "model.sequence_parallel": False,
            "model.pipeline_dtype": torch.float32,
            "model.params_dtype": torch.float32,
            "model.bf16": False,
            "model.transformer_layer_spec": provider.local_layer_spec,
            "model.transformer_impl": "local",
            "model.attention_dropout": 0.0,
            "model.hidden_dropout": 0.0,
            "model.masked_softmax_fusion": False,
            "model.gradient_accumulation_fusion": False,
            "model.bias_activation_fusion": False,
            "model.bias_dropout_fusion": False,
            "model.apply_rope_fusion": False,
            "model.moe_grouped_gemm": False,
            "model.moe_permute_fusion": False,
            "model.persist_layer_norm": False,
            "model.use_cpu_initialization": True,
            "model.cross_entropy_loss_fusion": False,
            "model.vocab_size": 64,
            "model.make_vocab_size_divisible_by": 1,
            "dataset.seq_length": 16,
            "dataset.num_workers": 0,
            "dataset.persistent_workers": False,
            "tokenizer.tokenizer_type": "NullTokenizer",
            "tokenizer.tokenizer_model": None,
            "tokenizer.vocab_size": 63,
            "train.train_iters": 4,
            "train.global_batch_size": 8,
            "train.micro_batch_size": 1,
            "validation.eval_iters": 0,
            "scheduler.lr_warmup_iters": 0,
            "optimizer.lr": 1e-2,
            "optimizer.clip_grad": 0.0,
            "optimizer.bf16": False,
            "logger.log_interval": 1,
            "logger.tensorboard_dir": None,
            "checkpoint.save": None,
            "checkpoint.load": None,
            "dist.distributed_backend": "gloo",
            "dist.use_decentralized_pg": False,
            "dist.use_gloo_process_groups": True,
            "mixed_precision": None,
        },
    )
    return config


def put(config: Any, values: Mapping[str, Any]) -> None:
    """Set fields of a config by their dotted names; fail if there is no such field."""
    for dotted, value in values.items():
        *path, last = dotted.split(".")
        owner = config
        for name in path:
            owner = getattr(owner, name)
        assert hasattr(owner, last), dotted
        setattr(owner, last, value)


# Fields of Megatron's configs that differ between Megatron's arguments and Bridge, without meaning
# for a plan: Bridge sets fields of FP8 without FP8, and has None where Megatron's validation sets a
# value.
_ALIKE = frozenset(
    {
        *("attention_backend", "barrier_with_L1_time", "bias_activation_fusion", "cp_comm_type"),
        *("fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        *("expert_tensor_parallel_num_weight_shards", "tensor_parallel_num_weight_shards"),
        *("inference_sampling_seed", "offload_modules", "persist_layer_norm"),
        *("use_cpu_initialization", "wgrad_deferral_limit", "delay_wgrad_compute"),
        "add_qkv_bias",  # Megatron's arguments set this field together with every other bias
        "batch_p2p_comm",  # Bridge sets this field to False if there is no pipeline
        "cross_entropy_fusion_impl",  # pretrain_gpt.py refuses the value te
        *("apply_rope_fusion", "moe_permute_fusion", "defer_embedding_wgrad_compute"),
        "gradient_accumulation_fusion",
        "pipeline_model_parallel_layout",
    }
)


def read_recipes(
    folder: Path, recipes: Mapping[str, int]
) -> dict[str, tuple[Mapping[str, Any], dict[str, Any]]]:
    """Read each of ``recipes``, which are given with their numbers of ranks, and return for each
    the settings that no argument of Megatron sets, and the facts for which `plan` reads another
    value than Bridge, with both values.

    This changes the process, so call it in a forked one only.
    """
    import_bridge(folder)
    return {name: _read_otherwise(name, ranks) for name, ranks in recipes.items()}


def _read_otherwise(name: str, ranks: int) -> tuple[Mapping[str, Any], dict[str, Any]]:
    full = f"megatron.bridge.recipes.{name}"
    module, _, function = full.partition(":")
    with hub():
        launch = launch_from_recipe(full, ())
        config = getattr(importlib.import_module(module), function)()
    args = megatron_arguments.parse_arguments(launch.arguments).args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, PipelineConfig(), ranks)
        model = megatron_arguments.check_model(args, PipelineConfig())
        _apply_parts(config, args.data_parallel_size)
    facts = [(field.name, getattr(model, field.name), config.model) for field in fields(model)]
    for part in (config.ddp, config.optimizer):
        named = [field.name for field in fields(part) if hasattr(args, field.name)]
        facts += [(name, getattr(args, name), part) for name in named]
    assert launch.recipe is not None
    return launch.recipe.settings, {
        name: (read, getattr(theirs, name))
        for name, read, theirs in facts
        if name not in _ALIKE and not callable(read) and str(read) != str(getattr(theirs, name))
    }


def _apply_parts(config: Any, data_parallel_size: int) -> None:
    """Apply the parts of ``config`` to its model as Bridge's `runtime_config_update` does, which
    also needs GPUs."""
    precision = config.mixed_precision
    if isinstance(precision, str):
        module: Any = importlib.import_module("megatron.bridge.training.mixed_precision")
        precision = module.get_mixed_precision_config(precision)
    if precision is not None:
        precision.finalize()
        precision.setup(config.model, config.optimizer, config.ddp)
    if config.comm_overlap is not None:
        config.comm_overlap.data_parallel_size = data_parallel_size
        config.comm_overlap.finalize()
        config.comm_overlap.setup(config.model, config.optimizer, config.ddp)
    settings: Any = importlib.import_module("megatron.bridge.training.config")
    settings._validate_and_sync_distributed_optimizer_settings(config)
    for name in ("apply_rope_fusion", "moe_permute_fusion", "defer_embedding_wgrad_compute"):
        setattr(config.model, name, False)  # the CPU has no kernels for these fusions
    config.model.finalize()


def run(folder: Path, jobs: Sequence[Job]) -> dict[str, list[Run] | str]:
    """Run ``jobs`` one after the other. Return for each job the records of its ranks, or how it
    failed.

    This changes the process, so call it in a forked one only.
    """
    import_bridge(folder)
    return {job.name: _run(job) for job in jobs}


def _run(job: Job) -> list[Run] | str:
    with agent_store() as port:
        results = run_ranks(job.ranks, lambda rank: _train(job, rank, port), connect=False)
    try:
        return values(results)
    except AssertionError as failure:
        return str(failure)


def _train(job: Job, rank: int, port: int) -> Run:
    torch.compiler.set_stance("force_eager")
    os.environ |= torchrun_environment(rank, job.ranks, port)
    fork_checkpoint_manager()
    apply(cpu.patches())
    _without_gpu()
    pretrain: Any = importlib.import_module("megatron.bridge.training.pretrain")
    gpt_step: Any = importlib.import_module("megatron.bridge.training.gpt_step")
    config = small_recipe(job.recipe)
    job.change(config)
    put(config, job.values)
    if job.draws:
        config.model.register_pre_wrap_hook(_draw)
        config.model.register_post_wrap_hook(_draw_adapters)
    if job.ours:
        from megatron_ext import bridge

        bridge.use(config, **job.ours)
    recorder = _Recorder()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        pretrain.pretrain(config, gpt_step.forward_step, callbacks=recorder.callbacks())
    recorder.run.said = said.getvalue()
    return recorder.run


def _without_gpu() -> None:
    """Let Bridge start without a GPU, as this project's CPU platform does for Megatron."""

    def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    # Without Transformer Engine Megatron has empty names for its layers, which Bridge would take
    # for real ones.
    utils: Any = importlib.import_module("megatron.bridge.peft.utils")
    utils.HAVE_TE = False

    def local(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "use_transformer_engine": False})

    apply(
        (
            wrap(
                "megatron.bridge.training.initialize:initialize_megatron",
                initialize,
                reason="Megatron asserts that there is a GPU, unless given allow_no_cuda",
            ),
            wrap(
                "megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
                local,
                reason="Bridge takes Transformer Engine's layers even if the decoder has others",
            ),
        )
    )


def _draw(model: list[Any]) -> list[Any]:
    """Bridge's hook before a model is wrapped: draw each weight from its name, so that it does not
    depend on the rank of its stage."""
    for chunk in model:
        tied = chunk.share_embeddings_and_output_weights
        draw_by_name(
            (_TABLE if tied and name == "output_layer.weight" else name, parameter)
            for name, parameter in named_parameters(chunk)
        )
    return model


def _draw_adapters(model: list[Any]) -> list[Any]:
    """Bridge's hook after a model is wrapped: draw the low-rank adapters, which Bridge adds after
    it has called `_draw`."""
    for chunk in model:
        draw_by_name(
            (name, parameter)
            for name, parameter in named_parameters(getattr(chunk, "module", chunk))
            if ".adapter." in name
        )
    return model


class _Recorder:
    """Records the values that Bridge passes to its callbacks."""

    def __init__(self) -> None:
        self.run = BridgeRun()

    def callbacks(self) -> Any:
        module: Any = importlib.import_module("megatron.bridge.training.callbacks")
        manager = module.CallbackManager()
        manager.register("on_train_step_end", self._step)
        manager.register("on_train_end", self._end)
        return manager

    def _step(self, context: Any) -> None:
        self.run.losses += [logged_loss(loss) for loss in (context.loss_dict or {}).values()]

    def _end(self, context: Any) -> None:
        settings = SimpleNamespace(
            use_distributed_optimizer=context.state.cfg.ddp.use_distributed_optimizer,
            ckpt_format="torch_dist",
            pipeline_model_parallel_size=context.state.cfg.model.pipeline_model_parallel_size,
            dist_ckpt_optim_fully_reshardable=True,
            distrib_optim_fully_reshardable_mem_efficient=False,
        )
        tensors = NamedTensors(context.model, context.optimizer, settings)
        self.run.state = digests(chain(tensors.parameters(), tensors.optimizer_states()))
        schedule = sys.modules["megatron.core.pipeline_parallel"].get_forward_backward_func()
        self.run.schedule = getattr(schedule, "__name__", type(schedule).__name__)
