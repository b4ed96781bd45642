"""Tests of plans that choose Megatron's recompute together with schedule and layout.

A launch with full recompute used to be planned with full recompute only. A launch without recompute
used to be planned without recompute only, even if its fullest rank had no memory for a shorter
schedule; recomputing a few norms frees enough memory for a much shorter step.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.layouts.comparison import LayoutComparison, compare_layouts
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.recompute import LayerRecompute, recompute_options
from megatron_ext.planner.layouts.work import Work
from tests.helpers.combinations import at_night

GPT = parse_model("layers=8,hidden=1024,heads=8,sequence=2048,vocabulary=8192,micro-batch=4")
DENSE, RUN = GPT.model, GPT.execution()
RATES = GPUS["h100"].rates()
NONE, FULL = LayerRecompute(), LayerRecompute("full", method="uniform", num_layers=1)
EXPERTS = replace(
    DENSE,
    layers=("*-", *["*E"] * 3),
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    multi_latent_attention=True,
    kv_lora_rank=256,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
)


def selective(*modules: str) -> LayerRecompute:
    return LayerRecompute("selective", modules)


def test_what_a_dense_model_could_recompute() -> None:
    """The recompute options of a dense model omit modules that free no memory: norms are fused with
    Transformer Engine's matrices, and its attention stores no matrix."""
    assert recompute_options(DENSE, RUN, RATES) == [NONE, selective("mlp"), FULL]


def test_local_layers_have_more_to_give() -> None:
    options = recompute_options(DENSE, replace(RUN, transformer_engine=False), RATES)
    assert options[1].modules in (("core_attn",), ("layernorm",))
    assert options[-2].modules == ("core_attn", "layernorm", "mlp")


def test_experts_and_latent_attention() -> None:
    """The recompute options of a model with experts and multi-latent attention add one module at a
    time, the cheapest first. Recompute of the whole experts replaces recompute of their parts."""
    options = recompute_options(EXPERTS, RUN, RATES)
    modules = [option.modules for option in options]
    assert options[0] == NONE and options[-1] == FULL
    assert set(modules[1]) <= {"layernorm", "moe_act"}
    pairs = pairwise(modules[:-1])
    assert all(len(after) > len(before) or "moe" in after for before, after in pairs)
    assert "moe" in modules[-2] and "moe_act" not in modules[-2]
    times = [seconds_of(EXPERTS, option) for option in options]
    assert times == sorted(times)


def seconds_of(model: Model, option: LayerRecompute) -> float:
    training = work(model, execution=option.in_execution(RUN), ranks=2)
    costs = training.variant("1f1b", evenly(len(model.layers), 2)).problem.costs
    return sum(map(sum, costs.seconds.values()))


def test_the_launchs_own_comes_first_and_once() -> None:
    own = selective("mlp")
    options = recompute_options(DENSE, own.in_execution(RUN), RATES)
    assert options == [own, NONE, FULL]
    block = LayerRecompute("full", method="block", num_layers=2)
    assert recompute_options(DENSE, block.in_execution(RUN), RATES)[0] == block
    assert FULL not in recompute_options(DENSE, FULL.in_execution(RUN), RATES)[1:]


def test_what_is_refused_is_not_offered() -> None:
    """Recompute options that Megatron refuses are not offered: with
    ``--overlap-moe-expert-parallel-comm``, full recompute and ``moe``."""

    def permits(option: LayerRecompute) -> bool:
        return option != FULL and "moe" not in option.modules

    options = recompute_options(EXPERTS, RUN, RATES, permits)
    assert all(map(permits, options)) and "shared_experts" in options[-1].modules


@pytest.mark.parametrize(
    ("option", "words", "name"),
    [
        (NONE, "", "none"),
        (
            selective("layernorm", "moe_act"),
            "--recompute-granularity selective --recompute-modules layernorm moe_act",
            "layernorm moe_act",
        ),
        (
            FULL,
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
        ),
    ],
)
def test_what_is_written_for_it(option: LayerRecompute, words: str, name: str) -> None:
    assert " ".join(option.words) == words and str(option) == name
    assert LayerRecompute.of(option.in_execution(RUN)) == option


def work(model: Model = DENSE, **changes: Any) -> Work:
    given: dict[str, Any] = {"ranks": 2, "microbatches": 8}
    execution = changes.pop("execution", RUN)
    return estimated_work(model, execution, TrainingState(), RATES, **(given | changes))


@functools.cache
def compared(own: LayerRecompute, room: float | None) -> LayoutComparison:
    works = [work(execution=option.in_execution(RUN)) for option in options(own)]
    launch = "1f1b", evenly(8, 2)
    return compare_layouts(works, launch, even, room, search=False)


def options(own: LayerRecompute) -> list[LayerRecompute]:
    return recompute_options(DENSE, own.in_execution(RUN), RATES)


def even(stages: int) -> Layout:
    if 8 % stages:
        raise ValueError(f"8 layers cannot be split evenly over {stages} stages")
    return evenly(8, stages)


@functools.cache
def fullest(own: LayerRecompute) -> float:
    """Return the bytes on the rank that stores most, in a launch whose recompute settings are
    ``own``."""
    return compared(own, None).baseline.fullest


def test_without_a_bound_nothing_is_recomputed() -> None:
    made = compared(FULL, None)
    assert made.baseline.recompute == FULL
    assert all(result.recompute == NONE for result in made.others.values())
    # With full recompute a step takes four times F: F itself, the recompute, and B, which takes
    # twice F.
    assert made.gain(made.chunks) > 0.2
    assert all(result.recompute == NONE for result in compared(NONE, None).others.values())


def test_as_much_is_recomputed_as_makes_it_fit() -> None:
    """A plan recomputes only as much as the memory requires. The limit lies between the memory of
    full recompute and that without recompute, and recompute of the MLPs is enough."""
    made = compared(FULL, 0.4 * fullest(FULL) + 0.6 * fullest(NONE))
    best = made.stock
    assert best.recompute == selective("mlp") and made.gain(best) > 0.05
    assert best.fullest <= (made.bound or 0)


CASES = [(own, share) for own in (NONE, selective("mlp"), FULL) for share in (0.0, 0.5, 1.0)]
BY_DAY = CASES[0], CASES[4]


@pytest.mark.parametrize(
    ("own", "share"), [*BY_DAY, *at_night(*(case for case in CASES if case not in BY_DAY))]
)
def test_nothing_is_slower_or_larger_than_may_be(own: LayerRecompute, share: float) -> None:
    room = (1 - share) * fullest(FULL) + share * fullest(NONE)
    made = compared(own, room)
    steps = [result.seconds for result in (made.baseline, *made.others.values())]
    assert steps == sorted(steps, reverse=True)
    bound = max(room, made.baseline.fullest)
    assert made.baseline.recompute == own
    assert all(result.fullest <= bound for result in made.others.values())
