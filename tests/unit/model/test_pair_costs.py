"""Tests of the time of experts' messages that overlapped passes hide, computed from the layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.frozen import without_frozen
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.messages.paired_layers import (
    PairedLayer,
    hidden_by_pairs,
    hidden_share,
    paired_layers,
)
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.schedule.action import Action, Kind

_I, _B = Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD
EXECUTION = Execution(4096, expert_parallel=32, dispatcher="alltoall", overlap=0.5)
RATES = GPUS["h100"].rates(EXECUTION.precision)


def model(layers: tuple[str, ...]) -> Model:
    return Model(
        layers,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=8192,
        vocabulary=32000,
        num_experts=64,
        moe_router_topk=4,
        moe_ffn_hidden_size=2048,
        mtp_num_layers=1,
        mtp_layer="*E",
    )


def test_messages_hide_behind_what_the_other_pass_computes_and_no_more() -> None:
    layer = PairedLayer(3.0, 4.0, 2.0, forward_messages=10.0, input_gradient_messages=1.0)
    assert layer.saving_with(layer, 1.0, with_weights=False) == 4.0 + 1.0
    assert layer.saving_with(layer, 1.0, with_weights=True) == 6.0 + 1.0
    assert layer.saving_with(layer, 0.25, with_weights=True) == 2.5 + 0.25


def test_a_pair_takes_no_less_than_its_messages() -> None:
    layer = PairedLayer(1.0, 1.0, 1.0, forward_messages=9.0, input_gradient_messages=9.0)
    # The overlap saves no more than both passes compute: 3.0. What each pass could hide alone, 2.0,
    # would add up to 4.0.
    assert layer.saving_with(layer, 1.0, with_weights=True) == 3.0


def test_layers_of_f_overlap_with_those_of_the_backward_pass_from_the_last_one() -> None:
    moe, dense = "*E", "*-"
    stages = [Stage((dense, moe)), Stage((moe, dense)), Stage((moe,)), Stage((dense, dense))]
    of_model = model((dense, moe))
    hidden = hidden_by_pairs(of_model, stages, EXECUTION, RATES)[_I]
    (layer,) = paired_layers(of_model, Stage((moe,)), EXECUTION, RATES)
    (other,) = paired_layers(of_model, Stage((dense,)), EXECUTION, RATES)
    share = hidden_share(EXECUTION, RATES)
    two = layer.saving_with(layer, share, with_weights=False)
    forward = layer.saving_with(other, share, with_weights=False)  # F has experts, I has none
    back = other.saving_with(layer, share, with_weights=False)
    assert min(two, forward, back) > 0
    # F of a dense layer overlaps with I of a layer with experts, and then the reverse.
    assert hidden[0][0] == pytest.approx(forward + back)
    assert hidden[0][1] == pytest.approx(two)
    assert hidden[2][0] == pytest.approx(two)  # only as many layers overlap as both passes have
    assert hidden[3][3] == 0.0


def test_the_share_is_that_of_gpu_dispatcher_and_queues() -> None:
    """The share of messages that overlapped passes hide depends on the GPU, the dispatcher and the
    number of hardware queues. A share of one third used to be assumed for every GPU and dispatcher,
    and one sixth in a plan for Blackwell with tensor parallelism that was made on a machine without
    a GPU."""
    blackwell = GPUS["b200"].rates(EXECUTION.precision)
    in_one = replace(EXECUTION, has_one_queue=True)
    assert hidden_share(EXECUTION, RATES) == pytest.approx(1 / 3)
    assert hidden_share(in_one, RATES) == pytest.approx(1 / 6)
    assert hidden_share(replace(in_one, dispatcher="flex"), RATES) == 0.5
    assert hidden_share(in_one, blackwell) == hidden_share(EXECUTION, blackwell) == 0.5


def test_predicted_tokens_are_a_layer_more() -> None:
    stages = [Stage(("*E",), depths=1), Stage(("*E", "*E"))]
    hidden = hidden_by_pairs(model(("*E",)), stages, EXECUTION, RATES)[_B]
    assert (
        hidden[1][0]
        > hidden_by_pairs(model(("*E",)), [stages[1], Stage(("*E",))], EXECUTION, RATES)[_B][0][1]
    )


def test_estimates_have_it_where_passes_run_in_pairs_only() -> None:
    stages = [Stage(("*E",)), Stage(("*E",), depths=1, output_layer=True)]
    of_model = model(("*E", "*E"))
    costs = estimate(of_model, stages, EXECUTION, RATES)
    apart = estimate(of_model, stages, replace(EXECUTION, overlap=0.0), RATES)
    assert not apart.overlap.savings
    assert costs.seconds == apart.seconds
    forward, back = Action(0, Kind.FORWARD, 1), Action(1, _B, 0)
    assert 0 < costs.overlap_saving(forward, back) == costs.overlap.savings[_B][0][1]
    frozen = without_frozen(costs, [0.0, 0.0], reached=1, output_layer=False)
    assert frozen.overlap_saving(forward, back) == costs.overlap.savings[_I][0][1]
