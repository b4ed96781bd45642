"""A page of timelines as one HTML file, which needs no network.

The page's data are in the file as JSON. Each property of the boxes is a column: a list with a
number for each box, or a single number if all boxes have the same.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_ext.base.text_file import write_text_file
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.viz.draw import COLOURS
from megatron_ext.viz.page.boxes import OMITTED
from megatron_ext.viz.page.run import MOST_PASSES, REDUCTION, Run, cut_to_fit

SUFFIX = ".html"
BROWSER = Path(__file__).with_name("browser")
SECONDS = "s"
# Files that together are one JavaScript module, in this order.
SCRIPTS = ("data.js", "view.js", "passes.js", "memory.js", "frame.js", "point.js", "start.js")
_DIGITS = 7  # digits to which the longest time is written
_OTHERS = "#999999"


@dataclass(frozen=True)
class Page:
    """HTML page with the timelines (runs) of one or several schedules.

    Attributes:
        title: title of the page.
        runs: one under the other, on one axis. The others are compared with the first.
        command: the command that made the page, so that it can be repeated.
        unit: unit of all times: `SECONDS`, or "" for the unit of the costs.
        open_at_first: number of runs that are open at first; None: all.
        most_passes: number of passes to which all runs together are cut.
    """

    title: str
    runs: tuple[Run, ...]
    command: str
    unit: str = ""
    open_at_first: int | None = None
    most_passes: int = MOST_PASSES


def check_page(path: Path) -> None:
    """Raise ValueError if no page can be written to ``path``, before work is done for the page."""
    if path.suffix != SUFFIX:
        raise ValueError(f"{path}: a page of timelines is written as {SUFFIX}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


def write_page(page: Page, path: Path) -> None:
    """Write ``page`` as an HTML file, cut if it would be too large for a browser (`cut_to_fit`).

    Raises:
        ValueError: as `check_page`.
        OSError: the file cannot be written.
    """
    check_page(path)
    write_text_file(path, text_of(page))


def text_of(page: Page) -> str:
    """Return the HTML of ``page``."""
    text = _file_text("page.html")
    script = "\n".join(map(_file_text, SCRIPTS))
    data = json.dumps(data_of(page), separators=(",", ":")).replace("<", "\\u003c")
    for name, content in {
        "title": html.escape(page.title),
        "style": _file_text("page.css"),
        "script": script,
        # This replacement is the last, so that users' names with {{...}} in them are not replaced.
        "data": data,
    }.items():
        text = text.replace(f"{{{{{name}}}}}", content)
    return text


def _file_text(name: str) -> str:
    """Return the text of one of the page's own script or style files."""
    return (BROWSER / name).read_text(encoding="utf-8")


def data_of(page: Page) -> dict[str, Any]:
    """Return the data of ``page`` as JSON values, in the form that browser/data.js reads."""
    runs = cut_to_fit(page.runs, page.most_passes)
    groups = {box.kind: box.track.group.value for run in runs for box in run.boxes}
    kinds = {
        name: look | {"group": groups[name]} for name, look in _looks().items() if name in groups
    }
    longest = max(run.length for run in runs)
    decimals = _DIGITS - math.ceil(math.log10(longest))
    return {
        "title": page.title,
        "command": page.command,
        "unit": page.unit,
        "open_at_first": len(runs) if page.open_at_first is None else page.open_at_first,
        "kinds": list(kinds.values()),
        "runs": [_run(run, list(kinds), decimals) for run in runs],
    }


def _looks() -> Mapping[str, dict[str, Any]]:
    """Return, by kind of box on a page, its name, what it does in words, its legend and its colour.

    The last value tells whether the box is a mark.
    """
    looks = {}
    for kind, rule in RULES.items():
        # A message or a copy has the colour of the pass that it belongs to.
        _, _, of = kind.rpartition("_")
        colour = COLOURS.get(Kind(of), _OTHERS) if of in set(Kind) else _OTHERS
        does = rule.label if rule.marker else rule.does
        looks[kind.value] = _look(
            kind.value, does, f"{kind}  {does}", colour, is_mark=bool(rule.marker)
        )
    for name, does, colour in (
        (REDUCTION, "reduction of a stage's gradients", COLOURS[Kind.BACKWARD_WEIGHT]),
        (OMITTED, "passes that are omitted", "#BBBBBB"),
    ):
        looks[name] = _look(name, does, does, colour)
    return looks


def _look(
    name: str, does: str, legend: str, colour: str, *, is_mark: bool = False
) -> dict[str, Any]:
    return {"name": name, "does": does, "legend": legend, "colour": colour, "is_mark": is_mark}


def _run(run: Run, kinds: Sequence[str], decimals: int) -> dict[str, Any]:
    def time(seconds: float) -> float:
        return _shorter(round(seconds, decimals))

    boxes = run.boxes
    limit = run.limit
    return {
        "title": run.title,
        "remarks": run.remarks,
        "ranks": run.ranks,
        "chunks": run.chunk_of,
        "length": time(run.length),
        "figures": asdict(run.figures),
        "limit": None if limit is None else {**asdict(limit), "text": str(limit)},
        "tracks": [
            {
                "rank": track.rank,
                "group": track.group.value,
                "title": track.title,
                "boxes": len(list(on_it)),
            }
            for track, on_it in groupby(boxes, lambda box: box.track)
        ],
        "kind": [kinds.index(box.kind) for box in boxes],
        "stage": [box.stage for box in boxes],
        "microbatch": [box.microbatch for box in boxes],
        "slice": _column(box.slice for box in boxes),
        "half": _column(box.half for box in boxes),
        "step": _column(box.step for box in boxes),
        "stands_for": _column(box.passes for box in boxes),
        "start": [time(box.start) for box in boxes],
        "end": [time(box.end) for box in boxes],
        "cost": [time(box.cost) for box in boxes],
        "needs": [box.needs for box in boxes],
        "held": _column(_rounded(box.held) for box in boxes),
        "held_bytes": _column(_as_int(box.held_bytes) for box in boxes),
        "critical": run.critical,
    }


def _column(figures: Iterable[float | None]) -> Any:
    """Return a column of the page's data as a list, or as a single number if all are equal."""
    column = list(figures)
    return column[0] if len(set(column)) == 1 else column


def _rounded(amount: float | None) -> float | None:
    return None if amount is None else _shorter(round(amount, 4))


def _as_int(amount: float | None) -> int | None:
    return None if amount is None else round(amount)


def _shorter(number: float) -> float:
    """Return ``number`` as an integer if it is whole, since JSON then has no ``.0``."""
    return int(number) if number == int(number) else number
