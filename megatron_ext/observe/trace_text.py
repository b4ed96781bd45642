"""Texts on a trace of Megatron's own step: for its log, and for `megatron-ext trace`.

The same findings go to two places, and should read alike in both: all rows and remarks are made
here, and the callers only print them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.base.words import counted
from megatron_ext.observe.trace_report import TraceReport
from megatron_ext.observe.what_if import SHARES, Prospect, WhatIf

_WORTH_SAYING = 0.005  # least difference that is mentioned, as a share of the makespan


def schedule_name(report: TraceReport) -> str:
    """Return the name of the traced schedule, preceded by "Megatron's own" if it is."""
    # plain words: the beginning of a phrase
    whose = "" if report.what_if is None else "Megatron's own "
    return f"{whose}{report.schedule}"


def summary(report: TraceReport, folder: Path) -> Iterator[str]:
    """Yield lines on traced steps of Megatron's own schedule, for the log of the training."""
    measured, assumed = report.measured, report.what_if
    assert assumed is not None
    yield (
        f"{schedule_name(report)} on {counted(report.pp, 'rank')}, "
        f"{counted(report.microbatches, 'microbatch')}: "
        f"{measured.bubble_share_makespan:.1%} of a step is bubble; a step takes "
        f"{milliseconds(measured.makespan)} (iteration {report.iteration}, the median of "
        f"{len(report.iterations)})"
    )
    shares = [
        f"{part} {seconds / measured.makespan:.1%}"
        for part, seconds in report.parts.items()
        if abs(seconds) > _WORTH_SAYING * measured.makespan
    ]
    yield f"where the step went: {', '.join(shares)}"
    for title, prospects in sections(assumed):
        yield title
        yield from _table(prospect_rows(prospects))
    yield from remarks(assumed)
    yield f"megatron-ext trace {folder} says more, and {folder}/trace.json is for ui.perfetto.dev"


def sections(assumed: WhatIf) -> Iterator[tuple[str, list[Prospect]]]:
    """Yield title and schedules of two tables: those that hold no more memory, and those that do.

    The memory is compared with Megatron's own schedule, which is first in the first table.
    """
    peak = counted(assumed.stock.peak, "microbatch")
    title = f"what schedules would take with these costs, in no more memory (peak {peak})"
    yield title, [assumed.stock, *assumed.within]
    if assumed.with_more:
        yield "and in more", list(assumed.with_more)


def prospect_rows(prospects: Sequence[Prospect]) -> list[dict[str, str]]:
    """Return a table row, by column, for each schedule whose step was predicted from a trace."""
    return [
        {
            "schedule": prospect.schedule,
            "step, ms": _between(f"{prospect.low * 1e3:.4g}", f"{prospect.high * 1e3:.4g}"),
            "of Megatron's": _between(*(f"{part:.3f}" for part in prospect.of_stock)),
            "bubble": f"{prospect.bubble_share:.1%}",
            "peak": f"{prospect.peak:.3g}",
            "stages of a rank": str(prospect.vpp),
        }
        for prospect in prospects
    ]


def remarks(assumed: WhatIf) -> Iterator[str]:
    """Yield the assumptions behind the tables of predicted schedules, a line each."""
    least, most = SHARES
    yield (
        f"W is assumed to take {least:g} to {most:g} of a backward pass, which Megatron runs whole"
    )
    chunks = assumed.stock.vpp
    if any(prospect.vpp != chunks for prospect in (*assumed.within, *assumed.with_more)):
        how = (
            "the layers are cut evenly, and the embedding and the output layer stay at the ends"
            if assumed.has_parts
            else "all of a rank's work is cut evenly, the output layer too: nothing is known of it"
        )
        how += ", with multi-token prediction on the last stage" * assumed.has_depths
        yield f"where a rank has another number of stages than {chunks}, {how}"
    if assumed.excluded:
        reasons = (f"{name} ({why})" for name, why in assumed.excluded.items())
        yield f"left out: {'; '.join(reasons)}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _table(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a text table of ``rows``, beneath the names of the columns."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
