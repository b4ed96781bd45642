"""`doctor` accepts the whole command that `plan` prints, wherever it accepts the given one.

Of a change `plan` printed flags alone: without `-m megatron_ext`, which they need, and with flags
of Megatron's left on the line that do not go with them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.doctor.check import check_launch
from megatron_ext.doctor.words import read_launch
from megatron_ext.launch_planner import parsed_launch
from megatron_ext.launch_planner.alternatives import (
    first_answer,
    layouts,
    pairs,
    without_full_recompute,
)
from megatron_ext.launch_planner.command_line import command_with
from megatron_ext.planner import confirmation, planner, verdict
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.verdict import Written
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.patches.test_layouts import FLAGS, LINES, ROUTED

PAIRS: dict[str, Any] = {
    **ROUTED,
    "moe_token_dispatcher_type": "alltoall",
    "num_virtual_stages_per_pipeline_rank": 2,
    "overlap_moe_expert_parallel_comm": True,
}
JOBS: dict[str, dict[str, Any]] = {
    **LINES,
    "experts": ROUTED,
    "pairs": PAIRS,
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ours": {"pipeline_schedule": "zb-h1", "pipeline_memory_limit": "1x"},
    "divided": {"pipeline_schedule": "1f1b", "pipeline_vocab_parallel": "1"},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few schedules, without a search; and whatever gains anything is told to be written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    specs = ["1f1b", "interleaved", "zb-h1", "zb-v"]
    for module in (planner, first_answer, without_full_recompute):
        monkeypatch.setattr(module, "all_specs", lambda: specs)
    monkeypatch.setattr(pairs, "_specs", lambda *, with_pairs: iter(["interleaved", "zb-v"]))
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE, VocabMethod.ONE]))
    lay_out = layouts.lay_out
    monkeypatch.setattr(
        layouts, "lay_out", lambda *given, **more: lay_out(*given, **more, search=False)
    )
    monkeypatch.setattr(verdict, "WORTH", 0.0)
    assert confirmation.verdict is verdict.verdict


@pytest.mark.parametrize("name", JOBS)
def test_doctor_accepts_what_plan_prints(name: str) -> None:
    words = model_flags(**(FLAGS | JOBS[name]))
    installs = ["-m", "megatron_ext"] if any("--pipeline-s" in word for word in words) else []
    command = ["torchrun", "--nproc-per-node", "4", *installs, str(SCRIPT), *words]
    given = check_launch(read_launch(command), None, None)
    assert given.is_right, given.findings
    _check_what_plan_prints(command)


def _check_what_plan_prints(command: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", "--gpu", "h100", "--", *command])
    assert result.exit_code == 0, result.output
    text = result.stdout.splitlines()
    assert any(row.startswith("verdict:") for row in text[:4])
    printed = [row for row in text if row.startswith("torchrun ")]
    if not printed:
        assert "keep it" in result.stdout
        return
    launch = read_launch(shlex.split(printed[0]))
    found = check_launch(launch, None, None)
    assert found.is_right, (printed, [f for f in found.findings if f.verdict == "wrong"])
    ours = [word for word in launch.arguments if word.startswith("--pipeline-schedule")]
    assert bool(ours) <= bool(launch.installs) and len(ours) <= 1
    (change,) = (row for row in text if row.startswith("verdict:"))
    if ours:
        (spec,) = re.findall(r"--pipeline-schedule (\S+)", change)
        assert found.prediction is not None
        assert spec.partition(":")[0] == found.prediction.schedule.partition(":")[0]


ADDED = Written(("--pipeline-schedule", "zb-v"), ("--num-virtual-stages-per-pipeline-rank",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torchrun --nnodes 2 train.py A", "torchrun --nnodes 2 -m megatron_ext train.py A"),
        ("python -u train.py A", "python -u -m megatron_ext train.py A"),
        ("python -m pkg.train A", "python -m megatron_ext -m pkg.train A"),
        ("X=1 srun python train.py A", "X=1 srun python -m megatron_ext train.py A"),
        ("train.py A", "-m megatron_ext train.py A"),
        ("python -m megatron_ext train.py A", "python -m megatron_ext train.py A"),
        ("srun bash -c 'python train.py A'", "srun bash -c 'python -m megatron_ext train.py A"),
    ],
)
def test_a_command_is_written_anew(before: str, after: str) -> None:
    given = "--bf16 --num-virtual-stages-per-pipeline-rank 4 --pipeline-schedule 1f1b --lr 1"
    left = "--bf16 --lr 1 --pipeline-schedule zb-v"
    words = shlex.split(before.replace(" A", f" {given}"))
    written = command_with(read_launch(words), ADDED)
    expected = after.replace(" A", f" {left}") + "'" * ("-c '" in after)
    assert written == expected
    layout = ("--pipeline-model-parallel-layout", "Et|tL")  # a flag of Megatron's
    stock = command_with(read_launch(words), Written(layout, ADDED.dropped))
    assert "zb-v" not in stock and "--pipeline-schedule" not in stock
    assert ("megatron_ext" in stock) is ("megatron_ext" in before)


def test_a_script_that_brings_us_along_is_left_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import megatron_ext.auto\n")
    written = command_with(read_launch(["python", str(script), "--bf16"]), ADDED)
    assert written == f"python {script} --bf16 --pipeline-schedule zb-v"
