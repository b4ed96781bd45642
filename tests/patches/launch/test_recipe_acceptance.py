"""Tests that check public recipes, with all their settings, against every refusal of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from scripts.evaluation.recipes.accepting import as_on_gpus, judge, judge_on_v, others
from scripts.evaluation.recipes.configured import configuration_of
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve
from scripts.evaluation.recipes.verdict import Verdict

LLAMA = "recipes.llama.h100.llama3:llama3_8b_pretrain_16gpu_h100_bf16_16k_config"
MODELS = read_models()


@pytest.fixture(scope="module", autouse=True)
def on_gpus() -> Iterator[None]:
    with as_on_gpus():
        yield


def recipe(**more: Any) -> Recipe:
    """Return a recipe of Llama-3 8B on four pipeline and two tensor-parallel ranks with the
    settings ``more``."""
    raw = {**read_recipes(RECIPES)[LLAMA], "train.global_batch_size": 16}
    raw |= {f"model.{name}": value for name, value in more.items()}
    return resolve(LLAMA, raw, MODELS)


def test_a_recipe_is_accepted_under_its_own_stages_and_on_a_v() -> None:
    llama = recipe()
    verdict = judge(llama)
    assert verdict.is_accepted and verdict.schedule == llama.schedule
    assert verdict.microbatches == 16 / (llama.parallel_copies or 0)
    assert judge_on_v(llama).is_accepted


def test_one_setting_that_is_refused_is_enough() -> None:
    verdict = judge(recipe(use_transformer_engine_op_fuser=True))
    assert not verdict.is_accepted
    assert verdict.why and "does not go with use_transformer_engine_op_fuser=True" in verdict.why
    assert verdict.without == ("use_transformer_engine_op_fuser",)


def test_what_stock_cannot_run_is_counted_apart() -> None:
    verdict = judge(recipe(num_layers=31))
    assert verdict.why_stock and "split evenly over 2" in verdict.why_stock
    assert not verdict.is_accepted
    assert not verdict.without
    assert judge_on_v(recipe(num_layers=31)).why_stock
    assert judge(recipe(enable_hyper_connections=True)).why_stock


def test_a_value_that_megatron_does_not_know_is_reported() -> None:
    verdict = judge(recipe(recompute_method="some"))
    assert verdict.why_stock and "recompute_method is 'some', and Megatron's" in verdict.why_stock
    assert not verdict.is_accepted


DEEPSEEK = "perf_recipes.deepseek.b200.deepseek_v3:deepseek_v3_pretrain_256gpu_b200_bf16_config"


def test_a_layout_of_nested_lists_is_accepted() -> None:
    """A recipe with a layout of nested lists is accepted. The 36 public recipes with such a layout
    used to be counted as recipes that stock cannot run."""
    raw = read_recipes(RECIPES)[DEEPSEEK]
    assert raw["model.pipeline_model_parallel_layout"].startswith("[['embedding', 'decoder'")
    verdict = judge(resolve(DEEPSEEK, raw, MODELS))
    assert verdict.is_accepted, verdict


def test_values_that_are_text_reach_megatron() -> None:
    """Settings that a recipe has as text are passed to Megatron. ``window_size="[512, 0]"`` used to
    end the script that judges recipes."""
    for text in ("[512, 0]", "(512, 0)", "512"):
        assert judge(recipe(window_size=text)).is_accepted


def test_settings_that_no_recipe_has_are_checked_by_all_refusals() -> None:
    raw = read_recipes(RECIPES)[LLAMA]

    def verdict(**more: Any) -> Verdict:
        settings = raw | {f"model.{name}": value for name, value in more.items()}
        return judge(resolve(LLAMA, settings, MODELS, others()))

    assert verdict(qk_layernorm_epsilon=None, apply_rope_fusion=True).is_accepted
    refused = verdict(num_microbatches_with_partial_activation_checkpoints=2)
    assert refused.why and "num_microbatches_with_partial" in refused.why
    with pytest.raises(ValueError, match=r"model\.no_such_thing is unknown"):
        verdict(no_such_thing=1)


@pytest.mark.parametrize(
    ("settings", "can_run"),
    [
        ({"num_layers": 60, "pipeline_model_parallel_size": 8}, False),
        ({"num_layers": 56, "pipeline_model_parallel_size": 8}, False),
        ({"num_layers": 64, "pipeline_model_parallel_size": 8}, True),
        (
            {
                "num_layers": 62,
                "pipeline_model_parallel_size": 8,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            True,
        ),
    ],
)
def test_layers_that_stock_cannot_divide(settings: dict[str, Any], can_run: bool) -> None:
    """A recipe whose layers stock cannot split over eight ranks of four chunks is reported as one
    that stock cannot run. Megatron's validation accepts all of these settings, and its model later
    asserts that a rank's layers split evenly over its chunks."""
    llama = recipe(virtual_pipeline_model_parallel_size=4, **settings)
    verdict = judge(replace(llama, gpus=None))
    assert verdict.is_accepted == can_run
    if not can_run:
        assert verdict.why_stock and "asserts where it builds the model" in verdict.why_stock


def test_what_a_plan_sees_of_a_recipe() -> None:
    seen = configuration_of(recipe())
    assert (seen.gpu, seen.ranks, seen.schedule, sum(seen.layers)) == ("h100", 2, "1f1b", 32)
    assert seen.microbatches == judge(recipe()).microbatches
    assert seen == configuration_of(recipe(cross_entropy_fusion_impl="native"))
    assert not seen.is_frozen and configuration_of(recipe(freeze_language_model=True)).is_frozen
    uneven = configuration_of(recipe(num_layers_in_first_pipeline_stage=14))
    assert uneven.layers == (14, 18)
    with pytest.raises(ValueError, match="memory of the recipe's GPU are unknown: h900"):
        configuration_of(replace(recipe(), gpu="h900"))
    with pytest.raises(
        ValueError, match="layers of the recipe's model are unknown: hyper connections"
    ):
        configuration_of(recipe(enable_hyper_connections=True))
