"""Figures of merit of the estimate: does it put measured configurations in the right order?

layouts/a100.csv has step times of Llama models on A100s over tensor and pipeline parallelism,
microbatch and sequence parallelism (Hagemann et al. 2023, arXiv:2311.05610). Each configuration is
estimated and compared with every other one of its set.

    python -m scripts.layout_order [--csv FILE] [--rows] [--perturb]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model import gpus, reductions, stage_seconds
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.messages import collectives
from megatron_ext.cost_model.messages.blocking import with_blocking_messages
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks
from megatron_ext.cost_model.rates import Rates
from megatron_ext.planner.layouts.layout import evenly
from megatron_ext.planner.outside_passes import seconds_outside_passes
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import Problem, VocabularyParallel

MEASURED = Path(__file__).parent / "layouts" / "a100.csv"
# What a rank may take of a GPU's memory: CUDA's context and NCCL's buffers take 2 to 3 GiB of 79
# (150 to 300 MiB for the incoming NVLink channels of each communicator).
USABLE = 0.96
# What PyTorch's allocator wastes of activations and temporary tensors, without expandable segments:
# 15 % on average of eight language models on A100s (Guo et al. 2024, GMLake, arXiv:2401.08156).
FRAGMENTED = 0.15
TIE = 0.02  # predictions as close as this are equal: the best of them that ran is chosen


@dataclass(frozen=True)
class Configuration:
    """A measured configuration.

    Attributes:
        group: the set of configurations that it is compared within.
        seconds: seconds of a step; None if the configuration ran out of memory.
    """

    group: str
    model: str
    sequence: int
    global_batch: int
    gpus: int
    micro_batch: int
    tensor_parallel: int
    pipeline_parallel: int
    sequence_parallel: bool
    seconds: float | None

    @property
    def data_parallel(self) -> int:
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and the bytes that the fullest rank reserves: by the figures above, and
    as `plan` counts them, which leaves more memory for temporary tensors."""

    seconds: float
    fullest: float
    in_plan: float = 0.0


def read(path: Path) -> list[Configuration]:
    """Return the rows of ``path``, the best of those that are the same configuration."""
    rows: dict[tuple[object, ...], Configuration] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            text = row["seconds_per_step"]
            tensor = int(row["tp"])
            read_row = Configuration(
                row["set"],
                row["model"],
                int(row["sequence"]),
                int(row["global_batch"]),
                int(row["gpus"]),
                int(row["micro_batch"]),
                tensor,
                int(row["pp"]),
                row["sequence_parallel"] == "1",
                None if text == "OOM" else float(text),
            )
            rows[tuple(row.values())[:-1]] = read_row
    return list(rows.values())


_LLAMA = {  # layers, hidden size, heads, MLP width
    "13B": (40, 5120, 40, 13824),
    "30B": (60, 6656, 52, 17920),
    "65B": (80, 8192, 64, 22016),
}
_VOCABULARY = 128_000  # assumed: the paper does not tell it


def model_of(configuration: Configuration) -> Model:
    """Return the Llama that ``configuration`` trains."""
    layers, hidden, heads, ffn = _LLAMA[configuration.model]
    return Model(
        layers=("*-",) * layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=ffn,
        vocabulary=_VOCABULARY,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
        normalization="RMSNorm",
    )


def execution_of(configuration: Configuration) -> Execution:
    """Return how ``configuration`` runs a microbatch: flash attention, and a fused RMSNorm."""
    return Execution(
        sequence=configuration.sequence,
        micro_batch=configuration.micro_batch,
        tensor_parallel=configuration.tensor_parallel,
        sequence_parallel=configuration.sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_span=configuration.gpus,
        framework=Framework.PYTORCH,
    )


def predict(configuration: Configuration, rates: Rates) -> Prediction:
    """Estimate a step of ``configuration`` under 1F1B."""
    model, execution = model_of(configuration), execution_of(configuration)
    ranks = configuration.data_parallel
    state = TrainingState(
        distributed=True,
        data_parallel=ranks,
        expert_data_parallel=ranks,
        gradient_bytes=2,  # as the weights: 13B on one pipeline rank would not fit otherwise
    )
    pipeline = configuration.pipeline_parallel
    stages = evenly(len(model.layers), pipeline).of(model)
    costs = with_blocking_messages(estimate(model, stages, execution, rates))
    microbatches = configuration.global_batch // (ranks * configuration.micro_batch)
    placement = line(pipeline)
    on_ranks = bytes_of_ranks(model, stages, execution, placement, VocabularyParallel.NONE, state)
    beside = max(
        seconds_outside_passes(on_rank, state=state, execution=execution, rates=rates)
        for on_rank in on_ranks
    )
    seconds, held = _passes(costs, placement, microbatches)
    fullest = max(
        own.total + (1 + FRAGMENTED) * (own.temporary + kept)
        for own, kept in zip(on_ranks, held, strict=True)
    )
    in_plan = max(own.total + kept for own, kept in zip(on_ranks, held, strict=True))
    return Prediction(seconds + beside, fullest, (1 + gpus.RESERVED_SHARE) * in_plan)


