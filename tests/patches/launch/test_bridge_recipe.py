"""Tests of `plan` and `doctor` of MODULE:FUNCTION, a launch that a Megatron-Bridge recipe
describes.

The recipe is a stand-in with the fields of Bridge's config;
tests/pipeline/callers/test_bridge.py reads Bridge's own recipes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_ext import bridge
from megatron_ext.cli import app
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.bridge_recipe import launch_from_recipe
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.planner import launch_job
from megatron_ext.launch.planner.command_line import arguments_with, command_with
from megatron_ext.launch.planner.launch_job import refusal_of
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, with_launch
from megatron_ext.planner.unequal_gains import ORDER
from megatron_ext.planner.verdict import Written
from tests.helpers.few_families import only_families

RANKS = 4

RECIPES = """
from dataclasses import dataclass
from types import SimpleNamespace


def silu(x): ...


def small():
    model = SimpleNamespace(
        num_layers=8, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8,
        num_query_groups=2, kv_channels=None, seq_length=1024, vocab_size=31000,
        should_pad_vocab=True, make_vocab_size_divisible_by=128, normalization="RMSNorm",
        add_bias_linear=False, gated_linear_unit=True, activation_func=silu,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_base=500000.0, multi_latent_attention=False, num_moe_experts=None,
        moe_router_load_balancing_type="aux_loss",
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=1,
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=None, overlap_p2p_comm=False, batch_p2p_comm=True,
        recompute_granularity="selective", recompute_modules=["core_attn", "mlp"],
        bf16=False, params_dtype=None, cuda_graph_impl="none", cuda_graph_modules="full",
        attention_backend=None, cp_comm_type=None, transformer_impl="transformer_engine",
    )
    return SimpleNamespace(
        model=model,
        train=SimpleNamespace(
            micro_batch_size=1, global_batch_size=8, train_iters=100, eval_interval=None
        ),
        validation=SimpleNamespace(eval_interval=50, eval_iters=2),
        optimizer=SimpleNamespace(lr=1e-4, use_distributed_optimizer=True, bf16=False),
        scheduler=SimpleNamespace(lr_warmup_iters=10, lr_decay_style="cosine"),
        ddp=SimpleNamespace(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True,
            bucket_size=None, average_in_collective=True,
        ),
        dist=SimpleNamespace(use_tp_pp_dp_mapping=False),
        tokenizer=SimpleNamespace(vocab_size=None),
        comm_overlap=SimpleNamespace(
            tp_comm_overlap=False, overlap_p2p_comm=None, overlap_grad_reduce=None,
            overlap_moe_expert_parallel_comm=None,
        ),
        mixed_precision=SimpleNamespace(
            bf16=True, fp8=None, fp8_recipe="tensorwise", grad_reduce_in_fp32=False
        ),
        peft=None,
        checkpoint=SimpleNamespace(dist_ckpt_optim_fully_reshardable=False, save=None, load=None),
        dataset=SimpleNamespace(dataloader_type="single"),
        env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": 1},
    )


def adapters():
    config = small()
    config.peft = object()
    return config


def large_layers():
    config = small()
    config.model.pipeline_model_parallel_layout = [
        ["embedding", "decoder", "decoder"], *[["decoder"] * 2] * 2, ["decoder"] * 2 + ["loss"]
    ]
    config.peft = object()
    return config


def packed():
    config = small()
    config.dataset = SimpleNamespace(dataloader_type="batch", enable_offline_packing=True)
    return config


def tower():
    config = small()
    config.model.vision_config = SimpleNamespace(
        depth=24, hidden_size=1152, num_heads=16, intermediate_size=4304, spatial_merge_size=2,
        hidden_act="gelu_pytorch_tanh", out_hidden_size=1024, deepstack_visual_indexes=[5, 11, 17],
    )
    config.model.freeze_vision_model = True
    return config


def broken():
    raise RuntimeError("no network")


def nothing():
    return 3


def fails(size):
    ...


def ends():
    raise SystemExit(3)


