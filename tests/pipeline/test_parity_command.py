"""`megatron-ext parity` on trained ranks: the numbers are the same, or the first that are not."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.parity.records.recording import read_recording
from tests.helpers.combinations import nightly
from tests.helpers.megatron_runs import SCRIPT, Run, assert_same, losses, model_flags, train
from tests.helpers.ranks import lasting_folder

ITERATIONS = 3
MODEL: dict[str, object] = {"pipeline_model_parallel_size": 2, "train_iters": 9, "log_interval": 5}


@functools.cache
def checkpoint() -> tuple[list[Run], Path]:
    """Stock's run, which writes a checkpoint first and trains on."""
    folder = lasting_folder()
    flags = MODEL | {"save": folder, "save_interval": 1, "exit_interval": 1 + ITERATIONS}
    return train(2, model_flags(**flags)), folder


@functools.cache
def recorded(**flags: object) -> tuple[list[Run], Path]:
    """A run in ranks that each call `parity record`, as under srun, from the checkpoint's first
    iteration on."""
    folder = lasting_folder() / "recording"
    loading = {"load": checkpoint()[1], "ckpt_step": 1, "save": folder / "nothing"}
    words = ["parity", "record", str(folder), "--iterations", str(ITERATIONS), "--"]
    return train(2, model_flags(**MODEL, **loading, **flags), before=words), folder


def compared(*folders: Path) -> tuple[int, dict[str, Any]]:
    words = ["parity", "compare", "--json", *map(str, folders)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


def test_recording_changes_nothing_and_ends_a_training_early() -> None:
    runs, folder = recorded()
    assert_same(runs, checkpoint()[0])
    recording = read_recording(folder)
    assert [iteration.number for iteration in recording.iterations] == [1, 2, 3, 4]
    assert [iteration.losses["lm loss"] for iteration in recording.trained] == losses(runs)
    assert not (folder / "nothing").exists(), "a recorded run saves nothing of its own"
    assert {run.schedule for run in runs} == {"forward_backward_pipelining_without_interleaving"}


def test_a_v_has_stocks_numbers() -> None:
    """Stages lie on other ranks there, and the two copies of the tied embedding on one."""
    (_, a), (_, b) = recorded(), recorded(pipeline_schedule="zb-v")
    assert compared(a, b, "--again", a)[0] == 0  # type: ignore[arg-type]
    status, found = compared(a, b)
    assert (status, found["verdict"]) == (0, "same")
    # 12 of a layer, 3 of the embedding and the last norm; Adam's two and its step for each
    assert found["compared"] == {"parameters": 52, "optimizer states": 156}
    assert found["settings"]["--pipeline-schedule"] == [None, "zb-v"]


def test_another_optimizer_step_is_named() -> None:
    """The first loss is computed before it, and so the same."""
    (_, a), (_, b) = recorded(), recorded(adam_beta1=0.8)
    status, found = compared(a, b)
    assert status == 1
    first = found["first_difference"]
    assert first["iteration"] == 2 and first["ranks"]
    assert "what" in first and found["settings"] == {"--adam-beta1": [0.9, 0.8]}
    losses_of = [figure for figure in found["iterations"] if figure["name"] == "lm loss"]
    assert losses_of[0]["ulps"] == 0 < losses_of[1]["ulps"]


def test_a_recording_is_not_written_over() -> None:
    _, folder = recorded()
    words = [sys.executable, "-m", "megatron_ext", "parity", "record", str(folder), "--"]
    result = CliRunner().invoke(app, [*words[3:], "torchrun", str(SCRIPT)])
    assert result.exit_code == 2
    assert "holds a recording already" in result.output


@nightly("above is what it runs, in forked ranks; the lines and the order of runs have unit tests")
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, {"pipeline_model_parallel_size": 2}),
        (
            4,
            {
                "pipeline_model_parallel_size": 2,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "bf16": True,
                "swiglu": True,
                "untie_embeddings_and_output_weights": True,
            },
        ),
    ],
)
def test_a_line_as_stock(tmp_path: Path, ranks: int, flags: dict[str, object]) -> None:
    flags = {**flags, "train_iters": 9}
    line = ["torchrun", "--nproc-per-node", str(ranks), str(SCRIPT), *model_flags(**flags)]
    words = ["--dir", "kept", "--iterations", "3", "--", *line, "--pipeline-schedule", "zb-v"]
    result = subprocess.run(
        [sys.executable, "-m", "megatron_ext", "parity", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same to the last bit" in result.stdout
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(
        ["A", "A-again", "B", "checkpoint", "A.log", "A-again.log", "B.log", "checkpoint.log"]
    )