def _passes(costs: Costs, placement: Placement, microbatches: int) -> tuple[float, list[float]]:
    """Return the seconds of the passes of a step, whose messages nothing hides, and the bytes that
    each rank holds at its peak. A long step is told by two shorter ones."""
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


@dataclass(frozen=True)
class Order:
    """How many of ``all`` pairs of configurations are in the right order."""

    right: int = 0
    all: int = 0

    @property
    def share(self) -> float:
        return self.right / self.all if self.all else 1.0

    def __add__(self, other: Order) -> Order:
        return Order(self.right + other.right, self.all + other.all)

    def __str__(self) -> str:
        return f"{self.right} of {self.all} ({self.share:.1%})"


@dataclass(frozen=True)
class Bars:
    """Figures of merit over all sets.

    Attributes:
        over_2, over_10: pairs whose measured times differ by more than that per cent.
        micro_batch: pairs that differ in the microbatch alone, and by more than 2 %.
        regret: by set, the share by which the chosen configuration takes longer than the best. The
            choice is the best of those that ran and are predicted within 2 % of the predicted best.
        fits: configurations that ran, and are predicted to fit.
        best_ran: by set, whether the predicted best of those predicted to fit ran.
        ratios: predicted over measured seconds, by tensor-parallel ranks.
    """

    over_2: Order
    over_10: Order
    micro_batch: Order
    regret: Mapping[str, float]
    fits: Order
    best_ran: Mapping[str, bool]
    ratios: Mapping[int, float]


def bars(
    configurations: Sequence[Configuration],
    predicted: Mapping[Configuration, Prediction],
    memory: float,
) -> Bars:
    """Return the figures of merit. ``memory``: bytes that a rank may take."""
    over_2, over_10, micro = Order(), Order(), Order()
    regret: dict[str, float] = {}
    best_ran: dict[str, bool] = {}
    fits = Order()
    by_ranks: dict[int, list[float]] = defaultdict(list)
    for group, rows in grouped(configurations, lambda c: c.group).items():
        ran = [row for row in rows if row.seconds is not None]
        for a, b in itertools.combinations(ran, 2):
            assert a.seconds is not None and b.seconds is not None
            difference = max(a.seconds, b.seconds) / min(a.seconds, b.seconds) - 1
            is_right = (a.seconds < b.seconds) == (predicted[a].seconds < predicted[b].seconds)
            if difference > 0.02:
                over_2 += Order(is_right, 1)
                if _differ_by_micro_batch(a, b):
                    micro += Order(is_right, 1)
            if difference > 0.1:
                over_10 += Order(is_right, 1)
        least = min(predicted[row].seconds for row in ran)
        chosen = [row for row in ran if predicted[row].seconds <= (1 + TIE) * least]
        seconds = [row.seconds for row in ran if row.seconds]
        regret[group] = min(row.seconds for row in chosen if row.seconds) / min(seconds) - 1
        fits += Order(sum(predicted[row].fullest <= memory for row in ran), len(ran))
        fitting = [row for row in rows if predicted[row].fullest <= memory]
        best = min(fitting, key=lambda row: predicted[row].seconds, default=None)
        best_ran[group] = best is not None and best.seconds is not None
        for row in ran:
            by_ranks[row.tensor_parallel].append(predicted[row].seconds / (row.seconds or 1))
    ratios = {ranks: sum(found) / len(found) for ranks, found in sorted(by_ranks.items())}
    return Bars(over_2, over_10, micro, regret, fits, best_ran, ratios)


