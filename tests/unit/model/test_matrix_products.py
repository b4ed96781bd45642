"""Tests of the estimated seconds of matrix products by their shape, and of collectives by their
steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_ext.cost_model.execution import Execution, Framework, Precision
from megatron_ext.cost_model.gpus import GPUS, MXFP8_WEIGHTS
from megatron_ext.cost_model.messages.blocking import with_blocking_messages
from megatron_ext.cost_model.messages.collective_seconds import (
    BEGIN,
    FAR_STEP,
    NEAR_STEP,
    ring_latency,
)
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState, bytes_of_chunk
from megatron_ext.cost_model.operations.ends import output_layer
from megatron_ext.cost_model.operations.matrix_products import MatrixProduct, TensorCores
from megatron_ext.cost_model.operations.mlp import mlp
from megatron_ext.cost_model.operations.operation import (
    Exchange,
    Group,
    Operation,
    Passes,
    dropout,
    linear,
)
from megatron_ext.cost_model.operations.temporaries import temporary_bytes
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.reductions import FULL_SPEED_NODES, seconds_of_a_byte
from megatron_ext.cost_model.stage_seconds import seconds_of_layers
from megatron_ext.planner.outside_passes import seconds_outside_passes
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts

A100 = GPUS["a100"].rates()
CORES = TensorCores(flops=100e12, operands=1e18, outputs=1e18, sms=100)


def seconds(rows: float, columns: float, depth: float, groups: float = 1) -> float:
    return CORES.seconds((rows, columns, depth), groups, 2, 2)


def test_a_full_wave_takes_its_operations() -> None:
    """A product whose tiles fill all SMs takes the time of its operations: here 100 tiles of 256 x
    128 on 100 SMs."""
    assert seconds(2560, 1280, 4096) == pytest.approx(2 * 2560 * 1280 * 4096 / 100e12, rel=1e-3)


def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    assert seconds(2560 + 64, 1280, 4096) > 1.05 * seconds(2560, 1280, 4096)
    assert seconds(64, 64, 4096) == pytest.approx(seconds(640, 640, 4096))


def test_a_tile_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    assert seconds(1, 6400, 4096) == seconds(64, 6400, 4096)


def test_groups_have_tiles_of_their_own() -> None:
    """Each group of a grouped product has tiles of its own. Ten experts with 64 rows each take as
    long as one product of 640 rows; with 65 rows each expert needs two tiles in place of one."""
    assert seconds(64, 640, 4096, groups=10) == pytest.approx(seconds(640, 640, 4096))
    assert seconds(65, 640, 4096, groups=10) > 1.4 * seconds(64, 640, 4096, groups=10)


def test_small_tiles_wait_for_operands() -> None:
    slow = replace(CORES, operands=CORES.flops / 50)
    assert slow.seconds((64, 64, 4096), 1, 2, 2) == pytest.approx(
        100 * 128 * 4096 * 2 / slow.operands, rel=1e-3
    )


def test_shapes_of_passes() -> None:
    product = MatrixProduct(8192, 4096, 1024, groups=8)
    assert product.shapes == ((1024, 1024, 4096), (1024, 4096, 1024), (1024, 4096, 1024))


def test_more_tokens_are_no_less_efficient() -> None:
    """A matrix product with more tokens is at least as efficient, because a few hundred tokens give
    an SM next to nothing to do."""
    efficiency = []
    for tokens in (64, 512, 4096, 32768):
        (operation,) = linear("fc", tokens, 5120, 13824, Execution(tokens))
        forward, _, _ = A100.seconds_of(operation)
        efficiency.append(operation.flops.forward / forward / 312e12)
    assert efficiency == sorted(efficiency)
    assert efficiency[0] < 0.5 < 0.8 < efficiency[-1] < 0.86


def test_only_weight_gradients_take_longer_in_mxfp8() -> None:
    """In MXFP8 only weight gradients take longer than in FP8 with one scale for each tensor.
    Trainings with LoRA, which have no such gradients, take equally long in both."""
    fp8, mxfp8 = (
        Execution(4096, precision=Precision.FP8),
        Execution(4096, precision=Precision.MXFP8),
    )
    one, many = (
        GPUS["gb200"].rates(run.precision).seconds_of(linear("fc", 4096, 8192, 8192, run)[0])
        for run in (fp8, mxfp8)
    )
    assert many[:2] == one[:2]
    # The ratio equals the factor to 1 %, as both times include the gap between kernels.
    assert many[2] == pytest.approx(MXFP8_WEIGHTS * one[2], rel=0.01)


def test_a_dropout_of_local_layers_draws_its_numbers() -> None:
    """In Megatron's local layers, F of a dropout takes the time to draw a random number for each
    element, which is longer than moving the bytes. I only reads the mask."""
    run = Execution(1024)
    forward, backward, weights = A100.seconds_of(dropout("dropout", 1e8, run))
    assert forward == pytest.approx(1e8 / 1.0e11, rel=0.01)
    assert backward == pytest.approx(5e8 / A100.memory, rel=0.01)
    assert weights == 0


def test_frozen_layers_have_no_weight_gradient_in_an_unsplit_pass() -> None:
    """I of an unsplit backward pass contains the weight gradients of its layers, but not if these
    are frozen. LoRA recipes with layers in CUDA graphs used to be estimated with such gradients, so
    their steps came out a third too long."""
    model = Model(("*-",), 1024, 8, 8, 128, ffn_hidden_size=4096, vocabulary=0)
    (stage,) = stages_of(model, [1])
    run = Execution(4096, captured=frozenset({"mlp", "attn"}), userbuffers=frozenset({"row"}))
    run = replace(run, tensor_parallel=2)
    whole = seconds_of_layers(model, stage, run, A100)
    frozen = seconds_of_layers(model, stage, replace(run, is_frozen=True), A100)
    assert frozen.totals[1] < whole.totals[1]
    assert sum(frozen.totals) == pytest.approx(sum(whole.totals))


def test_a_ring_has_a_step_for_each_other_rank() -> None:
    assert ring_latency(2, 1, near=8, nodes=1) == pytest.approx(BEGIN + 14 * NEAR_STEP)
    assert ring_latency(2, 2, near=1, nodes=4) == pytest.approx(2 * BEGIN + 6 * FAR_STEP)


def test_tokens_go_to_the_nodes_of_their_groups_alone() -> None:
    """Tokens are sent only to nodes with their chosen groups of experts. DeepSeek-V3 chooses 8 of
    256 experts, in 4 of 8 groups; each group is on one of 8 nodes."""
    passes = Passes(1e9, 1e9)
    anywhere = Exchange(Group.EXPERT, 64, 1, passes, choices=8)
    grouped = replace(anywhere, groups=(4, 8))
    seconds = [A100.seconds_to_exchange(one)[0] for one in (anywhere, grouped)]
    nodes = 8 * (1 - (1 - 1 / 8) ** 8)  # mean number of nodes with one of 8 chosen experts
    assert seconds[1] / seconds[0] == pytest.approx(4 / nodes, rel=1e-3)


def test_a_short_message_takes_its_latency() -> None:
    exchange = Exchange(Group.TENSOR, 8, 1, Passes(1.0, 0.0), ring_passes=2)
    forward, backward = A100.seconds_to_exchange(exchange)
    assert forward == pytest.approx(ring_latency(2, 1, 8, 1), rel=1e-3)
    assert backward == 0


def test_rings_of_many_nodes_are_slower_in_plain_pytorch() -> None:
    """Rings over many nodes are estimated slower than rings over few nodes in plain PyTorch only.
    The estimate used to do so for Megatron too: reductions over 128 nodes were estimated at six
    seconds more than a real step shows."""

    def of_nodes(framework: Framework) -> tuple[float, float]:
        few, many = (seconds_of_a_byte(8 * n, 1, A100, framework) for n in (FULL_SPEED_NODES, 32))
        return few, many

    few, many = of_nodes(Framework.PYTORCH)
    # The tolerance covers the ends of the rings: 256 ranks move 255 of 256 parts, 32 ranks 31 of
    # 32.
    assert many == pytest.approx(32 / FULL_SPEED_NODES * few, rel=0.03)
    full, as_full = of_nodes(Framework.MEGATRON)
    assert as_full == pytest.approx(full, rel=0.03)
    assert few == pytest.approx(full)


def test_plain_pytorch_sums_gradients_in_fp32() -> None:
    """Plain PyTorch (the framework Scaling) all-reduces whole gradients in fp32, which moves 8
    bytes a parameter around a ring, and gathers weights of 2 bytes. Megatron's distributed
    optimizer reduces 2 bytes a parameter and gathers 2 bytes."""
    model = ModelBytes(weights=2e9, gradients=2e9, optimizer=0.0, gathered=2e9)
    state = TrainingState(distributed=True, data_parallel=16, gradient_bytes=2)
    rates = replace(A100, memory=math.inf)
    plain, megatron = (
        seconds_outside_passes(model, state, Execution(1024, framework=framework), rates)
        for framework in (Framework.PYTORCH, Framework.MEGATRON)
    )
    assert plain == pytest.approx(10 / 4 * megatron)


def test_plain_pytorch_gathers_logits_and_sums_a_gates_gradient_on_its_own() -> None:
    """In plain PyTorch (the framework Scaling) each tensor-parallel rank computes the whole loss.
    In the backward pass of an MLP with a gate a rank also waits for two sums, unless sequence
    parallelism gathers the MLP's input once."""
    model = Model(
        ("*-",),
        4096,
        32,
        32,
        128,
        ffn_hidden_size=11008,
        vocabulary=128_000,
        gated_linear_unit=True,
    )
    plain = Execution(2048, tensor_parallel=8, sequence_parallel=False, framework=Framework.PYTORCH)
    megatron = replace(plain, framework=Framework.MEGATRON)
    logits = 2048 * 128_000

    def loss(execution: Execution) -> Operation:
        return next(o for o in output_layer(model, execution).operations if o.name == "loss")

    assert loss(plain).moved.input_gradient == 26 * logits
    assert loss(megatron).moved.input_gradient == 14 * logits / 8
    assert output_layer(model, plain).exchanges[-1].moved.forward == 2 * logits
    assert len(output_layer(model, megatron).exchanges) == 1

    def sums(execution: Execution) -> float:
        return sum(e.moved.input_gradient for e in mlp(model, execution).exchanges)

    assert sums(plain) == 2 * sums(megatron)
    assert sums(replace(plain, sequence_parallel=True)) == sums(megatron)


