"""Tests that the scripts in examples/ train, to the same losses as without the lines that use
megatron_ext."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.__main__ import main
from tests.helpers.combinations import at_night
from tests.helpers.ranks import ROOT, agent_store, run_ranks, torchrun_environment, values

EXAMPLES = ROOT / "examples"
RANKS = 2


@dataclass(frozen=True)
class Example:
    """Script of examples/, the schedule in its text, and the number of lines that name
    megatron_ext."""

    name: str
    schedule: str
    our_lines: int

    @property
    def source(self) -> str:
        return (EXAMPLES / self.name).read_text()

    def under(self, schedule: str) -> str:
        """Return the script's text with ``schedule`` in place of its own."""
        here = f'schedule="{self.schedule}"'
        assert self.source.count(here) == 1
        return self.source.replace(here, f'schedule="{schedule}"')

    def without_ours(self) -> str:
        """Return the script's text without the lines that name megatron_ext, and check their
        number."""
        lines = self.source.splitlines(keepends=True)
        code = self.source.partition('"""\n\n')[2]
        assert code.count("megatron_ext") == self.our_lines
        return "".join(line for line in lines if "megatron_ext" not in line)


PLAIN_LOOP = Example("plain_loop.py", "zb-v", our_lines=2)
BRIDGE_GROUPS = Example("bridge_groups.py", "zb-h1", our_lines=2)
VERL_LOOP = Example("verl_loop.py", "", our_lines=2)


def draw_weights_by_name(model: GPTModel) -> None:
    """Draw weights by name, so that a layer has the same weights on any rank. Ranks otherwise draw
    by their own position."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue  # biases and norms, which begin as zeros and ones
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(model.decoder.layers[int(words[2])].layer_number)
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(words).encode()))
        parameter.data.normal_(std=0.02, generator=generator)


def run(source: str, **env: str) -> list[str]:
    """Return the lines that the script prints when launched on two ranks of the CPU platform."""

    def on_rank(rank: int) -> str:
        torch.compiler.set_stance("force_eager")  # the launcher has torch compile nothing, too
        # MEGATRON_EXT_NIGHTLY, which selects the night's tests, is no setting of a training, so
        # megatron_ext.auto would refuse it.
        os.environ.pop("MEGATRON_EXT_NIGHTLY", None)
        os.environ |= torchrun_environment(rank, RANKS, port) | env
        build = GPTModel.__init__

        def build_and_draw(model: GPTModel, *args: Any, **kwargs: Any) -> None:
            build(model, *args, **kwargs)
            draw_weights_by_name(model)

        GPTModel.__init__ = build_and_draw
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([str(script)])
        return printed.getvalue()

    with tempfile.TemporaryDirectory() as folder, agent_store() as port:
        script = Path(folder) / "script.py"
        script.write_text(source)
        return "".join(values(run_ranks(RANKS, on_rank, connect=False))).splitlines()


@functools.cache
def stock_steps(example: Example) -> list[str]:
    lines = run(example.without_ours())
    assert not schedules(lines)
    return steps(lines)


def steps(lines: list[str]) -> list[str]:
    """Return the printed lines with the losses of steps, in full precision."""
    of_steps = [line for line in lines if line.startswith("step ")]
    assert len(of_steps) >= 5
    return of_steps


def schedules(lines: list[str]) -> set[str]:
    """Return the names of the schedules of megatron_ext that ran; none if stock's ran."""
    return {line.split()[1] for line in lines if " ranks, " in line}


@pytest.mark.parametrize(
    ("example", "schedule"),
    [(PLAIN_LOOP, "zb-v"), (BRIDGE_GROUPS, "zb-v"), *at_night((BRIDGE_GROUPS, "zb-h1"))],
    ids=lambda value: getattr(value, "name", value),
)
def test_two_lines_change_the_schedule_and_no_loss(example: Example, schedule: str) -> None:
    ours = run(example.under(schedule))
    assert schedules(ours) == {schedule}
    assert steps(ours) == stock_steps(example)
    first, *_, last = (float(line.split()[-1]) for line in steps(ours))
    assert last < 0.9 * first, "it does not learn"


@pytest.mark.parametrize("schedule", ["zb-v", "zb-auto", *at_night("zb-h1")])
def test_variables_change_the_schedule_and_no_loss(schedule: str) -> None:
    """Environment variables alone put verl's loop under our schedule, and no loss changes. verl
    evaluates before it trains, and channels used to be created for the tensors of that
    evaluation."""
    ours = run(
        VERL_LOOP.source,
        VERL_USE_EXTERNAL_MODULES="megatron_ext.auto",
        MEGATRON_EXT_SCHEDULE=schedule,
        MEGATRON_EXT_COSTS="f=1,i=1,w=1,comm=0",
    )
    assert ours.count(f"megatron_ext: schedule {schedule} is installed") == 1
    assert schedules(ours) == {schedule}
    assert steps(ours) == stock_steps(VERL_LOOP)
    stand_ins = [line for line in ours if "no step waits for a search" in line]
    # steps of zb-auto differ in their number of microbatches
    assert len(stand_ins) == (schedule == "zb-auto")


def test_a_caller_orders_its_microbatches_under_any_schedule() -> None:
    """A caller may order its microbatches under any schedule. Megatron's schedule and ours read the
    same order, with equal losses. The losses equal those in order of arrival up to rounding, so
    each microbatch is read exactly once."""
    stock = steps(run(VERL_LOOP.source, ORDER="1"))
    ours = run(
        VERL_LOOP.source,
        ORDER="1",
        VERL_USE_EXTERNAL_MODULES="megatron_ext.auto",
        MEGATRON_EXT_SCHEDULE="zb-v",
    )
    assert schedules(ours) == {"zb-v"} and steps(ours) == stock
    assert stock != stock_steps(VERL_LOOP)
    for line, expected in zip(stock, stock_steps(VERL_LOOP), strict=True):
        assert float(line.split()[-1]) == pytest.approx(float(expected.split()[-1]), rel=1e-3)
