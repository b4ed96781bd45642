"""``megatron-ext simulate``: what a schedule takes and holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_ext.commands.options import (
    UNIT,
    CostsText,
    Json,
    Limit,
    Microbatches,
    PostValidation,
    Ranks,
    Schedule,
)
from megatron_ext.commands.output import fail, print_table
from megatron_ext.commands.progress import showing_progress
from megatron_ext.schedule.build.build import build_program
from megatron_ext.schedule.build.overlap import what_overlapping_gains
from megatron_ext.schedule.build.registry import Choice, choose, with_option
from megatron_ext.schedule.build.report import report
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import P2P, Extras, Offload, Problem, VocabularyParallel
from megatron_ext.schedule.program.graph import Device
from megatron_ext.schedule.program.simulate import simulate as simulate_program
from megatron_ext.schedule.program.simulate import simulate_steps
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.progress import task
from megatron_ext.schedule.schedule_csv import to_csv
from megatron_ext.schedule.search.certify import certify as certify_program
from megatron_ext.schedule.show.draw import draw_steps
from megatron_ext.schedule.show.program_summary import program_of_1f1b
from megatron_ext.schedule.show.trace import write_trace
from megatron_ext.schedule.timeline import Timeline


def simulate(
    spec: Schedule,
    pp: Ranks,
    microbatches: Microbatches,
    costs: CostsText = UNIT,
    memory_limit: Limit = None,
    as_json: Json = False,
    vpp: Annotated[int | None, typer.Option(help="Chunks of a rank, for loops.")] = None,
    p2p: Annotated[P2P, typer.Option(help="How messages share communicators.")] = P2P.ASYNC,
    vocab_parallel: Annotated[
        VocabularyParallel,
        typer.Option(help="How embedding and output layer are divided over the ranks."),
    ] = VocabularyParallel.NONE,
    offload: Annotated[
        Offload, typer.Option(help="What leaves for host memory; give d2h= (and h2d=) in COSTS.")
    ] = Offload.NONE,
    post_validation: PostValidation = False,
    steps: Annotated[
        int, typer.Option(min=1, help="Consecutive ones, in what --plot and --trace write.")
    ] = 1,
    certify: Annotated[
        bool, typer.Option("--certify", help="Bound the best there can be.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="What --certify may search.")] = 60.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw it beneath 1F1B, or with post-validation beneath itself without it, as .svg "
            "or .png."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write its compute actions.")] = None,
    program_file: Annotated[
        Path | None,
        typer.Option(
            "--program",
            help="Write all that each rank does, in order: passes, sends, receives, waits, "
            "collectives, copies. A line a rank.",
        ),
    ] = None,
) -> None:
    """Predict how long a schedule takes and what it holds.

    makespan_if_passes_wait is the makespan on a device that, at every pass, waits for all that was
    posted before it.
    """
    try:
        _check_options(csv, vocab_parallel, certify, post_validation)
        choice = choose(spec if vpp is None else with_option(spec, "vpp", vpp))
        placement = choice.place(pp)
        limit = parse_limit(memory_limit, pp, microbatches) if memory_limit else None
        problem = Problem(
            placement,
            microbatches,
            parse_costs(costs, placement),
            limit,
            extras=Extras(
                p2p=p2p, vocabulary=vocab_parallel, offload=offload, post_validation=post_validation
            ),
        )
        with showing_progress():
            program, made = report(choice, problem)
            with task("simulating a device that waits at passes"):
                waiting = simulate_program(program, program.problem.costs, Device.WAITS_AT_PASSES)
            figures = asdict(made) | {"makespan_if_passes_wait": waiting.makespan}
            if certify:
                figures |= _certified(program, seconds)
        if csv is not None:
            csv.write_text(to_csv(program.schedule))
        if program_file is not None:
            program_file.write_text(program.text)
        if trace is not None:
            write_trace(_steps(program, steps), trace)
        if plot is not None:
            reference = _reference_program(choice, problem)
            draw_steps([_steps(reference, steps), _steps(program, steps)], plot)
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    print_table([{"": key, spec: value} for key, value in figures.items()])
    if post_validation:
        typer.echo(what_overlapping_gains(program))
    if plot is not None:
        typer.echo(f"picture: {plot}")


def _check_options(
    csv: Path | None, vocab_parallel: VocabularyParallel, certify: bool, post_validation: bool
) -> None:
    if csv is not None and vocab_parallel is not VocabularyParallel.NONE:
        raise ValueError(
            f"--csv writes a table to which the passes of --vocab-parallel {vocab_parallel} "
            f"would be added a second time when it is read: leave one of them out"
        )
    if certify and post_validation:
        raise ValueError(
            "--certify bounds the makespan, and with --post-validation a step costs the span: "
            "leave one of them out"
        )


def _certified(program: Program, seconds: float) -> dict[str, float | bool]:
    certificate = certify_program(program, seconds)
    return {
        "lower_bound": certificate.lower_bound,
        "gap": certificate.gap,
        "optimal": certificate.optimal,
    }


def _reference_program(choice: Choice, problem: Problem) -> Program:
    """The program that is drawn above the schedule's, to compare with."""
    if problem.extras.post_validation:
        return build_program(choice, problem.with_extras(post_validation=False))
    return program_of_1f1b(problem)


def _steps(program: Program, steps: int) -> tuple[Timeline, ...]:
    return simulate_steps(program, program.problem.costs, steps)