def test_gradients_are_reduced_round_a_ring() -> None:
    """Gradients are reduced around a ring: within a node at the speed of NVLink, and between nodes
    through a network port for each GPU that the ring has in a node."""
    rates = Rates.from_training_speed(operations=1e12, network=1e9, host=1e9, peers=10e9)
    assert seconds_of_a_byte(4, 1, rates) == pytest.approx(3 / 4 / 10e9)
    # With eight ranks a node, the network is nearly as fast as the peers.
    assert seconds_of_a_byte(16, 1, rates) == pytest.approx(15 / 16 / 8e9)
    # Here tensor-parallel ranks fill the node.
    assert seconds_of_a_byte(4, 8, rates) == pytest.approx(3 / 4 / 1e9)
    assert seconds_of_a_byte(1, 1, rates) == 0


def test_blocking_messages_are_in_the_pass_that_sends_them() -> None:
    passes = dict.fromkeys((Kind.FORWARD, Kind.BACKWARD_INPUT), (1.0, 1.0, 1.0))
    costs = Costs(PassCosts(passes), LinkCosts(p2p_seconds=0.3, p2p_seconds_by_stage=(0.1, 0.2)))
    blocking = with_blocking_messages(costs)
    assert blocking.seconds[Kind.FORWARD] == pytest.approx((1.1, 1.2, 1.0))
    assert blocking.seconds[Kind.BACKWARD_INPUT] == pytest.approx((1.0, 1.1, 1.2))
    assert not blocking.links.p2p_seconds and not blocking.links.p2p_seconds_by_stage


