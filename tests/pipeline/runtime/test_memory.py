"""Tests that the bytes that ranks store equal the simulator's prediction, for every schedule.

The bytes of a stage are measured once, with a single microbatch, and written to a costs file as a
user would write it. The peak of every schedule is predicted from that file, and compared with the
storages counted in a training with the same file (`held_bytes`). ``pytest -rP`` shows the numbers.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, peaks
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose, entries
from megatron_ext.runtime.weight_gradients import RowProduct, WeightGradients
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs_text import load_costs
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.problem import Offload, Problem, Recompute, ScheduleOptions
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.documents import DOCS
from tests.helpers.held_bytes import (
    Measured,
    computing,
    measure_steps,
    measure_stock_steps,
    read_steps,
)
from tests.helpers.megatron_runs import model_flags, train
from tests.helpers.ranks import lasting_folder
from tests.helpers.storages import LiveStorages, messages_on_their_way

RANKS = 4
MICROBATCHES = 6
TOLERANCE = 0.01
NO_FLAGS: Mapping[str, object] = {}
# Activations of a single layer are much larger than a tensor passed between stages. Megatron's
# rerun machine would store every microbatch's tokens for the whole step, so it is disabled.
MODEL: dict[str, object] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 2,
    "pipeline_model_parallel_size": RANKS,
    "rerun_mode": "disabled",
    "train_iters": 2,  # the first iteration fills caches, so the second is measured
}
# bytes of a tensor passed between stages: sequence x micro batch x hidden, in float32
BOUNDARY = 64 * 2 * 64 * 4
ON_THE_PAGE = ("1f1b", "zb-h1", "v-half", "v-min")  # schedules with a row in docs/measurements.md
FULL_RECOMPUTE: dict[str, object] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}


def layers(stages: int) -> int:
    """Return the number of layers: two a stage, and 16 at most."""
    return min(2 * stages, 16)


def measured(
    spec: str | None, flags: Mapping[str, object] = NO_FLAGS, microbatches: int = MICROBATCHES
) -> list[Measured]:
    """Return the measured second step of a training, by rank. If ``spec`` is None, the training
    runs Megatron's own 1F1B."""
    measure = measure_stock_steps if spec is None else measure_steps
    overrides = MODEL | {
        "num_layers": layers(RANKS if spec is None else choose(spec).place(RANKS).stages),
        "global_batch_size": 2 * microbatches,
        "pipeline_schedule": spec,
        **flags,
    }
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        measure(monkeypatch, Path(folder))
        train(RANKS, model_flags(**overrides))
        return read_steps(Path(folder), RANKS)


def costs_file(ranks: list[Measured], stages: int) -> Path:
    """Write a costs file with the bytes of microbatch 0, and with the times of passes that the
    documentation uses."""
    held = {
        sample.action: sample.own
        for rank in ranks
        for sample in rank.samples
        if sample.action.microbatch == 0
    }
    costs = {
        "version": 2,
        "f": 10,
        "i": 12,
        "w": 8,
        "comm": 1,
        "d2h": 8,
        "h2d": 8,
        "bytes": {
            Held.ACTIVATION.value: [held[Action(s, Kind.FORWARD, 0)] for s in range(stages)],
            Held.WEIGHT_INPUTS.value: [
                held.get(Action(s, Kind.BACKWARD_INPUT, 0), 0) for s in range(stages)
            ],
        },
    }
    path = lasting_folder() / "costs.json"
    path.write_text(json.dumps(costs))
    return path


@functools.cache
def costs_of(stages: int) -> Path:
    """Return a costs file for models of ``stages`` stages: a stage stores the same bytes under any
    placement and schedule.

    These costs do not tell the output layer's part, so its weight gradient is computed in I.
    """
    spec = {4: "2bp", 8: "interleaved-zb", 16: "hanayo"}[stages]
    return costs_file(measured(spec, {"pipeline_costs": "f=1,i=1,w=1"}, microbatches=1), stages)


def predicted(
    spec: str,
    costs: Path,
    microbatches: int = MICROBATCHES,
    way: Offload = Offload.NONE,
    limit: MemoryLimit | None = None,
) -> tuple[Program, list[int]]:
    """Return the program of ``spec``, and the peak bytes of each rank that the simulator
    predicts."""
    resolved = choose(spec)
    placement = resolved.place(RANKS)
    known = load_costs(costs, placement)
    problem = Problem(
        placement, microbatches, known, limit, options=ScheduleOptions(activation_offload=way)
    )
    program = build_program(resolved, problem)
    return program, [round(peak) for peak in peaks(program.schedule, in_bytes(problem.costs))]


