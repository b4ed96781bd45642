"""The section of docs/recipes.md on what layouts and schedules would gain."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from scripts.recipes.counting import Row
from scripts.recipes.gains import Gains, Option
from scripts.recipes.prospects import Prospect
from scripts.recipes.tables import name_of
from scripts.tables import table

_HEAD = """## What a plan would gain

The tables compare the step time of each recipe's own command with the best of stock's schedules,
with any layout, number of virtual stages or recompute, and with the best of all schedules.
A gain of 1.08 means that a step of the recipe's own command takes 1.08 times as long as the better
one. All of this is estimated, nothing measured:

- Seconds and bytes are those of [estimated costs](estimated-costs.md): from the model's dimensions
  and the GPU's data sheet. Every step includes the optimizer and the part of the gradients'
  reduction that no pass hides. A gain may be none if it is within the
  [spread](estimated-costs.md#spread) of its kind of comparison.
- One memory bound holds for all: the larger of what a rank [may take](estimated-costs.md#memory),
  and what the fullest rank of the recipe's own command takes. A gain that is gone with 2 GiB less
  has an asterisk.
- For a schedule that searches, the one used instead of a search is counted; a search may gain more.
  The vocabulary is divided if that is faster. Megatron's recompute is the best of nothing,
  modules, and all layers.
- The overlap of experts' communication with other microbatches ([pairs](pairs.md)) is counted for
  no schedule.
- A [vision tower](uneven-stages.md#towers) counts with as many patches as the language model has
  tokens. Passes of adapters and of frozen models are counted without weight gradients.

`megatron-ext plan -- COMMAND` says which [layout to write](planning.md#line); with `--json` this
script writes the layers of each stage.
"""

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


TABLE = "recipe-gains.csv"  # next to the page


def gains_section(prospects: Sequence[Prospect]) -> str:
    """Return the text of it; "" if nothing was planned."""
    planned = [prospect for prospect in prospects if isinstance(prospect.gains, Gains)]
    if not planned:
        return ""
    parts = [
        _HEAD,
        _summary(planned),
        f"[{TABLE}]({TABLE}) has each recipe: seconds, and GiB of the fullest rank.\n",
        _without(prospects),
    ]
    return "\n".join(parts)


def _summary(planned: Sequence[Prospect]) -> str:
    """Return the table of gains of distinct configurations, by microbatches a rank."""
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
    head = [
        "distinct configurations",
        "",
        "stock's best, median [largest]",
        "best of all, median [largest]",
        *(f">= {level}" for level in _LEVELS),
    ]
    return table(head, lines)


def _spread(gains: Sequence[float]) -> str:
    return f"{median(gains):.3f} [{max(gains):.2f}]"


def gains_table(prospects: Sequence[Prospect], made: Iterable[Row]) -> str:
    """Return what each recipe would gain, as CSV, the largest gain first."""
    rows = {row.name: row for row in made}
    planned = [prospect for prospect in prospects if isinstance(prospect.gains, Gains)]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_COLUMNS)
    for prospect in sorted(planned, key=_by_gain):
        gains, configuration = prospect.gains, prospect.configuration
        assert isinstance(gains, Gains) and configuration is not None
        own = gains.own
        lines.writerow(
            [
                name_of(prospect.recipe.name),
                configuration.ranks,
                configuration.microbatches,
                own.schedule,
                f"{own.seconds:.3g}",
                _gib(own),
                *_cells(gains.stock, gains.own),
                *_cells(gains.ours, gains.stock, _barred(gains.ours, rows[prospect.recipe.name])),
            ]
        )
    return text.getvalue()


def _by_gain(prospect: Prospect) -> tuple[float, str]:
    assert isinstance(prospect.gains, Gains)
    return -round(prospect.gains.ours.gain, 3), prospect.recipe.name


def _cells(option: Option, before: Option, barred: str = "") -> list[str]:
    """Return the three cells of a gain; empty ones if it equals the one ``before``."""
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
    """Return the settings to drop for ``option``, in words; empty for stock's schedules."""
    is_stock = option.schedule.partition(":")[0] in ("1f1b", "interleaved")
    if is_stock or row.own is None or row.own.verdict.why is None:
        return ""
    named = re.search(r"does not go with (\w+)=", row.own.verdict.why)
    without = row.own.verdict.without or ((named[1],) if named else ())
    return f" (without {', '.join(without)})" if without else " (refused)"


def _gib(option: Option) -> str:
    return f"{option.fullest / 2**30:.1f}"


def _without(prospects: Sequence[Prospect]) -> str:
    whys = Counter(p.gains.partition(";")[0] for p in prospects if isinstance(p.gains, str))
    if not whys:
        return "Every recipe is planned.\n"
    why, number = whys.most_common(1)[0]
    return f"{whys.total()} recipes are not planned; the most frequent reason ({number}): {why}.\n"