def test_temporary_tensors_of_the_loss() -> None:
    model = Model(("*-",), 1024, 8, 8, 128, 4096, vocabulary=128000)
    (stage,) = stages_of(model, [1])
    logits = 4096 * 128000
    run = Execution(4096)
    assert temporary_bytes(model, stage, run) == logits * 2
    fused = temporary_bytes(model, stage, replace(run, loss_fusion=True))
    # Temporary bytes of attention: gradients of the output, and of queries, keys and values twice;
    # and a sum in fp32.
    assert fused == 4096 * 1024 * (2 * (1 + 6) + 4 + 2 * 2), "of the layer"
    parts = temporary_bytes(model, stage, run, loss_share=1 / 4)
    assert parts == logits * 2 / 4, "of a vocabulary that is partitioned over four ranks"


def test_weights_are_gathered_in_the_form_that_crosses_the_network() -> None:
    """Data-parallel ranks gather each trained weight once, in the form that crosses the network.
    The estimate used to count all stored bytes as gathered: 4 bytes for each element of a matrix in
    FP8, although 2 are gathered, or 1 if only FP8 is stored. It also counted frozen weights, which
    are not gathered."""
    width = 64
    model = Model(("*-",), width, 4, 4, 16, ffn_hidden_size=4 * width, vocabulary=0)
    run = Execution(128)
    (stage,) = stages_of(model, [1])
    beside = TrainingState(distributed=True, matrix_bytes=4)
    alone = replace(beside, matrix_bytes=2, gathered_matrix_bytes=1)

    def gathered(model: Model, state: TrainingState) -> float:
        made = bytes_of_chunk(model, stage, run, state, tables=0, bucket=0)
        assert made.weights > 0
        return made.gathered

    matrices = 12 * width**2
    less = gathered(model, beside) - gathered(model, alone)
    assert less == matrices and 2 * matrices < gathered(model, beside) < 2.2 * matrices
    assert gathered(replace(model, is_frozen=True), beside) == 0
