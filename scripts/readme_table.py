"""The table of README.md, with computed figures.

    python -m scripts.readme_table          writes it

Each row compares the best that Megatron's own schedules do with the best of ours, on one basis, and
says its costs if they are not those above the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from megatron_ext.compile.registry import choose
from megatron_ext.compile.report import report
from megatron_ext.planner.layouts.comparison import compare_layouts
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.slices import Lengths, Slices
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR
from scripts import tables
from scripts.benchmarks.unequal import over_another
from scripts.benchmarks.uneven import V, with_tower
from scripts.evaluation.recipes.readme import README
from scripts.tables import part, table, with_part

_HEADINGS = ("where", "Megatron's best schedule", "with ours", "shown by")
_COSTS = "f=10,i=12,w=8,comm=1"
_OURS = "interleaved-zb"
_PLAIN = ScheduleOptions()


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: what it is called here.
        where: the case, with its costs.
        page: where the figures are shown, below docs/.
        figures: makes the cells for Megatron's best schedule and for ours.
        is_slow: whether that takes more than some seconds.
    """

    name: str
    where: str
    page: str
    figures: Callable[[], tuple[str, str]]
    is_slow: bool = False

    def cells(self) -> tuple[str, str, str, str]:
        stock, ours = self.figures()
        return self.where, stock, ours, f"[simulation](docs/{self.page})"


@dataclass(frozen=True)
class Step:
    """A simulated step: its makespan, and its peak in microbatches of a rank."""

    makespan: float
    peak: float

    def text(self, name: str = "") -> str:
        named = f" ({name})" if name else ""
        return f"{self.makespan:.4g}, peak {self.peak:.2g}{named}"


def _step(
    spec: str,
    costs: str,
    ranks: int,
    microbatches: int,
    options: ScheduleOptions = _PLAIN,
    limit: str = "",
) -> Step:
    """Return the step of ``spec`` at ``costs``, within a memory ``limit`` if one is given.

    Schedules that Megatron has itself run under its own executor.
    """
    resolved = choose(spec)
    placement = resolved.place(ranks)
    problem = Problem(
        placement,
        microbatches,
        parse_costs(costs, placement),
        parse_limit(limit, ranks, microbatches) if limit else None,
        options=options,
    )
    _, made = report(resolved, run_by_stock(problem, spec, STOCK_EXECUTOR))
    return Step(made.makespan, made.peak)


def _few() -> tuple[str, str]:
    stock, ours = (_step(f"{spec}:vpp=4", _COSTS, 8, 8) for spec in ("interleaved", _OURS))
    return stock.text(), ours.text(f"`{_OURS}`")


def _half_memory(ranks: int, microbatches: int) -> tuple[str, str]:
    stock = _step("1f1b", _COSTS, ranks, microbatches)
    ours = _step("v-auto", _COSTS, ranks, microbatches, limit="0.5x")
    return stock.text("1F1B"), ours.text("`v-auto`")


def _slices() -> tuple[str, str]:
    costs = f"{_COSTS},attention=0.3,latency=0.02"
    cut = ScheduleOptions(slices=Slices(4, Lengths.BALANCED))
    stock, ours = _step("interleaved:vpp=4", costs, 8, 8), _step("zb-v", costs, 8, 8, cut)
    return stock.text("four stages a rank"), ours.text("`zb-v`")


def _in_pairs() -> tuple[str, str]:
    costs, pairs = "f=10,i=12,w=8,comm=0.2,overlap_saving=5", ScheduleOptions(pairs=True)
    stock, ours = (_step(f"{spec}:vpp=4", costs, 8, 32, pairs) for spec in ("interleaved", _OURS))
    return stock.text(), ours.text(f"`{_OURS}`")


