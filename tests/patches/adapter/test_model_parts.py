"""Tests of the parts of a model chunk that Megatron built, and of costs that are computed from
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_ext.adapter import programs as programs_module
from megatron_ext.adapter.job import job_costs, of_built
from megatron_ext.adapter.model_parts import (
    ChunkSize,
    chunk_size,
    find_output_layer,
    language_model,
    may_lose_gradients,
)
from megatron_ext.adapter.programs import Programs
from megatron_ext.adapter.tied import tied_weights
from megatron_ext.config import CostsSource, PipelineConfig
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import line
from tests.helpers.estimated import costs_of_model

CONFIG = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4)


def holding(**children: torch.nn.Module) -> Any:
    module = torch.nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def gpt(layers: int, rows: int = 0) -> Any:
    """Return a stand-in for a GPT with the modules that are looked at, and 20 parameters in each
    layer."""
    model = holding(decoder=holding(layers=torch.nn.ModuleList(linear() for _ in range(layers))))
    if rows:
        model.output_layer = linear()
        model.output_layer.output_size_per_partition = rows
    return model


def linear() -> Any:
    return torch.nn.Linear(4, 4)


def test_a_language_model_is_found_in_its_wrappers() -> None:
    model = gpt(2, rows=8)
    head = model.output_layer
    wrappers = (
        model,
        holding(module=holding(module=model)),  # DistributedDataParallel around Float16Module
        holding(vision_model=gpt(3), language_model=model),
        holding(module=holding(thinker=holding(audio=linear(), language_model=model))),
    )
    for chunk in wrappers:
        assert language_model(chunk) is model
        assert find_output_layer(chunk) is head


def test_an_output_layer_is_found_in_a_model_that_is_not_known() -> None:
    head = linear()
    assert find_output_layer(holding(body=linear(), end=holding(output_layer=head))) is head
    assert find_output_layer(linear()) is None
    assert language_model(holding(encoder=gpt(1), language_model=linear())) is None


def test_sizes() -> None:
    wrapped = holding(module=holding(tower=linear(), language_model=gpt(2, rows=8)))
    assert chunk_size(wrapped) == ChunkSize("Module", 2, 8, parameters=80, other_parameters=20)
    assert chunk_size(linear()) == ChunkSize("Linear", None, 0, parameters=20, other_parameters=20)


def test_what_of_a_chunk_is_trained() -> None:
    model = gpt(2, rows=8)
    model.output_layer.requires_grad_(False)
    model.decoder.layers[0].weight.requires_grad = False
    size = chunk_size(model)
    assert (size.trained_matrices, size.head_is_trained, size.reached) == (0.5, False, 1.0)
    model.decoder.layers[0].requires_grad_(False)  # now all weights of the layer are frozen
    assert chunk_size(model).reached == 0.5
    assert chunk_size(holding(tower=linear(), language_model=model)).reached == 1.0
    assert chunk_size(model.requires_grad_(False)).reached == 0.0


def test_a_model_of_the_callers_own_has_no_tied_weights() -> None:
    assert tied_weights([linear(), linear()]) is None
    chunk = linear()
    chunk.pre_process = chunk.post_process = True
    chunk.config = ModelParallelConfig()
    assert tied_weights([chunk, chunk]) is None


def test_costs_leave_out_what_is_not_done_for_frozen_weights() -> None:
    """Costs omit work that frozen weights do not need. The test's model has adapters on the last
    stage, and trained norms in the last layers of the first stage."""
    whole = [replace(size(2), rows=rows) for rows in (0, 64)]
    parts = [
        replace(whole[0], trained_matrices=0.0, reached=0.25),
        replace(whole[1], trained_matrices=0.25, head_is_trained=False),
    ]
    of_all, of_parts = (costs_of_model(CONFIG, line(2), sizes, 16, 1) for sizes in (whole, parts))
    assert of_all.vocabulary is not None and of_parts.vocabulary is not None
    head = of_all.vocabulary.output_layer[0]
    forward, i, w = (of_parts.seconds[kind] for kind in of_parts.seconds)
    assert forward == pytest.approx(of_all.seconds[Kind.FORWARD])
    first, last = of_all.seconds[Kind.BACKWARD_INPUT]
    assert i == pytest.approx((first / 4, last))
    assert w == pytest.approx((0.0, (of_all.seconds[Kind.BACKWARD_WEIGHT][1] - head) / 4))
    assert of_parts.vocabulary.output_layer[2] == 0
    held = (costs.without_vocabulary().held_bytes for costs in (of_all, of_parts))
    kept, left = (figures[Held.WEIGHT_INPUTS] for figures in held if figures is not None)
    assert left == pytest.approx((0.0, kept[1] / 4))


def size(layers: int | None, others: int = 0) -> ChunkSize:
    return ChunkSize("Llama", layers, 0, parameters=100, other_parameters=others)


@pytest.mark.parametrize(
    ("config", "per_stage"),
    [
        (CONFIG, [size(2), size(None)]),
        (CONFIG, [size(0), size(0)]),
        (ModelParallelConfig(), [size(2), size(2)]),
    ],
)
def test_costs_that_cannot_be_estimated_are_equal(
    config: ModelParallelConfig, per_stage: list[ChunkSize]
) -> None:
    costs = costs_of_model(config, line(2), per_stage, 16, 1)
    assert set(costs.seconds) == {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    assert {figure for figures in costs.seconds.values() for figure in figures} == {1.0}
    assert costs.held_bytes is None and costs.vocabulary is None


@pytest.mark.parametrize(
    ("per_stage", "told"),
    [
        ([size(2), size(2)], None),
        (
            [size(2, others=40), size(2)],
            "ignore the parameters outside it (40% of stage 0);",
        ),
        ([size(None), size(2)], "the costs of Llama cannot be estimated, and are taken as equal"),
    ],
)
def test_one_line_says_what_is_not_estimated(per_stage: list[ChunkSize], told: str | None) -> None:
    lines: list[str] = []
    job = of_built(CONFIG, line(2), per_stage, 16, 1, ranks=2, stride=1)
    job_costs(CostsSource("profile", Path("costs.json")), job, 1, lines.append)
    assert not lines  # no remark, because the costs are being measured
    costs_of_model(CONFIG, line(2), per_stage, 16, 1, lines.append)
    if told is None:
        assert not lines
    else:
        (text,) = lines
        assert told in text and "--pipeline-costs profile measures them" in text


def test_a_training_with_sparse_attention_says_that_there_is_no_estimate() -> None:
    """A model with sparse attention trains under a schedule that is made for the costs of plain
    attention, and a line in the log says that there is no estimate. That line used to be
    missing."""
    sparse = replace(CONFIG)
    sparse.experimental_attention_variant = "dsa"
    lines: list[str] = []
    costs = costs_of_model(sparse, line(2), [size(2), size(2)], 16, 1, lines.append)
    (text,) = lines
    assert text.startswith("no estimate of the costs of Llama: how long sparse attention (dsa)")
    assert text.endswith("--pipeline-costs profile measures them (of install: costs='profile')")
    plain = costs_of_model(CONFIG, line(2), [size(2), size(2)], 16, 1)
    assert costs.no_estimate and costs == replace(plain, no_estimate=costs.no_estimate)


def test_given_costs_get_no_share_of_plain_attention() -> None:
    """Slices of a model with sparse attention are refused if the given costs do not say which share
    of a pass is attention. Such costs used to get the share of plain attention."""
    sparse = replace(CONFIG)
    sparse.experimental_attention_variant = "dsa"
    times = "f=10,i=12,w=8,comm=1"

    def costs_of(config: Any, text: str) -> Costs:
        job = of_built(config, line(2), [size(2), size(2)], 16, 1, ranks=2, stride=1)
        return job_costs(CostsSource(text), job, slices=2)

    with pytest.raises(ValueError, match=r"no estimate: how long sparse .* add the share, as in"):
        costs_of(sparse, times)
    assert costs_of(sparse, f"{times},attention=0.3").slices.attention == (0.3, 0.3)
    assert costs_of(CONFIG, times).slices.attention, "plain attention is estimated"


def test_what_was_frozen_in_the_first_step_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training ends if a weight that was frozen in its first step is trained later: no backward
    pass runs on that stage, so the gradient would be missing without an error."""
    programs = Programs(PipelineConfig(schedule="zb-h1"), lambda *_: {})
    pipeline: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 1)
    frozen, other = linear().requires_grad_(False), linear()
    monkeypatch.setattr(programs_module, "is_alone", lambda: False)
    with mock.patch.object(programs_module, "gather", return_value=[[False], [False], [True]]):
        assert programs.first_trained_stage(pipeline, [frozen]) == 2
        assert programs.first_trained_stage(pipeline, [frozen]) == 2
    with mock.patch.object(programs_module, "gather", return_value=[[True], [True], [True]]):
        assert programs.first_trained_stage(pipeline, [other]) == 0
    frozen.weight.requires_grad = True
    with pytest.raises(ValueError, match="stage 1 has parameters that require a gradient now"):
        programs.first_trained_stage(pipeline, [frozen])


def test_where_gradients_could_be_lost() -> None:
    """`may_lose_gradients` is true of a model with Megatron's recompute, whose frozen parts may
    block gradients, and of a model whose settings are unknown."""
    model = gpt(1)
    assert may_lose_gradients(linear()) and may_lose_gradients(model)
    model.config = replace(CONFIG)
    assert not may_lose_gradients(holding(module=model))
    model.config.recompute_granularity = "selective"
    assert may_lose_gradients(holding(module=model))
