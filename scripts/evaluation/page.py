"""The evaluation in words: the table of docs/estimated-costs.md, with the bars below it. A test
compares it with the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ext.planner.spread import SPREADS, ComparisonKind
from scripts.evaluation.bars import BARS
from scripts.evaluation.spreads import spread_of
from scripts.evaluation.tables import FigureLine
from scripts.tables import table, with_part

PART = "evaluation"
PAGE = Path(__file__).parents[2] / "docs" / "estimated-costs.md"
_HEADINGS = ("compared", "", "rows", "in view", "median", "10 % to 90 %", "right")


def text_of(lines: Sequence[FigureLine], errors: Mapping[ComparisonKind, Sequence[float]]) -> str:
    """Return the tables and the bars of the evaluation as they stand on the page."""
    return "\n".join(
        [
            table(_HEADINGS, map(_cells, _with_kinds_once(lines))),
            _SPREADS,
            table(
                ("steps that differ in", "pairs", "spread", "90 % are off by at most"),
                [
                    (kind, len(all_), f"{SPREADS[kind].share:.1%}", f"{spread_of(all_):.1%}")
                    for kind, all_ in errors.items()
                    if all_
                ],
            ),
            _BARS,
            "".join(f"- {bar.verdict(lines)}\n" for bar in BARS),
        ]
    )


_SPREADS = """<a id="spread"></a>

The **spread** of a kind of comparison is how far predicted ratios of two steps are
off the measured ones. `plan` says of a gain within its spread that it may be none.
A divided vocabulary and the overlap have the spreads from before constants were taken from
these rows or from stage times of the same trainings, and the schedule that from before
zb-h2's rows were found to be ZB-2p's, until others are measured.
"""
_BARS = """The bars, each with the figures that it judges. At night a test runs all this and
fails if a bar is missed that is not open, or an open one is met.
"""


def write(text: str) -> None:
    """Write ``text``, the tables of the evaluation, into the page."""
    PAGE.write_text(with_part(PAGE.read_text(), PART, text))


def _with_kinds_once(lines: Sequence[FigureLine]) -> list[tuple[str, FigureLine]]:
    """Return each line with its kind, or with "" if the line before has the same kind."""
    first = {line.kind: index for index, line in reversed(list(enumerate(lines)))}
    return [
        (line.kind if first[line.kind] == index else "", line) for index, line in enumerate(lines)
    ]


def _cells(named: tuple[str, FigureLine]) -> list[object]:
    kind, line = named
    spread = line.spread
    middle = ["" if line.is_estimated else "no estimate", ""]
    if spread is not None:
        middle = [f"{spread.median:.2f}", _range(line)]
    order = "" if line.order is None else f"{line.order[0]} of {line.order[1]}"
    return [kind, line.name, line.rows, line.in_view or "none", *middle, order]


def _range(line: FigureLine) -> str:
    assert line.spread is not None
    return "" if line.rows == 1 else f"{line.spread.p10:.2f} to {line.spread.p90:.2f}"
