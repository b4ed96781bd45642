"""Tests of the command `megatron-ext parity` on trained ranks: it reports equal numbers, or the
first that differ."""

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
from megatron_ext.recordings.run_recording import read_recording
from megatron_ext.runtime.weight_gradients import WeightGradients
from tests.helpers.combinations import at_night, nightly
from tests.helpers.megatron_runs import SCRIPT, Run, assert_same, losses, model_flags, train
from tests.helpers.ranks import lasting_folder

ITERATIONS = 3
MODEL: dict[str, object] = {"pipeline_model_parallel_size": 2, "train_iters": 9, "log_interval": 5}


@functools.cache
def checkpoint() -> tuple[list[Run], Path]:
    """Return stock's run and the folder of its first checkpoint, after which the run trains on."""
    folder = lasting_folder()
    flags = MODEL | {"save": folder, "save_interval": 1, "exit_interval": 1 + ITERATIONS}
    return train(2, model_flags(**flags)), folder


@functools.cache
def recorded(*options: str, **flags: object) -> tuple[list[Run], Path]:
    """Train from stock's first checkpoint on, each rank under `parity record` with ``options``, as
    under srun. Return the runs and the folder of the recording."""
    folder = lasting_folder() / "recording"
    loading: dict[str, object] = {"load": checkpoint()[1], "ckpt_step": 1}
    loading |= {"save": folder / "nothing", "save_interval": 1}
    words = ["parity", "record", str(folder), "--iterations", str(ITERATIONS), *options, "--"]
    return train(2, model_flags(**MODEL, **loading, **flags), before=words), folder


def compared(*folders: Path | str) -> tuple[int, dict[str, Any]]:
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
    """`parity` finds stock's numbers in a run on a V, although stages are on other ranks there, and
    both copies of the tied embedding on one rank."""
    (_, a), (_, b) = recorded(), recorded(pipeline_schedule="zb-v")
    status, found = compared(a, b)
    assert (status, found["verdict"]) == (0, "same")
    # Number of compared tensors: 12 parameters of each layer, 2 of the last norm and two tables;
    # for each parameter Adam's two tensors and its step.
    assert found["compared"] == {"parameters": 52, "optimizer states": 156}
    assert found["settings"]["--pipeline-schedule"] == [None, "zb-v"]


def test_sums_in_another_order_are_named() -> None:
    """`parity` reports where two runs first differ if sums have another order. Larger microbatches
    add the same samples in another order."""
    (_, a), (_, b) = recorded(), recorded(micro_batch_size=2)
    status, found = compared(a, b)
    assert status == 1
    first = found["first_difference"]
    assert first["iteration"] == 2, "the first after the checkpoint, where the loss is the same yet"
    assert first["what"] == "decoder.final_layernorm.bias" and first["ranks"] == [1]
    assert found["settings"]["--micro-batch-size"] == [1, 2]
    farthest = found["tensors_beyond_the_floor"][0]
    assert farthest["ulps"] > 0 and farthest["relative"] < 1e-2


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"pipeline_schedule": "zb-h1", "pipeline_slices": 2}, id="slices"),
        *at_night(
            pytest.param(
                {"pipeline_schedule": "zb-v", "pipeline_vocab_parallel": 1}, id="vocabulary"
            )
        ),
    ],
)
def test_what_another_order_of_sums_gives_is_no_difference(flags: dict[str, object]) -> None:
    """`parity` accepts differences that another order of sums explains, given a recording of stock
    with reversed microbatches. Slices of a sequence and a split vocabulary add in another order by
    design. Biases of keys, whose gradient is rounding noise, differ by "1736292493 ulps", so parity
    used to end with "different" and exit code 1, although both features did what their pages
    promise."""
    (_, a), (_, reordered), (_, b) = recorded(), recorded("--reversed"), recorded(**flags)
    status, found = compared(a, b)
    assert (status, found["verdict"]) == (1, "differ")
    status, found = compared(a, b, "--reordered", reordered)
    worst = max(
        (one["relative"] / max(one["floor_of_order"], 1e-30), one["tensor"], one["relative"])
        for one in found["tensors_that_differ"]
    )
    assert (status, found["verdict"]) == (0, "within what another order of sums gives"), worst
    print(worst, found["iterations"])


def test_a_missing_gradient_differs_by_more_than_another_order_of_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`parity` reports a missing gradient, which is a larger difference than another order of sums
    explains. The seeded fault must stay visible: the weight gradients of one microbatch of eight
    are never added."""
    run = WeightGradients.run

    def without_one(self: WeightGradients, stage: int, microbatch: int) -> None:
        if (stage, microbatch) == (1, 3):
            self._pending[stage, microbatch].clear()
        run(self, stage, microbatch)

    monkeypatch.setattr(WeightGradients, "run", without_one)
    flags: dict[str, object] = {"pipeline_schedule": "zb-v", "pipeline_vocab_parallel": 2}
    (_, a), (_, reordered), (_, b) = recorded(), recorded("--reversed"), recorded(**flags)
    status, found = compared(a, b, "--reordered", reordered)
    assert (status, found["verdict"]) == (1, "differ")
    farthest = found["tensors_beyond_the_floor"][0]
    assert farthest["relative"] > 0.01 > 1e3 * farthest["floor_of_order"]


def test_states_that_a_distributed_optimizer_divides() -> None:
    """`parity` joins the states that a distributed optimizer splits over data-parallel ranks, also
    of a gated layer, which torch_dist saves in halves. The parameters of the next step are still
    being gathered when an iteration is recorded here (--overlap-param-gather)."""
    flags = model_flags(
        pipeline_model_parallel_size=2,
        train_iters=9,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bf16=True,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
    )
    folders = [lasting_folder() / "recording" for _ in range(2)]
    for folder, ours in zip(folders, ([], ["--pipeline-schedule", "zb-h1"]), strict=True):
        words = ["parity", "record", str(folder), "--iterations", "2", "--"]
        train(4, [*flags, *ours], before=words)
    status, found = compared(*folders)
    assert (status, found["verdict"]) == (0, "same")
    # Number of compared tensors: 12 parameters of each layer, 2 of the last norm and three tables;
    # for each parameter a main copy, Adam's two tensors and its step.
    assert found["compared"] == {"parameters": 53, "optimizer states": 4 * 53}
    a = read_recording(folders[0])
    assert {dtype for dtype, _ in map(a.full_tensor, a.tensors)} == {"bfloat16", "float32"}
    for prefix in ("", "optimizer.state.exp_avg."):
        _, bits = a.full_tensor((f"{prefix}decoder.layers.mlp.linear_fc1.weight", (3,)))
        assert bits.shape == (128, 32), "both halves"


def test_a_recording_is_not_written_over() -> None:
    _, folder = recorded()
    words = [sys.executable, "-m", "megatron_ext", "parity", "record", str(folder), "--"]
    result = CliRunner().invoke(app, [*words[3:], "torchrun", str(SCRIPT)])
    assert result.exit_code == 2
    assert "holds a recording already" in result.output


@nightly("above is what it runs, in forked ranks; the rest and the order of runs have unit tests")
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
def test_a_command_as_stock(tmp_path: Path, ranks: int, flags: dict[str, object]) -> None:
    flags = {**flags, "train_iters": 9}
    command = ["torchrun", "--nproc-per-node", str(ranks), str(SCRIPT), *model_flags(**flags)]
    words = ["--dir", "kept", "--iterations", "3", "--", *command, "--pipeline-schedule", "zb-v"]
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
        ["A", "A-second", "B", "checkpoint", "A.log", "A-second.log", "B.log", "checkpoint.log"]
    )
