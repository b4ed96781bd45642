"""A training job that is described by its costs, its model's dimensions, or both.

Users know a model in different ways: its dimensions, measured costs, or both. A plan needs costs,
bytes and the options of schedules for each variant, whatever was given; what is not known stays
None, and nothing is made up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.links import with_links_of_span
from megatron_ext.cost_model.model import Model, Stage, stages_of
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks
from megatron_ext.cost_model.rates import Rates
from megatron_ext.planner.candidate import (
    Candidate,
    Variant,
    VocabMethod,
    goes_with,
    keeps_pairs,
)
from megatron_ext.planner.outside_passes import rank_passes, seconds_outside_passes
from megatron_ext.planner.redistribution import (
    redistribute,
    redistributed_layers,
    tells_vocabulary,
)
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem, ScheduleOptions
from megatron_ext.schedule.rank_speeds import RankSpeeds, at_speeds
from megatron_ext.schedule.slices import UNCUT
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR

_NO_OPTIONS = ScheduleOptions()


@dataclass(frozen=True)
class TrainedModel:
    """A model with the settings with which each rank trains it."""

    model: Model
    execution: Execution
    state: TrainingState
    rates: Rates

    def stages(self, placement: Placement, method: VocabMethod) -> tuple[Stage, ...]:
        """Return the layers of the model on each stage.

        Raises ValueError if the number of layers is not divisible.
        """
        number = placement.stages
        if method is VocabMethod.REDISTRIBUTED:
            return stages_of(self.model, redistributed_layers(len(self.model.layers), number))
        return stages_of(self.model, self.model.evenly(number))


@dataclass(frozen=True)
class Training:
    """Training job for a plan: model or costs, microbatches, and the options of its schedules.

    Attributes:
        ranks: pipeline ranks.
        costs: function that returns the given costs on a placement; None: they are estimated from
            ``trained``.
        trained: the model; None: only costs are known.
        limit: limit of activations; None: no limit.
        options: the requested options. Only schedules that can overlap passes do so.
        layers: number of layers of the model, if ``trained`` does not tell.
        speeds: speeds of the ranks, relative to those of the costs; None: all are equal.
        in_seconds: whether times are seconds, estimated or measured.
    """

    ranks: int
    microbatches: int
    costs: Callable[[Placement], Costs] | None = None
    trained: TrainedModel | None = None
    limit: MemoryLimit | None = None
    options: ScheduleOptions = _NO_OPTIONS
    layers: int | None = None
    speeds: RankSpeeds | None = None
    in_seconds: bool = True

    @property
    def rank_speeds(self) -> tuple[float, ...]:
        """Relative speed of each pipeline rank; () if all are equal."""
        return () if self.speeds is None else self.speeds.of_ranks(self.ranks)

    @property
    def is_estimate(self) -> bool:
        """Whether the times of passes are estimated, not given."""
        return self.costs is None

    def seconds_outside_passes(self, made: Candidate) -> float:
        """Return the seconds of a step for the optimizer and for reductions that no pass hides.

        0 if times are no estimates.
        """
        trained = self.trained
        if trained is None or not self.is_estimate:
            return 0.0
        state, run, rates = trained.state, trained.execution, trained.rates
        ranks = made.variant.model or ()
        passes = rank_passes(trained.model, run, rates, self.ranks)
        return max(seconds_outside_passes(rank, state, run, rates, passes) for rank in ranks)

    def variant(self, name: str, method: VocabMethod) -> Variant | None:
        """Return the problem of the schedule family ``name``, for `make_plan`.

        None if the given costs do not tell what the vocabulary ``method`` would change.

        Raises:
            ValueError: the layers cannot be split over the family's stages.
        """
        resolved = choose(name)
        if not goes_with(self.options.slices, resolved, method.vocabulary):
            return None
        placement = resolved.place(self.ranks)
        costs = self._costs(placement, method)
        if costs is None:
            return None
        if self.trained is not None and self.options.slices != UNCUT:
            costs = costs.with_slices_shared_by(self.trained.execution.context_parallel)
        costs = at_speeds(costs, placement, self.rank_speeds)
        pairs = self.options.pairs and keeps_pairs(resolved, method.vocabulary)
        options = replace(self.options, vocab_parallel=method.vocabulary, pairs=pairs)
        problem = Problem(placement, self.microbatches, costs, self.limit, options=options)
        problem = run_by_stock(problem, name, STOCK_EXECUTOR)
        trained = self.trained
        if trained is None:
            return Variant(
                resolved,
                problem,
                may_recompute=True,
                layers=self.layers,
                in_seconds=self.in_seconds,
            )
        model = bytes_of_ranks(
            trained.model,
            trained.stages(placement, method),
            trained.execution,
            placement,
            method.vocabulary,
            trained.state,
        )
        may_recompute = not trained.execution.recompute
        layers = len(trained.model.layers)
        return Variant(resolved, problem, model, may_recompute, layers, self.in_seconds)

    def _costs(self, placement: Placement, method: VocabMethod) -> Costs | None:
        trained, estimated = self.trained, None
        if trained is not None:
            stages = trained.stages(placement, method)
            run, rates = trained.execution, trained.rates
            estimated = estimate(trained.model, stages, run, rates, self.options.slices.count)
            estimated = with_links_of_span(estimated, placement, rates, run)
        if self.costs is None:
            return estimated
        given = self.costs(placement)
        if method is not VocabMethod.NAIVE and not tells_vocabulary(given):
            return None
        if method is VocabMethod.REDISTRIBUTED:
            layers = self.layers if trained is None else len(trained.model.layers)
            if layers is None:
                return None
            given = redistribute(given, layers)
        if estimated is None:
            return given
        if self.options.slices != UNCUT:
            given = given.with_slices_of(estimated)
        return _with_bytes(given, estimated)


def _with_bytes(costs: Costs, estimated: Costs) -> Costs:
    """Return ``costs``; if they have no bytes, with the bytes of the ``estimated`` costs."""
    if costs.held_bytes is not None:
        return costs
    assert estimated.vocabulary is not None
    vocabulary = replace(
        costs.vocabulary or VocabularyCosts(),
        logits_bytes=estimated.vocabulary.logits_bytes,
        deferred_bytes=estimated.vocabulary.deferred_bytes,
    )
    layers = (
        costs.without_vocabulary()
        .with_passes(held_bytes=estimated.without_vocabulary().held_bytes)
        .with_links(message_bytes=estimated.links.message_bytes)
        .with_slices(keys_values=estimated.slices.keys_values)
    )
    return layers.with_vocabulary(vocabulary)
