"""Tests of long sequences: the time of slices of a sequence, and their comparison with
alternatives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.output_layer import with_input_gradient
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import Maturity, choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.frozen import without_frozen
from megatron_ext.cost_model.gpus import GPUS, LATENCIES, LAUNCH
from megatron_ext.cost_model.links import with_links
from megatron_ext.cost_model.messages.collective_seconds import ring_latency
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.operations.attention import attended_tokens, squared_share
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.candidate import ALIKE, VocabMethod, stable_of
from megatron_ext.planner.figures import as_data
from megatron_ext.planner.long_sequences import (
    LongSequenceAlternative,
    LongSequences,
    alternatives_of_plan,
    alternatives_with_slices,
    cuts_that_may_gain,
    cuts_to_compare,
    long_sequences,
    name_of_cut,
)
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.schedule.action import Action, Kind, Slice
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import format_costs, parse_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem, ScheduleOptions
from megatron_ext.schedule.slices import Lengths, Slices, lengths_of
from megatron_ext.search.bounds import lower_bound
from tests.helpers.combinations import nightly
from tests.helpers.few_families import only_families

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
TOKENS, WIDTH = 16384, 2048
H100 = GPUS["h100"].rates()


def costs_of(
    layers: Sequence[str],
    tokens: int = TOKENS,
    rates: Rates = H100,
    *,
    slices: int = 1,
    run: Execution | None = None,
    **sizes: Any,
) -> Costs:
    """Return the costs of ``layers``, one on each stage, without a vocabulary."""
    model = Model(tuple(layers), WIDTH, 16, 16, 128, 4 * WIDTH, 0, **sizes)
    stages = stages_of(model, [1] * len(layers))
    return estimate(model, stages, run or Execution(tokens), rates, slices)


# ---- the time of slices


def test_attention_in_a_window_does_not_grow_with_the_square() -> None:
    """Attention in a sliding window does not count as work that grows with the square of the
    sequence. When it did, slices of such layers that should take equally long did not: the last of
    four had by far the fewest tokens, and took the least time."""
    full, window = costs_of(("*-", "w-"), window_size=127).slices.attention
    assert full > 0.2 and window < 0.001


def test_a_window_as_long_as_half_of_the_sequence_counts_in_part() -> None:
    assert squared_share(100, 0) == squared_share(100, 99) == squared_share(100, 500) == 1
    assert squared_share(10**6, 10) < 1e-4
    for window in range(1, 100):
        share = squared_share(100, window)
        for end in range(1, 101):  # share of all attention before the end
            exact = end * attended_tokens(end, window) / (100 * attended_tokens(100, window))
            told = (1 - share) * end / 100 + share * (end / 100) ** 2
            assert abs(told - exact) < 0.055, (window, end)


def test_states_do_not_grow_with_the_square() -> None:
    """Recurrent layers (linear attention) do not count as work that grows with the square of the
    sequence. They run at attention's rate, and used to be taken for attention."""
    linear: dict[str, Any] = {
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    }
    assert costs_of(("G-",), **linear).slices.attention == (0,)
    latent: dict[str, Any] = {
        **{"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
    }
    (share,) = costs_of(("*-",), multi_latent_attention=True, **latent).slices.attention
    assert share > 0.2


@pytest.mark.parametrize("layers", [("*-", "w-", "w-", "w-"), ("*-", "G-", "G-", "*-")])
def test_balanced_slices_of_mixtures_take_as_long(layers: tuple[str, ...]) -> None:
    """Balanced slices of a model with mixed layer types take equal time, summed over all stages.
    The lengths follow from counts of operations."""
    sizes: dict[str, Any] = {
        "window_size": 4095,
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    }
    sizes["rates"] = replace(H100, launch=0.0)
    costs = costs_of(layers, **sizes)
    options = ScheduleOptions(slices=Slices(4, Lengths.BALANCED))
    problem = Problem(line(4), 1, costs, options=options)

    def until(end: int) -> float:
        return sum(sum(figures) for figures in costs_of(layers, end, **sizes).seconds.values())

    ends = [round(end * TOKENS) for end in problem.slice_ends]
    took = [until(end) - until(begin) for begin, end in pairwise(ends)]
    took.insert(0, until(ends[0]))
    assert max(took) < 1.07 * min(took), took


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", "zb-v"])
def test_lengths_are_by_the_share_of_all_stages(spec: str) -> None:
    """Balanced slice lengths use the mean share of attention over all stages. Even if stages
    differ, no other share gives a step that is more than 0.5 % shorter."""
    placement = choose(spec).place(4)
    shares = "/".join(["0.5", "0.05"] * (placement.stages // 2))
    costs = parse_costs(f"f=10,i=12,w=8,comm=0.2,attention={shares}", placement)

    def makespan(share: float) -> float:
        lengths = lengths_of(Slices(4, Lengths.BALANCED).ends(share), 32768)
        problem = Problem(placement, 4, costs, options=ScheduleOptions(slices=Slices(4, lengths)))
        return simulate(build_program(choose(spec), problem), costs).makespan

    ours = makespan(costs.attention_share)
    assert costs.attention_share == pytest.approx(0.275)
    assert ours < 1.005 * min(map(makespan, (0.2, 0.25, 0.325, 0.4)))


def test_each_slice_is_launched() -> None:
    """Each slice adds the time in which the host launches its kernels. Nothing else is added on a
    machine whose speed does not depend on shapes."""
    rates = replace(H100, sms=0, kernel=0.0, memory=float("inf"))
    costs = costs_of(("*-", "*-"), rates=rates, slices=2)
    parts = [Slice(0, at, (0.5, 1.0)) for at in range(2)]
    for kind, more in ((F, LAUNCH), (I, LAUNCH), (W, 0.0)):
        took = sum(costs.of(Action(0, kind, part)) for part in parts)
        assert took == pytest.approx(costs.seconds[kind][0] + more)


def test_given_costs_have_what_each_slice_takes() -> None:
    text = "f=8/8,i=12/12,w=4/4,comm=0,fixed_f=1/1,fixed_w=2/3"
    given = parse_costs(text, line(2))
    assert format_costs(given) == text
    parts = [Slice(0, at, (0.5, 1.0)) for at in range(2)]
    assert [given.of(Action(0, F, part)) for part in parts] == [4.5, 4.5]
    assert [given.of(Action(1, W, part)) for part in parts] == [3.5, 3.5]
    assert [given.of(Action(0, I, part)) for part in parts] == [6, 6]
    with pytest.raises(ValueError, match="fixed_i is the time of a slice"):
        parse_costs("f=8,i=12,w=4,fixed_i=1/1/1", line(2))
    # The costs i and fixed_i are given for a rank, and are halved for its two stages.
    of_v = parse_costs("f=8,i=12,w=4,fixed_i=2", choose("zb-v").place(2))
    assert of_v.seconds[I] == (6,) * 4 and of_v.slices.fixed == {I: (1,) * 4}


def test_no_slice_adds_more_than_its_pass_takes() -> None:
    """The lower bound of a step counts no more fixed time for a slice than its pass takes. With a
    fixed time of five units in passes of one unit, the bound used to be longer than the step."""
    costs = parse_costs("f=1,i=1,w=1,attention=0.9,fixed_f=5", line(2))
    problem = Problem(line(2), 2, costs, options=ScheduleOptions(slices=Slices(4)))
    made = simulate(build_program(choose("zb-h1"), problem), costs)
    assert 2 * (1.3 + 2) <= lower_bound(problem, splits_backward=True) <= made.makespan


EXPERTS: dict[str, Any] = {"num_experts": 32, "moe_router_topk": 2, "moe_ffn_hidden_size": WIDTH}


@pytest.mark.parametrize("slices", [2, 8])
@pytest.mark.parametrize("layer", ["*-", "*E"])
def test_a_mean_slice_takes_what_the_estimate_says_of_its_rows(layer: str, slices: int) -> None:
    """The mean slice takes as long as the estimate for a sequence of its length. Slices used to be
    priced at their share of a whole sequence: for slices of 4,096 tokens of a 235B model, `plan`
    promised a step 1.54 times as fast, while the times of products with as many rows give 1.32."""
    linear = layer.replace("*", "")
    costs = costs_of((linear, linear), slices=slices, **EXPERTS)
    short = costs_of((linear, linear), TOKENS // slices, **EXPERTS)
    ends = tuple((at + 1) / slices for at in range(slices))
    for kind in (F, I, W):
        took = sum(costs.of(Action(0, kind, Slice(0, at, ends))) for at in range(slices))
        assert took == pytest.approx(slices * short.seconds[kind][0])
    with_attention = costs_of((layer, layer), slices=slices, **EXPERTS)
    whole = costs_of((layer, layer), **EXPERTS)
    assert with_attention.seconds == whole.seconds and not whole.slices.fixed
    assert with_attention.slices.attention == whole.slices.attention
    for kind in (F, I, W):  # attention adds little fixed time to a slice
        more = with_attention.slices.fixed[kind][0] - costs.slices.fixed[kind][0]
        assert 0 <= more < 0.1 * whole.seconds[kind][0]


def test_each_slice_adds_to_all_gradients_of_experts() -> None:
    """W of each slice takes the time to read and write the gradients of all experts, 8 bytes a
    weight, however few tokens the slice has. W of a dense layer has so many rows that this does not
    matter."""
    experts = costs_of(("E", "E"), 4096, slices=8, **EXPERTS)
    added = 8 * 32 * 2 * WIDTH * WIDTH / H100.memory
    assert experts.slices.fixed[W][0] == pytest.approx(added, rel=0.15)
    assert experts.slices.fixed[W][0] > 0.7 * experts.seconds[W][0]
    dense = costs_of(("-", "-"), slices=8)
    assert dense.slices.fixed[W][0] < 0.05 * dense.seconds[W][0]


def test_each_slice_has_the_latency_of_collectives() -> None:
    def fixed(ranks: int) -> float:
        run = Execution(TOKENS, tensor_parallel=ranks)
        return costs_of(("-", "-"), slices=4, run=run).slices.fixed[F][0]

    latency = ring_latency(2, 2, 8, 1)  # latency of a gather and of a reduction in F
    assert fixed(8) > latency
    assert fixed(8) == pytest.approx(fixed(1) + latency, abs=0.5 * latency)


def test_frozen_weights_have_no_gradient_to_add_to() -> None:
    costs = costs_of(("E", "E"), slices=4, **EXPERTS)
    frozen = without_frozen(costs, (0.0, 0.5), reached=0.5, output_layer=False)
    before, after = costs.slices.fixed, frozen.slices.fixed
    assert after[W] == (0, 0.5 * before[W][1])
    assert after[I] == (0.5 * before[I][0], before[I][1]) and after[F] == before[F]


def test_the_vocabulary_has_a_price_of_its_own_for_each_slice() -> None:
    """If only adapters of layers are trained, W of a slice does not add to a gradient of the output
    layer. The price of that W used to contain this addition, because the last stage had one price
    for its layers and the output layer. If a program computes the output layer's gradient in I, the
    price of I contains the addition; it used to stay in the price of W."""
    model = Model(("E", "E"), WIDTH, 16, 16, 128, 4 * WIDTH, 65536, **EXPERTS)
    costs = estimate(model, stages_of(model, [1, 1]), Execution(TOKENS), H100, 4)
    layers, vocabulary = costs.layers_alone, costs.vocabulary
    assert vocabulary is not None
    *_, of_gradient = vocabulary.fixed_output_layer
    _, of_table = vocabulary.fixed_embedding
    assert of_gradient > 0 and 0 < of_table == pytest.approx(vocabulary.embedding[1])
    assert costs.slices.fixed[W] == pytest.approx(
        (layers.slices.fixed[W][0] + of_table, layers.slices.fixed[W][1] + of_gradient)
    )
    trained = without_frozen(costs, (0.5, 0.5), reached=1, output_layer=True).slices.fixed
    frozen = without_frozen(costs, (0.5, 0.5), reached=1, output_layer=False).slices.fixed
    half = 0.5 * layers.slices.fixed[W][1]
    assert trained[W][1] == pytest.approx(half + of_gradient)
    assert frozen[W][1] == pytest.approx(half) and frozen[I] == trained[I] == costs.slices.fixed[I]

    at_once = with_input_gradient(costs)
    before, after = costs.slices.fixed, at_once.slices.fixed
    assert after[W][1] == pytest.approx(before[W][1] - of_gradient)
    assert after[I][1] == pytest.approx(before[I][1] + of_gradient)
    assert at_once.layers_alone.slices.fixed[W] == pytest.approx(layers.slices.fixed[W])

    text = format_costs(costs)
    assert (
        f"fixed_output_layer={'/'.join(f'{x:.4g}' for x in vocabulary.fixed_output_layer)}" in text
    )
    read = parse_costs(text, line(2))
    assert read.slices.fixed[W] == pytest.approx(before[W], rel=1e-3)
    told = parse_costs("f=1,i=1,w=1,output_layer=1/1/2,embedding=0/1", line(2))
    told = told.with_slices_of(costs)
    assert told.vocabulary is not None
    share = of_gradient / vocabulary.output_layer[2]
    assert told.vocabulary.fixed_output_layer[2] == pytest.approx(2 * share)
    assert told.slices.fixed[W][1] == pytest.approx(
        layers.slices.fixed[W][1] / layers.seconds[W][1] + 2 * share
    )


def test_a_price_of_nothing_stays_given() -> None:
    """Costs whose slices have no fixed part, or no attention, are written with these zeros. The
    zeros used to be omitted, and the next reader replaced them by estimates."""
    text = "f=1/1,i=1/1,w=1/1,comm=0,attention=0/0,fixed_f=0/0"
    costs = parse_costs(text, line(2))
    assert format_costs(costs) == text
    estimated = costs_of(("*-", "*-"), slices=4)
    assert (
        parse_costs(format_costs(costs), line(2)).with_slices_of(estimated).slices == costs.slices
    )


def test_a_message_of_a_slice_has_the_latency_of_its_link() -> None:
    """A slice's message takes the latency of its link besides its share of the bytes. It used to be
    counted without latency."""
    costs = costs_of(("*-",) * 4)
    near, far = LATENCIES
    rates = replace(H100, domain=2)
    # ranks 0 and 1 share a node, and so do 2 and 3
    linked = with_links(costs, line(4), rates, 4, 1)
    part = Slice(0, 0, (0.25, 1.0))
    hops = [linked.of(Action(stage, Kind.SEND_F, part)) for stage in range(3)]
    size = costs.links.message_bytes
    of_near, of_far = size / H100.peers, size / H100.network
    assert hops == pytest.approx(
        [
            near + (of_near - near) / 4,
            far + (of_far - far) / 4,
            near + (of_near - near) / 4,
        ]
    )
    # The time of a message with a whole microbatch is unchanged.
    assert linked.of(Action(1, Kind.SEND_F, 0)) == of_far
    alike = with_links(costs, line(4), H100, 4, 1)
    assert alike.links.latency == pytest.approx(near) and not alike.links.latencies


def test_costs_that_do_not_tell_attention_have_it_estimated() -> None:
    """If costs do not give attention's share, it is taken from the estimate, and the origin of the
    costs says so. Such costs used to give even slices although balanced ones were requested, and no
    message said so."""
    estimated = costs_of(("*-", "*-"), slices=4)
    given = parse_costs("f=1,i=1,w=1", line(2))
    told = given.with_slices_of(estimated)
    assert told.slices.attention == estimated.slices.attention
    for kind in (F, I, W):
        share = estimated.slices.fixed[kind][0] / estimated.seconds[kind][0]
        assert told.slices.fixed[kind] == pytest.approx((share, share))
    assert told.origin == "given; attention and short slices in estimated proportions"
    apart = parse_costs("f=1,i=1,w=1,attention=0", line(2)).with_slices_of(estimated)
    assert apart.slices.attention == (0, 0) and apart.slices.fixed == told.slices.fixed
    assert apart.origin == "given; short slices in estimated proportions"
    assert told.with_slices_of(estimated) is told


def test_context_parallel_ranks_have_all_keys_and_values_of_slices() -> None:
    """With slices, each context-parallel rank stores the keys and values of the whole sequence;
    with whole sequences only its share."""
    costs = costs_of(("*-", "*-"))
    gathered = costs.with_slices_shared_by(4)
    assert costs.held_bytes is not None and gathered.held_bytes is not None
    more = gathered.held_bytes[Held.ACTIVATION][0] - costs.held_bytes[Held.ACTIVATION][0]
    assert more == 3 * costs.slices.keys_values[0] == 3 * 2 * TOKENS * WIDTH * 2
    assert gathered.slices.keys_values[0] == 4 * costs.slices.keys_values[0]
    assert costs.with_slices_shared_by(1) == costs


def test_the_last_of_context_parallel_ranks_attends_to_most() -> None:
    """The time of slices under context parallelism is that of the last rank, which attends to the
    most tokens: to all before the slice, and within the slice, as the last of four ranks, to its
    own quarter and the quarters before."""
    costs = parse_costs("f=1,i=2,w=0,attention=1", line(2))
    parts = [Slice(0, at, (0.5, 1.0)) for at in range(2)]
    took = [costs.with_slices_shared_by(4).of(Action(0, F, part)) for part in parts]
    assert took == pytest.approx([0.25 + 0.5 * 0.375, 0.75 + 0.5 * 0.375])
    assert [costs.of(Action(0, F, part)) for part in parts] == [0.25, 0.75]


# ---- comparisons of slices with alternatives

SPECS = ("1f1b", "zb-h1", "zb-v", "v-half")


@pytest.fixture(scope="module")
def training() -> Training:
    gpt = parse_model("layers=4,hidden=2048,heads=16,sequence=32768,vocabulary=32000")
    state = TrainingState(distributed=True, data_parallel=4)
    return Training(2, 2, trained=TrainedModel(gpt.model, gpt.execution(), state, H100))


def with_sequence(training: Training, tokens: int) -> Training:
    assert training.trained is not None
    execution = replace(training.trained.execution, sequence=tokens)
    return replace(training, trained=replace(training.trained, execution=execution))


def compared(training: Training, room: float | None = None) -> LongSequences:
    made = long_sequences(training, make_plan(training.variant, room, specs=SPECS), room)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def free(training: Training) -> LongSequences:
    """Return the comparison of alternatives for long sequences, without a memory limit."""
    return compared(training)


def test_long_sequences_are_compared_in_all_ways(free: LongSequences) -> None:
    made, words = free, [way.words for way in free.alternatives]
    assert words == [
        "whole sequences",
        "--recompute-granularity full",
        "--context-parallel-size 2, DP 2",
        *("2 slices", "4 slices", "8 slices"),
    ]
    shown = {way.words: way.shortest for way in made.alternatives}
    whole, best = shown["whole sequences"], made.best
    assert best is not None and whole is not None
    assert best.step < whole.step  # 2 microbatches on 2 ranks
    slices = f"--pipeline-slices {best.report.slices} --pipeline-slice-lengths balanced"
    assert slices in " ".join(made.written.added)
    again = shown["--recompute-granularity full"]
    assert again is not None and again.step > whole.step and again.holds < whole.holds
    data = as_data(made)["alternatives"]
    assert [entry["words"] for entry in data] == words
    assert next(e for e in data if e["words"] == "8 slices")["candidates"][0]["slices"] == 8


def test_context_parallelism_has_as_many_microbatches_again(
    training: Training, free: LongSequences
) -> None:
    """The alternative with twice the context parallelism has half of the tokens on a rank and twice
    the microbatches. It is shown for comparison, and never chosen."""
    made = free
    (divided,) = (way for way in made.alternatives if not way.is_here)
    assert divided.shortest is not None
    assert divided.shortest.report.microbatches == 2 * training.microbatches
    assert made.best not in divided.candidates


@nightly("test_long_sequences_are_compared_in_all_ways")
def test_what_does_not_fit_whole_may_in_slices(training: Training, free: LongSequences) -> None:
    leanest = min(made.holds for made in free.alternatives[0].candidates)
    made = compared(training, 0.95 * leanest)
    assert made.best is not None and made.best.fullest is not None
    assert made.best.fullest <= 0.95 * leanest
    assert not made.alternatives[0].candidates


def test_of_slices_that_tie_the_leanest_are_taken(free: LongSequences) -> None:
    """Among numbers of slices with equally long steps, the one with the least memory is chosen. Two
    slices at 71.7 GiB used to be chosen over four at 63.5 GiB for a gain of 0.3 %, because only the
    shortest step was compared further."""
    eligible = [one for way in free.alternatives if way.slices > 1 for one in way.candidates]
    shortest = min(stable_of(eligible), key=lambda one: one.step)
    tie = [one for one in stable_of(eligible) if one.step <= (1 + ALIKE) * shortest.step]
    best = free.best
    assert best is not None and set(free.tied) == set(tie) and len(tie) > 1
    assert best.holds <= (1 + ALIKE) * min(one.holds for one in tie)
    assert best.holds < shortest.holds


def test_the_price_decides_how_short_slices_are(training: Training) -> None:
    """The time that each slice adds decides how short slices become. That time used not to be
    counted, and instead slices of fewer than 4,096 tokens were never chosen."""
    assert training.trained is not None
    wide = parse_model("layers=4,hidden=8192,heads=64,sequence=4096,vocabulary=32000")
    trained = replace(training.trained, model=wide.model, execution=wide.execution())
    made = compared(replace(training, trained=trained))
    assert made.best is not None and made.best.report.slices > 1
    assert made.best.step < 0.98 * min(one.step for one in made.alternatives[0].candidates)
    apart = [way.slices for way in made.alternatives if "joined" not in way.words]
    assert apart == [1, 2, 4]  # eight slices can gain nothing
    for short in (with_sequence(training, 256), with_sequence(training, 1024)):
        assert long_sequences(short, make_plan(short.variant, specs=SPECS), None) is None


def test_w_of_slices_are_joined_if_that_is_shorter(training: Training) -> None:
    """W of experts takes as long for a slice as for a sequence. A plan used to count joined W (one
    product for all slices of a microbatch) only if the user had set them, and never proposed them,
    so slices that gain only with joined W were not recommended."""
    assert training.trained is not None
    gpt = parse_model("layers=8,hidden=4096,heads=32,sequence=4096,vocabulary=32000")
    experts = replace(gpt.model, layers=("*E",) * 8, **EXPERTS)
    trained = replace(training.trained, model=experts, execution=gpt.execution())
    job = replace(training, ranks=4, trained=trained)
    made = compared(job)
    words = [way.words for way in made.alternatives]
    assert words == [
        "whole sequences",
        "2 slices",
        *(f"{n} slices, their W joined" for n in (2, 4)),
    ]
    best = made.best
    assert best is not None and best.report.options.slices.joined_weights
    assert "--pipeline-join-slice-weights" in made.written.added
    slices = replace(best.variant.problem.slices, joined_weights=False)
    apart = replace(job, options=ScheduleOptions(slices=slices)).variant(
        best.schedule, VocabMethod.NAIVE
    )
    assert apart is not None
    program = apart.build(apart.resolved, apart.problem)
    assert simulate(program, program.problem.costs).makespan > 1.1 * best.step

    requested = replace(job, options=ScheduleOptions(slices=slices))
    words = [way.words for way in compared(requested).alternatives]
    assert words[0] == name_of_cut(slices) and name_of_cut(best.variant.problem.slices) in words


def test_slices_that_save_little_are_shown_and_not_taken(free: LongSequences) -> None:
    """Slices of a sequence that gain little are shown and not recommended, because their sums
    differ from stock's. They used to be recommended to a dense 70B model for 0.2 % of a step."""
    best = free.best
    assert best is not None
    for step, is_taken in ((1.02 * best.step, False), (1.04 * best.step, True)):
        uncut: Any = SimpleNamespace(step=step, maturity=Maturity.STABLE)
        first = LongSequenceAlternative("whole sequences", (uncut,))
        sliced = [one for one in free.alternatives if one.slices > 1]
        made = LongSequences(32768, (first, *sliced))
        assert (made.best is best) == is_taken


def test_slices_are_not_looked_at_where_ranks_are_hardly_idle(training: Training) -> None:
    busy = replace(training, microbatches=100)
    plan = make_plan(busy.variant, specs=["zb-v"])
    assert plan.best is not None and plan.best.report.bubble_share_makespan < 0.02
    assert long_sequences(busy, plan, None) is None


def test_slices_are_compared_where_they_may_replace_recompute(training: Training) -> None:
    """Slices of a sequence are compared if they may replace recompute, because slices store less.
    Ranks that recompute are not idle, so the bubble alone would not suggest slices."""
    busy = replace(training, microbatches=100)
    best = make_plan(busy.variant, specs=["zb-v"]).best
    assert best is not None

    def cuts(recomputed: float) -> list[Slices]:
        report = SimpleNamespace(bubble_share_makespan=0.01, recomputed=recomputed)
        plan: Any = SimpleNamespace(best=SimpleNamespace(step=1.2 * best.step, report=report))
        return cuts_that_may_gain(
            lambda cut: replace(busy, options=ScheduleOptions(slices=cut)).variant, plan
        )

    assert cuts(0.5) and not cuts(0.0)


def test_slices_of_given_costs_are_shared_by_context_parallel_ranks(training: Training) -> None:
    """Context parallelism changes the time of slices for given costs as for estimated ones. It used
    to be ignored that the last rank attends to more tokens, so passes were too short."""
    assert training.trained is not None
    run = replace(training.trained.execution, context_parallel=2)
    cut = replace(
        training,
        trained=replace(training.trained, execution=run),
        options=ScheduleOptions(slices=Slices(2, Lengths.BALANCED)),
    )
    given = replace(cut, costs=lambda placement: parse_costs("f=1,i=1,w=1", placement))
    found = [one.variant("zb-h1", VocabMethod.NAIVE) for one in (cut, given)]
    estimated, told = (one.problem.costs for one in found if one is not None)
    assert estimated.slices.sharing == told.slices.sharing == 2
    assert estimated.slices.keys_values == told.slices.keys_values
    assert estimated.held_bytes == told.held_bytes


@nightly("test_long_sequences_are_compared_in_all_ways")
def test_a_training_with_slices_is_compared_with_whole_sequences(training: Training) -> None:
    cut = replace(training, options=ScheduleOptions(slices=Slices(4, Lengths.BALANCED)))
    words = [way.words for way in compared(cut).alternatives]
    assert words == ["4 slices", "whole sequences", "2 slices"]  # eight slices can gain nothing


def test_why_there_are_no_slices_is_said_once(training: Training) -> None:
    def none(slices: Slices) -> Any:
        raise ValueError("in slices, experts would drop other tokens")

    ways = (
        *alternatives_of_plan(make_plan(training.variant, specs=SPECS)),
        *alternatives_with_slices(none, None, cuts_to_compare(none)),
    )
    made = LongSequences(32768, ways)
    assert made.best is None
    assert {way.why_not for way in made.alternatives if way.slices > 1} == {
        "in slices, experts would drop other tokens"
    }


def test_too_many_slices_are_refused_before_anything_is_built(training: Training) -> None:
    """Schedules with very many slices in a step are refused before they are built, with a reason
    that says how many there are."""
    many = replace(training, microbatches=2000)
    (way,) = alternatives_with_slices(
        lambda cut: replace(many, options=ScheduleOptions(slices=cut)).variant,
        None,
        [Slices(8, Lengths.BALANCED)],
        ["1f1b", "zb-h1"],
    )
    assert isinstance(way, LongSequenceAlternative) and not way.candidates
    assert "simulating 16000 slices in a step takes too long" in way.why_not


def test_the_command_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    only_families(monkeypatch, "1f1b", "zb-v")
    model = "layers=4,hidden=2048,heads=16,sequence=32768,vocabulary=32000"
    words = ["plan", "--gpu", "h100", f"{model},pp=2,m=2,dp=2"]
    result = CliRunner().invoke(app, [*words, "--all"])
    assert result.exit_code == 0, result.output
    verdict, table = result.stdout.split("sequences of 32,768 tokens, whole and in slices:")
    for way in ("whole sequences", "--context-parallel-size 2, DP 1", "4 slices", "8 slices"):
        assert f"\n{way}" in table
    assert re.search(r"\nverdict: +--pipeline-schedule \S+ .*--pipeline-slices [48] ", verdict)
