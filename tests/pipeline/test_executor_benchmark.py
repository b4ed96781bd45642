"""The benchmark on emulated clocks runs every contender and does not flatter any."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_ext.compile.registry import choose
from megatron_ext.runtime.stage import Backward
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Extras, Recompute
from scripts.benchmarks import emulated
from scripts.benchmarks.contestants import EmulatedStage, ideal_of, program_of
from scripts.benchmarks.emulated import EmulatedChunk, EmulatedCopies
from scripts.benchmarks.executors import app
from scripts.benchmarks.runs import Setting
from tests.helpers.combinations import nightly

ARGUMENTS = ["--pp", "2", "-m", "4", "--costs", "f=4,i=4,w=4", "--launches", "1"]


def test_every_contender_takes_at_least_its_ideal_time() -> None:
    """A sleep never ends early: a step below the ideal would be one that left passes out."""
    result = CliRunner().invoke(app, [*ARGUMENTS, "--schedules", "1f1b zb-v", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = {row["name"]: row for row in report["rows"]}
    assert {"megatron 1f1b", "torch 1F1B", "torch ZBVZeroBubble", "megatron-ext zb-v"} <= set(rows)
    assert rows["megatron-ext 1f1b"]["ideal"] == pytest.approx(0.06)
    assert rows["megatron-ext zb-v"]["ideal"] == pytest.approx(0.05)
    for row in rows.values():
        assert 0.5 < row["efficiency"] * row["measured"] / row["ideal"] < 1.01
        assert row["measured"] >= row["ideal"]
        assert row["host_microseconds"] > 0
    assert all(microseconds > 1 for microseconds in report["autograd_microseconds"])


def test_a_vocabulary_that_is_divided_is_measured_beside_one_that_is_not() -> None:
    """The head, as long as a stage, is on one rank of two, or half of it on each."""
    arguments = [*ARGUMENTS[:-4], "--costs", "f=4,i=4,w=4,head=4/4/4", *ARGUMENTS[-2:]]
    result = CliRunner().invoke(
        app, [*arguments, "--schedules", "zb-v", "--vocab-parallel", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    naive, divided = rows["megatron-ext zb-v"], rows["megatron-ext zb-v, vocabulary 2"]
    assert divided["ideal"] < naive["ideal"]
    for row in (naive, divided):
        assert row["measured"] >= row["ideal"]


def test_passes_that_are_made_again_take_what_they_cost() -> None:
    """All F of 4 microbatches once more, on both ranks: 2 ms as is given, not 4 as F."""
    arguments = [*ARGUMENTS[:-4], "--costs", "f=4,i=4,w=4,r=2", *ARGUMENTS[-2:]]
    result = CliRunner().invoke(
        app, [*arguments, "--schedules", "1f1b", "--recompute", "first:2", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    again = rows["megatron-ext 1f1b, recompute first:2"]
    assert again["measured"] >= again["ideal"] > rows["megatron-ext 1f1b"]["ideal"]
    extras = Extras(recompute=Recompute(first=2))
    assert again["ideal"] < ideal_of(program_of(choose("1f1b"), 2, 4, "f=4,i=4,w=4", extras))


def test_a_pair_takes_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its two passes nothing besides. On lines there are none."""
    taken: list[float] = []
    monkeypatch.setattr(
        emulated, "take", lambda seconds: taken.append(seconds) if emulated._clock.runs else None
    )
    costs = program_of(choose("zb-v"), 2, 4, "f=8,i=6,w=4,hidden=4").problem.costs
    behind, ahead = (EmulatedStage(n, EmulatedChunk(n, costs), has_loss=False) for n in (1, 2))
    x = torch.ones(emulated.SHAPE, requires_grad=True)
    y = ahead.forward(0, x)
    queue.splitting = True
    behind.forward_beside(1, x, Backward(ahead, 0, torch.ones_like(y), whole=False))
    queue.clear()
    assert taken == pytest.approx([0.004, 0.004 + 0.003 - 0.002])
    ours = Setting(2, 4, "f=1,i=1,w=1", ("1f1b", "zb-v"), 1, pairs=True).ours
    assert ours == [("1f1b", Extras()), ("zb-v", Extras()), ("zb-v", Extras(pairs=True))]


