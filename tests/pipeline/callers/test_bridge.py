"""Tests of Megatron-Bridge's own training loop, under Bridge's schedule and under ours.

The recipes, `pretrain` and the forward step are Bridge's; a recipe's model is shrunk. All trainings
of this file run in one process, because the import of Bridge takes longer than they do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from megatron_ext import bridge
from scripts.caller_packages import prepare
from tests.helpers import bridge_on_cpu
from tests.helpers.bridge_on_cpu import Job, put
from tests.helpers.combinations import at_night, nightly
from tests.helpers.megatron_runs import Run, assert_same, losses, whole_state
from tests.helpers.packed import sliced_packs_on_the_cpu
from tests.helpers.ranks import HANGS, lasting_folder, run_ranks, values

COSTS = {"costs": "f=1,i=1,w=1,comm=0"}
OURS = {
    "v-auto": {"schedule": "v-auto", "memory_limit": "0.5x", **COSTS},
    "zb-h1": {"schedule": "zb-h1", **COSTS},
    "zb-v": {"schedule": "zb-v", **COSTS},
    "interleaved-zb": {"schedule": "interleaved-zb", **COSTS},
}
FOLDER = lasting_folder()  # folder of the checkpoints that the jobs share
# Replacement of a rank's attention, which lasts until the rank ends.
_ATTENTION = contextlib.ExitStack()


def experts(config: Any) -> None:
    """Set four experts, on two expert-parallel ranks, and a distributed optimizer."""
    put(
        config,
        {
            "model.num_moe_experts": 4,
            "model.moe_router_topk": 2,
            "model.moe_ffn_hidden_size": 32,
            "model.moe_aux_loss_coeff": 1e-2,
            "model.moe_token_dispatcher_type": "alltoall",
            "model.add_bias_linear": False,
            "model.expert_model_parallel_size": 2,
            "ddp.use_distributed_optimizer": True,
        },
    )


def multi_token_prediction(config: Any) -> None:
    """Set multi-token prediction with rotary positions, because Megatron leaves two tables of
    learned positions unequal under any schedule."""
    put(
        config,
        {
            "model.mtp_num_layers": 1,
            "model.share_embeddings_and_output_weights": False,
            "model.position_embedding_type": "rope",
        },
    )


def overlap(config: Any) -> None:
    """Set Bridge's overlap of communication, which ``pretrain`` applies if there are two
    replicas."""
    comm_overlap: Any = importlib.import_module("megatron.bridge.training.comm_overlap")
    config.comm_overlap = comm_overlap.CommOverlapConfig(tp_comm_overlap=False)
    put(config, {"ddp.use_distributed_optimizer": True})


def overlap_and_deferral(config: Any) -> None:
    """Set the overlap of communication, and deferred weight gradients of the embedding, which our
    schedules compute by themselves."""
    overlap(config)
    put(config, {"comm_overlap.defer_embedding_wgrad_compute": True})


def adapters(config: Any) -> None:
    """Set low-rank adapters on the weights of the checkpoint that the stock job saved."""
    lora: Any = importlib.import_module("megatron.bridge.peft.lora")
    config.peft = lora.LoRA(dim=4, alpha=8)
    config.checkpoint.pretrained_checkpoint = str(FOLDER / "stock")


def two_expert_ranks(config: Any) -> None:
    """Set two expert-parallel ranks without DeepEP, whose kernels the recipe names and which needs
    a GPU."""
    put(
        config,
        {"model.expert_model_parallel_size": 2, "model.moe_token_dispatcher_type": "alltoall"},
    )


def packed_conversations(config: Any) -> None:
    """Set Bridge's packing of prompts and completions, with a local file in place of the recipe's
    SQuAD."""
    put(
        config,
        {
            "model.seq_length": 32,
            "dataset.seq_length": 32,
            "dataset.hf_dataset": None,
            "dataset.hf_validation_proportion": None,
            "dataset.do_validation": False,
            "dataset.dataset_root": str(FOLDER / "conversations"),
            "dataset.offline_packing_specs.packed_sequence_size": 32,
            "dataset.offline_packing_specs.num_tokenizer_workers": 1,
            "tokenizer.tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer.tokenizer_model": str(FOLDER / "conversations"),
            "tokenizer.vocab_size": None,
        },
    )
    _ATTENTION.enter_context(sliced_packs_on_the_cpu())


def write_conversations() -> None:
    """Write prompts and completions of made-up words, and a tokenizer that has a token for each."""
    folder, draw = FOLDER / "conversations", Random(1)
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {str(word): word for word in range(64)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {**model, "unk_token": "0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"unk_token": "0", "pad_token": "0", "eos_token": "1", "bos_token": "2"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = (
        json.dumps(
            {
                name: " ".join(str(draw.randrange(3, 64)) for _ in range(draw.randint(2, 9)))
                for name in ("input", "output")
            }
        )
        for _ in range(128)
    )
    (folder / "training.jsonl").write_text("\n".join(lines))


DENSE = Job("dense")
EXPERTS = Job("experts", experts, ranks=4)
PREDICTION = Job("prediction", multi_token_prediction)
OVERLAP = Job("overlap", overlap, ranks=4)
DEFERRAL = Job("deferral", overlap_and_deferral, ranks=4)
ADAPTERS = Job("adapters", adapters)
# These recipes read the model's config.json from Hugging Face.
LLAMA = Job("llama2", recipe="llama.h100.llama2:llama2_7b_pretrain_2gpu_h100_bf16_config")
QWEN = Job("qwen3", recipe="qwen.h100.qwen3:qwen3_600m_pretrain_1gpu_h100_bf16_config")
QWEN_EXPERTS = Job(
    "qwen3-moe",
    two_expert_ranks,
    ranks=4,
    recipe="qwen.h100.qwen3_moe:qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
)
PACKED = Job(
    "packed",
    packed_conversations,
    recipe="qwen.h100.qwen3:qwen3_600m_sft_1gpu_h100_bf16_config",
)
SAVING = DENSE.but(
    "saving",
    checkpoint__save=str(FOLDER / "stock"),
    checkpoint__save_interval=2,
    checkpoint__dist_ckpt_optim_fully_reshardable=True,
)
RESUMING = DENSE.but("resuming", checkpoint__ckpt_step=2)
TIED = DENSE.but("tied", OURS["zb-v"])

# Recipes that `launch_from_recipe` reads, by name, with the number of ranks.
READ = {
    "gpt.gpt3_175b:gpt3_175b_pretrain_config": 64,
    "olmoe.h100.olmoe_7b:olmoe_7b_pretrain_8gpu_h100_bf16_config": 8,
    "nemotronh.h100.nemotronh:nemotronh_8b_pretrain_2gpu_h100_bf16_config": 8,
    **{job.recipe: 8 for job in (LLAMA, QWEN, QWEN_EXPERTS, PACKED)},
    "qwen.h100.qwen3:qwen3_600m_peft_1gpu_h100_bf16_config": 8,
    "qwen_vl.h100.qwen3_vl:qwen3_vl_8b_pretrain_4gpu_h100_bf16_mock_config": 4,
}
# Settings of these recipes that Megatron has no arguments for: frozen weights and image encoders.
BESIDE_ARGUMENTS = {
    "qwen3_600m_peft": {
        "freeze_language_model": True,
        "freeze_vision_model": True,
        "freeze_vision_projection": True,
    },
    "qwen3_vl_8b": {
        "freeze_language_model": True,
        "freeze_vision_model": True,
        "vision": {
            "layers": 4,
            "hidden": 32,
            "heads": 4,
            "ffn": 64,
            "merged": 4,
            "deepstack_mergers": 1,
            "gated": False,
            "out_hidden": 32,
        },
    },
}

# Each entry is a job, our settings for it, and the job under Bridge's own schedule that must have
# the same losses.
BY_DAY = ((DENSE, "v-auto", DENSE),)
AT_NIGHT = (
    *((DENSE, name, DENSE) for name in ("zb-h1", "zb-v", "interleaved-zb")),
    *((EXPERTS, name, EXPERTS) for name in OURS),
    *((PREDICTION, name, PREDICTION) for name in OURS),
    *((DEFERRAL, name, OVERLAP) for name in OURS),
    *((ADAPTERS, name, ADAPTERS) for name in OURS),
    *((job, name, job) for job in (LLAMA, QWEN, QWEN_EXPERTS) for name in ("zb-h1", "v-auto")),
    *((PACKED, name, PACKED) for name in OURS),
)
CASES = (*BY_DAY, *at_night(*AT_NIGHT))


def used_before(config: Any) -> None:
    """Call `use` on the config while the recipe is changed, so that the job's own call is the
    second one."""
    bridge.use(config, **OURS["zb-v"])


TWICE = Job("dense/twice", used_before, OURS["zb-v"])
SLICES = PACKED.but(
    "packed/slices",
    {"schedule": "zb-h1", "slices": "4", "slice_lengths": "9,11,5,7", **COSTS},
)
# The job sets a layout as the command `plan` writes it for Bridge, without a number of virtual
# stages.
LAID_OUT = DENSE.but(
    "dense/laid-out", OURS["zb-v"], model__pipeline_model_parallel_layout="Ett|ttt|t|ttL"
)


def under(job: Job, name: str, **values: Any) -> Job:
    return job.but(f"{job.name}/{name}", OURS[name], **values)


JOBS = (
    DENSE,
    *at_night(
        SAVING,
        under(SAVING, "zb-v", checkpoint__save=str(FOLDER / "ours")),
        RESUMING.but("resuming", checkpoint__load=str(FOLDER / "ours")),
        under(RESUMING, "zb-v", checkpoint__load=str(FOLDER / "stock")),
        EXPERTS,
        PREDICTION,
        OVERLAP,
        ADAPTERS,
        LLAMA,
        QWEN,
        QWEN_EXPERTS,
        PACKED,
        SLICES,
        replace(TIED, draws=False),
        TWICE,
        LAID_OUT,
    ),
    *(under(job, name) for job, name, _ in CASES),
)


@functools.cache
def trained() -> dict[str, list[Run] | str]:
    folder, problem = prepare("bridge")
    if problem:
        pytest.skip(f"Megatron-Bridge cannot be installed with pip: {problem}")
    write_conversations()
    (results,) = values(
        run_ranks(
            1,
            lambda rank: bridge_on_cpu.run(folder, JOBS),
            timeout=HANGS * (1 + len(JOBS)),
            connect=False,
        )
    )
    return results


@nightly("by day with a stand-in for a recipe: test_bridge_recipe.py")
def test_recipes_are_read_as_bridge_applies_them() -> None:
    """`launch_from_recipe` translates a recipe of Bridge into Megatron's arguments. Megatron makes
    from these arguments the same model config, optimizer settings and reduction settings as Bridge
    makes from its recipe."""
    folder, problem = prepare("bridge")
    if problem:
        pytest.skip(f"Megatron-Bridge cannot be installed with pip: {problem}")
    (found,) = values(
        run_ranks(
            1, lambda rank: bridge_on_cpu.read_recipes(folder, READ), timeout=HANGS, connect=False
        )
    )
    assert found.keys() == READ.keys()
    for name, (settings, differences) in found.items():
        assert not differences
        function = name.partition(":")[2]
        named = [own for begin, own in BESIDE_ARGUMENTS.items() if function.startswith(begin)]
        assert settings == (named[0] if named else {})


def runs(name: str) -> list[Run]:
    made = trained()[name]
    assert not isinstance(made, str), made
    return made


@pytest.mark.parametrize(
    ("job", "schedule", "stock"),
    CASES,
    ids=[f"{job.name}-{schedule}" for job, schedule, _ in CASES],
)
def test_bridge_trains_to_the_same_bits_under_our_schedule(
    job: Job, schedule: str, stock: Job
) -> None:
    theirs, ours = runs(stock.name), runs(f"{job.name}/{schedule}")
    assert {run.schedule for run in theirs} == {"forward_backward_pipelining_without_interleaving"}
    assert {run.schedule for run in ours} == {"PipelineStep"}
    assert_same(ours, theirs)
    assert len(losses(ours)) == 4
    assert any("exp_avg_sq" in name for name in whole_state(ours))


@nightly("test_slices_of_packs.py has Megatron's own packs")
def test_packs_are_cut_into_slices() -> None:
    """Sequences that Megatron-Bridge has packed train in slices. This used to be refused."""
    theirs, ours = runs("packed"), runs("packed/slices")
    assert {run.schedule for run in ours} == {"PipelineStep"}
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-6) and len(losses(ours)) == 4


@nightly("Megatron's own builder takes layouts in test_layouts.py")
def test_a_layout_of_the_config_is_taken() -> None:
    assert_same(runs("dense/laid-out"), runs("dense"))
    assert {run.schedule for run in runs("dense/laid-out")} == {"PipelineStep"}


@nightly("what it leaves in the config: test_bridge_config.py")
def test_use_may_be_called_twice() -> None:
    assert_same(runs("dense/twice"), runs("dense"))
    assert {run.schedule for run in runs("dense/twice")} == {"PipelineStep"}


@nightly("Megatron's own checkpoints go both ways in test_checkpoints.py")
def test_checkpoints_go_both_ways() -> None:
    """Checkpoints of Bridge's loop go both ways: saved under a V schedule and loaded under stock,
    and the reverse. Bridge used to save optimizer states rank by rank, which do not fit the stages
    of a V."""
    assert_same(runs("saving/zb-v"), runs("saving"))
    for name in ("resuming", "resuming/zb-v"):
        assert len(losses(runs(name))) == 2
        assert_same(runs(name), runs("saving"))
    assert {run.schedule for run in runs("resuming/zb-v")} == {"PipelineStep"}


@nightly("the same rule under Megatron's own builder: test_placements.py")
def test_a_v_begins_with_equal_copies_of_a_tied_embedding() -> None:
    """Both copies of a tied embedding are equal when Bridge's training starts on a V. Bridge builds
    chunks by itself, so Megatron's setup used to leave the output layer's copy at zero, and the
    first step refused the model."""
    assert len(losses(runs("tied"))) == 4
