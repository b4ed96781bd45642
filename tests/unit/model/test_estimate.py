"""Tests of costs that are estimated from a model's description."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.assumptions import not_checked
from megatron_ext.cost_model.estimate import estimate, waiting_shares
from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.gpus import (
    ACHIEVED,
    DATA_SHEETS,
    GPU,
    GPUS,
    DataSheet,
    assumed_rates,
    gpu_named,
)
from megatron_ext.cost_model.links import with_links
from megatron_ext.cost_model.model import Model, Stage, stages_of
from megatron_ext.cost_model.operations.attention import attended_tokens
from megatron_ext.cost_model.operations.operation import Group
from megatron_ext.cost_model.operations.parts import part_of
from megatron_ext.cost_model.rates import CPU, Rates
from megatron_ext.cost_model.stage_seconds import seconds_of_layers
from megatron_ext.observe.program_summary import summarize
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from tests.helpers.documents import check_written, table
from tests.helpers.flops import flops_of

PAGE = "estimated-costs.md"
F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
EVEN = (4, 4, 4, 4)
TOKENS, WIDTH = 4096, 2048
# Bytes that fused attention stores for a token in addition to activations: one fp32 value for each
# of 16 heads.
FIGURES = 4 * 16
# These are local layers; fused attention would compute its scores a second time in I.
RUN = Execution(TOKENS, transformer_engine=False, recompute_modules=frozenset())
WHOLE = Rates.from_training_speed(operations=400e12, network=40e9, host=25e9, peers=300e9)
ALONE = replace(WHOLE, peers=math.inf)  # infinitely fast links between peers, so that no rank waits


def gpt(layers: int | Sequence[str], vocabulary: int = 0, **others: Any) -> Model:
    """Return a GPT with these ``layers``. If ``layers`` is a number, it is the number of dense
    layers."""
    own = ("*-",) * layers if isinstance(layers, int) else tuple(layers)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "kv_channels": 128,
        "ffn_hidden_size": 4 * WIDTH,
    }
    return Model(own, vocabulary=vocabulary, **(sizes | others))


def costs_of(
    layers: Sequence[int] = EVEN,
    rates: Rates = WHOLE,
    vocabulary: int = 0,
    model: Model | None = None,
    **run: Any,
) -> Costs:
    """Return the costs of ``model``, by default a GPT. ``layers`` are the numbers of layers of the
    stages, and ``run`` changes fields of the execution `RUN`."""
    model = model or gpt(sum(layers), vocabulary)
    run = {"fused": False} | run
    execution = replace(RUN, transformer_engine=run.pop("fused"), **run)
    return estimate(model, stages_of(model, layers), execution, rates)


def held(costs: Costs, kind: Held) -> tuple[float, ...]:
    assert costs.held_bytes is not None
    return costs.held_bytes[kind]


def ratios(costs: Costs, stage: int = 1) -> tuple[float, float]:
    """Return the costs of I and W of a stage, relative to F."""
    seconds = costs.seconds
    return seconds[I][stage] / seconds[F][stage], seconds[W][stage] / seconds[F][stage]


# ---- layers


def test_a_known_model() -> None:
    """The estimate of a plain GPT equals the known formula: a layer of width h has 24 h^2
    operations a token, and causal attention 2 h s for s tokens (Narayanan)."""
    seconds = costs_of().seconds[F][1]
    counted = 4 * TOKENS * (24 * WIDTH**2 + 2 * WIDTH * TOKENS)
    assert seconds * WHOLE.linear == pytest.approx(counted)


def test_products_cost_the_same_three_times() -> None:
    i, w = ratios(costs_of(sequence=1))
    assert i == pytest.approx(1, abs=1e-3)
    assert w == pytest.approx(1, abs=1e-3)


def test_attention_has_no_weight_gradient() -> None:
    i, w = ratios(costs_of())
    assert w < 1 < i
    assert i + w == pytest.approx(2)  # attention computes once forward and twice backward
    longer_i, longer_w = ratios(costs_of(sequence=4 * TOKENS))
    assert longer_i > i
    assert longer_w < w


def test_fused_attention_recomputes_its_scores() -> None:
    """I of fused attention recomputes the scores, which is half of attention's forward pass.
    Estimates used to omit that time."""
    plain, fused = costs_of(), costs_of(fused=True)
    more = fused.seconds[I][1] - plain.seconds[I][1]
    assert more * WHOLE.attention == pytest.approx(4 * TOKENS * WIDTH * TOKENS)
    assert fused.seconds[F] == plain.seconds[F] and fused.seconds[W] == plain.seconds[W]


def test_local_layers_with_flash_attention_write_no_scores() -> None:
    """Megatron's local layers with flash attention have kernels of their own, and write no matrix
    of scores. Trainings with them used to be estimated as trainings with Transformer Engine's
    layers, whose passes are shorter."""
    rates = GPUS["a100"].rates()
    runs: tuple[dict[str, Any], ...] = ({}, {"local_flash_attention": True}, {"fused": True})
    local, flash, engine = (
        costs_of(rates=rates, hidden_dropout=0.0, attention_dropout=0.0, **run) for run in runs
    )
    for kind in (F, I):
        assert engine.seconds[kind][1] < flash.seconds[kind][1] < local.seconds[kind][1]
    assert engine.seconds[W] == flash.seconds[W] == local.seconds[W]
    # fused attention stores a value for each token and head in place of the scores
    of_scores = 4 * TOKENS * 16 * (2 * TOKENS - 4)
    activations = [held(costs, Held.ACTIVATION)[1] for costs in (local, flash)]
    assert activations[0] - activations[1] == of_scores


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_unfused_attention_moves_its_matrix(dropout: float) -> None:
    """Unfused attention takes time for reading and writing its matrix of scores. The prediction for
    GPT 175B without fused attention used to be 0.76 times its published step time."""
    moving = replace(WHOLE, linear=math.inf, matrix=math.inf, attention=math.inf, memory=1e12)
    moving = replace(moving, attention_backward=math.inf)
    plain, fused, recomputed = (
        costs_of(
            rates=moving,
            fused=fused,
            attention_dropout=dropout,
            recompute_modules=frozenset(modules),
        )
        for fused, modules in ((False, []), (True, []), (False, ["core_attn"]))
    )
    # Seconds to move the score matrices of 4 layers with 16 heads once, in 16 bits.
    matrices = 4 * 16 * TOKENS**2 * 2 / moving.memory
    dropped = 2.5 if dropout else 0
    # Bytes that local kernels move in addition for each element between layers: two dropouts with
    # masks (10) and a copy behind attention (4); in I also the joined gradients of three tensors
    # (12) and norms (8).
    element = 4 * TOKENS * WIDTH / moving.memory
    more = [plain.seconds[kind][1] - fused.seconds[kind][1] for kind in (F, I, W)]
    expected = [(4 + dropped) * matrices + 14 * element, (7 + dropped) * matrices + 30 * element, 0]
    assert more == pytest.approx(expected)
    assert recomputed.seconds[I][1] - plain.seconds[I][1] > (4 + dropped) * matrices


@pytest.mark.parametrize(("sequence", "window", "seen"), [(4, 0, 2), (4, 9, 2), (100, 9, 9.5)])
def test_tokens_in_a_sliding_window(sequence: int, window: int, seen: float) -> None:
    """With a sliding window a token of a short sample attends to half of the sample on average. In
    a long sample it attends to the tokens of the window, except near the sample's beginning."""
    assert attended_tokens(sequence, window) == pytest.approx(seen)


