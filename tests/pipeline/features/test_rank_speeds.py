"""Tests of `--pipeline-rank-speeds`: a schedule for ranks of different speeds trains as stock
does."""

from __future__ import annotations

import re

import pytest

from tests.helpers.megatron_runs import Run, assert_same, model_flags, train

COSTS = re.compile(r"costs .*?: (f=[^,]+),")


def run(**flags: object) -> list[Run]:
    return train(2, model_flags(pipeline_model_parallel_size=2, train_iters=2, **flags))


def test_a_training_whose_schedule_is_made_for_a_slow_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reference = run()
    capfd.readouterr()
    ours = {"pipeline_schedule": "zb-auto", "pipeline_memory_limit": "1x"}
    assert_same(run(**ours, pipeline_rank_speeds="1,0.5"), reference)
    slow = COSTS.search(capfd.readouterr().out)
    assert_same(run(**ours), reference)
    alike = COSTS.search(capfd.readouterr().out)
    assert slow and alike and ".." not in alike[1]
    least, most = (float(figure) for figure in slow[1].removeprefix("f=").split(".."))
    assert most == pytest.approx(2 * least, rel=0.01)


def test_speeds_of_other_ranks_end_the_launch() -> None:
    with pytest.raises(BaseException, match="3 speeds for 2 pipeline ranks"):
        run(pipeline_schedule="zb-h1", pipeline_rank_speeds="1,1,0.5")
