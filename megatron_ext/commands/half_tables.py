"""``megatron-ext plan --half-pipeline``: a pipeline beside half of it, with twice the copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from megatron_ext.commands.output import print_table
from megatron_ext.commands.plan_tables import print_unit
from megatron_ext.compile.registry import Mark
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.half_pipeline import Halves, Side
from megatron_ext.planner.verdict import NOTHING
from megatron_ext.words import bytes_text, counted

_ALIKE = 0.0005  # of a step
NOTHING_FITS_HALVES = "no schedule fits, on all pipeline ranks or on half of them"


def print_halves(halves: Halves) -> None:
    """Every schedule on both, what the shortest of each takes, and what half of the ranks gain."""
    if halves.job:
        typer.echo(halves.job)
    whole, half = halves.whole.division, halves.half.division
    of_whole, of_half = (counted(division.microbatches, "microbatch") for division in (whole, half))
    typer.echo(
        f"the same GPUs and global batch: {whole}, {of_whole} of each copy of the model; "
        f"{half}, {of_half}\n"
    )
    if halves.rows:
        print_table(_kept([_row(*row, halves) for row in halves.rows]))
    print_unit(is_estimate=halves.is_estimate)
    sides = [side for side in (halves.whole, halves.half) if side.plan.best is not None]
    if any(side.reduction is not None for side in sides):
        typer.echo("\nthe shortest of each, and what its fullest rank holds:")
        print_table([_memory(side) for side in sides])
    for side in (halves.whole, halves.half):
        if side.plan.best is None:
            why = "; ".join(dict.fromkeys(side.plan.refusals.values()))
            typer.echo(f"\n{side.division}: no schedule fits: {why}")
    if len(sides) == 2:
        typer.echo(f"\n{_verdict(halves)}")
    for remark in halves.remarks:
        typer.echo(f"\n{remark}")
    if halves.written != NOTHING:
        typer.echo(f"write for {halves.half.division}: {halves.written}")


def _row(
    name: str, of_whole: Candidate | None, of_half: Candidate | None, halves: Halves
) -> dict[str, Any]:
    both = of_whole, of_half
    (candidate, *_) = filter(None, both)
    row = {"schedule": name, "mark": None if candidate.mark is Mark.STABLE else candidate.mark}

    def add(head: str, figure: Callable[[Candidate], Any]) -> None:
        for side, of_side in zip((halves.whole, halves.half), both, strict=True):
            row[f"{head}\n{side.division}"] = "-" if of_side is None else figure(of_side)

    add("makespan", lambda side: side.report.makespan)
    if candidate.report.post_validation:
        add("step", lambda side: side.step)
    change = f"{of_half.step / of_whole.step - 1:+.1%}" if of_whole and of_half else "-"
    row[f"than\n{halves.whole.division}"] = change
    if candidate.fullest is not None:
        add("fullest rank", lambda side: bytes_text(side.fullest or 0))
        return row
    add("span", lambda side: side.report.span)
    # A rank of the half has twice the layers: its microbatches hold twice as much.
    ranks = halves.whole.division.ranks
    add("peak", lambda side: side.report.peak * ranks / side.report.pp)
    return row


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without columns that no row fills."""
    kept = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return [{key: "" if row[key] is None else row[key] for key in kept} for row in rows]


def _memory(side: Side) -> dict[str, Any]:
    best, reduction = side.plan.best, side.reduction
    assert best is not None and best.memory is not None and reduction is not None
    fullest = max(best.memory, key=lambda rank: rank.total)
    return {
        "": str(side.division),
        "schedule": best.schedule,
        "weights": bytes_text(fullest.model.weights),
        "gradients": bytes_text(fullest.model.gradients),
        "optimizer": bytes_text(fullest.model.optimizer),
        "activations": bytes_text(fullest.activations),
        "total": bytes_text(fullest.total),
        "gradients\nreduced in": reduction.gradients,
        "parameters\ngathered in": reduction.parameters,
    }


def _verdict(halves: Halves) -> str:
    whole, half = halves.whole, halves.half
    assert whole.plan.best is not None and half.plan.best is not None
    text = (
        f"{half.division} under {half.plan.best.schedule} takes "
        f"{_than(half.plan.best.step, whole.plan.best.step)} {whole.division} under "
        f"{whole.plan.best.schedule}"
    )
    if half.reduction is None:
        return text
    assert half.whole_step is not None and whole.whole_step is not None
    return (
        f"{text};\n{_than(half.whole_step, whole.whole_step)} that with the reduction of gradients "
        f"and the gathering of parameters, if no pass hides them"
    )


def _than(step: float, other: float) -> str:
    share = step / other - 1
    if abs(share) < _ALIKE:
        return "as long as"
    return f"{abs(share):.1%} {'less' if share < 0 else 'more'} time than"