def test_a_sliding_window_takes_less_than_all() -> None:
    model = gpt(
        ("*-", "w-"),
        window_size=127,
    )
    full, window = costs_of((1, 1), model=model).seconds[F]
    assert (full - window) * WHOLE.attention == pytest.approx(
        4 * TOKENS * WIDTH * (TOKENS / 2 - 128), rel=0.01
    )


def test_recompute_runs_the_forward_again_in_i() -> None:
    before, again = costs_of(fused=True), costs_of(fused=True, recompute=True)
    i, w = ratios(before)
    assert ratios(again) == pytest.approx((i + 1, w))
    layers = held(before, Held.ACTIVATION)[1] - 4 * TOKENS * FIGURES
    assert held(again, Held.ACTIVATION)[1] == layers / 17


def test_recompute_of_some_layers_of_a_stage() -> None:
    """Recompute of a number of layers applies to the first layers of each chunk."""
    none, two, all_of_them = (
        costs_of(recompute=on, recompute_method="block", recompute_num_layers=2).seconds[I][1]
        if number != 4
        else costs_of(recompute=True).seconds[I][1]
        for number, on in ((0, False), (2, True), (4, True))
    )
    assert two == pytest.approx((none + all_of_them) / 2)


@pytest.mark.parametrize(
    ("modules", "stored"),
    [([], 34), (["layernorm"], 34), (["mlp"], 34 - 16), (["layernorm", "mlp"], 34 - 16)],
)
def test_recomputed_modules_are_not_stored(modules: list[str], stored: int) -> None:
    """Recomputed modules store no activations: of 34 bytes for each token and unit of width, 16 are
    the input and output of the MLP's activation (Korthikanti et al. 2022). Transformer Engine fuses
    norms with its matrices, and Megatron recomputes none of them. Only stored tensors take time to
    offload."""
    costs = costs_of(recompute_modules=frozenset(modules), fused=True)
    kept = held(costs, Held.ACTIVATION)[1]
    assert kept == 4 * TOKENS * (WIDTH * stored + FIGURES)
    assert costs.host is not None
    for kind in (Kind.OFFLOAD_F, Kind.RELOAD_F):
        assert costs.host.seconds[kind][1] == pytest.approx(kept / WHOLE.host)
    # Operations that I repeats if the MLP is recomputed.
    products = 4 * TOKENS * 2 * 8 * WIDTH**2 if "mlp" in modules else 0
    more = costs.seconds[I][1] - costs_of(fused=True).seconds[I][1]
    assert more * WHOLE.linear == pytest.approx(products)