def table(name: str, expected: list[int], ranks: list[Measured]) -> Iterator[str]:
    for rank, (figure, result) in enumerate(zip(expected, ranks, strict=True)):
        yield (
            f"| {name} | {rank} | {figure} | {result.peak} | {result.peak / figure - 1:+.3%} "
            f"| {result.peak_on_its_way // BOUNDARY} |"
        )


def within_tolerance(expected: list[int], ranks: list[Measured]) -> bool:
    return [rank.peak for rank in ranks] == pytest.approx(expected, rel=TOLERANCE)


def assert_nothing_is_left(rank: Measured) -> None:
    """Assert that after I a microbatch stores only the inputs of W, after W nothing, and that
    nothing is left after the step."""
    for sample in computing(rank.samples):
        kinds = RULES[sample.action.kind].covers
        if Kind.BACKWARD_WEIGHT in kinds:
            assert sample.own == sample.queued == 0, sample
        elif Kind.BACKWARD_INPUT in kinds:
            assert sample.own == sample.queued > 0, sample
    assert rank.left_over == 0


# By day one schedule runs for each placement and order of backward passes.
BY_DAY = ("v-half",)  # gis runs by day with offload


@pytest.mark.parametrize("spec", entries() if IS_NIGHT else BY_DAY)
def test_the_peak_is_what_the_simulator_said(spec: str) -> None:
    costs = costs_of(choose(spec).place(RANKS).stages)
    program, expected = predicted(spec, costs)
    ranks = measured(spec, {"pipeline_costs": costs})
    print(*table(spec, expected, ranks), sep="\n")
    assert {rank.digest for rank in ranks} == {program.digest}
    assert within_tolerance(expected, ranks)
    if spec in ON_THE_PAGE:
        first, last = (f"{ranks[rank].peak / 1e6:.2f}" for rank in (0, -1))
        name = f"`{spec}`, {layers(program.problem.placement.stages)} layers"
        assert f"| {name} | {first} | {last} |" in (DOCS / "measurements.md").read_text()
    for rank, row in zip(ranks, program.schedule.rows, strict=True):
        assert_nothing_is_left(rank)
        assert all(sample.copied == 0 for sample in rank.samples)
        # messages in transit come on top, in exactly the number that the program predicts
        moving = messages_on_their_way(row, program.schedule.placement)
        assert [sample.on_its_way for sample in rank.samples] == [BOUNDARY * n for n in moving]


@pytest.mark.parametrize(
    ("spec", "way"),
    [
        ("gis", Offload.FIT),
        *at_night(
            ("v-half", Offload.FULL),
            ("gis-h", Offload.HALF),
            ("1f1b", Offload.FULL),
            ("gis", Offload.FULL),
            ("gis", Offload.HALF),
            *((spec, Offload.FULL) for spec in ("gis-h", "interleaved", "zb-v")),
        ),
    ],
)
def test_the_peak_with_offload_is_what_the_simulator_said(spec: str, way: Offload) -> None:
    costs = costs_of(choose(spec).place(RANKS).stages)
    microbatches = 2 * RANKS
    _, without = predicted(spec, costs, microbatches)
    flags: dict[str, object] = {"pipeline_costs": costs, "pipeline_activation_offload": way}
    limit = None
    if way is Offload.FIT:
        flags["pipeline_memory_limit"] = text = f"{0.7 * max(without) / 2**30:.9f}GiB"
        limit = parse_limit(text, RANKS, microbatches)
    program, expected = predicted(spec, costs, microbatches, way, limit)
    assert max(expected) < 0.8 * max(without)
    ranks = measured(spec, flags, microbatches)
    print(*table(f"{spec}, offload {way}", expected, ranks), sep="\n")
    assert {rank.digest for rank in ranks} == {program.digest}
    assert within_tolerance(expected, ranks)
    for rank, row in zip(ranks, program.schedule.rows, strict=True):
        assert_nothing_is_left(rank)
        moving = messages_on_their_way(row, program.schedule.placement)
        assert [sample.on_its_way for sample in rank.samples] == [BOUNDARY * n for n in moving]


def test_stocks_1f1b_has_the_same_peak() -> None:
    _, expected = predicted("1f1b", costs_of(4))
    ranks = measured(None)
    print(*table("Megatron's 1F1B", expected, ranks), sep="\n")
    assert within_tolerance(expected, ranks)


