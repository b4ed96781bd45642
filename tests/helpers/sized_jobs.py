"""Trainings of a model that is described by its sizes, with other parallel sizes, for tests that
plan without a launch command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Framework
from megatron_ext.cost_model.links import with_links
from megatron_ext.cost_model.messages.blocking import with_blocking_messages
from megatron_ext.cost_model.model import Stage
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.recompute import LayerRecompute
from megatron_ext.planner.layouts.work import Work
from megatron_ext.planner.sizes.described_job import SizedJob
from megatron_ext.planner.sizes.search import SizedWorks
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement


def work_of(job: SizedJob, sizes: Sizes, recompute: LayerRecompute) -> Work:
    """Return the training ``job`` with the parallel ``sizes``. Its layout and schedule are still
    open."""
    model, execution = job.model_of(sizes), job.execution_of(sizes, recompute)

    def costs_of(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        costs = estimate(model, stages, execution, job.rates, slices)
        if execution.framework is Framework.PYTORCH:
            return with_blocking_messages(costs)
        return with_links(costs, placement, job.rates, job.gpus, job.stride(sizes))

    work = estimated_work(
        model,
        execution,
        job.state_of(sizes),
        job.rates,
        ranks=sizes.pipeline,
        microbatches=job.microbatches(sizes),
    )
    return replace(work, costs_of=costs_of)


def described_works(job: SizedJob, sizes: Sizes) -> SizedWorks:
    """Return the trainings of ``job`` with the parallel ``sizes``: one for each choice of
    recompute."""
    works = [work_of(job, sizes, recompute) for recompute in job.recompute]
    return SizedWorks(works, lambda stages: Layout(tuple(job.model.evenly(stages))))