def test_layers_are_counted_per_stage() -> None:
    seconds = costs_of((2, 4, 4, 0)).seconds[F]
    assert seconds[1] == pytest.approx(2 * seconds[0])
    assert seconds[3] == 0


LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 1024}


def test_what_is_compressed_and_expanded_again() -> None:
    """Multi-latent attention stores the outputs of its compressing matrices, and may recompute the
    expanding ones (mla_up_proj)."""
    model = gpt(4, **LATENT)
    plain, again = (
        costs_of(EVEN[:1], model=model, recompute_modules=frozenset(modules))
        for modules in ([], ["mla_up_proj"])
    )
    ups = 2 * TOKENS * (512 * 16 * 192 + 256 * 16 * 256)
    more = again.seconds[I][0] - plain.seconds[I][0]
    assert more * WHOLE.linear == pytest.approx(4 * ups)
    less = held(plain, Held.ACTIVATION)[0] - held(again, Held.ACTIVATION)[0]
    assert less == 4 * TOKENS * 16 * (192 + 192 + 128) * 2, "queries, keys and values"
    assert again.seconds[F] == plain.seconds[F]


def test_what_experts_recompute_is_not_stored() -> None:
    """Recompute of experts frees the stored output of the experts' activation, of a shared expert,
    or of everything between router and sum."""
    model = gpt(("*E",), moe_shared_expert_intermediate_size=512, **EXPERTS)
    kept = [
        held(costs_of((1,), model=model, recompute_modules=frozenset(again)), Held.ACTIVATION)[0]
        for again in ([], ["moe_act"], ["shared_experts"], ["moe"])
    ]
    less = [(kept[0] - figure) / TOKENS / 2 for figure in kept[1:]]
    assert less == [2 * 1024, 2 * 512, 2 * WIDTH + 2 * (2 * 1024 + 512)]


def test_a_dense_layer_among_experts() -> None:
    """A dense layer among layers with experts has no router. The router's weight gradient is
    computed in I, because the router is no linear layer of Megatron's."""
    model = gpt(("*-", "*E"), **EXPERTS)
    costs = costs_of((1, 1), model=model)
    dense, routed = costs.seconds[W]
    experts, router = 2 * 2 * WIDTH * 1024, WIDTH * 8
    assert (dense - routed) * WHOLE.linear / (2 * TOKENS) == pytest.approx(8 * WIDTH**2 - experts)
    forward = (costs.seconds[F][0] - costs.seconds[F][1]) * WHOLE.linear / (2 * TOKENS)
    assert forward == pytest.approx(8 * WIDTH**2 - experts - router)


def test_experts_weights_are_read_by_few_tokens() -> None:
    """With many experts on a rank and few tokens, the products wait until the experts' weights are
    read from memory, which no count of operations shows. W takes more than 8 times as long as with
    the experts spread over 64 ranks."""
    model = gpt(("E",), num_experts=512, moe_router_topk=2, moe_ffn_hidden_size=1024)
    few, many = (
        costs_of((1,), GPU, model=model, expert_parallel=ranks, sequence=256) for ranks in (1, 64)
    )
    assert few.seconds[W][0] > 8 * many.seconds[W][0]


# ---- the embedding and the output layer


def test_the_output_layer_is_on_the_last_stage() -> None:
    without, costs = costs_of(), costs_of(vocabulary=50304)
    head = 2 * TOKENS * WIDTH * 50304 / WHOLE.matrix
    for kind in (F, I, W):
        assert costs.seconds[kind][:3] == without.seconds[kind][:3]
        assert costs.seconds[kind][3] == pytest.approx(without.seconds[kind][3] + head)
    # Additional bytes of the last stage: until I the logits in fp32; until W their gradient in 16
    # bits, and the layer's input.
    logits = TOKENS * 50304
    more = {Held.ACTIVATION: 4 * logits, Held.WEIGHT_INPUTS: 2 * (logits + TOKENS * WIDTH)}
    for kept, expected in more.items():
        assert held(costs, kept)[3] == pytest.approx(held(without, kept)[3] + expected)