def no_optimizer():
    config = small()
    del config.optimizer
    return config


def unknown_layer():
    config = large_layers()
    config.model.pipeline_model_parallel_layout[1] = ["decoder", "encoder"]
    return config


def layout_of_numbers():
    config = small()
    config.model.pipeline_model_parallel_layout = [1, 2]
    return config


def list_of_variables():
    config = small()
    config.env_vars = ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
    return config


def no_model():
    config = small()
    config.model = "gpt"
    return config
"""

# The training of the recipe, as a launch command of Megatron's.
COMMAND = f"""
torchrun --nproc-per-node {RANKS} pretrain_gpt.py --num-layers 8 --hidden-size 1024
--ffn-hidden-size 4096 --num-attention-heads 8 --group-query-attention --num-query-groups 2
--seq-length 1024 --max-position-embeddings 1024 --padded-vocab-size 31232 --normalization RMSNorm
--disable-bias-linear --swiglu --untie-embeddings-and-output-weights
--position-embedding-type rope --rotary-base 500000 --tensor-model-parallel-size 2
--sequence-parallel --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
--recompute-granularity selective --recompute-modules core_attn mlp --bf16 --grad-reduce-in-bf16
--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --eval-interval 50 --eval-iters 2
--lr 1e-4 --use-distributed-optimizer --lr-warmup-iters 10 --lr-decay-style cosine
--overlap-grad-reduce --overlap-param-gather --ddp-average-in-collective
""".split()


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module of recipes into the working directory, and yield its name."""
    (tmp_path / "stand_in_recipes.py").write_text(RECIPES)
    monkeypatch.chdir(tmp_path)
    yield "stand_in_recipes"
    sys.modules.pop("stand_in_recipes", None)


