"""The family of the best V schedule that can be found for costs and a memory limit (`best`)."""

from __future__ import annotations

from functools import partial

from megatron_ext.compile.registry import Mark, family
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.best import best_known, best_schedule


@family(
    "v-auto",
    v,
    source="ours; the V is that of Qi et al. 2024, arXiv:2405.15362",
    mark=Mark.STABLE,
    splits_backward=True,
    uses_costs=True,
    searches=True,
    steps_overlap=True,
    fits_recompute=True,
    takes_slices=True,
    keeps_pairs=True,
    at_once=partial(best_known, "v-auto"),
)
def v_auto(problem: Problem) -> Schedule:
    """Least makespan within the memory limit (without a limit: p microbatches, as ZB-V needs, or
    with slices the need of 1F1B); with post-validation, least span. If recompute has to fit into
    the limit, R is placed too, except with slices.

    Raises:
        ValueError: no V schedule fits into the limit.
    """
    return best_schedule("v-auto", problem)