def test_the_loss_and_the_embeddings_table_take_memory() -> None:
    """The loss and the embedding's table take time for memory traffic: each microbatch adds to the
    gradient of the whole table, whichever rows its tokens use."""
    costs = costs_of(rates=GPU, vocabulary=50304)
    fused = costs_of(rates=GPU, vocabulary=50304, loss_fusion=True)
    assert costs.vocabulary is not None and fused.vocabulary is not None
    look_up, table = costs.vocabulary.embedding
    moved = 12 * 50304 * WIDTH / GPU.memory
    assert table == pytest.approx(moved + GPU.kernel) and table > 10 * look_up
    assert (
        costs.vocabulary.output_layer[0]
        > fused.vocabulary.output_layer[0]
        > fused.vocabulary.output_layer[2]
    )


def test_multi_token_prediction_is_on_the_last_stage() -> None:
    """Multi-token prediction is on the last stage by default. Each depth is a layer, a projection
    from twice the hidden size to the hidden size, and a run of the output layer."""
    rows, depths = 50304, 2
    model = gpt(16, rows)
    without = costs_of(model=model)
    costs = costs_of(model=replace(model, mtp_num_layers=depths))
    projection, head = 2 * TOKENS * 2 * WIDTH**2, 2 * TOKENS * WIDTH * rows
    for kind in (F, I, W):
        layer = costs_of().seconds[kind][1] / 4
        more = depths * (layer + (projection + head) / WHOLE.linear)
        assert costs.seconds[kind][:3] == without.seconds[kind][:3]
        assert costs.seconds[kind][3] == pytest.approx(without.seconds[kind][3] + more)
    assert costs.vocabulary is not None and without.vocabulary is not None
    heads = [(1 + depths) * part for part in without.vocabulary.output_layer]
    assert costs.vocabulary.output_layer == pytest.approx(heads)
    assert costs.vocabulary.logits_bytes == (1 + depths) * TOKENS * rows * 4
    assert costs.vocabulary.deferred_bytes == (1 + depths) * TOKENS * (rows + WIDTH) * 2


def test_multi_token_prediction_is_where_a_layout_has_it() -> None:
    """Costs of multi-token prediction are on the stage that the layout gives; only its runs of the
    output layer are on the last stage. All of it used to be counted on the last stage."""
    model = replace(gpt(16, 50304), mtp_num_layers=2)
    counts, run = [4, 4, 8, 0], replace(RUN, tensor_parallel=1)
    before, without = (
        estimate(model, stages_of(model, counts, depths), run, WHOLE)
        for depths in ([0, 0, 2, 0], [0, 0, 0, 2])
    )
    assert before.vocabulary == without.vocabulary, "the loss's stage predicts all tokens"
    for kind in (F, I, W):
        on_its_stage, on_the_last = before.seconds[kind], without.seconds[kind]
        assert on_its_stage[:2] == on_the_last[:2]
        moved = on_its_stage[2] - on_the_last[2]
        assert moved == pytest.approx(on_the_last[3] - on_its_stage[3]) and moved > 0
    assert before.held_bytes is not None and without.held_bytes is not None
    for held, other in zip(before.held_bytes.values(), without.held_bytes.values(), strict=True):
        assert held[2] - other[2] == pytest.approx(other[3] - held[3]) and held[2] > other[2]


def test_messages_behind_multi_token_prediction_have_all_its_hidden_states() -> None:
    """Messages behind the stage of multi-token prediction carry one more hidden state for each
    depth, and messages before that stage carry one. Seconds and bytes used to be counted for one
    hidden state everywhere."""
    model = replace(gpt(16, 50304), mtp_num_layers=2)
    stages = stages_of(model, [4, 4, 8, 0], [0, 0, 2, 0])
    costs = estimate(model, stages, replace(RUN, tensor_parallel=1), WHOLE)
    plain = estimate(model, stages_of(model, [4, 4, 8, 0]), RUN, WHOLE).links
    assert not plain.p2p_seconds_by_stage and costs.links.message_bytes == plain.message_bytes
    assert costs.links.p2p_seconds_by_stage == pytest.approx(
        (plain.p2p_seconds, plain.p2p_seconds, 3 * plain.p2p_seconds)
    )
    linked = with_links(costs, line(4), WHOLE, ranks=4, stride=1)
    first, *others = linked.links.p2p_seconds_by_stage
    assert others == pytest.approx([first, 3 * first]) and first > 0
    amounts = [in_bytes(costs)(Held.MESSAGE, stage) for stage in range(4)]
    assert amounts == [plain.message_bytes * states for states in (1, 1, 3, 3)]
    joined = costs.links.joined([(0, 1), (2,), (3,)], costs)
    assert joined.states == (1, 3)


# ---- ranks that wait for each other


def test_tensor_parallel_ranks_share_the_work() -> None:
    alone, four = costs_of(), costs_of(rates=ALONE, tensor_parallel=4)
    for kind in (F, I, W):
        assert four.seconds[kind] == pytest.approx([s / 4 for s in alone.seconds[kind]])
    assert four.links.p2p_seconds == alone.links.p2p_seconds / 4


