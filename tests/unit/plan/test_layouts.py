"""Tests of layouts of layers on stages: their text forms, their balance, and the time of a step.

A published recipe of Llama-3 has the layout ``Et*2|(t*2|)*34,t*3|..``, written by hand "because
first and last stages carry more work". No command used to compute such a layout, or to say what it
gains.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.base.progress import Task
from megatron_ext.compile.output_layer import with_input_gradient
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import Model, Stage, stages_of
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner import limits
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts import work as of_work
from megatron_ext.planner.layouts.candidates import Candidates
from megatron_ext.planner.layouts.comparison import LayoutComparison, compare_layouts, permit_all
from megatron_ext.planner.layouts.descent import Timed, descend
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.planner.layouts.order import Order
from megatron_ext.planner.layouts.stage_figures import StageFigures, busy
from megatron_ext.planner.layouts.work import Work, evaluate
from megatron_ext.planner.outside_passes import RankPasses, seconds_outside_passes
from megatron_ext.planner.planning_time import PlanningEnd, planning, start_planning_time
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement, line, loop
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.search import best as search
from scripts.evaluation.recipes.recipe import expanded
from tests.helpers.combinations import at_night
from tests.helpers.planning_end import ended_at

GPT = parse_model("layers=16,hidden=1024,heads=8,sequence=2048,vocabulary=32768")
MIXED = replace(
    GPT.model,
    layers=("*-",) * 5 + ("M", "*") * 6,
    mamba_num_heads=32,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
)


def work(model: Model = GPT.model, **changes: Any) -> Work:
    given: dict[str, Any] = {"ranks": 4, "microbatches": 8}
    execution = changes.pop("execution", GPT.execution())
    return estimated_work(
        model, execution, TrainingState(), GPUS["h100"].rates(), **(given | changes)
    )


@pytest.mark.parametrize(("span", "far"), [(128, {3, 4}), (64, set()), (0, set(range(7)))])
def test_messages_take_the_link_between_their_ranks(span: int, far: set[int]) -> None:
    """A message takes the speed of the link between its two ranks. In a pipeline over two NVLink
    domains of 72 GPUs, all messages used to count as messages over the network, although five of
    seven pairs of neighbours share a domain. Only the plan of a launch command counted them
    correctly."""
    rates = GPUS["gb200"].rates()
    execution = replace(GPT.execution(), pipeline_span=span)
    trained = TrainedModel(GPT.model, execution, TrainingState(), rates)
    variant = Training(8, 16, trained=trained).variant("1f1b", VocabMethod.NAIVE)
    assert variant is not None
    described = estimated_work(
        GPT.model, execution, TrainingState(), rates, ranks=8, microbatches=16
    ).costs_of(stages_of(GPT.model, GPT.model.evenly(8)), line(8), 1)
    for costs in (variant.problem.costs, described):
        near_seconds, far_seconds = (costs.links.message_bytes / s for s in rates.to_neighbours)
        for stage in range(7):
            seconds = far_seconds if stage in far else near_seconds
            assert costs.p2p_seconds_behind(stage) == pytest.approx(seconds)


def even(stages: int) -> Layout:
    """Return equally many layers on each stage, as Megatron does, or raise if that is
    impossible."""
    layers = len(GPT.model.layers)
    if layers % stages:
        raise ValueError(f"{layers} layers cannot be split evenly over {stages} stages")
    return evenly(layers, stages)


@pytest.mark.parametrize(
    ("layers", "depths", "text"),
    [
        ((2, 2, 2, 2), 0, "Ett|tt|tt|ttL"),
        ((2, 2, 2, 2), 1, "Ett|tt|tt|ttmL"),
        ((4, 5, 5, 5, 5, 0), 0, "Et*4|(t*5|)*4L"),
        ((1, *[2] * 14, 1), 2, "Et|(tt|)*14tmmL"),
    ],
)
def test_text_of_a_layout(layers: tuple[int, ...], depths: int, text: str) -> None:
    layout = Layout(layers)
    assert layout.text(depths) == text
    segments = expanded(text).split("|")
    assert tuple(segment.count("t") for segment in segments) == layers
    assert segments[-1].endswith("m" * depths + "L")


def test_cuts_of_a_pattern() -> None:
    assert Layout((1, 2, 1)).cut("M-|*-/*-/*-") == "M|-*|-/*-/*-"


@pytest.mark.parametrize(
    ("layers", "ends"), [((3, 4, 4, 2), (3, 2)), ((3, 4, 5, 2), None), ((3, 2), None)]
)
def test_counts_of_the_ends_where_they_say_all(
    layers: tuple[int, ...], ends: tuple[int, int] | None
) -> None:
    assert Layout(layers).ends == ends


@pytest.mark.parametrize("speeds", [(), (1.0, 0.5, 1.0, 0.8)], ids=["ranks alike", "slow ranks"])
@pytest.mark.parametrize(
    ("model", "separates_prediction"),
    [(GPT.model, False), (MIXED, False), (replace(GPT.model, mtp_num_layers=2), True)],
    ids=["alike", "mixed", "multi-token prediction apart"],
)
def test_no_layout_has_a_faster_slowest_stage(
    model: Model, separates_prediction: bool, speeds: tuple[float, ...]
) -> None:
    figures = StageFigures(
        replace(work(model), speeds=speeds), separates_prediction=separates_prediction
    )
    layers = len(model.layers)
    found = least_slowest_stage(layers, line(4), figures)
    all_layouts = [
        (*cuts[:1], cuts[1] - cuts[0], cuts[2] - cuts[1], layers - cuts[2])
        for cuts in itertools.combinations_with_replacement(range(1, layers + 1), 3)
        if cuts[0] < cuts[1] < cuts[2]
    ]
    slowest = busy(figures.of(np.array(all_layouts), line(4))).max(axis=1)
    of_found = busy(figures.of(np.array([found.layers]), line(4))).max()
    assert of_found == pytest.approx(slowest.min(), rel=1e-9)
    assert found.depths == ((0, 0, 2, 0) if separates_prediction else ())


def test_ranks_of_several_chunks_are_balanced() -> None:
    """The chunks of a rank are balanced together: with an output layer the rank that takes longest
    takes less than 0.9 times as long as in the layout with equal stages."""
    figures = StageFigures(work())
    placement = loop(4, vpp=2)
    found = with_even_ranks(evenly(16, 8), placement, 64, figures)

    def slowest(layout: Layout) -> float:
        of_stages = busy(figures.of(np.array([layout.layers]), placement))[0]
        return max(sum(of_stages[stage] for stage in row) for row in placement.stages_of)

    assert slowest(found) < 0.9 * slowest(evenly(16, 8))
    assert sum(found.layers) == 16


def test_figures_stay_right_wherever_the_planning_time_ends() -> None:
    """A table of stages stays right if the planning time ends while a stage is added to it. The
    stage used to be noted before its row was there: a later layout had the values of another stage,
    or the plan failed with an IndexError."""
    training, counts = work(MIXED), np.array([[5, 4, 4, 4], [6, 3, 4, 4], [4, 5, 4, 4]])
    expected = StageFigures(training).of(counts, line(4))
    adding = StageFigures.rows.__code__, StageFigures._row.__code__
    for number in itertools.count():
        figures = StageFigures(training)
        was_ended = ended_at(number, adding, functools.partial(figures.of, counts[:2], line(4)))
        of_others_first = figures.of(counts[::-1], line(4))[::-1]
        assert np.array_equal(of_others_first, expected), f"ended at line {number}"
        if not was_ended:
            break
    assert number > 50


@pytest.mark.parametrize("model", [GPT.model, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize("spec", ["1f1b", "interleaved:vpp=2", "zb-h1", "zb-v"])
@pytest.mark.parametrize("speeds", [(), (1.0, 0.5, 1.0, 0.8)], ids=["ranks alike", "slow ranks"])
def test_an_order_is_timed_as_it_is_simulated(
    model: Model, spec: str, speeds: tuple[float, ...]
) -> None:
    """The quick estimate of a layout's step equals the simulation with the output layer's weight
    gradient in I. If that gradient is in W, the step is no longer than the estimate."""
    training = replace(work(model), speeds=speeds)
    placement = choose(spec).place(4)
    layout = evenly(len(model.layers), placement.stages)
    as_it_is = evaluate(training, spec, layout)

    def in_input_gradient(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        return with_input_gradient(training.costs_of(stages, placement, slices))

    exact = evaluate(replace(training, costs_of=in_input_gradient), spec, layout)
    assert as_it_is.candidate.step <= exact.candidate.step
    figures = StageFigures(training)
    problem = training.variant(spec, layout).problem
    order = Order(choose(spec).build(problem), problem.costs, problem.executor)
    counts = np.array([layout.layers])
    assert order.seconds(figures, counts)[0] == pytest.approx(exact.candidate.step, rel=0.03)
    assert order.rank_bytes(figures.of(counts, placement))[0] == pytest.approx(
        exact.rank_bytes, rel=0.05
    )


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1"])
def test_each_link_takes_its_own_time(spec: str) -> None:
    """The estimate of a layout uses the time of each link. Messages take longer between nodes than
    within one, and all used to be counted with the mean."""
    training = work()

    def costs_of(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        costs = training.costs_of(stages, placement, slices)
        hops = [
            costs.links.p2p_seconds * (20 if stage % 4 == 1 else 1)
            for stage in range(placement.last)
        ]
        return costs.with_links(p2p_seconds_by_stage=tuple(hops))

    linked = replace(training, costs_of=costs_of)
    layout = evenly(16, choose(spec).place(4).stages)
    exact = evaluate(linked, spec, layout)
    timed = Timed(spec, layout, StageFigures(linked), None).best_of([layout])
    assert timed.seconds == pytest.approx(exact.candidate.step, rel=0.01)


def made_better(training: Work, room: float | None = None) -> Layout:
    figures = StageFigures(training)
    timed = Timed("1f1b", evenly(16, 4), figures, room)
    return descend(lambda layout: timed, evenly(16, 4), Task("")).layout


def test_a_layer_goes_where_a_step_gains() -> None:
    """A layer is moved to where the step becomes shorter. The embedding is cheap and the output
    layer expensive, so the last stage loses layers."""
    training = work()
    better = made_better(training)
    assert better.layers[-1] < 4
    before, after = (evaluate(training, "1f1b", made) for made in (evenly(16, 4), better))
    assert after.seconds < 0.95 * before.seconds
    passes = training.variant("1f1b", evenly(16, 4)).problem.costs.seconds
    stages = [sum(seconds) for seconds in zip(*passes.values(), strict=True)]
    assert max(stages) == stages[3] and stages[3] * 4 / sum(stages) - 1 > 0.3


def test_what_does_not_fit_is_moved_until_it_does() -> None:
    """Layers are moved until a layout fits into memory. Under 1F1B the first rank is the fullest,
    because it stores the most microbatches."""
    training = work(replace(GPT.model, vocabulary=8192))
    whole = evaluate(training, "1f1b", evenly(16, 4))
    room = 0.9 * whole.fullest
    with pytest.raises(ValueError, match=r"rank 0 would hold"):
        evaluate(training, "1f1b", evenly(16, 4), allowed_bytes=room)
    layout = made_better(training, room)
    assert evaluate(training, "1f1b", layout, allowed_bytes=room).fullest <= room
    assert layout.layers[0] < 4


def test_what_holds_more_than_is_estimated_is_made_to_fit() -> None:
    """If the simulated memory of a layout exceeds the limit although its estimated memory does not,
    layers are moved until the simulated memory fits. Here it exceeds the limit by half a
    message."""
    training = work(replace(GPT.model, vocabulary=8192))
    whole = evaluate(training, "1f1b", evenly(16, 4))
    message = training.variant("1f1b", evenly(16, 4)).problem.costs.links.message_bytes
    room = whole.fullest - message / 2
    timed = Timed("1f1b", evenly(16, 4), StageFigures(training), room)
    assert timed.best_of([evenly(16, 4)]).fits
    made = Candidates(
        [training], room, lambda stages: evenly(16, stages), permit_all, False, Task("")
    )
    (found,) = made.by_layout([["1f1b"]], [])
    assert found.fullest <= room and found.seconds < 1.1 * whole.seconds


def test_a_long_step_is_extrapolated_from_a_short_one() -> None:
    """The time of a long step is extrapolated from a simulated step of about three microbatches a
    rank, and is right to 1 %. Each further microbatch takes as long as one in the middle of the
    simulated step."""
    training = work(microbatches=130)
    figures = StageFigures(training)
    layout = Layout((5, 5, 4, 2))
    timed = Timed("1f1b", layout, figures, None)
    seconds = timed.best_of([layout]).seconds
    exact = evaluate(training, "1f1b", layout).candidate.step
    assert seconds == pytest.approx(exact, rel=0.01)


SMALL: dict[str, Any] = {"ranks": 2, "microbatches": 4}
OWN = ("1f1b", evenly(16, 2))


def compared(training: Work, own: tuple[str, Layout] = OWN, **changes: Any) -> LayoutComparison:
    return compare_layouts([training], own, even, **({"search": False} | changes))


@functools.cache
def four_results() -> LayoutComparison:
    return compared(work(**SMALL))


def test_four_results() -> None:
    made = four_results()
    steps = [result.seconds for result in (made.baseline, *made.others.values())]
    assert steps == sorted(steps, reverse=True)
    assert made.chunks.layout.is_even and not made.stock.layout.is_even
    assert made.gain(made.stock) > 0.02
    assert made.ours.schedule not in ("1f1b", "interleaved") and not made.refused
    assert sum(made.stock.layout.layers) == sum(made.ours.layout.layers) == 16


@pytest.mark.parametrize(("ended", "is_better"), [("by_rule", "baseline"), ("further", "stock")])
def test_a_comparison_that_its_time_ends_has_the_best_so_far(
    ended: str, is_better: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison of layouts that reaches its time limit returns the best layout so far. All
    results used to be lost."""
    expected = four_results()  # computed before the time limit is patched
    whole = getattr(Candidates, ended)

    def end(*arguments: Any) -> None:
        whole(*arguments)
        raise PlanningEnd

    monkeypatch.setattr(Candidates, ended, end)
    with planning() as time:
        start_planning_time()
        made = compared(work(**SMALL))
    assert time.is_short
    assert made.ours.seconds < getattr(made, is_better).seconds
    assert made.ours.seconds == pytest.approx(expected.ours.seconds)


