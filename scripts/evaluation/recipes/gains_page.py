"""Tables on what layouts and schedules would gain. Medians by the number of microbatches stand in
docs/recipes.md, and a row for each recipe in its CSV file."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from scripts.evaluation.recipes.counting import Row
from scripts.evaluation.recipes.gains import Gains, Option
from scripts.evaluation.recipes.prospects import Prospect
from scripts.tables import table

_CLASSES = (
    ("m <= 2p", 0, 2),
    ("2p < m <= 8p", 2, 8),
    ("m > 8p", 8, float("inf")),
)
_LEVELS = (1.03, 1.1, 1.3)
_COLUMNS = (
    *("recipe", "ranks", "microbatches", "own line", "seconds", "GiB"),
    *("stock's best", "stock's gain", "stock's GiB"),
    *("best of all", "gain of all", "GiB of all"),
)


def gains_section(prospects: Sequence[Prospect]) -> str:
    """Return the table of gains, followed by a sentence on the recipes that are not planned."""
    planned = [prospect for prospect in prospects if isinstance(prospect.gains, Gains)]
    return f"{_summary(planned)}\n{_without(prospects)}"


def _summary(planned: Sequence[Prospect]) -> str:
    """Return the table of gains of distinct configurations, by microbatches per rank."""
    distinct = {prospect.configuration: prospect.gains for prospect in planned}
    lines = []
    for words, above, up_to in (*_CLASSES, ("all", 0, float("inf"))):
        those = [
            gains
            for configuration, gains in distinct.items()
            if configuration is not None
            and isinstance(gains, Gains)
            and above < configuration.microbatches / configuration.ranks <= up_to
        ]
        if those:
            stock, ours = ([getattr(g, kind).gain for g in those] for kind in ("stock", "ours"))
            counts = [sum(gain >= level for gain in ours) for level in _LEVELS]
            lines.append([words, len(those), _spread(stock), _spread(ours), *counts])
    headings = [
        "distinct configurations",
        "",
        "stock's best, median [largest]",
        "best of all, median [largest]",
        *(f">= {level}" for level in _LEVELS),
    ]
    return table(headings, lines)


def _spread(gains: Sequence[float]) -> str:
    return f"{median(gains):.3f} [{max(gains):.2f}]"


def gains_table(prospects: Sequence[Prospect], made: Iterable[Row]) -> str:
    """Return what each recipe would gain, as CSV, with the largest gain first."""
    rows = {row.name: row for row in made}
    planned = [prospect for prospect in prospects if isinstance(prospect.gains, Gains)]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_COLUMNS)
    for prospect in sorted(planned, key=_by_gain):
        gains, configuration = prospect.gains, prospect.configuration
        assert isinstance(gains, Gains) and configuration is not None
        baseline = gains.baseline
        lines.writerow(
            [
                prospect.recipe.short_name,
                configuration.ranks,
                configuration.microbatches,
                baseline.schedule,
                f"{baseline.seconds:.3g}",
                _gib(baseline),
                *_cells(gains.stock, gains.baseline),
                *_cells(gains.ours, gains.stock, _barred(gains.ours, rows[prospect.recipe.name])),
            ]
        )
    return text.getvalue()


def _by_gain(prospect: Prospect) -> tuple[float, str]:
    assert isinstance(prospect.gains, Gains)
    return -round(prospect.gains.ours.gain, 3), prospect.recipe.name


def _cells(option: Option, before: Option, barred: str = "") -> list[str]:
    """Return the three table cells on the gain of ``option``. They are empty if its step takes as
    long as that of ``before``."""
    if option.seconds == before.seconds:
        return ["", "", ""]
    name = option.schedule
    if option.vocabulary != "naive":
        name += f", vocabulary {option.vocabulary}"
    if option.recompute:
        name += f", recompute: {option.recompute}"
    gain = f"{option.gain:.3f}" + "*" * option.is_tight
    return [name + barred, gain, _gib(option)]


def _barred(option: Option, row: Row) -> str:
    """Return in words which settings to drop for ``option``; "" for Megatron's schedules."""
    is_stock = option.schedule.partition(":")[0] in ("1f1b", "interleaved")
    if is_stock or row.on_stages is None or row.on_stages.why is None:
        return ""
    named = re.search(r"does not go with (\w+)=", row.on_stages.why)
    without = row.on_stages.without or ((named[1],) if named else ())
    return f" (without {', '.join(without)})" if without else " (refused)"


def _gib(option: Option) -> str:
    return f"{option.fullest / 2**30:.1f}"


def _without(prospects: Sequence[Prospect]) -> str:
    whys = Counter(p.gains.partition(";")[0] for p in prospects if isinstance(p.gains, str))
    if not whys:
        return "Every recipe is planned."
    why, number = whys.most_common(1)[0]
    return f"{whys.total()} recipes are not planned; the most frequent reason ({number}): {why}."