def test_tensor_parallel_ranks_wait_for_one_another() -> None:
    """Costs include the communication of tensor-parallel ranks. A layer has two pairs of matrices,
    and each pair gathers and scatters once in F and in I. W waits for nothing. In B, half of the
    time of I's exchanges is hidden, as they run during products of weight gradients."""
    once = 4 * TOKENS * WIDTH * 2 * 3 / 4 / WHOLE.peers * 4
    waiting, alone = (costs_of(rates=r, tensor_parallel=4) for r in (WHOLE, ALONE))
    for kind, more in ((F, once), (I, once), (W, 0.0)):
        assert waiting.seconds[kind][1] == pytest.approx(alone.seconds[kind][1] + more)
    assert waiting.fused_backward_saving_on(1) == pytest.approx(once / 2)
    whole = Action(1, Kind.FULL_BACKWARD, 0)
    assert waiting.of(whole) == pytest.approx(alone.of(whole) + once / 2)
    assert not any(alone.passes.fused_backward_saving)
    together = costs_of(tensor_parallel=4, sequence_parallel=False)
    assert together.seconds[F][1] == pytest.approx(waiting.seconds[F][1])
    assert together.fused_backward_saving_on(1) > waiting.fused_backward_saving_on(1), (
        "nothing but reductions"
    )
    again = [
        costs_of(rates=r, tensor_parallel=4, recompute=True).seconds[I][1] for r in (WHOLE, ALONE)
    ]
    assert again[0] - again[1] == pytest.approx(2 * once)


def test_gathers_for_w_overlap_its_products() -> None:
    """Gathers for W overlap with W's products and cost nothing, unless a gather takes longer. Of
    tensors that are gathered for W, a rank stores only its own share until then."""
    kept, local, both = (
        functools.partial(costs_of, tensor_parallel=4, gathered_for_w=frozenset(ways))
        for ways in ((), ["inputs"], ["inputs", "gradients"])
    )
    assert local().seconds[W] == kept().seconds[W]
    slow = replace(WHOLE, peers=1e9)
    assert local(rates=slow).seconds[W][1] > kept(rates=slow).seconds[W][1]
    left = [
        held(costs, Held.WEIGHT_INPUTS)[1]
        for costs in (kept(), local(), both(), both(sequence_parallel=False))
    ]
    inputs = TOKENS * WIDTH * 2 * 2 * 4
    assert left[0] - left[1] == left[1] - left[2] == pytest.approx(inputs * 3 / 4)
    assert left[3] == left[0], "every rank has them whole"


def test_layers_in_userbuffers_leave_nothing_to_w() -> None:
    """Layers with Userbuffers compute their weight gradients in I, and leave none to W. If
    Userbuffers overlap only the reductions, the second of two matrices, which is split by rows,
    still leaves its weight gradient to W."""
    split = costs_of(rates=ALONE, tensor_parallel=4)
    all_whole, rows_whole = (
        costs_of(tensor_parallel=4, userbuffers=frozenset(ends))
        for ends in (["row", "column"], ["row"])
    )
    assert not any(all_whole.seconds[W])
    assert not any(held(all_whole, Held.WEIGHT_INPUTS)[:-1]), "the last has what enters the head"
    assert 0 < rows_whole.seconds[W][1] < split.seconds[W][1]
    for costs in (all_whole, rows_whole):
        assert costs.seconds[F] == pytest.approx(split.seconds[F])
        whole = Action(1, Kind.FULL_BACKWARD, 0)
        assert costs.of(whole) == pytest.approx(split.of(whole))
        assert not any(costs.passes.fused_backward_saving)


def waits(group: Group, model: Model, rates: Rates = WHOLE, **run: Any) -> tuple[float, float]:
    """Return the seconds of communication in ``group``, in F and in I, of a stage with all layers
    of ``model``."""
    execution = replace(RUN, **run)
    seconds = seconds_of_layers(model, Stage(model.layers), execution, rates)
    return seconds.forward.get(group, 0.0), seconds.input_gradient.get(group, 0.0)


