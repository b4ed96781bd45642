"""Tests of our schedules in torch's own pipeline runtime, as tables that the command `simulate`
writes."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed.pipelining.schedules  # noqa: F401 (once, in the parent of all ranks)
from typer.testing import CliRunner

from megatron_ext.cli import app
from tests.helpers.combinations import at_night
from tests.helpers.ranks import ROOT, agent_store, run_ranks, torchrun_environment, values
from tests.helpers.short_search import shorten_search

EXAMPLE = ROOT / "examples" / "torch_pipelining.py"
RANKS, MICROBATCHES = 2, 8
OWN = "ZBVZeroBubble"


def run(schedule: str) -> list[str]:
    """Run the example under ``schedule`` on all ranks, and return the lines that it prints."""

    def on_rank(rank: int) -> str:
        os.environ |= torchrun_environment(rank, RANKS, port)
        sys.argv = [str(EXAMPLE), schedule]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        return printed.getvalue()

    with agent_store() as port:
        return "".join(values(run_ranks(RANKS, on_rank, connect=False))).splitlines()


@functools.cache
def torchs_own() -> list[str]:
    lines = run(OWN)
    first, *_, last = (float(line.split()[-1]) for line in lines)
    assert last < 0.9 * first, "it does not learn"
    return lines


@pytest.mark.parametrize(
    "words",
    [
        ["v-auto", "--memory-limit", "1.5"],
        ["zb-auto"],
        *at_night(
            ["wave-auto"], ["interleaved-zb"], ["loop-auto"], ["hanayo"], ["v-half"], ["zb-v"]
        ),
    ],
    ids=" ".join,
)
def test_torch_trains_our_tables_to_the_same_losses(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's runtime trains our tables to the losses of torch's own zero-bubble V, in every digit,
    because layers and the order of microbatches are equal."""
    shorten_search(monkeypatch)
    table = tmp_path / "ours.csv"
    sizes = ["--pp", str(RANKS), "-m", str(MICROBATCHES), "--torch-csv", str(table)]
    made = CliRunner().invoke(app, ["simulate", *words, *sizes])
    assert made.exit_code == 0, made.output
    assert run(str(table)) == torchs_own()