@nightly("test_parity.py trains with full recompute by day; here are its bytes")
def test_full_recompute_holds_the_stages_input_alone() -> None:
    """With full recompute a stage in the middle of the pipeline stores its input only. The first
    stage stores tokens too, and the last one logits."""
    ranks = measured("zb-h1", FULL_RECOMPUTE)
    _, expected = predicted("zb-h1", costs_file(ranks, RANKS))
    print(*table("zb-h1, full recompute", expected, ranks), sep="\n")
    assert within_tolerance(expected, ranks)
    for rank in ranks:
        assert_nothing_is_left(rank)
    for stage in range(1, RANKS - 1):
        samples = [s for s in ranks[stage].samples if s.action.kind is Kind.FORWARD]
        assert len(samples) == MICROBATCHES
        assert all(sample.own == BOUNDARY for sample in samples)


@nightly("the simulator's count is a unit test; test_placements.py trains so")
@pytest.mark.parametrize("spec", ["zb-h1", "zb-v"])
def test_a_recomputed_pass_leaves_its_input_alone(spec: str) -> None:
    """A recomputed stage stores only its input between F and R. For stages in the middle of the
    pipeline the measured bytes are exact."""
    stages = choose(spec).place(RANKS).stages
    costs = costs_of(stages)
    first = stages - 1
    resolved = choose(spec)
    known = load_costs(costs, resolved.place(RANKS))
    options = ScheduleOptions(recompute=Recompute(first=first))
    program = build_program(
        resolved, Problem(resolved.place(RANKS), MICROBATCHES, known, options=options)
    )
    ranks = measured(spec, {"pipeline_costs": costs, "pipeline_recompute": f"first:{first}"})
    assert {rank.digest for rank in ranks} == {program.digest}
    samples = [sample for rank in ranks for sample in rank.samples]
    again = [s for s in samples if s.action.kind is Kind.RECOMPUTE]
    assert len(again) == first * MICROBATCHES
    inputs = {
        s.action.stage: s.own
        for s in samples
        if s.action.kind is Kind.FORWARD and s.action.stage < first
    }
    print(inputs)
    assert all(inputs[stage] == BOUNDARY for stage in range(1, first))
    whole = in_bytes(known)
    figures = {Held.INPUT: inputs, Held.MESSAGE: {}}

    def amount(held: Held, stage: int) -> float:
        return figures[held].get(stage, 0) if held in figures else whole(held, stage)

    expected = [round(peak) for peak in peaks(program.schedule, amount)]
    print(*table(f"{spec}, recompute", expected, ranks), sep="\n")
    assert within_tolerance(expected, ranks)
    for rank in ranks:
        assert_nothing_is_left(rank)


def test_a_copy_and_a_leak_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement of stored bytes notices a copy and a leak. This test gives the queue of
    weight gradients a copy of each layer's input, and keeps a reference to the input itself."""
    costs = costs_of(4)  # measured before the copy and the leak are seeded
    put, kept = WeightGradients.put, []

    def put_copy(
        self: WeightGradients,
        weight: Tensor,
        compute: RowProduct[Tensor],
        tensors: Iterable[Tensor],
        gather: Callable[[], None] | None = None,
    ) -> None:
        gradient: Any = compute.operands.__self__  # type: ignore[attr-defined]  # a `_WeightGradient`
        kept.append(gradient._x)
        gradient._x = gradient._x.clone()
        put(self, weight, compute, (gradient._x, gradient._dy), gather)

    monkeypatch.setattr(WeightGradients, "put", put_copy)
    _, expected = predicted("2bp", costs, microbatches=2)
    ranks = measured("2bp", {"pipeline_costs": costs}, microbatches=2)
    print(*table("2bp with copies", expected, ranks), sep="\n")
    for figure, rank in zip(expected, ranks, strict=True):
        assert rank.peak > (1 + TOLERANCE) * figure
        assert any(sample.copied for sample in rank.samples)
        assert any(sample.own > sample.queued > 0 for sample in computing(rank.samples))
        assert rank.left_over > 0


def test_a_storage_counts_once_and_as_long_as_it_lives() -> None:
    before = torch.ones(100, requires_grad=True)
    with LiveStorages() as live:
        assert not live.sizes()
        view = before.detach().view(10, 10)
        assert not live.sizes()
        copy = view.clone()
        part = copy[3:]
        assert list(live.sizes().values()) == [400]
        del copy
        assert list(live.sizes().values()) == [400]
        del part
        assert not live.sizes()
        loss = before.exp().sum()  # autograd keeps the result of exp
        assert sorted(live.sizes().values()) == [4, 400]
        loss.backward()
        # The gradient of `before` takes as many bytes as exp's result, which has been freed.
        assert sorted(live.sizes().values()) == [4, 400]
        del loss
        before.grad = None
        assert not live.sizes()