def test_tokens_go_to_their_experts_and_back() -> None:
    """Tokens are sent to their experts and back in F and in I; with two experts a token, that is
    twice its width each way. Messages to experts on another node share the network with messages
    between stages."""
    model = gpt(("*E",), **EXPERTS)
    sent = 2 * 2 * TOKENS * WIDTH * 2
    in_node = waits(Group.EXPERT, model, expert_parallel=8)
    assert in_node == pytest.approx([sent * 7 / 8 / WHOLE.peers] * 2)
    larger = replace(model, num_experts=16)
    far = waits(Group.EXPERT, larger, expert_parallel=16)
    assert far == pytest.approx([sent / 2 / WHOLE.network] * 2)
    joined = replace(WHOLE, domain=72)
    near = waits(Group.EXPERT, larger, joined, expert_parallel=16)
    assert near == pytest.approx([sent * 15 / 16 / WHOLE.peers] * 2)
    once_a_rank = waits(Group.EXPERT, model, expert_parallel=2, dispatcher="flex")
    assert once_a_rank == pytest.approx([2 * TOKENS * WIDTH * 2 * 1.5 / 2 / WHOLE.peers] * 2)
    once_a_node = waits(Group.EXPERT, larger, expert_parallel=16, dispatcher="flex")
    assert once_a_node == pytest.approx([2 * TOKENS * WIDTH * 2 * 1.5 / 2 / WHOLE.network] * 2)
    again = waits(Group.EXPERT, model, expert_parallel=8, recompute_modules=frozenset(["moe"]))
    assert again == pytest.approx((in_node[0], 2 * in_node[1]))


def test_keys_and_values_go_round_while_attention_goes_on() -> None:
    """Context-parallel ranks exchange keys and values while attention computes, so a pass waits
    only for the part that attention does not hide. An all-to-all of heads hides nothing, and a pass
    waits for all of it."""
    run: dict[str, Any] = {"context_parallel": 4, "sequence": 4 * TOKENS}
    assert waits(Group.CONTEXT, gpt(1), **run) == (0, 0)
    slow = replace(WHOLE, peers=3e9)
    moved = 3 * TOKENS * 2 * WIDTH * 2 / slow.peers
    attention = 2 * TOKENS * 4 * TOKENS * WIDTH / WHOLE.attention
    forward, backward = waits(Group.CONTEXT, gpt(1), slow, **run)
    assert forward == pytest.approx(moved - attention) and backward > 0
    again = waits(Group.CONTEXT, gpt(1), slow, recompute_modules=frozenset(["core_attn"]), **run)
    assert again == pytest.approx((forward, forward + backward))
    heads, _ = waits(Group.CONTEXT, gpt(1), context_exchange="a2a", **run)
    assert heads == pytest.approx(4 * TOKENS * WIDTH * 2 * 3 / 4 / WHOLE.peers)


@pytest.mark.parametrize(("ranks", "later"), [(1, 0), (2, 1), (4, 3)])
def test_a_ring_of_context_parallel_ranks_merges_its_steps(ranks: int, later: int) -> None:
    """Ring attention takes time to merge the results of its steps: the first output is copied, and
    each later output is added to it, for three quarters of the tokens on average. With one gather
    (`all_gather`) there is nothing to merge."""
    run = replace(RUN, context_parallel=ranks, sequence=ranks * TOKENS)
    merging = [o for o in part_of("*", gpt(1), run).operations if o.name == "merging"]
    passes = [o.moved.forward / (2 * TOKENS * WIDTH) for o in merging]
    assert passes == pytest.approx([2 + 3 * 0.75 * later] if later else [])
    backward = [o.moved.input_gradient / (2 * TOKENS * WIDTH) for o in merging]
    # In I, later steps merge three gradients: those of queries, keys and values.
    assert backward == pytest.approx([2 + 3 * 3 * 0.75 * later] if later else [])
    at_once = replace(run, context_exchange="all_gather")
    assert "merging" not in [o.name for o in part_of("*", gpt(1), at_once).operations]


def test_what_tensor_parallel_ranks_gather_is_cast_before() -> None:
    """Tensor-parallel ranks cast a tensor to FP8 before they gather it. With sequence parallelism
    each rank casts only its share of the first product's input and of the last product's output
    gradient; without it each rank casts everything."""
    run = replace(RUN, precision=Precision.FP8, tensor_parallel=4)

    def casts(sequence_parallel: bool) -> dict[str, tuple[float, float]]:
        shared = replace(run, sequence_parallel=sequence_parallel)
        operations = [o for symbol in "*-" for o in part_of(symbol, gpt(1), shared).operations]
        return {
            o.name: (o.moved.forward, o.moved.input_gradient)
            for o in operations
            if o.name.endswith("casts")
        }

    own, whole = casts(sequence_parallel=True), casts(sequence_parallel=False)
    assert len(own) == 4
    for name, (forward, backward) in own.items():
        is_first = name in ("qkv's casts", "fc1's casts")
        assert forward == pytest.approx(whole[name][0] / (4 if is_first else 1)), name
        assert backward == pytest.approx(whole[name][1] / (1 if is_first else 4)), name


def test_which_part_of_a_pass_is_waiting() -> None:
    model = gpt(("*E",) * 4, **EXPERTS)
    run = replace(RUN, tensor_parallel=2, expert_parallel=4)
    shares = waiting_shares(model, run, WHOLE)
    assert set(shares) == {Group.TENSOR, Group.EXPERT}
    for of_passes in shares.values():
        assert list(of_passes) == ["F", "I", "W", "B"] and of_passes["W"] == 0
        assert 0 < of_passes["B"] < of_passes["I"] < 1
    assert not waiting_shares(model, RUN, WHOLE)


