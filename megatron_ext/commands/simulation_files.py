"""Files that ``megatron-ext simulate`` writes: tables, programs, traces, pictures and pages.

Each is another view of the same program. Whether it can be written is checked before the program is
made, which may take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from megatron_ext.base.text_file import write_text_file
from megatron_ext.base.words import counted
from megatron_ext.commands.output import command_line
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate_steps
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.observe.program_summary import program_of_1f1b
from megatron_ext.observe.torchtitan import for_torchtitan
from megatron_ext.observe.trace import write_trace
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule_csv import to_csv, to_torch_csv
from megatron_ext.schedule.timeline import Timeline
from megatron_ext.viz.draw import check_picture, draw_steps
from megatron_ext.viz.page.run import Run, simulated_run, title_of
from megatron_ext.viz.page.write import Page, check_page, write_page


@dataclass(frozen=True)
class SimulationFiles:
    """Files that a simulation writes; None for each that is not requested."""

    csv: Path | None
    torch_csv: Path | None
    program: Path | None
    perfetto: Path | None
    plot: Path | None
    page: Path | None

    def check(self) -> None:
        """Raise ValueError if a file cannot be written, before the simulation takes its time."""
        for file in (self.csv, self.torch_csv, self.program):
            if file is not None and not file.parent.is_dir():
                raise ValueError(f"{file}: there is no folder {file.parent}")
        if self.plot is not None:
            check_picture(self.plot)
        if self.page is not None:
            check_page(self.page)

    def write(self, resolved: ResolvedSpec, problem: Problem, program: Program, steps: int) -> None:
        """Write the requested files about ``program``.

        Args:
            resolved, problem: schedule and problem of ``program``, from which the pictures get a
                reference to compare it with.
            steps: number of successive steps in the pictures.

        Raises:
            OSError: a file cannot be written.
        """
        if self.csv is not None:
            write_text_file(self.csv, to_csv(program.schedule))
        if self.torch_csv is not None:
            write_text_file(self.torch_csv, to_torch_csv(program.schedule))
        if self.program is not None:
            write_text_file(self.program, program.text)
        if self.perfetto is not None:
            write_trace(_steps(program, steps), self.perfetto)
        if self.plot is None and self.page is None:
            return
        reference = _reference_program(resolved, problem)
        if self.plot is not None:
            drawn = _differing(reference, program)
            runs_of_steps = [_steps(one, steps) for one in drawn]
            costs = [one.problem.costs for one in drawn]
            titles = [title_of(one.schedule.name, one.problem.options) for one in drawn]
            draw_steps(runs_of_steps, self.plot, costs, titles)
        if self.page is not None:
            runs = _runs(resolved, reference, program, steps)
            ranks, microbatches = problem.ranks, problem.microbatches
            on = f"{counted(ranks, 'rank')}, {counted(microbatches, 'microbatch')}"
            write_page(Page(f"{resolved.spec} on {on}", runs, command_line()), self.page)

    def name(self, program: Program) -> None:
        """Print the paths of the files, and how to look at them or use them."""
        if self.torch_csv is not None:
            problem = program.problem
            typer.echo(for_torchtitan(problem.placement, problem.microbatches, self.torch_csv))
        if self.plot is not None:
            typer.echo(f"picture: {self.plot}")
        if self.page is not None:
            typer.echo(f"page: {self.page}")


def _runs(
    resolved: ResolvedSpec, reference: Program, program: Program, steps: int
) -> tuple[Run, ...]:
    """Return the timelines of a page: that of ``program`` below that of ``reference``, if the two
    differ."""
    run = simulated_run(title_of(resolved.spec, program.problem.options), program, steps)
    if len(_differing(reference, program)) == 1:
        return (run,)
    title = title_of(reference.schedule.name, reference.problem.options)
    return simulated_run(title, reference, steps), run


def _reference_program(resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the program to compare a schedule with in a picture.

    If steps or passes overlap, it is the same schedule without that overlap; otherwise 1F1B.
    """
    if problem.options.steps_overlap:
        return build_program(resolved, problem.with_options(steps_overlap=False))
    if problem.options.pairs:
        return build_program(resolved, problem.with_options(pairs=False))
    return program_of_1f1b(problem)


def _differing(reference: Program, program: Program) -> tuple[Program, ...]:
    """Return the programs to draw: ``reference`` and ``program``, or one if they are the same."""
    return (program,) if reference.digest == program.digest else (reference, program)


def _steps(program: Program, steps: int) -> tuple[Timeline, ...]:
    return simulate_steps(program, program.problem.costs, steps)
