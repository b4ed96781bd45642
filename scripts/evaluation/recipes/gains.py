"""Estimated gains of another layout and another schedule for a recipe. Needs no Megatron.

Whether our schedules are worth it depends on the recipe. Within the memory of the recipe's own
command, two steps are found: the best of Megatron's schedules with another layout, and the best of
all schedules. The first shows what layouts gain, the second what our schedules add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.frozen import without_frozen
from megatron_ext.cost_model.gpus import GPUS, free_memory
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState, least_lasting
from megatron_ext.planner.layouts.comparison import LayoutComparison, compare_layouts
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.recompute import LayerRecompute
from megatron_ext.planner.layouts.work import Evaluated, Work
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

MARGIN = 2 * 2**30  # bytes of free memory; a gain that leaves less is marked
PROCESSES = 2


@dataclass(frozen=True)
class Configuration:
    """Training job of a recipe, as far as its plan depends on it. Many recipes have the same one.

    Attributes:
        gpu: a name of `GPUS`.
        schedule: Megatron's schedule, under which the recipe trains.
        layers: layers of each stage in the recipe.
        counted: whether Megatron counts the embedding, and the loss, as a layer of its stage.
        is_frozen: whether the model's own weights are frozen, so that only adapters or a tower are
            trained.
        recompute: other choices of the layers that Megatron recomputes.
    """

    model: Model
    execution: Execution
    state: TrainingState
    gpu: str
    ranks: int
    microbatches: int
    schedule: str
    layers: tuple[int, ...]
    counted: tuple[int, int] = (0, 0)
    is_frozen: bool = False
    recompute: tuple[LayerRecompute, ...] = ()


@dataclass(frozen=True)
class Option:
    """A schedule with a layout, and what it would gain.

    Attributes:
        vocabulary: treatment of the embedding and the output layer.
        layers: layers of each stage.
        gain: the seconds of a step of the recipe's own command, divided by those of this step.
        seconds: seconds of a step.
        fullest: bytes of the rank that holds most.
        is_tight: whether nothing is gained if ranks have `MARGIN` less memory.
        recompute: the recomputed layers, if they are not those of the recipe.
    """

    schedule: str
    vocabulary: str
    layers: tuple[int, ...]
    gain: float
    seconds: float
    fullest: float
    is_tight: bool = False
    recompute: str = ""


@dataclass(frozen=True)
class Gains:
    """Gains that are possible for a recipe.

    Attributes:
        baseline: the recipe's own command.
        stock: the best of Megatron's schedules, with any layout.
        ours: the best of all schedules, with any layout.
        bound: bytes that a rank may take.
    """

    baseline: Option
    stock: Option
    ours: Option
    bound: float


def gains_of(configuration: Configuration) -> Gains:
    """Return what ``configuration`` could gain. Raises ValueError if it cannot be planned."""
    works = works_of(configuration)
    allowed_bytes = allowed_bytes_of(configuration, works[0])
    compared = _compared(configuration, works, allowed_bytes, 0)
    assert compared.bound is not None
    less = compared
    gaining = [one for one in (compared.stock, compared.ours) if 1 + compared.gain(one) > _WORTH]
    if any(one.fullest > compared.bound - MARGIN for one in gaining):
        less = _compared(configuration, works, allowed_bytes, MARGIN)
    return Gains(
        baseline=_option(compared, compared.baseline),
        stock=_option(compared, compared.stock, less.gain(less.stock)),
        ours=_option(compared, compared.ours, less.gain(less.ours)),
        bound=compared.bound,
    )


def allowed_bytes_of(configuration: Configuration, work: Work) -> float:
    """Return the bytes that a rank of the recipe may take, computed as `plan` computes them."""
    memory = GPUS[configuration.gpu].memory
    assert memory is not None
    variant = work.variant(configuration.schedule, Layout(configuration.layers))
    return free_memory(memory, lasting=least_lasting(variant.model)).allocated


def _option(compared: LayoutComparison, made: Evaluated, gain_with_less: float = 0.0) -> Option:
    gain = 1 + compared.gain(made)
    return Option(
        schedule=made.schedule,
        vocabulary=made.method.value,
        layers=made.layout.layers,
        gain=gain,
        seconds=made.seconds,
        fullest=made.fullest,
        is_tight=gain > _WORTH > 1 + gain_with_less,
        recompute=str(made.recompute) if made.recompute != compared.baseline.recompute else "",
    )


_WORTH = 1.01  # least ratio of step times that counts as a gain


def _compared(
    configuration: Configuration, works: Sequence[Work], allowed_bytes: float, margin: float
) -> LayoutComparison:
    start = configuration.schedule, Layout(configuration.layers)
    return compare_layouts(
        works, start, _rule(configuration), allowed_bytes, margin=margin, search=False
    )


def _rule(configuration: Configuration) -> Callable[[int], Layout]:
    """Return the function from a number of stages to the layout that Megatron gives them."""
    layers, (embedding, loss) = len(configuration.model.layers), configuration.counted

    def layout(stages: int) -> Layout:
        per_stage, left = divmod(layers + embedding + loss, stages)
        if left or per_stage < max(embedding, loss):
            raise ValueError(f"{layers} layers cannot be split evenly over {stages} stages")
        counts = [per_stage] * stages
        counts[0] -= embedding
        counts[-1] -= loss
        return Layout(tuple(counts))

    return layout


def works_of(configuration: Configuration) -> list[Work]:
    """Return the trainings of the recipe, one for each choice of recomputed layers, with the
    recipe's own choice first."""
    execution = configuration.execution
    others = (option.in_execution(execution) for option in configuration.recompute)
    return [work_of(configuration, one) for one in (execution, *others)]


