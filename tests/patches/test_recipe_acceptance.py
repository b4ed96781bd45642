"""Recipes are asked of all that refuses, with all their settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from scripts.recipes.accepting import as_on_gpus, judge, judge_on_v
from scripts.recipes.configured import configuration_of
from scripts.recipes.recipe import RECIPES, Recipe, read_models, read_recipes, resolve

LLAMA = "recipes.llama.h100.llama3:llama3_8b_pretrain_16gpu_h100_bf16_16k_config"
MODELS = read_models()


@pytest.fixture(scope="module", autouse=True)
def on_gpus() -> Iterator[None]:
    with as_on_gpus():
        yield


def recipe(**more: Any) -> Recipe:
    """Llama-3 8B on 4 x 2 ranks, with other settings."""
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


def test_what_stock_cannot_run_is_told_apart() -> None:
    verdict = judge(recipe(num_layers=31))
    assert verdict.why_stock and "divisible" in verdict.why_stock and not verdict.is_accepted
    assert not verdict.without
    assert judge_on_v(recipe(num_layers=31)).why_stock
    assert judge(recipe(enable_hyper_connections=True)).why_stock


def test_what_a_plan_sees_of_a_recipe() -> None:
    seen = configuration_of(recipe())
    assert (seen.gpu, seen.ranks, seen.schedule, sum(seen.layers)) == ("h100", 2, "1f1b", 32)
    assert seen.microbatches == judge(recipe()).microbatches
    assert seen == configuration_of(recipe(cross_entropy_fusion_impl="native"))
    assert not seen.is_frozen and configuration_of(recipe(freeze_language_model=True)).is_frozen
    uneven = configuration_of(recipe(num_layers_in_first_pipeline_stage=14))
    assert uneven.layers == (14, 18)
    with pytest.raises(ValueError, match="nothing is known of its GPU: h900"):
        configuration_of(replace(recipe(), gpu="h900"))
    with pytest.raises(ValueError, match="layers are not known: hyper connections"):
        configuration_of(recipe(enable_hyper_connections=True))
