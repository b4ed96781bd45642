"""Tests that a test with the mark of a setting fails if the setting is off in our trainings and on
in stock's.

160 public recipes fuse their cross entropy, and the test with that mark used to pass with the
fusion switched off.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, read_models, resolve
from tests.helpers.combinations import nightly
from tests.helpers.covers.markers import NIGHT, collect
from tests.helpers.covers.tested import features_of
from tests.helpers.ranks import HANGS
from tests.helpers.transformer_engine_on_cpu import VERSIONS
from tests.helpers.witnesses import SWITCHED_OFF, WITNESSES

ROOT = Path(__file__).resolve().parents[3]

_SETTINGS = "tests/pipeline/training/test_recipe_settings.py::"
_CONTEXT = "tests/pipeline/training/test_context_parallel.py::"
_PARITY = "tests/pipeline/training/test_parity.py::"
_OPTIMIZERS = "tests/pipeline/training/test_optimizers.py::"
_GRAPHS = "tests/pipeline/training/test_cuda_graphs.py::test_training_is_stocks_to_the_last_bit"
_STOCKS = "test_it_is_stock_to_the_last_bit"
_WINDOWS = f"{_SETTINGS}{_STOCKS}[windows, sinks, an output gate-zb-h1]"
_GROUPS = (
    f"{_SETTINGS}{_STOCKS}[experts in groups, dense layers, a gated shared one, recomputed-zb-h1]"
)
_BESIDE_TENSOR = f"{_SETTINGS}{_STOCKS}[whole experts beside tensor parallel-zb-h1]"
_CAPACITY = f"{_SETTINGS}{_STOCKS}[experts of some capacity-zb-h1]"
_LATENT = f"{_SETTINGS}{_STOCKS}[multi-latent attention-zb-h1]"
_FUSED_LOSS = f"{_SETTINGS}{_STOCKS}[fused cross entropy, loss per token-zb-h1]"
_SHARDED = f"{_OPTIMIZERS}{_STOCKS}[averaged, sharded-zb-h1]"
_LAYOUT = "tests/pipeline/training/test_placements.py::test_uneven_stages[layout]"
_SHARED_EXPERT = f"{_GRAPHS}[shared expert-moe_router moe_preprocess-interleaved-zb]"
_OTHER_OPTIMIZERS = f"{_OPTIMIZERS}test_optimizers_of_other_packages"
_PREDICTION = f"tests/pipeline/training/test_multi_token_prediction.py::{_STOCKS}"
_LATENT_SPACE = (
    "tests/patches/layers/test_transformer_engine_training.py::test_training_is_stocks_to_the_last_bit"
    f"[{VERSIONS[-1]}-experts, grouped, in a latent space]"
)
_PAIRS = "tests/pipeline/training/test_pairs.py::test_trainings_are_stocks_to_the_last_bit"

# For each setting, one test that is marked as a test of the setting.
MARKED = {
    "account_for_embedding_in_pipeline_split": f"{_SETTINGS}test_an_end_that_counts_as_a_layer"
    "[account_for_embedding_in_pipeline_split-zb-h1]",
    "account_for_loss_in_pipeline_split": f"{_SETTINGS}test_an_end_that_counts_as_a_layer"
    "[account_for_loss_in_pipeline_split-zb-h1]",
    "attention_output_gate": _WINDOWS,
    "average_in_collective": f"{_OPTIMIZERS}{_STOCKS}[averaged-zb-h1]",
    "calculate_per_token_loss": _FUSED_LOSS,
    "check_for_nan_in_grad": f"{_SETTINGS}test_a_gradient_that_is_no_number_ends_the_training"
    "[zb-h1]",
    "context_parallel_size": f"{_CONTEXT}{_STOCKS}[tied-zb-h1]",
    "cross_entropy_fusion_impl": _FUSED_LOSS,
    "cuda_graph_impl": f"{_GRAPHS}[dense--zb-h1]",
    "cuda_graph_scope": f"{_GRAPHS}[dense-attn-zb-h1]",
    "exp_avg_dtype": f"{_OTHER_OPTIMIZERS}[fused, states in bf16-zb-h1]",
    "exp_avg_sq_dtype": f"{_OTHER_OPTIMIZERS}[fused, states in bf16-zb-h1]",
    "expert_model_parallel_size": _BESIDE_TENSOR,
    "expert_tensor_parallel_size": _BESIDE_TENSOR,
    "grad_reduce_in_fp32": f"{_OPTIMIZERS}{_STOCKS}[gradients in bf16-zb-h1]",
    "group_query_attention": _WINDOWS,
    "main_grads_dtype": f"{_OPTIMIZERS}{_STOCKS}[offloaded-zb-h1]",
    "main_params_dtype": f"{_OTHER_OPTIMIZERS}[fused, main parameters in fp16-zb-h1]",
    "moe_expert_capacity_factor": _CAPACITY,
    "moe_latent_size": _LATENT_SPACE,
    "moe_layer_freq": _GROUPS,
    "moe_router_dtype": _GROUPS,
    "moe_router_force_load_balancing": f"{_SETTINGS}test_routing_at_random_is_stocks[zb-h1-None]",
    "moe_router_num_groups": _GROUPS,
    "moe_shared_expert_gate": _GROUPS,
    "moe_shared_expert_intermediate_size": _SHARED_EXPERT,
    "moe_token_dispatcher_type": _CAPACITY,
    "mtp_num_layers": f"{_PREDICTION}[tied, 1 depth-zb-h1]",
    "mtp_use_repeated_layer": f"{_PREDICTION}[untied, repeated layer-zb-h1]",
    "multi_latent_attention": _LATENT,
    "num_experts": _CAPACITY,
    "num_layers_in_first_pipeline_stage": f"{_SETTINGS}test_layers_of_the_ends[zb-h1-ends0]",
    "num_layers_in_last_pipeline_stage": f"{_SETTINGS}test_layers_of_the_ends[zb-h1-ends1]",
    "overlap_grad_reduce": f"{_PARITY}test_gradient_reduction_overlaps",
    "overlap_moe_expert_parallel_comm": f"{_PAIRS}[all]",
    "overlap_param_gather": _SHARDED,
    "packed": "tests/pipeline/training/test_packed_sequences.py::"
    + _STOCKS
    + "[conversations-zb-h1]",
    "pipeline_model_parallel_layout": _LAYOUT,
    "precision": _FUSED_LOSS,
    "qk_layernorm": _LATENT,
    "recompute_granularity": f"{_SETTINGS}{_STOCKS}[full recompute-zb-h1]",
    "recompute_modules": f"{_SETTINGS}{_STOCKS}[shared experts recomputed-zb-h1]",
    "sequence_parallel": _BESIDE_TENSOR,
    "softmax_type": _WINDOWS,
    "tensor_model_parallel_size": _BESIDE_TENSOR,
    "use_distributed_optimizer": _SHARDED,
    "use_precision_aware_optimizer": f"{_OPTIMIZERS}{_STOCKS}[offloaded-zb-h1]",
    "window_size": _WINDOWS,
}


# Without these settings our training fails before its numbers could differ: the other settings
# require them, or a rank's own check ends it.
NEEDED = frozenset(
    (
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("expert_tensor_parallel_size", "moe_router_num_groups", "multi_latent_attention"),
        *("num_experts", "overlap_moe_expert_parallel_comm", "sequence_parallel"),
        "use_precision_aware_optimizer",
    )
)

_CALLERS = "its tests call the schedule with models of their own, without flags"
_BUILT = "its tests set it where a model is built, without a flag"
_IS_W = "W defers weight gradients, with the flag and without"
_ORDER = "it sets when something happens, which changes no number"

# Settings that tests on the CPU are marked with, but that this file does not switch off, each with
# its reason.
NOT_SWITCHED = {
    "defer_embedding_wgrad_compute": _IS_W,
    "delay_wgrad_compute": _IS_W,
    "experimental_attention_variant": _CALLERS,
    "first_last_layers_bf16": _BUILT,
    "fp8_output_proj": _BUILT,
    "freeze_language_model": _CALLERS,
    "freeze_vision_model": _CALLERS,
    "gradient_accumulation_fusion": _BUILT,
    "hybrid_layer_pattern": _CALLERS,
    "microbatch_group_size_per_vp_stage": _ORDER,
    "optimizer": "Muon's package cannot be fetched everywhere, and a skipped test tells nothing",
    "overlap_dispatch_backward_with_experts_wgrad": _IS_W,
    "overlap_param_gather_with_optimizer_step": _ORDER,
    "peft": _CALLERS,
    "tp_comm_overlap": "its tests run layers by themselves, without a training",
    "transformer_impl": _BUILT,
    "vision": _CALLERS,
}


@nightly("it collects all tests, a minute long")
def test_each_setting_that_recipes_count_is_switched_off_or_named() -> None:
    """Every setting that recipes use and that marks of tests name is in `MARKED` or in
    `NOT_SWITCHED`, or has a witness: a function whose call shows that the setting is on. Each test
    in `MARKED` has the mark of its setting."""
    models = read_models()
    recipes = [resolve(name, raw, models) for name, raw in read_recipes(RECIPES).items()]
    used = {feature for recipe in recipes for feature in features_of(recipe)}
    shown: dict[str, set[str]] = {}
    for mark in collect():
        if mark.grade != "C":
            for feature in mark.features & used:
                shown.setdefault(feature.setting, set()).add(mark.test)
    watched = {feature.setting for feature in WITNESSES}
    assert shown.keys() == (MARKED.keys() | NOT_SWITCHED.keys() | watched) & shown.keys()
    assert not NOT_SWITCHED.keys() & MARKED.keys() and shown.keys() >= NOT_SWITCHED.keys()
    for setting, test in MARKED.items():
        assert test in shown[setting], f"{test} has no mark of {setting}"


@nightly("its test by day is that of the setting itself")
@pytest.mark.parametrize("setting", MARKED)
def test_a_marked_test_fails_without_its_setting(setting: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", MARKED[setting]]
    environment = {**os.environ, **NIGHT, SWITCHED_OFF: setting}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=4 * HANGS
    )
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-2000:]
    if setting not in NEEDED:
        # docstrings contain the bare words, so a number is required
        ended = re.search(r"rank \d+ ended with", done.stdout)
        assert ended is None, f"a rank ended before it: {done.stdout[-2000:]}"