def test_messages_within_a_domain_are_peers() -> None:
    """Messages between ranks of one NVLink domain have the speed of NVLink. Four pipeline ranks of
    two GPUs fit into one node; sixteen do not, but they fit into one rack."""
    rack = replace(WHOLE, domain=72)
    hops = {
        (span, rates.domain): costs_of(rates=rates, pipeline_span=span).links.p2p_seconds
        for span in (0, 8, 32)
        for rates in (WHOLE, rack)
    }
    message = TOKENS * WIDTH * 2
    assert hops[0, 8] == hops[32, 8] == hops[0, 72] == message / WHOLE.network
    assert hops[8, 8] == hops[32, 72] == message / WHOLE.peers


# ---- rates of GPUs


def test_a_slower_machine_takes_longer_and_holds_as_much() -> None:
    fast, slow = costs_of(), costs_of(rates=CPU)
    for kind in (F, I, W):
        times = WHOLE.linear / CPU.linear
        assert slow.seconds[kind] == pytest.approx([s * times for s in fast.seconds[kind]])
    assert slow.links.p2p_seconds == pytest.approx(
        fast.links.p2p_seconds * WHOLE.network / CPU.network
    )
    assert slow.held_bytes == fast.held_bytes


def test_a_pass_of_a_chunk_is_launched() -> None:
    """F and I of a chunk take time for launching their kernels. W does not, because the host has
    launched its work long before."""
    quick, launched = costs_of(), costs_of(rates=replace(WHOLE, launch=1e-3))
    for kind, more in ((F, 1e-3), (I, 1e-3), (W, 0.0)):
        assert launched.seconds[kind][1] == pytest.approx(quick.seconds[kind][1] + more)


@pytest.mark.parametrize("name", GPUS)
def test_quantized_products_are_quicker_and_casts_take_memory(name: str) -> None:
    """Quantized products are faster, and their casts take time for memory traffic. Attention and
    the output layer stay in 16 bits."""
    gpu, model = GPUS[name], gpt(4, 50304)
    sheet = DATA_SHEETS[name]
    # largest ratio of FP8 to bf16: VR200 has more units for 8 and for 4 bits
    most = 4.4 if name == "vr200" else 2.1
    assert sheet.source.startswith("https://") and sheet.fp8 < most * sheet.bf16
    plain = costs_of((4,), gpu.rates(), model=model, fused=True)
    for precision in (Precision.FP8, Precision.FP4):
        if not gpu.can(precision):
            with pytest.raises(ValueError, match="no tensor cores for"):
                gpu.rates(precision)
            continue
        costs = costs_of((4,), gpu.rates(precision), model=model, fused=True, precision=precision)
        for kind in (F, I, W):
            assert 0.4 * plain.seconds[kind][0] < costs.seconds[kind][0] < plain.seconds[kind][0]
        assert costs.vocabulary == plain.vocabulary


def test_what_whole_trainings_are_published_to_reach() -> None:
    """Estimates of whole trainings are near published efficiencies. Megatron-LM's README has 41 to
    48 % of 989e12 operations a second on H100s, with pipelines and data parallelism; Korthikanti et
    al. 2022, table 5, have 41 to 56 % of 312e12 on A100s, and Hagemann et al. 2023 up to 70 %.
    Layers alone reach more."""
    model = Model(("*-",) * 8, 8192, 64, 8, 128, 28672, 128256, gated_linear_unit=True)
    run = Execution(8192, tensor_parallel=8)
    counted = flops_of(model, Stage(model.layers), run)
    for name, least, most in (("h100", 0.48, 0.65), ("a100", 0.6, 0.75)):
        costs = estimate(model, [Stage(model.layers)], run, GPUS[name].rates()).without_vocabulary()
        whole = costs.of(Action(0, Kind.FULL_BACKWARD, 0)) + costs.seconds[F][0]
        assert least < counted / whole / DATA_SHEETS[name].bf16 < most, name
    assert all(0 < share <= 1 for share in vars(ACHIEVED).values())


def table_of(sheets: Mapping[str, DataSheet]) -> str:
    def terabytes(figure: float, unit: float) -> str:
        return f"{figure / unit:,.0f}" if figure else "-"

    rows = [
        [
            f"`{name}`",
            *(terabytes(figure, 1e12) for figure in (sheet.bf16, sheet.fp8, sheet.fp4)),
            *(terabytes(figure, 1e9) for figure in (sheet.bandwidth, sheet.peers)),
            f"{sheet.domain}",
            *(terabytes(figure, 1e9) for figure in (sheet.network, sheet.host)),
            f"{sheet.memory / 2**30:.0f} GiB",
            f"{sheet.sms}",
            f"{sheet.matrices:.2f}",
            sheet.source,
        ]
        for name, sheet in sheets.items()
    ]
    units = ["bf16", "fp8", "fp4", "memory", "peers", "joined", "network", "host"]
    return table(["", *units, "has", "SMs", "matrices", "source"], rows)


