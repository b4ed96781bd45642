"""Tests of image encoders (vision towers): their time, stored bytes and parameters, trained and
frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.frozen import without_frozen
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.cost_model.tower import TowerTraining, parse_tower, tower_of
from megatron_ext.cost_model.tower_costs import tower_costs, tower_layers, tower_matrices
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import VocabularyParallel
from scripts.evaluation.recipes.recipe import read_models

H100 = GPUS["h100"].rates()
GPT = parse_model("layers=8,hidden=4096,heads=32,sequence=4096,vocabulary=32000,gated=true")
TOWER = tower_of(parse_tower("siglip"), 4096, 4096)
# Billions of parameters of image encoders with their projectors, counted by others in published
# checkpoints.
PUBLISHED = {
    "Qwen/Qwen3.5-397B-A17B": 0.453,
    "Qwen/Qwen3.5-122B-A10B": 0.448,
    "Qwen/Qwen3-VL-235B-A22B-Instruct": 0.573,
    "Qwen/Qwen3.5-35B-A3B": 0.444,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 0.536,
    "Qwen/Qwen3.5-27B": 0.458,
    "LGAI-EXAONE/EXAONE-4.5-33B": 1.286,
    "MiniMaxAI/MiniMax-M3": 0.688,
    "Qwen/Qwen2.5-VL-32B-Instruct": 0.688,
    "stepfun-ai/Step-3.7-Flash": 1.802,
    "zai-org/GLM-4.5V": 0.593,
}


def with_tower(trained: TowerTraining = TowerTraining.ALL) -> Model:
    return replace(GPT.model, tower=replace(TOWER, trained=trained))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_tower_has_its_published_parameters(name: str) -> None:
    sizes: Mapping[str, Any] = read_models()[name]
    tower = tower_of(sizes["vision"], sizes["hidden_size"], 4096)
    counted = sum(matrices + others for matrices, others, _ in tower_matrices(tower))
    assert counted / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_work_is_that_of_textbooks() -> None:
    """An image encoder's operations are those of textbooks: in F 2 x parameters x tokens, and for
    attention 4 x tokens x tokens of an image x width."""
    rates = replace(H100, sms=0, memory=float("inf"), kernel=0.0, attention=H100.linear, launch=0.0)
    (layers, _, _), _ = tower_matrices(TOWER)
    products = 2 * layers * TOWER.patches
    scores = TOWER.layers * 4 * TOWER.patches * TOWER.patches_of_image * TOWER.hidden_size
    width = TOWER.merged * TOWER.hidden_size
    projector = 2 * (TOWER.patches / TOWER.merged) * (width * width + width * 4096)
    forward, _, weights = tower_costs(TOWER, Execution(4096), rates).seconds
    assert forward * rates.linear == pytest.approx(products + scores + projector, rel=1e-6)
    assert weights * rates.linear == pytest.approx(products + projector, rel=1e-6)


def test_a_frozen_tower_has_no_backward_pass_and_stores_nothing() -> None:
    whole, projector, frozen = (
        tower_costs(replace(TOWER, trained=trained), Execution(4096), H100)
        for trained in (TowerTraining.ALL, TowerTraining.PROJECTOR, TowerTraining.NOTHING)
    )
    assert whole.seconds[0] == projector.seconds[0] == frozen.seconds[0]
    assert whole.seconds[1] > 5 * projector.seconds[1] > 0 and frozen.seconds[1:] == (0, 0)
    assert whole.seconds[2] > projector.seconds[2] > 0
    assert whole.activation > 5 * projector.activation > 0 and frozen.activation == 0


def test_it_is_on_the_first_stage_alone() -> None:
    model, run = with_tower(), GPT.execution()
    stages = stages_of(model, [2, 2, 2, 2])
    costs = estimate(model, stages, run, H100)
    without = estimate(GPT.model, stages, run, H100)
    tower = tower_costs(TOWER, run, H100)
    assert costs.tower == tower and costs.held_bytes is not None and without.held_bytes is not None
    for kind, more in zip(
        (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), tower.seconds, strict=True
    ):
        first, *others = costs.seconds[kind]
        assert first == pytest.approx(without.seconds[kind][0] + more)
        assert tuple(others) == without.seconds[kind][1:]
    assert costs.held_bytes[Held.ACTIVATION][0] == pytest.approx(
        without.held_bytes[Held.ACTIVATION][0] + tower.activation
    )
    assert costs.slices.attention[0] < without.slices.attention[0]


def test_a_trained_tower_in_front_of_a_frozen_model_keeps_its_backward_pass() -> None:
    model, run = with_tower(), GPT.execution()
    costs = estimate(model, stages_of(model, [4, 4]), run, H100)
    frozen = without_frozen(costs, [0.0, 0.0], reached=1.0, output_layer=False)
    tower = tower_costs(TOWER, run, H100)
    assert frozen.seconds[Kind.BACKWARD_WEIGHT][0] == pytest.approx(
        tower.seconds[2] + table_gradient(run), rel=1e-6
    )


def table_gradient(run: Execution) -> float:
    vocabulary = estimate(GPT.model, stages_of(GPT.model, [4, 4]), run, H100).vocabulary
    assert vocabulary is not None
    return vocabulary.embedding[1]


@pytest.mark.parametrize(
    ("trained", "of_a_parameter"), [(TowerTraining.ALL, 18.0), (TowerTraining.NOTHING, 2.0)]
)
def test_its_memory_is_on_the_first_rank(trained: TowerTraining, of_a_parameter: float) -> None:
    """An image encoder's memory is on the first rank: 2 bytes a weight and, if it is trained, 4
    bytes for the gradient and 4 bytes for each of three states."""
    run, placement = GPT.execution(2), line(4)

    def bytes_of(model: Model) -> list[float]:
        stages = stages_of(model, [2, 2, 2, 2])
        ranks = bytes_of_ranks(
            model, stages, run, placement, VocabularyParallel.NONE, TrainingState()
        )
        return [rank.total for rank in ranks]

    more, *others = (
        a - b for a, b in zip(bytes_of(with_tower(trained)), bytes_of(GPT.model), strict=True)
    )
    counted = sum(matrices // 2 + beside for matrices, beside, _ in tower_matrices(TOWER))
    assert more == pytest.approx(of_a_parameter * counted, rel=1e-3)
    assert others == [0.0] * 3


def test_attention_of_a_tower_looks_both_ways() -> None:
    model = tower_layers(TOWER)
    run = Execution(1024)
    seconds = [
        estimate(m, stages_of(m, [13, 14]), run, H100).slices.attention[0]
        for m in (model, replace(model, is_causal=True))
    ]
    assert seconds[0] > seconds[1]


def test_towers_are_read() -> None:
    sizes = parse_tower("layers=2,hidden=64,heads=4,ffn=128,gated=true,trained=projector")
    tower = tower_of(sizes, 512, 100)
    assert (tower.gated_linear_unit, tower.output_size) == (True, 512)
    assert tower.trained is TowerTraining.PROJECTOR
    assert (tower.images, tower.patches_of_image) == (1, 100)
    assert tower_of(parse_tower("clip,trained=none"), 512, 2500).images == 3
    for text, why in (
        ("resnet", "write one of clip, siglip"),
        ("layers=2,depth=3", "depth=3 is not understood"),
        ("layers=0,hidden=64,heads=4,ffn=128", "layers=0 is not understood"),
        ("clip,trained=half", "trained=half is not understood"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_tower(text)
    with pytest.raises(ValueError, match="vision tower lack heads, ffn"):
        tower_of(parse_tower("layers=2,hidden=64"), 512, 100)
