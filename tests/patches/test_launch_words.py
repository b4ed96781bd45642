"""Launch commands as people have them: where they begin, and what of them is left out."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from megatron_ext.launch_command.launch_words import Launch, read_launch


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        ("x.py --a 1", Launch("x.py", False, ("--a", "1"))),
        ("-m mine --a", Launch("mine", True, ("--a",))),
        ("-m megatron_ext x.py --a", Launch("x.py", False, ("--a",), installs=True)),
        ("torchrun --nproc-per-node 8 x.py -m", Launch("x.py", False, ("-m",), 8, installs=False)),
        (
            "bin/torchrun --nnodes 1:2 --nproc_per_node=4 -m megatron_ext -m mine",
            Launch("mine", True, (), 8, installs=True),
        ),
        ("torchrun --nproc-per-node gpu x.py", Launch("x.py", False, (), installs=False)),
        ("torchrun --nnodes '$N' x.py", Launch("x.py", False, (), installs=False)),
        (
            "torchrun --no-python python -u -m megatron_ext x.py",
            Launch("x.py", False, (), 1, installs=True),
        ),
        ("python3.12 -u -X dev x.py --a", Launch("x.py", False, ("--a",), installs=False)),
        (
            "/usr/bin/python -m torch.distributed.run --nproc-per-node 2 -m megatron_ext x.py",
            Launch("x.py", False, (), 2, installs=True),
        ),
        (
            "ft_launcher --nproc-per-node 4 --max-restarts=3 --ft-rank-heartbeat-timeout 600 "
            "--ft_log_level=INFO --term-timeout 5 -m megatron_ext x.py --ft-a 1",
            Launch("x.py", False, ("--ft-a", "1"), 4, installs=True, max_restarts=3),
        ),
        (
            "A=1 MEGATRON_EXT_SCHEDULE=zb-v torchrun x.py",
            Launch(
                "x.py",
                False,
                (),
                1,
                installs=False,
                environment={"A": "1", "MEGATRON_EXT_SCHEDULE": "zb-v"},
            ),
        ),
        (
            "B=2 srun -N 2 --container-image=a.sqsh -m block env A=x=1 torchrun x.py",
            Launch(
                "x.py",
                False,
                (),
                1,
                installs=False,
                environment={"B": "2", "A": "x=1"},
                ignored=("srun", "-N", "2", "--container-image=a.sqsh", "-m", "block", "env"),
            ),
        ),
        (
            "srun -n 4 bash -c 'cd /there && A=1 torchrun --nproc-per-node 2 x.py --a'",
            Launch(
                "x.py",
                False,
                ("--a",),
                2,
                installs=False,
                environment={"A": "1"},
                ignored=("srun", "-n", "4", "bash", "-c", "cd", "/there", "&&"),
            ),
        ),
        ("srun -n 4 ./x.py --a", Launch("./x.py", False, ("--a",), ignored=("srun", "-n", "4"))),
    ],
)
def test_where_a_launch_command_begins(command: str, launch: Launch) -> None:
    words = shlex.split(command)
    assert read_launch(words) == replace(launch, words=tuple(words))


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("pretrain --num-layers 3", "'pretrain --num-layers 3' begins no launch command"),
        ("srun -N 2 prog", "'srun -N 2' begins no launch command: give it from SCRIPT.py"),
        ("", "begins no launch command"),
        ("torchrun --nproc-per 2 --no-such x.py", "torchrun's own words: "),
    ],
)
def test_what_is_no_launch_command(command: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_launch(command.split())


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("bash train.sh --nodes 4", "train.sh"),
        ("sh -x ./train", "./train"),
        ("./train.sh", "./train.sh"),
        ("sbatch --nodes 4 job.sbatch", "job.sbatch"),
        ("A=1 srun -n 4 bash train.sh", "train.sh"),
    ],
)
def test_a_shell_script_is_not_run(command: str, script: str) -> None:
    with pytest.raises(ValueError) as error:
        read_launch(command.split())
    assert "runs a shell script, which is not run here" in str(error.value)
    assert "the log of an earlier start, as --megatron-args LOG" in str(error.value)
    assert f"write echo before the launcher (torchrun, python) in {script}," in str(error.value)


def test_a_shell_script_before_the_launcher_is_left_out() -> None:
    words = ("./bind.sh", "python", "x.py", "--a")
    found = Launch("x.py", False, ("--a",), installs=False, ignored=("./bind.sh",), words=words)
    assert read_launch(words) == found