def test_nothing_is_slower_than_the_launch_itself() -> None:
    """No recommended layout is slower than the launch's own, which may be better than any even
    layout. The search starts from it."""
    best = four_results().stock
    again = compared(work(**SMALL), (best.schedule, best.layout))
    assert again.baseline.seconds == pytest.approx(best.seconds)
    assert again.chunks is again.baseline
    assert again.ours.seconds <= again.stock.seconds <= again.baseline.seconds


def test_all_are_within_the_bound() -> None:
    """Recommended layouts take no more memory than the larger of the free memory and the launch's
    own memory."""
    training, fullest = work(**SMALL), four_results().baseline.fullest
    made = compared(training, allowed_bytes=0.5 * fullest)
    assert made.bound == fullest
    assert all(result.fullest <= fullest for result in made.others.values())


def test_refused_schedules_are_not_recommended_and_their_gain_is_named() -> None:
    def permits(spec: str, method: object) -> None:
        if spec not in ("1f1b", "interleaved:vpp=2"):
            raise ValueError("the schedule does not go with a flag")

    made = compared(work(**SMALL), permits=permits)
    assert made.refused["zb-v"] == "the schedule does not go with a flag"
    assert made.ours is made.stock and made.best_not_permitted is not None
    assert made.best_not_permitted.seconds < made.ours.seconds


