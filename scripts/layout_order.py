"""Figures of merit of the estimate: does it put measured configurations in the right order?

layouts/a100.csv has step times of Llama models on A100s over tensor and pipeline parallelism,
microbatch and sequence parallelism (Hagemann et al. 2023, arXiv:2311.05610). Each configuration is
estimated and compared with every other one of its set. It fits if it takes no more than
`free_memory` allows, by which `plan` and `doctor` judge too.

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
from math import ceil, inf
from pathlib import Path

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model import reductions, stage_seconds
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.gpus import GPUS, Gpu, free_memory
from megatron_ext.cost_model.messages import collectives
from megatron_ext.cost_model.messages.blocking import with_blocking_messages
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks, least_lasting
from megatron_ext.cost_model.rates import Rates
from megatron_ext.planner.layouts.layout import evenly
from megatron_ext.planner.outside_passes import seconds_outside_passes
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import Problem, VocabularyParallel

MEASURED = Path(__file__).parent / "layouts" / "a100.csv"
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
    full_recompute: bool = False

    @property
    def data_parallel(self) -> int:
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on a rank; the last one may have fewer samples."""
        return ceil(self.global_batch / (self.data_parallel * self.micro_batch))

    def __str__(self) -> str:
        return (
            f"{self.group:20} mb {self.micro_batch} tp {self.tensor_parallel} "
            f"pp {self.pipeline_parallel} sp {self.sequence_parallel:d}"
        )


@dataclass(frozen=True)
class Prediction:
    """Prediction for a step.

    Attributes:
        fullest: bytes of the fullest rank, without its allocator's reserve.
        allowed: bytes that it may take so.
    """

    seconds: float
    fullest: float
    allowed: float

    @property
    def fits(self) -> bool:
        return self.fullest <= self.allowed


_COLUMNS = (
    *("set", "model", "sequence", "global_batch", "gpus", "micro_batch", "tp", "pp"),
    *("full_recompute", "sequence_parallel", "seconds_per_step"),
)


def read(path: Path) -> list[Configuration]:
    """Return the rows of ``path``, the best of those that are the same configuration.

    Raises:
        ValueError: a column is missing, or a row is not understood.
    """
    best: dict[Configuration, Configuration] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path} has no column {', '.join(missing)}: write {','.join(_COLUMNS)} as its "
                f"first line"
            )
        for row in reader:
            try:
                found = _configuration(row)
            except ValueError as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
            same = replace(found, seconds=None)
            known = best.get(same)
            if known is None or (found.seconds or inf) < (known.seconds or inf):
                best[same] = found
    if not best:
        raise ValueError(f"{path} has no row below its first line")
    return list(best.values())


def _configuration(row: Mapping[str, str | None]) -> Configuration:
    """Return the configuration of ``row``. Raises ValueError if it is not understood."""

    def number(name: str, least: int = 1, most: int = 10**9) -> int:
        text = (row[name] or "").strip()
        if not (text.isdecimal() and least <= int(text) <= most):
            raise ValueError(f"{name} is {text!r}: write a whole number from {least} to {most}")
        return int(text)

    def is_on(name: str) -> bool:
        return number(name, 0, 1) == 1

    seconds, text = None, (row["seconds_per_step"] or "").strip()
    if text != "OOM":
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < inf:
            raise ValueError(f"seconds_per_step is {text!r}: write seconds, or OOM")
    found = Configuration(
        (row["set"] or "").strip(),
        (row["model"] or "").strip(),
        sequence=number("sequence"),
        global_batch=number("global_batch"),
        gpus=number("gpus"),
        micro_batch=number("micro_batch"),
        tensor_parallel=number("tp"),
        pipeline_parallel=number("pp"),
        sequence_parallel=is_on("sequence_parallel"),
        seconds=seconds,
        full_recompute=is_on("full_recompute"),
    )
    if found.model not in _LLAMA:
        raise ValueError(f"model is {found.model!r}: write one of {', '.join(_LLAMA)}")
    layers, *_ = _LLAMA[found.model]
    tensor, pipeline = found.tensor_parallel, found.pipeline_parallel
    if found.gpus % (tensor * pipeline):
        raise ValueError(f"{found.gpus} GPUs do not divide into tp {tensor} x pp {pipeline}")
    if pipeline > layers:
        raise ValueError(f"pp is {pipeline}, and {found.model} has {layers} layers")
    return found


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
        recompute=configuration.full_recompute,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_span=configuration.gpus,
        framework=Framework.PYTORCH,
    )


def predict(configuration: Configuration, gpu: Gpu, rates: Rates) -> Prediction:
    """Estimate a step of ``configuration`` under 1F1B, at ``rates`` of ``gpu``."""
    assert gpu.memory is not None
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
    placement = line(pipeline)
    on_ranks = bytes_of_ranks(model, stages, execution, placement, VocabularyParallel.NONE, state)
    beside = max(
        seconds_outside_passes(on_rank, state=state, execution=execution, rates=rates)
        for on_rank in on_ranks
    )
    seconds, held = _passes(costs, placement, configuration.microbatches)
    fullest = max(own.total + kept for own, kept in zip(on_ranks, held, strict=True))
    allowed = free_memory(gpu.memory, lasting=least_lasting(on_ranks)).allocated
    return Prediction(seconds + beside, fullest, allowed)


