"""The problems of all families for a model that is described by its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.model.estimate import estimate
from megatron_ext.schedule.model.execution import Execution
from megatron_ext.schedule.model.model import Model, Stage, stages_of
from megatron_ext.schedule.model.model_memory import TrainingState, bytes_of_ranks
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.model.reductions import Reduction, reductions_of_ranks
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.plan.candidate import (
    Candidate,
    Variant,
    VocabMethod,
    goes_with,
    keeps_pairs,
)
from megatron_ext.schedule.plan.vocabulary_plan import (
    redistribute,
    redistributed_layers,
    tells_vocabulary,
)
from megatron_ext.schedule.problem import Extras, Problem
from megatron_ext.schedule.slices import UNCUT, Slices


@dataclass(frozen=True)
class Training:
    """A model and how it is trained.

    Attributes:
        ranks: pipeline ranks.
        limit: of activations; None: none.
        measured: the costs on a placement, instead of estimated ones.
        post_validation: whether steps overlap, where they can.
        slices: how each microbatch is cut.
        pairs: whether passes may run in pairs.
    """

    model: Model
    execution: Execution
    state: TrainingState
    ranks: int
    microbatches: int
    rates: Rates
    limit: MemoryLimit | None = None
    measured: Callable[[Placement], Costs] | None = None
    post_validation: bool = False
    slices: Slices = UNCUT
    pairs: bool = False

    def variant(self, name: str, method: VocabMethod) -> Variant | None:
        """The problem of the family ``name``, for `make_plan`; None if the measured costs do not
        tell what ``method`` would change.

        Raises:
            ValueError: the layers do not divide over its stages.
        """
        choice = choose(name)
        if not goes_with(self.slices, choice, method.vocabulary):
            return None
        placement = choice.place(self.ranks)
        stages = self._stages(placement, method)
        costs = estimate(self.model, stages, self.execution, self.rates)
        if self.measured is not None:
            measured = self.measured(placement)
            if method is not VocabMethod.NAIVE and not tells_vocabulary(measured):
                return None
            if method is VocabMethod.REDISTRIBUTED:
                measured = redistribute(measured, len(self.model.layers))
            costs = _with_bytes(measured, costs)
        problem = Problem(
            placement,
            self.microbatches,
            costs,
            self.limit,
            extras=Extras(
                vocab_parallel=method.vocabulary,
                post_validation=self.post_validation,
                slices=self.slices,
                pairs=self.pairs and keeps_pairs(choice, method.vocabulary),
            ),
        )
        model = bytes_of_ranks(
            self.model, stages, self.execution, placement, method.vocabulary, self.state
        )
        return Variant(choice, problem, model, may_recompute=not self.execution.recompute)

    def longest_reduction(self, candidate: Candidate) -> Reduction:
        """That of the pipeline rank which takes longest under ``candidate``."""
        placement, method = choose(candidate.schedule).place(self.ranks), candidate.method
        stages = self._stages(placement, method)
        reductions = reductions_of_ranks(
            self.model,
            stages,
            self.execution,
            placement,
            method.vocabulary,
            self.state,
            self.rates,
        )
        return max(reductions, key=lambda reduction: reduction.total)

    def _stages(self, placement: Placement, method: VocabMethod) -> tuple[Stage, ...]:
        number = placement.stages
        if method is VocabMethod.REDISTRIBUTED:
            counts = redistributed_layers(len(self.model.layers), number)
        else:
            counts = self.model.evenly(number)
        return stages_of(self.model, counts)


def _with_bytes(costs: Costs, estimated: Costs) -> Costs:
    """``costs``, with the bytes of ``estimated`` where they have none."""
    if costs.held_bytes is not None:
        return costs
    assert estimated.vocabulary is not None
    vocabulary = replace(
        costs.vocabulary or VocabularyCosts(), logits_bytes=estimated.vocabulary.logits_bytes
    )
    layers = (
        costs.without_vocabulary()
        .with_passes(held_bytes=estimated.without_vocabulary().held_bytes)
        .with_links(message_bytes=estimated.links.message_bytes)
        .with_slices(keys_values=estimated.slices.keys_values)
    )
    return layers.with_vocabulary(vocabulary)