def test_the_table_of_gpus_is_that_of_the_data_sheets() -> None:
    check_written("gpus", table_of(DATA_SHEETS), PAGE)
    shares = {name: f"{share:.2f}" for name, share in vars(ACHIEVED).items()}
    check_written("achieved", table([*shares], [[*shares.values()]]), PAGE)


def test_no_other_file_lists_the_gpus() -> None:
    """GPUs are listed only in the data file (gpus.toml) and on the page that is written from it."""
    root = Path(__file__).parents[3]
    names = "|".join(name for name in GPUS if name not in ("a100", "h100", "h200", "b200"))
    files = [*root.glob("docs/*.md"), *root.glob("megatron_ext/**/*.py")]
    lists = {
        path.name for path in files if re.search(rf"\b({names}), ({names})\b", path.read_text())
    }
    assert not lists


def test_a_gpu_by_its_drivers_name() -> None:
    assert gpu_named("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_named("AMD Instinct MI300X") is GPUS["mi300x"]
    assert gpu_named("NVIDIA A100-SXM4-80GB") is GPUS["a100"]
    assert gpu_named("NVIDIA A100-SXM4-40GB") is GPUS["a100-40"], "it was one of 80 GB"
    assert gpu_named("NVIDIA A100-PCIE-40GB") is GPUS["a100-40"]
    assert gpu_named("NVIDIA GH200 480GB") is GPUS["gh200"], "that is the Grace's memory"
    assert gpu_named("NVIDIA GH200 144G HBM3e") is GPUS["gh200-144"]
    for name in ("h800", "h20", "a800", "l40s"):
        assert gpu_named(f"NVIDIA {name.upper()}") is GPUS[name]
    assert gpu_named("NVIDIA A800-SXM4-80GB") is GPUS["a800"]
    assert gpu_named("NVIDIA GeForce RTX 4090") is None
    assert GPUS["a100-40"].memory == 39 * 2**30
    assert assumed_rates(Precision.FP4) == GPUS["b200"].rates(Precision.FP4)


def test_what_is_captured_has_whole_backwards() -> None:
    model = gpt(("*E",), moe_shared_expert_intermediate_size=512, **EXPERTS)
    for captured, symbol, left in (
        (["attn"], "*", set()),
        (["moe"], "E", set()),
        (["moe_router"], "E", {"experts' fc1", "experts' fc2"}),
    ):
        run = replace(RUN, captured=frozenset(captured))
        split = {
            operation.name
            for operation in part_of(symbol, model, run).operations
            if operation.flops.weight_gradient and not operation.is_unsplit
        }
        assert split == left


def test_estimates_serve_a_schedule() -> None:
    costs = costs_of(vocabulary=50304)
    problem = Problem(line(4), 8, costs, parse_limit("60GiB", 4, 8))
    assert build_program(choose("zb-h1"), problem).problem.costs.origin.startswith("estimated")


def test_what_no_measurement_has_checked_is_said() -> None:
    assert not_checked(RUN) is None
    assert not_checked(replace(RUN, expert_parallel=8)) is None, "within a node"
    run = replace(RUN, expert_parallel=16, context_parallel=2, precision=Precision.FP8)
    assert not_checked(run) == (
        "not checked against measurements: experts across nodes, context parallelism, "
        "matrices in fp8"
    )


def test_sparse_attention_has_no_estimate() -> None:
    """The estimated costs of a model with sparse attention say that there is no estimate, and texts
    made from them predict no bubble. The numbers are those of plain attention, because a schedule
    is still made for them, but published steps take a fifth to six times as long as these numbers
    say. They used to be printed without this remark."""
    model = gpt(8, 1000)
    plain = estimate(model, stages_of(model, [2] * 4), RUN, WHOLE)
    sparse = replace(model, sparse_attention="dsa")
    costs = estimate(sparse, stages_of(sparse, [2] * 4), RUN, WHOLE)
    assert costs == replace(plain, no_estimate=costs.no_estimate)
    assert costs.no_estimate.startswith("how long sparse attention (dsa) takes is not known")
    problem = Problem(line(4), 8, costs)
    text = summarize(build_program(choose("zb-h1"), problem))
    assert text.startswith("zb-h1 on 4 ranks, 8 microbatches: no estimate of its bubble, peak 4")
    assert text.endswith(f"; no estimate: {costs.no_estimate}") and "%" not in text
    known = summarize(build_program(choose("zb-h1"), replace(problem, costs=plain)))
    assert "predicted bubble" in known and "no estimate" not in known