def work_of(configuration: Configuration, execution: Execution) -> Work:
    rates = GPUS[configuration.gpu].rates(execution.precision)
    execution = replace(execution, is_frozen=configuration.is_frozen)
    work = estimated_work(
        configuration.model,
        execution,
        configuration.state,
        rates,
        ranks=configuration.ranks,
        microbatches=configuration.microbatches,
    )
    return _frozen(work) if configuration.is_frozen else work


def _frozen(work: Work) -> Work:
    """Return ``work`` without the passes, gradients and states that frozen weights do not have."""

    def costs_of(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        costs = work.costs_of(stages, placement, slices)
        return without_frozen(costs, [0.0] * costs.stages, reached=1, output_layer=False)

    def bytes_of(
        stages: Sequence[Stage], placement: Placement, vocabulary: VocabularyParallel
    ) -> list[ModelBytes]:
        ranks = work.bytes_of(stages, placement, vocabulary)
        return [replace(rank, gradients=0.0, optimizer=0.0) for rank in ranks]

    return replace(
        work, costs_of=costs_of, bytes_of=bytes_of, seconds_outside_passes=lambda model: 0.0
    )


Found = Gains | str  # gains of a recipe, or the reason why there are none


def all_gains(
    configurations: Iterable[Configuration], report: Callable[[], None]
) -> dict[Configuration, Found]:
    """Return the gains of each distinct one of ``configurations``. ``report`` is called after each.

    They are computed by `PROCESSES` processes.
    """
    distinct = list(dict.fromkeys(configurations))
    # Configurations that take long come first, so that no process starts with one near the end.
    distinct.sort(key=lambda c: c.ranks * c.microbatches, reverse=True)
    found: dict[Configuration, Found] = {}
    with get_context("spawn").Pool(PROCESSES) as pool:
        for configuration, gains in pool.imap_unordered(_found, distinct):
            found[configuration] = gains
            report()
    return found


def _found(configuration: Configuration) -> tuple[Configuration, Found]:
    try:
        return configuration, gains_of(configuration)
    except ValueError as error:
        return configuration, str(error)
