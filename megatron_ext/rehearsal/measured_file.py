"""Costs file and trace of a rehearsed schedule, as a training writes them.

What a rehearsal has measured serves as a profile of a training would: plans and launches read the
costs, and the trace is looked at with the same tools.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_ext.compile.program.simulate import simulate
from megatron_ext.cost_model.measured.file import as_data
from megatron_ext.cost_model.measured.layer_costs import layer_costs
from megatron_ext.cost_model.measured_costs import Machine, RankFigures, measured_costs
from megatron_ext.observe.trace import NAME, TraceFile, traced_step
from megatron_ext.observe.what_if import weight_shares
from megatron_ext.rehearsal.compose import ComposedStep, measured_passes
from megatron_ext.rehearsal.prepare import PreparedSchedule
from megatron_ext.rehearsal.record import RankRecord
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import save_costs
from megatron_ext.schedule.problem import VocabularyParallel

COSTS, TRACE = "costs.json", NAME  # names of files in the folder of a rehearsed schedule


def write_costs(
    prepared: PreparedSchedule, records: Mapping[int, RankRecord], device: str, path: Path
) -> Costs:
    """Write the costs file of a rehearsed schedule to ``path``, and return its costs.

    The seconds of passes are those that the ranks measured. Bytes, messages and copies stay as they
    were estimated.

    Args:
        prepared: schedule that was rehearsed.
        records: records of the ranks that ran, by pipeline rank.
        device: name of the GPU, or "the CPU", for the file's description.

    Raises:
        OSError: the file cannot be written.
    """
    program = prepared.program
    # The estimate is computed from the costs before the vocabulary was partitioned.
    estimate = prepared.costs.unpartitioned or prepared.costs
    ranks = [
        figures
        for one in prepared.classes
        for figures in _figures(prepared, one.members, records[one.rank])
    ]
    what = f"{prepared.spec} rehearsed on {device}, rank by rank"
    costs = measured_costs(program, estimate, ranks, what)
    costs = replace(
        costs.with_passes(held_bytes=estimate.held_bytes),
        links=estimate.links,
        host=estimate.host,
        origin=f"{costs.origin}; bytes, messages and copies as estimated",
    )
    layers = None
    if prepared.basis is not None:
        vocabulary = program.problem.options.vocab_parallel
        is_divided = vocabulary is not VocabularyParallel.NONE
        layers = layer_costs(costs, prepared.basis, is_divided=is_divided)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_costs(costs, path, as_data(layers, Machine.of(ranks)))
    return costs


def _figures(
    prepared: PreparedSchedule, members: tuple[int, ...], record: RankRecord
) -> list[RankFigures]:
    """Return measurements for each rank of ``members`` from ``record``, of the rank that ran."""
    groups: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for (chunk, kind, _), found in measured_passes(prepared.program, record).items():
        groups[chunk, kind].append(found.seconds)
    reserved = None
    if record.reserved is not None and record.allocated is not None:
        reserved = float(record.reserved - record.allocated)
    stages_of = prepared.program.schedule.placement.stages_of
    return [
        RankFigures(
            {
                (stages_of[rank][chunk], kind): statistics.median(figures)
                for (chunk, kind), figures in groups.items()
            },
            {},
            (),
            reserved=reserved,
        )
        for rank in members
    ]


def write_composed_trace(prepared: PreparedSchedule, step: ComposedStep, path: Path) -> None:
    """Write the composed ``step`` of a rehearsed schedule as a trace file to ``path``.

    The trace also has the step that the simulator predicts from estimated costs, for comparison.

    Raises:
        OSError: the file cannot be written.
    """
    predicted = simulate(prepared.program, prepared.costs)
    traced = traced_step(1, step.timeline, predicted, clock_error=0.0)
    if prepared.is_stock:
        shares = weight_shares(prepared.costs)
        executor = prepared.program.problem.stock
        traced = replace(traced, weight_shares=shares, executor=executor)
    TraceFile(path).add(traced)