@pytest.fixture
def few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a plan compare only four families, so that it takes little time."""
    only_families(monkeypatch, "1f1b", "interleaved", "zb-h1", "zb-v")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def validated(arguments: tuple[str, ...]) -> dict[str, Any]:
    args = megatron_arguments.parse_arguments(arguments).args
    with megatron_arguments.on_gpus(args):
        return vars(megatron_arguments.validate(args, PipelineConfig(), RANKS))


def test_a_recipe_gives_the_arguments_of_its_launch_command(recipes: str) -> None:
    read = validated(launch_from_recipe(f"{recipes}:small", ()).arguments)
    written = validated(read_launch(COMMAND).arguments)
    differences = {name: value for name, value in written.items() if read[name] != value}
    assert differences == {}


def test_a_layout_of_lists_is_read_and_adapters_are_named(recipes: str) -> None:
    launch = launch_from_recipe(f"{recipes}:large_layers", ("--pipeline-schedule", "zb-v"))
    args = megatron_arguments.parse_arguments(launch.arguments).args
    assert args.pipeline_model_parallel_layout == "Ett|tt|tt|ttL"
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert args.pipeline_schedule == "zb-v"
    assert any("config.peft" in remark for remark in launch.remarks)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("ends", "calling the function without arguments fails: SystemExit: 3"),
        ("no_optimizer", "AttributeError: "),
        ("unknown_layer", "has a layer 'encoder', and the layers of a layout are embedding"),
        ("layout_of_numbers", "TypeError: "),
        ("list_of_variables", "TypeError: env_vars of the config is a list; it must"),
        ("no_model", "TypeError: "),
    ],
)
@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_config_that_is_nearly_right_is_refused(
    command: str, recipe: str, why: str, recipes: str
) -> None:
    """`plan` and `doctor` refuse a nearly right Bridge config in one line that names the recipe.
    Each of these configs used to end in a traceback of ours, or was accepted silently."""
    ran = run(command, f"{recipes}:{recipe}")
    assert ran.exit_code == 2, ran.output
    (line,) = ran.output.splitlines()
    assert line.startswith(f"megatron-ext: error: recipe {recipes}:{recipe}: ") and why in line


def test_a_plan_prints_lines_for_the_config(recipes: str, few_schedules: None) -> None:
    ran = run("plan", "--gpu", "h100", "--world-size", str(RANKS), f"{recipes}:small")
    assert ran.exit_code == 0, ran.output
    job = "8 layers on 4 ranks (TP 2 x PP 2), 8 microbatches of 1 x 1024 tokens"
    assert f"{job}, under interleaved:vpp=2" in ran.stdout
    lines = ran.stdout.partition("write:\n")[2].splitlines()
    code = [text for text in lines if text.startswith(("config.", "megatron_ext."))]
    assert "torchrun" not in ran.stdout
    config, settings = sys.modules[recipes].small(), []
    use = SimpleNamespace(use=lambda config, **given: settings.append(given))
    exec("\n".join(code), {"config": config, "megatron_ext": SimpleNamespace(bridge=use)})
    assert len(settings) == 1
    verdict = ran.stdout.partition("verdict: ")[2].splitlines()[0]
    assert f"--pipeline-schedule {settings[0]['schedule']}" in verdict


def test_changes_name_the_fields_of_the_config(recipes: str) -> None:
    launch = launch_from_recipe(
        f"{recipes}:small", ("--pipeline-p2p", "batched", "--pipeline-schedule", "zb-h1")
    )
    written = Written(
        (
            *("--pipeline-schedule", "v-auto", "--pipeline-memory-limit", "0.5x"),
            *("--micro-batch-size", "2", "--recompute-modules", "mlp", "layernorm"),
            *("--pipeline-post-validation", "--overlap-moe-expert-parallel-comm"),
        ),
        ("--num-virtual-stages-per-pipeline-rank", "--sequence-parallel"),
    )
    assert command_with(launch, written).splitlines() == [
        "config.model.virtual_pipeline_model_parallel_size = None",
        "config.model.sequence_parallel = False",
        "config.train.micro_batch_size = 2",
        "config.model.recompute_modules = ['mlp', 'layernorm']",
        "config.comm_overlap.overlap_moe_expert_parallel_comm = True",
        'megatron_ext.bridge.use(config, schedule="v-auto", memory_limit="0.5x", p2p="batched", '
        "post_validation=True)",
    ]
    changed = megatron_arguments.parse_arguments(arguments_with(launch, written)).args
    assert (changed.micro_batch_size, changed.sequence_parallel) == (2, False)
    stock = Written(("--num-virtual-stages-per-pipeline-rank", "4"))
    assert command_with(launch, stock) == ("config.model.virtual_pipeline_model_parallel_size = 4")
    arranged = Written(arranging=("--pipeline-microbatch-order", "small-ends"))
    (call,) = command_with(launch_from_recipe(f"{recipes}:small", ()), arranged).splitlines()
    assert call == (
        'megatron_ext.bridge.use(config, schedule="interleaved:vpp=2", '
        'microbatch_order="small-ends")'
    )


def test_doctor_checks_a_recipe_with_flags_of_ours(recipes: str) -> None:
    words = ["--world-size", str(RANKS), f"{recipes}:small"]
    ran = run("doctor", *words, "--pipeline-schedule", "zb-v")
    assert ran.exit_code == 0, ran.output
    assert "zb-v, 8 microbatches" in ran.output
    assert "datasets" not in ran.output
    # The recipe has two stages a rank, which `use` removes for zb-h1.
    ran = run("doctor", *words, "--pipeline-schedule", "zb-h1")
    assert ran.exit_code == 0 and "zb-h1, 8 microbatches" in ran.output
    ran = run("doctor", *words, "--pipeline-shedule", "zb-v")
    assert ran.exit_code == 2
    assert "No such option: --pipeline-shedule" in ran.output


ARRANGED = ("--pipeline-schedule", "zb-v", "--pipeline-microbatch-order", "small-ends")


def findings(*words: str) -> tuple[dict[str, str], float]:
    """Return doctor's last finding on each subject, and the bytes of the model on the first
    rank."""
    told = json.loads(run("doctor", "--json", "--world-size", str(RANKS), *words).output)
    found = {one["subject"]: f"{one['verdict']}: {one['text']}" for one in told["findings"]}
    return found, told["prediction"]["ranks"][0]["model_bytes"]


def test_doctor_refuses_what_use_would(recipes: str) -> None:
    """`doctor` of a recipe refuses what `bridge.use` would refuse. Whether microbatches can be
    ordered depends on the recipe's dataset, which Megatron's arguments do not show. doctor used to
    refuse an order for a recipe of packed sequences, and to accept one for a recipe whose
    microbatches all cost the same."""
    found, _ = findings(f"{recipes}:small", *ARRANGED)
    with pytest.raises(ValueError) as refused:
        bridge.check(
            sys.modules[recipes].small(),
            PipelineConfig.parse(schedule="1f1b", microbatch_order="small-ends"),
        )
    assert found["megatron_ext.bridge.use"] == f"wrong: {refused.value}"
    assert "dataset.inter_document_masking" in str(refused.value)
    found, _ = findings(f"{recipes}:packed", *ARRANGED)
    assert not {"megatron_ext.bridge.use", "microbatches"} & found.keys()


def test_a_plan_arranges_the_packs_of_a_recipe(recipes: str) -> None:
    """`plan` of a recipe orders packed microbatches if `bridge.use` would. It used to decide by
    Megatron's arguments, which do not show that a recipe packs its sequences."""
    written = Written(("--pipeline-schedule", "zb-v"), arranging=ORDER)

    def refused(name: str) -> str | None:
        launch = launch_from_recipe(f"{recipes}:{name}", ())
        request = LaunchRequest(launch, world_size=RANKS)
        return with_launch(request, lambda parsed: refusal_of(request, parsed, written))

    assert refused("packed") is None
    assert "dataset.inter_document_masking" in (refused("small") or "")