def test_searches_are_tried_on_the_launchs_own_layout() -> None:
    """Searching schedules are tried on the launch's own layout too. They used to be tried on the
    best layouts only, and loop-auto on the launch's own layout was shorter than the printed best of
    any schedule with any layout."""
    training = work(**SMALL)
    own = evaluate(training, "interleaved:vpp=2", evenly(16, 4))
    best = evaluate(training, "1f1b", evenly(16, 2))
    candidates = Candidates([training], None, even, permit_all, False, Task(""))
    more = candidates.further([best], own)
    assert ("loop-auto:vpp=2", own.layout) in {(other.schedule, other.layout) for other in more}


@pytest.mark.parametrize("chunks", [2, *at_night(1)])
def test_nothing_on_the_launchs_own_layout_is_better(chunks: int) -> None:
    own = ("1f1b" if chunks == 1 else f"interleaved:vpp={chunks}"), evenly(16, 2 * chunks)
    training = work(**SMALL)
    made = compared(training, own)
    specs = {
        1: ["zb-2p", "zb-1p", "zb-auto"],
        2: [f"{n}:vpp=2" for n in ("interleaved-zb", "gis", "loop-auto")],
    }
    for spec in (own[0], *specs[chunks]):
        known = evaluate(training, spec, own[1], allowed_bytes=made.bound, search=False)
        assert made.ours.seconds <= known.seconds, spec


