"""Half the pipeline ranks and twice the data parallelism, on the same GPUs, with the same batch.

That is what schedules with two copies of the model are (DualPipe, Chimera, BitPipe): every stage
twice, and each copy half of the microbatches. Passes take twice as long, and the pipeline's ends
as long or a little less. A rank has twice the parameters and gradients, of the distributed
optimizer's states as many, and as many activations; twice the gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.planner.training import Training
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement, loop


@dataclass(frozen=True)
class Division:
    """Division of a training over its ranks.

    Attributes:
        ranks: of a pipeline.
        data_parallel: copies of the model.
        microbatches: of each copy, in a step.
    """

    ranks: int
    data_parallel: int
    microbatches: int

    def __str__(self) -> str:
        copies = f" x DP {self.data_parallel}" if self.data_parallel > 1 else ""
        return f"PP {self.ranks}{copies}"

    def halved(self) -> Division:
        """Half of the pipeline ranks, with twice the copies.

        Raises:
            ValueError: that is no pipeline, or microbatches do not divide.
        """
        if self.ranks % 2 or self.ranks < 4:
            raise ValueError(
                f"--half-pipeline compares with a pipeline of half the ranks: {self.ranks} ranks "
                "have no half; give an even number of pipeline ranks, 4 or more"
            )
        if self.microbatches % 2:
            raise ValueError(
                "--half-pipeline compares with twice the copies of the model, over which "
                f"{self.microbatches} microbatches do not divide: give an even number of "
                "microbatches"
            )
        return Division(self.ranks // 2, 2 * self.data_parallel, self.microbatches // 2)


def half_of(training: Training) -> Training:
    """Return ``training`` with twice as many copies of its model on half the pipeline ranks.

    Raises:
        ValueError: there is no half.
    """
    trained, limit, extras = training.trained, training.limit, training.extras
    if extras.slices.count > 1 or extras.pairs or training.speeds is not None:
        raise ValueError(
            "--half-pipeline compares whole microbatches, one pass after the other, on ranks that "
            "are all alike: drop --slices, --pairs and --rank-speeds"
        )
    half = division_of(training).halved()
    return replace(
        training,
        ranks=half.ranks,
        microbatches=half.microbatches,
        limit=limit and of_half_limit(limit),
        costs=training.costs and _of_half(training.costs),
        trained=trained and replace(trained, state=_twice(trained.state)),
    )


def division_of(training: Training) -> Division:
    """Return the division of ``training``."""
    copies = 1 if training.trained is None else training.trained.state.data_parallel
    return Division(training.ranks, copies, training.microbatches)


def _twice(state: TrainingState) -> TrainingState:
    return replace(
        state,
        data_parallel=2 * state.data_parallel,
        expert_data_parallel=2 * state.expert_data_parallel,
    )


def _of_half(costs: Callable[[Placement], Costs]) -> Callable[[Placement], Costs]:
    """Return ``costs`` of twice the ranks on half of them: two successive stages become one."""

    def on(placement: Placement) -> Costs:
        return costs(loop(2 * placement.ranks, vpp=placement.chunks)).in_pairs()

    return on


def of_half_limit(limit: MemoryLimit) -> MemoryLimit:
    """Return the limit for as many bytes if a microbatch holds twice as many."""
    if limit.microbatches is None:
        return limit
    return MemoryLimit(microbatches=limit.microbatches / 2)
