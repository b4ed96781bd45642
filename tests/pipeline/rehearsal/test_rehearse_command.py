"""Test of the command `megatron-ext rehearse` from the command line to its report, on the CPU."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

from tests.helpers.combinations import nightly
from tests.helpers.megatron_runs import SCRIPT, model_flags

CPU_SECONDS = 60


@nightly(
    "tests/patches/launch/test_rehearse.py has a stand-in for ranks, "
    "test_rehearsed_rank.py has ranks"
)
def test_three_schedules_of_eight_ranks_take_less_than_a_minute(tmp_path: Path) -> None:
    flags = model_flags(pipeline_model_parallel_size=8, num_layers=16, global_batch_size=16)
    words = ["rehearse", "--cpu", "--json", "--dir", str(tmp_path)]
    words += ["--schedules", "stock zb-h1 zb-v", "--"]
    words += ["torchrun", "--nproc-per-node", "8", str(SCRIPT), *flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-m", "megatron_ext", *words], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 0, ran.stderr[-2000:]
    report = json.loads(ran.stdout)
    assert [one["name"] for one in report["schedules"]] == ["stock", "zb-h1", "zb-v"]
    assert [one["trained"] for one in report["ranks"]] == [5] * 8
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < CPU_SECONDS, f"{used:.0f} CPU seconds"