def test_frozen_weights_and_a_tower_of_a_recipe_are_counted(
    recipes: str, few_schedules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` and `doctor` of a recipe count frozen weights and an image encoder. A recipe with
    adapters used to be planned as a training of all weights."""
    schedule = ("--pipeline-schedule", "zb-h1")
    (_, whole), (found, frozen), (_, seeing) = (
        findings(f"{recipes}:{name}", *schedule) for name in ("small", "adapters", "tower")
    )
    assert frozen < 0.3 * whole < 0.3 * seeing
    assert "weights are frozen" in found["recipe"]
    monkeypatch.setattr(launch_job, "_layouts", lambda read: None)
    words = ("plan", "--gpu", "h100", "--world-size", str(RANKS))
    plain, adapted, with_tower = (
        run(*words, f"{recipes}:{name}").stdout for name in ("small", "adapters", "tower")
    )
    assert "vision tower on the first stage, frozen, its projector trained" in with_tower
    first, second, third = (
        float(re.findall(r"now: .*: (\S+) s a step", told)[0])
        for told in (plain, adapted, with_tower)
    )
    assert second < 0.9 * first < 0.9 * third


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("stand_in_recipes", "is not of the form MODULE:FUNCTION"),
        ("stand_in_recipes:smal", "did you mean small?"),
        ("stand_in_recipes:broken", "RuntimeError: no network"),
        ("stand_in_recipes:nothing", "returns a int"),
        ("stand_in_recipes:fails", "without arguments fails: TypeError"),
        ("no_such_module:small", "cannot be imported here"),
    ],
)
def test_a_recipe_that_cannot_be_read_says_why(recipes: str, recipe: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"recipe {recipe}.*{message.replace('?', '.')}"):
        launch_from_recipe(recipe, ())


def test_a_recipe_stands_in_place_of_other_sources(recipes: str, tmp_path: Path) -> None:
    recipe = f"{recipes}:small"
    for other in ("train.log", "values.json", "pp=4,m=8"):
        ran = run("plan", recipe, other)
        assert ran.exit_code == 2 and "a job is one word" in ran.output
    ran = run("plan", recipe, "--", *COMMAND)
    assert ran.exit_code == 2 and "give only one of the two" in ran.output