@nightly("emulated copies: those that share a link are timed by day, below")
def test_copies_take_what_they_cost_beside_the_passes() -> None:
    """They take as long as the passes, so that a step would be far longer if passes waited."""
    arguments = [*ARGUMENTS[:-4], "--costs", "f=20,i=20,w=20,d2h=16,h2d=16", *ARGUMENTS[-2:]]
    result = CliRunner().invoke(
        app, [*arguments, "--schedules", "gis", "--offload", "full", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    without, full = rows["megatron-ext gis"], rows["megatron-ext gis, offload full"]
    assert full["ideal"] == pytest.approx(without["ideal"])
    assert full["measured"] >= full["ideal"]


@pytest.mark.real_time
def test_emulated_copies_take_turns_on_a_shared_link(tmp_path: Path) -> None:
    """Two ranks' copies of 50 ms at once: 100 ms on one link, and each its own time on two."""
    for more, least in ((",link=2", 0.1), ("", 0.05)):
        placement = line(2)
        costs = parse_costs(f"f=1,i=1,w=1,d2h=0.05{more}", placement)
        ranks = [EmulatedCopies(costs, rank, tmp_path) for rank in range(2)]
        begin = time.monotonic()
        transfers = [
            copies.start(Action(rank, Kind.OFFLOAD_F, 0), [], None)
            for rank, copies in enumerate(ranks)
        ]
        for transfer in transfers:
            transfer.finish()
        assert time.monotonic() - begin >= least


def test_a_copy_waits_for_the_one_before_it(tmp_path: Path) -> None:
    """A buffer is filled anew only when its content has been copied back."""
    costs = parse_costs("f=1,i=1,w=1,d2h=0.01,h2d=0.05", line(1))
    copies = EmulatedCopies(costs, 0, tmp_path)
    host, first, second = (torch.full((1,), n, dtype=torch.uint8) for n in (7, 0, 9))
    back = copies.start(Action(0, Kind.RELOAD_F, 0), [(first, host)], None)
    out = copies.start(Action(0, Kind.OFFLOAD_F, 1), [(host, second)], back)
    out.finish()
    assert (first.item(), host.item()) == (7, 9)


def test_a_schedule_that_does_not_exist() -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, "--schedules", "zb-x"])
    assert result.exit_code == 2
    assert "there is no schedule 'zb-x'" in result.output


def test_steps_in_a_row_with_post_validation() -> None:
    """They overlap, so that the ideal of a step is its span; but for one after a bad verdict."""
    result = CliRunner().invoke(
        app,
        [
            *(*ARGUMENTS, "--schedules", "zb-2p", "--json"),
            *("--post-validation", "--steps", "4", "--bad-every", "2"),
        ],
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    at_once, afterwards = rows["megatron-ext zb-2p"], rows["megatron-ext zb-2p, post-validation"]
    assert at_once["ideal"] == pytest.approx(0.052)
    assert afterwards["ideal"] == pytest.approx(0.048)
    assert at_once["measured"] >= at_once["ideal"]
    assert at_once["after_bad"] is None
    # Rank 0 has two forward passes more to run before it asks for the verdict. Then all ranks do
    # the step again together, and begin the next one together.
    assert afterwards["ideal_after_bad"] == pytest.approx(at_once["ideal"] + 0.008)
    assert afterwards["after_bad"] >= afterwards["ideal_after_bad"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bad-every", "2"], "add --post-validation"),
        (["--post-validation", "--steps", "4", "--bad-every", "5"], "a number from 2 to 4"),
        (["--memory-limit", "2"], "add --recompute fit"),
        (["--recompute", "fit"], "has no memory limit to fit into"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