def _vocabulary() -> tuple[str, str]:
    text = f"{_COSTS},output_layer=20/24/16"
    work = given_work(parse_costs(text, line(8)), 31, ranks=8, microbatches=32)

    def rule(stages: int) -> Layout:  # --account-for-loss-in-pipeline-split
        if 32 % stages:
            raise ValueError(f"31 layers and the loss cannot be split evenly over {stages} stages")
        return Layout((*[32 // stages] * (stages - 1), 32 // stages - 1))

    made = compare_layouts([work], ("1f1b", rule(8)), rule, search=False)
    divided = ScheduleOptions(vocab_parallel=VocabularyParallel.TWO)
    ours = _step("zb-v", text, 8, 32, divided)
    return f"{made.stock.seconds:.4g} (`{made.stock.schedule}`, layers moved)", (
        f"{ours.makespan:.4g} (`zb-v`, divided)"
    )


def _unequal() -> tuple[str, str]:
    stock, ours = (over_another(spec, "1f1b", 8, 16, "long-128k") for spec in ("1f1b", "zb-h1"))
    return f"{stock[1]:.2f} (1F1B, ordered and dealt)", f"{ours[1]:.2f} (`zb-h1`, the same)"


def _tower() -> tuple[str, str]:
    stock, ours = (with_tower("trained", spec) for spec in ("1f1b", V))
    return f"{stock.laid_out:.2f} (1F1B, laid out)", f"{ours.laid_out:.2f} (`{V}`, laid out)"


ROWS = (
    Row(
        "few",
        "few microbatches, p = 8, m = 8, four stages a rank",
        "choosing-a-schedule.md#where-there-is-a-bubble",
        _few,
    ),
    Row(
        "half",
        "half of 1F1B's memory, p = 8, m = 32",
        "measurements.md#half-the-memory",
        partial(_half_memory, 8, 32),
        is_slow=True,
    ),
    Row(
        "half, p = 4",
        "the same, p = 4, m = 16",
        "measurements.md#half-the-memory",
        partial(_half_memory, 4, 16),
        is_slow=True,
    ),
    Row(
        "half, p = 2",
        "the same, p = 2, m = 8",
        "measurements.md#half-the-memory",
        partial(_half_memory, 2, 8),
        is_slow=True,
    ),
    Row(
        "slices",
        "long sequences, p = 8, m = 8, ours in four slices; attention 0.3 of a pass",
        "slices.md#before-a-training",
        _slices,
    ),
    Row(
        "pairs",
        "experts, passes in pairs, p = 8, m = 32, four stages a rank; message 0.2, a pair saves 5",
        "pairs.md#what-they-bring",
        _in_pairs,
    ),
    Row(
        "vocabulary",
        "large vocabulary, p = 8, m = 32, output layer of two stages",
        "vocabulary-parallelism.md#when-to-use-it",
        _vocabulary,
        is_slow=True,
    ),
    Row(
        "unequal",
        "microbatches that differ: packs of 128k tokens, attention in documents, p = 8, m = 16, "
        "four replicas; over 1F1B in order of arrival",
        "unequal-microbatches.md#what-it-gains",
        _unequal,
    ),
    Row(
        "tower",
        "vision tower of a tenth of the model on the first stage, p = 8, m = 16; over a step "
        "without bubble",
        "uneven-stages.md#towers",
        _tower,
        is_slow=True,
    ),
)
# Rows of what was trained, not simulated.
_TRAINED = (
    (
        "losses, parameters, optimizer states",
        "",
        "",
        "bitwise equal [on the CPU](docs/compatibility.md), with gloo",
    ),
    (
        "on one GPU, two ranks",
        "",
        "",
        "losses bitwise equal over NCCL, in BF16 and FP8 too, peaks within 5.4 % of predicted [on "
        "an H200](docs/measurements.md#on-one-gpu)",
    ),
    (
        "on several GPUs",
        "",
        "",
        "none yet: `scripts/gpu_tests.sh` [shows it](docs/measurements.md#tests-on-gpus)",
    ),
)


def rows_of(readme: str) -> Mapping[str, str]:
    """Return the rows of the table in ``readme`` by their first cell."""
    lines = re.findall(r"^\| .* \|$", part(readme, "table"), re.M)
    return {text.split(" | ")[0].removeprefix("| "): text for text in lines}


def line_of(row: Row) -> str:
    """Return ``row`` as the table has it."""
    return tables.row(row.cells()).strip()


def main() -> None:
    made = table(_HEADINGS, [*(row.cells() for row in ROWS), *_TRAINED])
    README.write_text(with_part(README.read_text(), "table", made))


if __name__ == "__main__":
    main()
