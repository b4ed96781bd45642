"""Tests of `--pipeline-schedule plan`: a launch that chooses its schedule, and trains as stock
does.

Each rank has one layer, which no V can split over two chunks, so no V is searched for on four
ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.megatron_runs import Run, assert_same, losses, model_flags, train

SAVED_AT = 2
ULP = 2.0**-23  # unit in the last place of fp32


def trained(**flags: object) -> list[Run]:
    return train(4, model_flags(pipeline_model_parallel_size=4, train_iters=3, **flags))


@nightly("test_placements.py trains what auto takes; test_launch_plan.py has what plan takes")
def test_a_launch_chooses_its_schedule(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A launch with `--pipeline-schedule plan` chooses its schedule and equals stock to the last
    bit. If it chooses a split vocabulary, losses are only close to stock's, because sums have
    another order."""
    reference = trained(save=tmp_path, save_interval=SAVED_AT)
    for more, taken in (
        ({"pipeline_vocab_parallel": "none"}, "--pipeline-schedule zb-"),
        ({"load": tmp_path, "ckpt_step": SAVED_AT}, "--pipeline-vocab-parallel 2"),
    ):
        capfd.readouterr()
        runs = trained(pipeline_schedule="plan", **more)
        (line,) = [x for x in capfd.readouterr().out.splitlines() if "plan takes" in x]
        assert taken in line and "in no more memory than 1f1b" in line
        assert {run.schedule for run in runs} == {"PipelineStep"}
        if "load" in more:
            ours = losses(runs)
            assert ours == pytest.approx(losses(reference)[SAVED_AT:], rel=16 * ULP)
        else:
            assert_same(runs, reference)
