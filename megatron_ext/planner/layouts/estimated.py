"""Work of a model that is described, with estimated costs.

`layouts` needs the costs of any stage of a model. For a described model they come from the cost
model, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.links import with_links_of_span
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState, bytes_of_ranks
from megatron_ext.cost_model.rates import Rates
from megatron_ext.planner.layouts.recompute import LayerRecompute
from megatron_ext.planner.layouts.work import Work
from megatron_ext.planner.outside_passes import rank_passes, seconds_outside_passes
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel


def estimated_work(
    model: Model,
    execution: Execution,
    state: TrainingState,
    rates: Rates,
    *,
    ranks: int,
    microbatches: int,
    limit: MemoryLimit | None = None,
    steps_overlap: bool = False,
) -> Work:
    """Return the training of a described ``model``, with estimated costs for any layout.

    ``ranks`` is the number of pipeline ranks. Other arguments are those of `Training`.
    """

    def bytes_of(
        stages: Sequence[Stage], placement: Placement, vocabulary: VocabularyParallel
    ) -> list[ModelBytes]:
        return bytes_of_ranks(model, stages, execution, placement, vocabulary, state)

    def costs_of(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        costs = estimate(model, stages, execution, rates, slices)
        costs = with_links_of_span(costs, placement, rates, execution)
        return costs if slices == 1 else costs.with_slices_shared_by(execution.context_parallel)

    return Work(
        model,
        ranks,
        microbatches,
        costs_of=costs_of,
        bytes_of=bytes_of,
        seconds_outside_passes=partial(
            seconds_outside_passes,
            state=state,
            execution=execution,
            rates=rates,
            passes=rank_passes(model, execution, rates, ranks),
        ),
        limit=limit,
        steps_overlap=steps_overlap,
        recompute=LayerRecompute.of(execution),
    )
