"""Tests of the start times of passes, computed for one vector of seconds and for many at once,
without messages and with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.compile.program.longest_paths import BatchedTimes, Precedence
from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.compile.program.pass_graph import pass_graph
from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.weight_gradient_filling import Deadlock, time
from tests.helpers.random_schedules import PROPERTY, Case, cases, seeds
from tests.helpers.schedules import B, F


def ends_of(graph: Precedence, lags: Floats | None, vectors: Floats) -> Floats:
    """Return the time at which each node of the graph ends: a row for each node, a column for each
    of the ``vectors`` of durations."""
    batched = BatchedTimes(graph, lags)
    times = vectors[batched.order]
    batched.run(times)
    return np.asarray(times[batched.place])


@settings(PROPERTY)
@given(seed=seeds, nodes=st.integers(1, 40), has_lags=st.booleans())
def test_many_vectors_at_once_are_timed_as_one_by_one(
    seed: int, nodes: int, has_lags: bool
) -> None:
    """Many vectors of seconds at once give the same times as one after the other, to the last bit.
    The graphs are random: their nodes are numbered at random and wait for any number of others."""
    random = np.random.default_rng(seed)
    edges = np.unique(np.sort(random.integers(nodes, size=(2 * nodes, 2)), axis=1), axis=0)
    numbers = random.permutation(nodes).astype(np.int32)
    earlier, later = numbers[edges[edges[:, 0] < edges[:, 1]]].T
    graph = Precedence(before=NodeLists.of(later, earlier, nodes))
    lags = np.array(random.integers(3, size=len(later)), float) if has_lags else None
    vectors = random.uniform(0, 3, size=(nodes, 5))
    ends = ends_of(graph, lags, vectors)
    if lags is None:
        for column, vector in enumerate(vectors.T):
            assert ends[:, column].tolist() == graph.longest_paths(vector.tolist())[1]
        return
    for node in range(nodes):
        span = slice(*graph.before.bounds[node : node + 2])
        ready = ends[graph.before.nodes[span]] + lags[span, None]
        assert (ends[node] == ready.max(axis=0, initial=0) + vectors[node]).all()


@settings(PROPERTY)
@given(case=cases, hop=st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_passes_alone_are_timed_as_they_are_simulated_with_messages(case: Case, hop: float) -> None:
    """Passes that are timed without a program of messages end when the simulator, which has one,
    lets them end, for any placement and order. If messages are so short that none waits for
    another, each only delays the passes that need it."""
    schedule, costs = case.schedule, case.problem.costs.with_links(p2p_seconds=hop)
    exact = simulate_unproved(schedule, replace(case.problem, costs=costs))
    timed = time(schedule.rows, replace(case.problem, costs=costs))
    assert timed.rows == schedule.rows
    assert (timed.makespan, timed.span) == pytest.approx((exact.makespan, exact.span))
    graph = pass_graph(schedule, costs)
    seconds = np.array(schedule.arrays.of_each(costs.of))
    whole = ends_of(graph, graph.lags, seconds[:, None]).max()
    assert whole <= timed.makespan + 1e-9
    if hop <= 0.1:
        assert whole == pytest.approx(timed.makespan)


@pytest.mark.parametrize(
    ("first", "second", "stuck"),
    [
        ("F0 B0 F1 B1", "F1 B1 F0 B0", "0B0, 1F1"),  # each rank waits for the other
        ("F0 B0", "B0 F0", "0B0, 1B0"),  # a rank needs its own later pass first
    ],
)
def test_an_order_that_hangs_names_where(first: str, second: str, stuck: str) -> None:
    kinds = {"F": F, "B": B}
    rows = [
        [Action(rank, kinds[word[0]], int(word[1])) for word in text.split()]
        for rank, text in enumerate((first, second))
    ]
    placement = line(2)
    problem = Problem(placement, len(rows[0]) // 2, uniform(placement, 1, 1, 1, 1))
    with pytest.raises(Deadlock, match=f"would deadlock at {stuck}$"):
        time(rows, problem)