def grouped(
    rows: Iterable[Configuration], key: Callable[[Configuration], str]
) -> dict[str, list[Configuration]]:
    groups: dict[str, list[Configuration]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _differ_by_micro_batch(a: Configuration, b: Configuration) -> bool:
    def others(row: Configuration) -> tuple[int, int, bool]:
        return row.tensor_parallel, row.pipeline_parallel, row.sequence_parallel

    return others(a) == others(b) and a.micro_batch != b.micro_batch


_RATES = (
    *("linear", "attention", "attention_backward", "memory", "operands", "kernel", "launch"),
    *("peers", "network"),
)
_CONSTANTS = {
    "BEGIN": collectives,
    "NEAR_STEP": collectives,
    "FAR_STEP": collectives,
    "FULL_SPEED_NODES": reductions,
}
DRAWS = 16  # of factors for all constants at once


@contextmanager
def perturbed(factors: Mapping[str, float], rates: Rates) -> Iterator[Rates]:
    """Yield ``rates`` with constants multiplied by ``factors``, by their names; those of modules
    are multiplied until the end."""
    changed = {
        name: factor * getattr(rates, name) for name, factor in factors.items() if name in _RATES
    }
    if "linear" in factors:
        changed["matrix"] = factors["linear"] * rates.matrix
    before = {name: getattr(_CONSTANTS[name], name) for name in factors if name in _CONSTANTS}
    for name, constant in before.items():
        setattr(_CONSTANTS[name], name, factors[name] * constant)
    stage_seconds._of_layer.cache_clear()  # it knows rates, not these
    try:
        yield replace(rates, **changed)
    finally:
        for name, constant in before.items():
            setattr(_CONSTANTS[name], name, constant)
        stage_seconds._of_layer.cache_clear()


def _print_perturbed(configurations: Sequence[Configuration], rates: Rates, memory: float) -> None:
    """Print the figures with each constant 20 % off, and with all of them in drawn directions."""
    names = (*_RATES, *_CONSTANTS)
    cases = {f"{name} | {factor}": {name: factor} for name in names for factor in (0.8, 1.2)}
    rng = random.Random(0)
    for number in range(DRAWS):
        cases[f"all, draw {number} | 0.8 or 1.2"] = {name: rng.choice((0.8, 1.2)) for name in names}
    print("| constant | times | pairs over 2 % | over 10 % | microbatch alone | regret <= 5 % |")
    print("| - | - | - | - | - | - |")
    for case, factors in cases.items():
        with perturbed(factors, rates) as changed:
            predicted = {row: predict(row, changed) for row in configurations}
        found = bars(configurations, predicted, memory)
        small = sum(share <= 0.05 for share in found.regret.values())
        print(
            f"| {case} | {found.over_2.share:.1%} | {found.over_10.share:.1%} "
            f"| {found.micro_batch.right} of {found.micro_batch.all} "
            f"| {small} of {len(found.regret)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=MEASURED, help="File of measured step times.")
    parser.add_argument("--rows", action="store_true", help="Print every configuration.")
    parser.add_argument(
        "--perturb",
        action="store_true",
        help="Print the figures with each constant 20 %% off, and with all of them at once.",
    )
    options = parser.parse_args()
    gpu = GPUS["a100"]
    assert gpu.memory is not None
    configurations = read(options.csv)
    rates = gpu.rates()
    if options.perturb:
        _print_perturbed(configurations, rates, USABLE * gpu.memory)
        return
    predicted = {row: predict(row, rates) for row in configurations}
    if options.rows:
        for row in configurations:
            found = predicted[row]
            ratio = f"{found.seconds / row.seconds:.2f}" if row.seconds else "   -"
            print(
                f"{row.group:20} mb {row.micro_batch} tp {row.tensor_parallel} "
                f"pp {row.pipeline_parallel} sp {row.sequence_parallel:d} "
                f"{row.seconds or 'OOM':>8} {found.seconds:8.1f} {ratio} "
                f"{found.fullest / 2**30:6.1f} GiB"
            )
    result = bars(configurations, predicted, USABLE * gpu.memory)
    print(f"pairs over 2 %: {result.over_2}; over 10 %: {result.over_10}")
    print(f"microbatch alone: {result.micro_batch}")
    print("regret:", {group: f"{share:.1%}" for group, share in result.regret.items()})
    print(f"ran, predicted to fit: {result.fits}; predicted best ran: {result.best_ran}")
    in_plan = {row: replace(found, fullest=found.in_plan) for row, found in predicted.items()}
    bound = bars(configurations, in_plan, gpus.USABLE * gpu.memory)
    ran = sum(bound.best_ran.values())
    print(f"by plan's bound: {bound.fits}; predicted best ran in {ran} of {len(bound.best_ran)}")
    print("predicted over measured by TP:", {k: round(v, 3) for k, v in result.ratios.items()})


if __name__ == "__main__":
    main()
