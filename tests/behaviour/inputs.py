"""Inputs of commands that several subjects share."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import replace
from pathlib import Path

import click
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.observe.trace import NAME, TraceFile, traced_step
from megatron_ext.schedule.schedule import is_compute
from megatron_ext.schedule.timeline import GradientReduction, Timeline
from tests.helpers.schedules import line_problem, program

COSTS = "--costs f=10,i=12,w=8,comm=1"
HEAD = f"{COSTS},output_layer=10/12/8,embedding=1/2"
HOST = f"{COSTS},d2h=14,h2d=14"

# Pattern of progress lines, which commands print only after some seconds.
_PROGRESS = re.compile(r"^megatron-ext: .* so far\b.*\n", re.MULTILINE)
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-own-schedule.md"


def run(command: str, *, with_stderr: bool = True) -> str:
    """Return the output of ``megatron-ext`` without progress lines, after its exit status if that
    is not 0.

    ``with_stderr``: include stderr; otherwise it is included only if stdout is empty, as libraries
    print warnings to stderr.
    """
    result = CliRunner().invoke(app, command.split())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    status = f"exits with {result.exit_code}\n" if result.exit_code else ""
    text = result.output if with_stderr or not result.stdout else result.stdout
    plain = _PROGRESS.sub("", click.unstyle(text)).replace(str(Path.cwd()), "FOLDER")
    plain = plain.replace(", ".join(GPUS), "GPUS")  # a new GPU does not change the recorded text
    megatron = importlib.metadata.distribution("megatron-core").locate_file("")
    return status + plain.replace(str(megatron), "SITE")


def own_families() -> dict[str, str]:
    """Return the Python files of docs/your-own-schedule.md, by name."""
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


def write_inputs() -> None:
    """Write the files that entries name into the working directory: costs with bytes, a table,
    families of a user, a folder with a trace, and a script."""
    costs = {"version": 2, "f": 10, "i": 12, "w": 8, "comm": 1, "origin": "measured: on a Monday"}
    held = {"activation": 2**30, "weight inputs": 2**29, "logits": 2**28, "message": 2**24}
    Path("bytes.json").write_text(json.dumps(costs | {"bytes": held, "output_layer": [10, 12, 8]}))
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    for name, text in own_families().items():
        Path(name).write_text(text)
    Path("pretrain.py").write_text("from megatron.training import pretrain\n")
    _write_trace(Path("traced"))


def _write_trace(folder: Path) -> None:
    """Write two steps as a recorder would: only passes, with a slow last one in the second step, at
    times that floats represent exactly."""
    made = program("zb-h1", line_problem(2, 3, 10, 12, 8, 1))
    simulated = simulate(made, made.problem.costs)
    passes = tuple(event for event in simulated.events if is_compute(event.action))
    last = passes[-1]
    slow = tuple(e._replace(end=e.end + 50.0) if e == last else e for e in passes)
    file = TraceFile(folder / NAME)
    for iteration, events in ((7, passes), (8, slow)):
        step = replace(simulated, events=events).moved(1000.0 + iteration, 1 / 128)
        reductions = tuple(
            GradientReduction(rank, rank, row[-1].end, row[-1].end + 0.25, rank > 0)
            for rank, row in enumerate(step.compute)
        )
        measured = Timeline(step.schedule, step.events, reductions)
        file.add(traced_step(iteration, measured, simulated, 2e-5))
