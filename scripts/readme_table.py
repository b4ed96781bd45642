"""The table of README.md, with computed numbers.

    python -m scripts.readme_table          writes it

Each row compares the best that Megatron's own schedules do with the best of ours, on one basis, and
says its costs if they are not those above the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from megatron_ext.compile.report import ScheduleReport
from megatron_ext.planner.layouts.comparison import compare_layouts
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Evaluated
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.slices import Lengths, Slices
from scripts import tables
from scripts.benchmarks.unequal import over_another
from scripts.benchmarks.uneven import V, with_tower
from scripts.evaluation.recipes.readme import README
from scripts.simulated_steps import USUAL_COSTS, simulated_step
from scripts.tables import part, table, with_part

_HEADINGS = ("where", "Megatron's best schedule", "with ours", "shown by")
_OURS = "interleaved-zb"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: name of the row in this module and its tests.
        where: the case, with its costs.
        page: page below docs/ that shows the numbers.
        figures: makes the cell for Megatron's best schedule and the cell for ours.
        is_slow: whether this takes more than some seconds.
    """

    name: str
    where: str
    page: str
    figures: Callable[[], tuple[str, str]]
    is_slow: bool = False

    def cells(self) -> tuple[str, str, str, str]:
        stock, ours = self.figures()
        return self.where, stock, ours, f"[simulation](docs/{self.page})"


def _text(made: ScheduleReport, name: str = "") -> str:
    """Return in words the makespan and the peak of a step, and the schedule's ``name``."""
    named = f" ({name})" if name else ""
    return f"{made.makespan:.4g}, peak {made.peak:.2g}{named}"


def _few() -> tuple[str, str]:
    stock, ours = (
        simulated_step(f"{spec}:vpp=4", USUAL_COSTS, 8, 8) for spec in ("interleaved", _OURS)
    )
    return _text(stock, "`interleaved`"), _text(ours, f"`{_OURS}`")


def _half_memory(ranks: int, microbatches: int) -> tuple[str, str]:
    stock = simulated_step("1f1b", USUAL_COSTS, ranks, microbatches)
    ours = simulated_step("v-auto", USUAL_COSTS, ranks, microbatches, limit="0.5x")
    return _text(stock, "1F1B"), _text(ours, "`v-auto`")


def _slices() -> tuple[str, str]:
    costs = f"{USUAL_COSTS},attention=0.3,latency=0.02"
    cut = ScheduleOptions(slices=Slices(4, Lengths.BALANCED))
    stock, ours = (
        simulated_step("interleaved:vpp=4", costs, 8, 8),
        simulated_step("zb-v", costs, 8, 8, cut),
    )
    return _text(stock, "`interleaved`, four stages a rank"), _text(ours, "`zb-v`")


def _in_pairs() -> tuple[str, str]:
    costs, pairs = "f=10,i=12,w=8,comm=0.2,overlap_saving=5", ScheduleOptions(pairs=True)
    stock, ours = (
        simulated_step(f"{spec}:vpp=4", costs, 8, 32, pairs) for spec in ("interleaved", _OURS)
    )
    return _text(stock, "`interleaved`"), _text(ours, f"`{_OURS}`")


def vocabulary_steps() -> tuple[Evaluated, ScheduleReport]:
    """Return the shortest step of Megatron's schedules with any layout, and a step of one of ours.

    The output layer takes as long as two stages. Our schedule has the vocabulary sharded over all
    ranks.
    """
    text = f"{USUAL_COSTS},output_layer=20/24/16"
    work = given_work(parse_costs(text, line(8)), 31, ranks=8, microbatches=32)

    def rule(stages: int) -> Layout:  # --account-for-loss-in-pipeline-split
        if 32 % stages:
            raise ValueError(f"31 layers and the loss cannot be split evenly over {stages} stages")
        return Layout((*[32 // stages] * (stages - 1), 32 // stages - 1))

    made = compare_layouts([work], ("1f1b", rule(8)), rule, search=False)
    divided = ScheduleOptions(vocab_parallel=VocabularyParallel.TWO)
    return made.stock, simulated_step("zb-v", text, 8, 32, divided)


def _vocabulary() -> tuple[str, str]:
    stock, ours = vocabulary_steps()
    return f"{stock.seconds:.4g} (`{stock.schedule}`, layers moved)", (
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
# Rows of schedules that were trained, not simulated.
TRAINED = (
    (
        "losses, parameters, optimizer states, on the CPU with gloo",
        "stock Megatron, from the same checkpoint",
        "bitwise equal",
        "[tests](docs/compatibility.md)",
    ),
    (
        "losses on one GPU, two ranks over NCCL, in BF16 and FP8 too",
        "stock Megatron on one rank",
        "bitwise equal; peaks within 5.4 % of the prediction",
        "[on an H200](docs/measurements.md#on-one-gpu)",
    ),
    (
        "on several GPUs",
        "",
        "nothing yet",
        "`scripts/gpu_tests.sh` [will show it](docs/measurements.md#tests-on-gpus)",
    ),
)


def rows_of(readme: str) -> Mapping[str, str]:
    """Return the rows of the table in the text ``readme``, by their first cell."""
    lines = re.findall(r"^\| .* \|$", part(readme, "table"), re.M)
    return {text.split(" | ")[0].removeprefix("| "): text for text in lines}


def line_of(row: Row) -> str:
    """Return ``row`` as a line of the table."""
    return tables.row(row.cells()).strip()


def main() -> None:
    made = table(_HEADINGS, [*(row.cells() for row in ROWS), *TRAINED])
    README.write_text(with_part(README.read_text(), "table", made))


if __name__ == "__main__":
    main()