def _passes(costs: Costs, placement: Placement, microbatches: int) -> tuple[float, list[float]]:
    """Return the seconds of the passes of a step, whose messages nothing hides, and the bytes that
    each rank holds at its peak. A long step is extrapolated from two shorter ones."""
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
        failed_fit: configurations that ran out of memory, and are predicted to fit.
        best_ran: by set, whether the predicted best of those predicted to fit ran.
        ratios: predicted over measured seconds, by tensor-parallel ranks.
    """

    over_2: Order
    over_10: Order
    micro_batch: Order
    regret: Mapping[str, float]
    fits: Order
    failed_fit: Order
    best_ran: Mapping[str, bool]
    ratios: Mapping[int, float]


def bars(
    configurations: Sequence[Configuration], predicted: Mapping[Configuration, Prediction]
) -> Bars:
    """Return the figures of merit. In a set in which nothing ran there is nothing to choose."""
    over_2, over_10, micro = Order(), Order(), Order()
    regret: dict[str, float] = {}
    best_ran: dict[str, bool] = {}
    fits, failed_fit = Order(), Order()
    by_ranks: dict[int, list[float]] = defaultdict(list)
    for group, rows in grouped(configurations, lambda c: c.group).items():
        ran = [row for row in rows if row.seconds is not None]
        fitting = [row for row in rows if predicted[row].fits]
        fits += Order(sum(row in fitting for row in ran), len(ran))
        failed_fit += Order(sum(row not in ran for row in fitting), len(rows) - len(ran))
        if not ran:
            continue
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
        best = min(fitting, key=lambda row: predicted[row].seconds, default=None)
        best_ran[group] = best is not None and best.seconds is not None
        for row in ran:
            by_ranks[row.tensor_parallel].append(predicted[row].seconds / (row.seconds or 1))
    ratios = {ranks: sum(found) / len(found) for ranks, found in sorted(by_ranks.items())}
    return Bars(over_2, over_10, micro, regret, fits, failed_fit, best_ran, ratios)


def grouped(
    rows: Iterable[Configuration], key: Callable[[Configuration], str]
) -> dict[str, list[Configuration]]:
    groups: dict[str, list[Configuration]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _differ_by_micro_batch(a: Configuration, b: Configuration) -> bool:
    def others(row: Configuration) -> Configuration:
        return replace(row, micro_batch=1, seconds=None)

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
MEASURED_RATE = "linear"  # of matrix products: others measured it (cost_model/gpus.toml)


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
    _forget_layers()
    try:
        yield replace(rates, **changed)
    finally:
        for name, constant in before.items():
            setattr(_CONSTANTS[name], name, constant)
        _forget_layers()


def _forget_layers() -> None:
    """Clear the seconds of layers, which are cached by rates and not by constants of modules."""
    stage_seconds.seconds_of_layers.cache_clear()
    stage_seconds._of_layer.cache_clear()


def _print_perturbed(configurations: Sequence[Configuration], gpu: Gpu) -> None:
    """Print the figures with each constant 20 % off, and with all of them in drawn directions."""
    names = (*_RATES, *_CONSTANTS)
    cases = {f"{name} | {factor}": {name: factor} for name in names for factor in (0.8, 1.2)}
    rng = random.Random(0)
    for number in range(DRAWS):
        drawn = {name: rng.choice((0.8, 1.2)) for name in names}
        cases[f"all, draw {number} | 0.8 or 1.2"] = drawn
        cases[f"all but {MEASURED_RATE}, draw {number} | 0.8 or 1.2"] = {
            name: factor for name, factor in drawn.items() if name != MEASURED_RATE
        }
    print("| constant | times | pairs over 2 % | over 10 % | microbatch alone | regret <= 5 % |")
    print("| - | - | - | - | - | - |")
    for case, factors in cases.items():
        with perturbed(factors, gpu.rates()) as changed:
            predicted = {row: predict(row, gpu, changed) for row in configurations}
        found = bars(configurations, predicted)
        small = sum(share <= 0.05 for share in found.regret.values())
        print(
            f"| {case} | {found.over_2.share:.1%} | {found.over_10.share:.1%} "
            f"| {found.micro_batch.right} of {found.micro_batch.all} "
            f"| {small} of {len(found.regret)} |",
            flush=True,
        )


def _row_text(row: Configuration, found: Prediction) -> str:
    ratio = f"{found.seconds / row.seconds:.2f}" if row.seconds else "   -"
    return (
        f"{row} {row.seconds or 'OOM':>8} {found.seconds:8.1f} {ratio} "
        f"{found.fullest / 2**30:6.1f} of {found.allowed / 2**30:.1f} GiB"
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
    try:
        configurations = read(options.csv)
    except (OSError, ValueError) as error:
        parser.error(f"--csv: {error}")
    if options.perturb:
        _print_perturbed(configurations, gpu)
        return
    rates = gpu.rates()
    predicted = {row: predict(row, gpu, rates) for row in configurations}
    if options.rows:
        for row in configurations:
            print(_row_text(row, predicted[row]))
    result = bars(configurations, predicted)
    print(f"pairs over 2 %: {result.over_2}; over 10 %: {result.over_10}")
    print(f"microbatch alone: {result.micro_batch}")
    print("regret:", {group: f"{share:.1%}" for group, share in result.regret.items()})
    print(f"ran, predicted to fit: {result.fits}; predicted best ran: {result.best_ran}")
    print(f"ran out of memory, predicted to fit: {result.failed_fit}")
    for row in configurations:
        if predicted[row].fits != (row.seconds is not None):
            print(f"  {_row_text(row, predicted[row])}")
    print("predicted over measured by TP:", {k: round(v, 3) for k, v in result.ratios.items()})


if __name__ == "__main__":
    main()
