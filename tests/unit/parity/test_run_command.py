"""Tests of launch commands that are rewritten for parity, so that each rank records, whatever
starts it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_ext.parity.run_command import (
    as_stock,
    read_run_command,
    record_here,
    recorded,
    saving,
)

RUN = "python -m torch.distributed.run"
RECORD = "-m megatron_ext parity record DIR --iterations 4 --"


@pytest.mark.parametrize(
    ("command", "rewritten"),
    [
        (
            "torchrun --nproc-per-node 4 p.py --x 1",
            f"torchrun --nproc-per-node 4 {RECORD} p.py --x 1",
        ),
        ("torchrun -m megatron_ext p.py --x", f"torchrun {RECORD} p.py --x"),
        ("torchrun -m mine.train --x", f"torchrun {RECORD} -m mine.train --x"),
        ("torchrun -m megatron_ext -m mine.train --x", f"torchrun {RECORD} -m mine.train --x"),
        ("python -u p.py", f"python -u {RECORD} p.py"),
        (f"{RUN} --nnodes 2 p.py -m 1", f"{RUN} --nnodes 2 {RECORD} p.py -m 1"),
        ("A=1 srun -n 8 python -m megatron_ext p.py", f"A=1 srun -n 8 python {RECORD} p.py"),
        ("env A=1 torchrun p.py", f"env A=1 torchrun {RECORD} p.py"),
        ("p.py --x", f"python {RECORD} p.py --x"),
        ("srun bash -c 'torchrun p.py --x'", f"srun bash -c 'torchrun {RECORD} p.py --x'"),
    ],
)
def test_a_command_is_recorded(command: str, rewritten: str) -> None:
    words = recorded(read_run_command(shlex.split(command)), Path("DIR"), 4)
    assert shlex.join(words) == rewritten


def test_more_arguments_come_last_and_so_count() -> None:
    command = read_run_command(["torchrun", "p.py", "--load", "old"])
    assert recorded(command, Path("D"), 4, ["--load", "new"])[-4:] == [
        "--load",
        "old",
        "--load",
        "new",
    ]


def test_a_shells_command_is_refused_rather_than_changed() -> None:
    with pytest.raises(ValueError, match=r"a shell .*parity record DIR"):
        read_run_command(["srun", "bash", "-c", "torchrun --node-rank $SLURM_NODEID p.py"])


def test_a_rank_records_right_here() -> None:
    assert record_here(read_run_command(["-m", "mine", "--x"])) == ["-m", "mine", "--x"]
    assert record_here(read_run_command(["p.py", "--x"])) == ["p.py", "--x"]
    assert record_here(read_run_command(["torchrun", "p.py"])) is None


def test_a_checkpoint_that_any_placement_loads() -> None:
    words = shlex.join(
        saving(read_run_command(["torchrun", "-m", "megatron_ext", "p.py"]), Path("C"))
    )
    assert words.startswith("torchrun -m megatron_ext p.py --save C --save-interval 1")
    assert "--dist-ckpt-optim-fully-reshardable" in words and "--ckpt-format torch_dist" in words


@pytest.mark.parametrize(
    "ours",
    [
        "--pipeline-schedule zb-v --pipeline-memory-limit 5",
        "--pipeline-schedule=zb-v --pipeline-post-validation",
        "--pipeline-report-split --pipeline-schedule zb-h1",
    ],
)
def test_as_stock_a_command_has_no_flags_of_ours(ours: str) -> None:
    command = read_run_command(
        shlex.split(f"torchrun p.py --pipeline-model-parallel-size 2 {ours} --lr 1")
    )
    assert as_stock(command).arguments == ("--pipeline-model-parallel-size", "2", "--lr", "1")


def test_as_stock_a_command_has_no_variables_of_ours() -> None:
    command = read_run_command(shlex.split("MEGATRON_EXT_SCHEDULE=zb-v A=1 torchrun p.py"))
    assert as_stock(command).launcher == ("A=1", "torchrun")


def test_the_value_of_a_flag() -> None:
    command = read_run_command(["p.py", "--load", "a", "--save=b", "--load=c"])
    assert [command.value(name) for name in ("--load", "--save", "--lr")] == ["c", "b", None]
