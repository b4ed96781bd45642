"""Benchmark of executors on emulated clocks: ours, Megatron's own and torch's.

python -m scripts.benchmarks.executors --pp 4 -m 8 --schedules "zb-h1 zb-v"
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from megatron_ext.commands.options import Json, Microbatches, Ranks
from megatron_ext.commands.output import fail, print_table
from megatron_ext.schedule.problem import Offload, VocabularyParallel
from scripts.benchmarks.runs import (
    DEFAULT_SCHEDULES,
    STEPS,
    STEPS_IN_A_ROW,
    BenchResult,
    Setting,
    measure,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    pp: Ranks = 4,
    microbatches: Microbatches = 8,
    costs: Annotated[
        str, typer.Option(help="Milliseconds per microbatch of a rank: f=40,i=40,w=40")
    ] = "f=40,i=40,w=40",
    schedules: Annotated[
        str, typer.Option(help="Ours to measure, separated by blanks.")
    ] = DEFAULT_SCHEDULES,
    launches: Annotated[
        int, typer.Option(min=1, help="How often the ranks are started afresh.")
    ] = 3,
    as_json: Json = False,
    vocab_parallel: Annotated[
        VocabularyParallel,
        typer.Option(
            help="Measure ours with vocabulary parallelism too; give head=F/I/W in COSTS."
        ),
    ] = VocabularyParallel.NONE,
    offload: Annotated[
        Offload, typer.Option(help="Measure ours with offload too; give d2h= in COSTS.")
    ] = Offload.NONE,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="{none,fit,first:N}",
            help="Measure ours with recompute too; R takes r= in COSTS, or as long as F.",
        ),
    ] = "none",
    memory_limit: Annotated[
        str | None, typer.Option(help="Of a rank, in microbatches, for --recompute fit: 5 or 0.5x.")
    ] = None,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Measure ours with passes in pairs too, those with several stages on a rank; give "
            "hidden= in COSTS.",
        ),
    ] = False,
    post_validation: Annotated[
        bool,
        typer.Option(
            "--post-validation",
            help="Measure steps in a row, with an all-reduce after each, and ours with the "
            "optimizer's post-validation in its place too.",
        ),
    ] = False,
    bad_every: Annotated[
        int, typer.Option(min=0, help="With --post-validation: every so many-th verdict is bad.")
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Timed in a launch: {STEPS}, or {STEPS_IN_A_ROW} in a row."),
    ] = None,
) -> None:
    """Measure executors on emulated clocks: ours, Megatron's own, torch's."""
    specs = tuple(schedules.split())
    try:
        setting = Setting(
            pp,
            microbatches,
            costs,
            specs,
            launches,
            vocab_parallel,
            offload,
            steps or (STEPS_IN_A_ROW if post_validation else STEPS),
            post_validation,
            bad_every,
            recompute,
            memory_limit,
            pairs,
        )
        measured = measure(setting, lambda text: typer.echo(text, err=True))
    except ValueError as error:
        fail(error)
    if as_json:
        report = {
            **asdict(setting),
            "rows": [asdict(row) for row in measured.rows],
            "autograd_microseconds": measured.autograd_microseconds,
            "doubts": measured.doubts,
        }
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(
        f"{pp} ranks, {microbatches} microbatches, {costs} ms, {setting.steps} steps a launch"
        f"{', in a row' * post_validation}, {launches} launches; seconds of a step, median over "
        f"launches"
    )
    rows = [_bench_row(row) for row in measured.rows]
    if bad_every:
        for cells, row in zip(rows, measured.rows, strict=True):
            cells["after a bad verdict, ideal"] = row.ideal_after_bad or ""
            cells["after a bad verdict, measured"] = row.after_bad or ""
    print_table(rows)
    cold, warm = measured.autograd_microseconds
    typer.echo(
        f"autograd alone takes {cold:.0f} us a pass here after a sleep, {warm:.0f} us without one: "
        f"that much of every pass is the machine's"
    )
    for doubt in measured.doubts:
        typer.echo(f"not to be believed: {doubt}")


def _bench_row(row: BenchResult) -> dict[str, Any]:
    return {
        "": row.name,
        "ideal": row.ideal,
        "measured": row.measured,
        "of ideal": f"{row.efficiency:.1%}",
        "over Megatron's 1F1B": f"{row.speedup:.2f}x",
        "spread": f"{row.spread:.1%}",
        "host, us a pass": f"{row.host_microseconds:.0f}",
    }


if __name__ == "__main__":
    app()
