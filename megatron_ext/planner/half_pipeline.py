"""The same GPUs and global batch with half the pipeline ranks, and twice the data parallelism.

That is what schedules with two copies of the model are (DualPipe, Chimera, BitPipe): every stage
twice, and each copy half of the microbatches. Passes take twice as long, and the pipeline's ends
as long or a little less. A rank has twice the parameters and gradients, of the distributed
optimizer's states as many, and as many activations; twice the gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.reductions import Reduction
from megatron_ext.planner.candidate import Candidate, Plan
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.training import Training
from megatron_ext.planner.verdict import NOTHING, Written
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement, loop


@dataclass(frozen=True)
class Division:
    """How a training is divided.

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
                f"--half-pipeline compares with a pipeline of half the ranks: of {self.ranks} "
                f"there is none; give an even number of them, 4 or more"
            )
        if self.microbatches % 2:
            raise ValueError(
                f"--half-pipeline compares with twice the copies of the model, over which "
                f"{self.microbatches} microbatches do not divide: give an even number of them"
            )
        return Division(self.ranks // 2, 2 * self.data_parallel, self.microbatches // 2)


@dataclass(frozen=True)
class Side:
    """What there is with one division.

    Attributes:
        reduction: the longest of a rank under the best; None where the model is not known.
    """

    division: Division
    plan: Plan
    reduction: Reduction | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The words that make a launch train under the best; () where nothing fits."""
        if self.plan.best is None:
            return ()
        ranks = str(self.division.ranks)
        return ("--pipeline-model-parallel-size", ranks, *flags_of(self.plan.best))

    @property
    def whole_step(self) -> float | None:
        """Of the best, with a reduction that no pass hides; None where nothing fits."""
        if self.plan.best is None:
            return None
        return self.plan.best.step + (self.reduction.total if self.reduction is not None else 0.0)


@dataclass(frozen=True)
class Halves:
    """Both divisions.

    Attributes:
        written: for the best on half of the ranks; nothing where nothing fits there.
        job: what is trained, in words; "" where nobody needs to be told.
        remarks: what was assumed.
        is_estimate: whether times are seconds that were estimated.
    """

    whole: Side
    half: Side
    written: Written = NOTHING
    job: str = ""
    remarks: tuple[str, ...] = ()
    is_estimate: bool = True

    @property
    def rows(self) -> list[tuple[str, Candidate | None, Candidate | None]]:
        """Each schedule with what is best done about the vocabulary, on all ranks and on half of
        them, where it is possible; by the time that it takes on half of them."""
        of_whole, of_half = (
            {candidate.schedule: candidate for candidate in side.plan.best_of_each}
            for side in (self.whole, self.half)
        )
        left = [name for name in of_whole if name not in of_half]
        return [(name, of_whole.get(name), of_half.get(name)) for name in (*of_half, *left)]

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return bool(self.rows)


def compare_halves(training: Training, room: float | None = None) -> Halves:
    """``training``, and twice as many copies of its model on half the ranks.

    Args:
        room: bytes that a rank has for everything; None: as much as it takes.

    Raises:
        ValueError: there is no half.
    """
    trained, limit = training.trained, training.limit
    copies = 1 if trained is None else trained.state.data_parallel
    whole = Division(training.ranks, copies, training.microbatches)
    half = whole.halved()
    of_half = replace(
        training,
        ranks=half.ranks,
        microbatches=half.microbatches,
        limit=limit and of_half_limit(limit),
        costs=training.costs and _of_half(training.costs),
        trained=trained and replace(trained, state=_twice(trained.state)),
    )

    def side(division: Division, training: Training) -> Side:
        plan = make_plan(training.variant, room, may_offload=training.trained is not None)
        if plan.best is None or training.trained is None:
            return Side(division, plan)
        return Side(division, plan, training.trained.longest_reduction(plan.best))

    of_all, of_halves = side(whole, training), side(half, of_half)
    written = Written(of_halves.flags)
    return Halves(of_all, of_halves, written, is_estimate=training.is_estimate)


def _twice(state: TrainingState) -> TrainingState:
    return replace(
        state,
        data_parallel=2 * state.data_parallel,
        expert_data_parallel=2 * state.expert_data_parallel,
    )


def _of_half(costs: Callable[[Placement], Costs]) -> Callable[[Placement], Costs]:
    """``costs`` of twice the ranks on half of them, where a stage is two in a row of theirs."""

    def on(placement: Placement) -> Costs:
        return costs(loop(2 * placement.ranks, vpp=placement.chunks)).in_pairs()

    return on


def of_half_limit(limit: MemoryLimit) -> MemoryLimit:
    """As many activations, where a microbatch has twice as many."""
    if limit.microbatches is None:
        return limit
    return MemoryLimit(microbatches=limit.microbatches / 2)
