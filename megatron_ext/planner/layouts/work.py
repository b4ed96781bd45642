"""A training whose layout and schedule are open, and the time of a step if both are given.

A layout search must not know whether its costs are estimated, measured or given. `Work` has what it
needs: the problem for any schedule and layout, and the seconds and bytes of any stage. `evaluate`
turns both into a simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.model_memory import ModelBytes
from megatron_ext.planner.candidate import Candidate, Variant, VocabMethod
from megatron_ext.planner.fitting import consider
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.recompute import NO_RECOMPUTE, LayerRecompute
from megatron_ext.planner.limits import is_close
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.rank_speeds import at_speeds
from megatron_ext.schedule.slices import UNCUT, Slices
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR, StockExecutor

CostsOf = Callable[[Sequence[Stage], Placement, int], Costs]
BytesOf = Callable[[Sequence[Stage], Placement, VocabularyParallel], Sequence[ModelBytes]]


@dataclass(frozen=True)
class Work:
    """Training whose layers may be placed on stages in different ways, for a comparison of layouts.

    Attributes:
        model: the layers.
        ranks: number of pipeline ranks.
        microbatches: number of microbatches of a step in one pipeline.
        costs_of: function that returns seconds and bytes of a microbatch on stages with a
            placement, cut into a number of slices.
        bytes_of: function that returns bytes of the model on each rank.
        seconds_outside_passes: function that returns the seconds of a step for the optimizer and
            for reductions that no pass hides, by the bytes of the model on a rank.
        limit: the user's limit of activations; None: no limit.
        steps_overlap: whether consecutive steps overlap.
        recompute: Megatron's recompute of layers, which ``costs_of`` counts.
        pairs: whether forward and backward passes overlap if a rank has several stages.
        speeds: speeds of the ranks, relative to those that ``costs_of`` is for; () if all are
            equal.
        slices: slices of each microbatch.
        stock: how Megatron runs its own schedules.
        may_separate_prediction: whether multi-token prediction may be on another stage than the
            loss.
    """

    model: Model
    ranks: int
    microbatches: int
    costs_of: CostsOf
    bytes_of: BytesOf
    seconds_outside_passes: Callable[[ModelBytes], float]
    limit: MemoryLimit | None = None
    steps_overlap: bool = False
    recompute: LayerRecompute = NO_RECOMPUTE
    pairs: bool = False
    speeds: tuple[float, ...] = ()
    slices: Slices = UNCUT
    stock: StockExecutor = STOCK_EXECUTOR
    may_separate_prediction: bool = False

    def variant(
        self, spec: str, layout: Layout, method: VocabMethod = VocabMethod.NAIVE
    ) -> Variant:
        """Return the problem of the schedule ``spec`` with ``layout`` (layers of each stage).

        Raises:
            ValueError: the schedule cannot have this layout.
        """
        resolved = choose(spec)
        placement = resolved.place(self.ranks)
        if placement.stages != layout.stages:
            raise ValueError(
                f"{spec} has {placement.stages} stages on {self.ranks} ranks, and the layout "
                f"{layout.text()} has {layout.stages} stages"
            )
        stages = layout.of(self.model)
        problem = Problem(
            placement,
            self.microbatches,
            at_speeds(self.costs_of(stages, placement, self.slices.count), placement, self.speeds),
            self.limit,
            options=ScheduleOptions(
                vocab_parallel=method.vocabulary,
                steps_overlap=self.steps_overlap,
                slices=self.slices,
                pairs=self.pairs and placement.chunks > 1,
            ),
        )
        problem = run_by_stock(problem, spec, self.stock)
        return Variant(resolved, problem, self.bytes_of(stages, placement, method.vocabulary))


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Simulated step of a schedule with a layout (layers of each stage).

    Results are compared by identity.

    Attributes:
        seconds: seconds of a step: its passes, and the time outside them.
        recompute: Megatron's recompute of layers.
    """

    layout: Layout
    candidate: Candidate
    seconds: float
    recompute: LayerRecompute = NO_RECOMPUTE

    @property
    def schedule(self) -> str:
        return self.candidate.schedule

    @property
    def method(self) -> VocabMethod:
        return self.candidate.method

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Peak bytes of each rank under this schedule and layout; () if not known."""
        memory = self.candidate.memory
        return () if memory is None else tuple(rank.total for rank in memory)

    @property
    def fullest(self) -> float:
        """Bytes of the rank that holds most under this schedule and layout; 0 if not known."""
        return max(self.rank_bytes, default=0.0)


def evaluate(
    work: Work,
    spec: str,
    layout: Layout,
    method: VocabMethod = VocabMethod.NAIVE,
    allowed_bytes: float | None = None,
    *,
    search: bool = True,
    better_than: float = math.inf,
    may_offload: bool = False,
) -> Evaluated:
    """Simulate a training step under the schedule ``spec`` with ``layout`` (layers of each stage).

    Args:
        work: the training.
        allowed_bytes: bytes that a rank has for everything, of which schedules make use; None: as
            much as it takes.
        search: whether a schedule that searches does so. If not, its result without a search
            counts, and the seconds of a long step are extrapolated from two shorter steps.
        better_than: seconds. A long step is searched only if it takes less without the search.
        may_offload: whether activations may be copied to the host if they do not fit.

    Raises:
        ValueError: the schedule cannot be made so, or a rank would hold more.
    """
    variant = work.variant(spec, layout, method)
    assert variant.model is not None
    outside = max(map(work.seconds_outside_passes, variant.model))
    if search:
        candidate = _searched(variant, method, allowed_bytes, better_than - outside, may_offload)
        step = candidate.step
    else:
        variant = replace(variant, resolved=variant.resolved.without_search)
        candidate, step = _from_shorter(variant, method, allowed_bytes, may_offload)
    return Evaluated(layout, candidate, step + outside, work.recompute)


# Largest product of stages and microbatches with which a search takes only seconds.
LONG_STEP = 2600


def _searched(
    variant: Variant,
    method: VocabMethod,
    allowed_bytes: float | None,
    better_than: float,
    may_offload: bool,
) -> Candidate:
    """Return the simulated schedule ``variant``, searched unless a search of a long step is
    useless.

    A long step is not searched if that could gain almost nothing, or if the step takes
    ``better_than`` seconds or more without a search.
    """
    problem = variant.problem
    is_long = problem.placement.stages * problem.microbatches > LONG_STEP
    if variant.resolved.traits.searches and is_long:
        short = replace(variant, resolved=variant.resolved.without_search)
        candidate = consider(short, method, allowed_bytes, may_offload)
        if is_close(candidate) or candidate.step >= better_than:
            return candidate
    return consider(variant, method, allowed_bytes, may_offload)


STEADY = 5  # microbatches per rank after which the order of passes repeats itself


def _from_shorter(
    variant: Variant, method: VocabMethod, allowed_bytes: float | None, may_offload: bool
) -> tuple[Candidate, float]:
    """Return a schedule simulated with fewer microbatches, and the seconds of a step with all.

    Steps of few microbatches are simulated in full.
    """
    ranks, microbatches = variant.problem.ranks, variant.problem.microbatches
    longer = STEADY * ranks + microbatches % ranks
    if microbatches < 2 * longer:
        candidate = consider(variant, method, allowed_bytes, may_offload)
        return candidate, candidate.step
    steps = []
    for number in (longer - ranks, longer):
        problem = replace(variant.problem, microbatches=number)
        candidate = consider(replace(variant, problem=problem), method, allowed_bytes, may_offload)
        steps.append(candidate.step)
    each = (steps[1] - steps[0]) / ranks
    return candidate, steps[1] + (microbatches - longer) * each