def test_of_a_long_step_nothing_is_searched_for_that_can_gain_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No search is started for a long step if it could gain only little. On 16 ranks with 128
    microbatches each search used to take half a minute and gained nothing."""
    monkeypatch.setattr(search, "searched", lambda *given: pytest.fail("it is searched for"))
    monkeypatch.setattr(of_work, "LONG_STEP", 0)
    training, layout = work(**SMALL), evenly(16, 4)
    known = evaluate(training, "v-auto", layout, search=False).seconds
    assert evaluate(training, "v-auto", layout, better_than=known).seconds == known
    monkeypatch.setattr(limits, "CLOSE", 1.0)
    assert evaluate(training, "v-auto", layout).seconds == known


def test_a_divided_vocabulary_is_tried_where_loops_lead() -> None:
    """A split vocabulary is tried with the best schedule that can have it. It used to be tried with
    the best schedules only: if those were loops, whose vocabulary cannot be split, a V with a split
    vocabulary was never considered."""
    training = work(replace(GPT.model, vocabulary=65536), microbatches=12)
    candidates = Candidates([training], None, even, permit_all, False, Task(""))
    made = candidates.by_layout([["zb-v"], ["interleaved-zb:vpp=2"]], [])
    (loop_alone,) = (other for other in made if other.schedule != "zb-v")
    more = candidates.further([loop_alone], loop_alone)
    divided = [other for other in more if other.schedule == "zb-v"]
    assert {other.method for other in divided} == {VocabMethod.ONE, VocabMethod.TWO}
    assert min(other.seconds for other in divided) < loop_alone.seconds


def test_reductions_are_those_of_each_ones_group() -> None:
    """The time of gradient reductions uses the group of each parameter. Experts' gradients used to
    count as reduced among all 32 data-parallel ranks, not among the four with the same experts."""
    model = ModelBytes(
        3e9,
        6e9,
        2e9,
        expert_weights=2e9,
        expert_gradients=4e9,
        gathered=3e9,
        expert_gathered=2e9,
    )
    state = TrainingState(distributed=True, data_parallel=32, expert_data_parallel=4)
    execution = replace(GPT.execution(), expert_parallel=8)
    rates = GPUS["h100"].rates()
    dense = 31 / 32 / (8 * rates.network)  # eight rings, one for each GPU of a node
    experts = 3 / 4 / rates.network  # a ring over four nodes
    moved = 2 * 6e9 + 2 * 2e9 + 3e9
    assert seconds_outside_passes(model, state, execution, rates) == pytest.approx(
        moved / rates.memory + (2e9 + 1e9) * dense + (4e9 + 2e9) * experts
    )
    bucket = 40_000_000
    overlapped, long = replace(state, bucket=bucket), RankPasses(1.0, 1.0)
    exposed = moved / rates.memory + bucket * (4 + 2) * (dense + experts)
    assert seconds_outside_passes(model, overlapped, execution, rates, long) == pytest.approx(
        exposed
    )
    short = RankPasses(0.0, 1.0)  # the gather of weights begins with the first pass
    gather = (1e9 - bucket * 2) * dense + 2e9 * experts
    assert seconds_outside_passes(model, overlapped, execution, rates, short) == pytest.approx(
        exposed + gather
    )


def test_what_experts_have_of_a_model() -> None:
    model = replace(
        GPT.model,
        layers=("*-", "*E"),
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=512,
        add_bias_linear=False,
    )
    execution = replace(GPT.execution(), expert_parallel=4)
    training = work(model, execution=execution, ranks=2)
    dense, routed = training.bytes_of(Layout((1, 1)).of(model), line(2), VocabularyParallel.NONE)
    assert dense.expert_weights == dense.expert_gradients == 0
    elements = 2 * 2 * 512 * 1024  # two experts of two matrices each
    assert (routed.expert_weights, routed.expert_gradients) == (2 * elements, 4 * elements)
    assert routed.weights > routed.expert_weights


def test_a_mixed_model() -> None:
    """Layouts of a model with mixed layer types are compared: stages with equally many layers take
    different times."""
    layers = len(MIXED.layers)
    made = compare_layouts(
        [work(MIXED, **SMALL)],
        ("1f1b", evenly(layers, 2)),
        lambda stages: evenly(layers, stages),
        search=False,
    )
    assert made.gain(made.ours) >= made.gain(made.stock) > 0
