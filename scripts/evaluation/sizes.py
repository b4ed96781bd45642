"""Order and memory of configurations of one model with other parallel sizes and microbatches.

measured.csv has step times of Llama models on A100s over tensor and pipeline parallelism,
microbatch and sequence parallelism (Hagemann et al. 2023, arXiv:2311.05610). Each configuration is
estimated and compared with every other one of its set. It fits if it takes no more than
`free_memory` allows, by which `plan` and `doctor` judge too. The framework is described by its
sources (`Framework.PYTORCH`). The slower rings beyond 4 nodes were chosen with these rows at hand.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.gpus import GPUS, free_memory
from megatron_ext.cost_model.messages.blocking import with_blocking_messages
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks, least_lasting
from megatron_ext.planner.layouts.layout import evenly
from megatron_ext.planner.outside_passes import seconds_outside_passes
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from scripts.evaluation.measured import PublishedStep, dense_model

# Beginning of a row's job if the row compares sizes; the name of the set follows.
OF_SIZES = "sizes "
# Predictions that differ by less than this share count as equal; of the configurations with equal
# predictions, the one that was fastest when run is chosen.
TIE = 0.02
_GPU = GPUS["a100"]


@dataclass(frozen=True)
class SizesPrediction:
    """Prediction for a step.

    Attributes:
        fullest: bytes of the fullest rank, without those that its allocator reserves beyond them.
        allowed: the most bytes with which that rank does not run out of memory.
    """

    seconds: float
    fullest: float
    allowed: float

    @property
    def fits(self) -> bool:
        return self.fullest <= self.allowed


def model_of(step: PublishedStep) -> Model:
    """Return the Llama model that ``step`` trains."""
    return dense_model(step, gated_linear_unit=True, normalization="RMSNorm")


def predict_sizes(step: PublishedStep) -> SizesPrediction:
    """Return the prediction for ``step`` under 1F1B.

    It is for plain PyTorch with flash attention and a fused RMSNorm.
    """
    assert _GPU.memory is not None
    rates = _GPU.rates()
    model = model_of(step)
    execution = Execution(
        sequence=step.size("seq"),
        micro_batch=step.size("mbs"),
        tensor_parallel=step.size("tp"),
        sequence_parallel=step.cells["sp"] == "1",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_span=step.gpus,
        framework=Framework.PYTORCH,
    )
    state = TrainingState(
        distributed=True,
        data_parallel=step.size("dp"),
        expert_data_parallel=step.size("dp"),
        # Gradients have 2 bytes, as weights have, since 13B parameters would not fit on one
        # pipeline rank otherwise.
        gradient_bytes=2,
    )
    stages = evenly(len(model.layers), step.pipeline).of(model)
    costs = with_blocking_messages(estimate(model, stages, execution, rates))
    placement = line(step.pipeline)
    on_ranks = bytes_of_ranks(model, stages, execution, placement, VocabularyParallel.NONE, state)
    outside = max(
        seconds_outside_passes(on_rank, state=state, execution=execution, rates=rates)
        for on_rank in on_ranks
    )
    seconds, held = _passes(costs, placement, step.microbatches)
    fullest = max(on_rank.total + kept for on_rank, kept in zip(on_ranks, held, strict=True))
    allowed = free_memory(_GPU.memory, lasting=least_lasting(on_ranks)).allocated
    return SizesPrediction(seconds + outside, fullest, allowed)


def _passes(costs: Costs, placement: Placement, microbatches: int) -> tuple[float, list[float]]:
    """Return the seconds of the passes of a step, and the bytes that each rank holds at its peak.

    Ranks wait for each message. The seconds of a step with many microbatches are extrapolated from
    two steps with fewer.
    """
    ranks = placement.ranks
    longer = min(microbatches, 5 * ranks)
    lasts: dict[int, float] = {}
    for number in {max(longer - ranks, 1), longer}:
        problem = Problem(placement, number, costs)
        program = build_program(choose("1f1b"), problem)
        lasts[number] = simulate(program, costs).makespan
    held = peaks(program.schedule, in_bytes(costs))
    shorter = min(lasts)
    if microbatches == longer:
        return lasts[longer], held
    each = (lasts[longer] - lasts[shorter]) / (longer - shorter)
    return lasts[longer] + (microbatches - longer) * each, held


# Sets of measurements by which the constant FULL_SPEED_NODES was chosen.
_CHOOSING = ("sizes 13B-2048-32-sp", "sizes 30B-2048-256-all")
_CHOSEN_BY = {True: "the two sets that a constant rests on", False: "the three other sets"}
Predicted = Mapping[PublishedStep, SizesPrediction]


def pairs_of_sizes(predicted: Predicted) -> Iterator[tuple[PublishedStep, PublishedStep]]:
    """Yield the pairs of steps of one set that ran, with the slower step first.

    Pairs whose measured times differ by less than 2 % are omitted.
    """
    for rows in _sets(predicted).values():
        for steps in itertools.combinations([row for row in rows if row.ran], 2):
            faster, slower = sorted(steps, key=lambda row: row.seconds)
            if slower.seconds > 1.02 * faster.seconds:
                yield slower, faster


def orders(predicted: Predicted) -> dict[str, tuple[int, int]]:
    """Return, by name, how many predictions of a kind are right, and how many there are.

    Where the best step of a set is chosen, it is the fastest of those that ran and that are
    predicted to be within `TIE` of the predicted best.
    """
    found: dict[str, list[bool]] = defaultdict(list)
    for slower, faster in pairs_of_sizes(predicted):
        is_right = predicted[slower].seconds > predicted[faster].seconds
        found["pairs over 2 %"].append(is_right)
        found[f"{_CHOSEN_BY[slower.job in _CHOOSING]}, pairs over 2 %"].append(is_right)
        if slower.seconds > 1.1 * faster.seconds:
            found["pairs over 10 %"].append(is_right)
        if _but_microbatch(slower) == _but_microbatch(faster):
            found["pairs that differ in the microbatch only"].append(is_right)
    for rows in _sets(predicted).values():
        ran = [row for row in rows if row.ran]
        fitting = [row for row in rows if predicted[row].fits]
        found["ran, and predicted to fit"] += [row in fitting for row in ran]
        found["ran out of memory, and predicted not to fit"] += [
            row not in fitting for row in rows if not row.ran
        ]
        if not ran:
            continue
        least = min(predicted[row].seconds for row in ran)
        chosen = min(row.seconds for row in ran if predicted[row].seconds <= (1 + TIE) * least)
        shortest = min(row.seconds for row in ran)
        found["sets whose predicted best is at most 5 % slower"].append(chosen <= 1.05 * shortest)
        best = min(fitting, key=lambda row: predicted[row].seconds, default=None)
        found["sets whose predicted best of those that fit ran"].append(
            best is not None and best.ran
        )
    return {name: (sum(right), len(right)) for name, right in found.items()}


def _sets(predicted: Predicted) -> dict[str, list[PublishedStep]]:
    sets: dict[str, list[PublishedStep]] = defaultdict(list)
    for step in predicted:
        sets[step.job].append(step)
    return sets


def _but_microbatch(step: PublishedStep) -> tuple[object, ...]:
    return step.pipeline, step.size("tp"), step.cells["sp"]
