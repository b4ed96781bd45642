"""Tests of the commands on a login node, where torch or Megatron is not installed or cannot be
loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.commands.doctor import _print_summary
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.doctor.doctor import Diagnosis, PatchState, State

ROOT = Path(__file__).parents[3]
TRAINING = "scripts/pretrain_gpt.py --num-layers 2 --pipeline-schedule"

# Program for a process in which named modules cannot be imported, and torch's libraries are
# missing.
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        missing, libraries = {missing!r}, {libraries!r}
        if name.split(".")[0] in missing:
            if libraries:
                raise OSError("libcudart.so.13: cannot open shared object file")
            raise ModuleNotFoundError("No module named " + repr(name.split(".")[0]))
        return None

sys.meta_path.insert(0, Missing())
"""


def run(
    tmp_path: Path, command: str, missing: tuple[str, ...], libraries: bool = False
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(missing=missing, libraries=libraries))
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext", *command.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"},
    )


BOTH = ("torch", "megatron")


@pytest.mark.parametrize(
    ("command", "missing", "said"),
    [
        (f"doctor -- torchrun --nproc-per-node 2 {TRAINING} zb-v", BOTH, "No module named 'torch'"),
        (f"plan -- torchrun --nproc-per-node 2 {TRAINING} zb-v", BOTH, "No module named 'torch'"),
        (f"doctor -- {TRAINING} zb-v", BOTH, "a check needs Megatron"),
        (f"plan -- {TRAINING} zb-v", BOTH, "plan needs Megatron"),
        (f"{TRAINING} zb-v", BOTH, "a training needs torch, which cannot be imported here: No mod"),
        ("scripts/pretrain_gpt.py --num-layers 2", BOTH, "a training needs torch"),
        (f"{TRAINING} plan", BOTH, "a training needs torch"),
    ],
)
def test_a_command_that_needs_torch_says_so_in_one_line(
    tmp_path: Path, command: str, missing: tuple[str, ...], said: str
) -> None:
    """A command that needs torch or Megatron says so in one line if it is not installed. Each of
    these commands used to end in a traceback."""
    result = run(tmp_path, command, missing)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr and re.fullmatch(r"megatron[-_]ext: error: .*\n", result.stderr), (
        result.stderr
    )


@pytest.mark.parametrize("schedule", ["plan", "zb-v"])
def test_a_launch_without_megatron_says_one_cause_once(tmp_path: Path, schedule: str) -> None:
    """A launch without Megatron names the missing package once. It used to list a dozen functions
    of Megatron that were not found."""
    result = run(tmp_path, f"{TRAINING} {schedule}", ("megatron",))
    assert result.returncode == 2 and result.stderr.startswith("megatron_ext: error: ")
    assert result.stderr.count("No module named 'megatron'") == 1, result.stderr


@pytest.mark.parametrize(
    "command", [f"doctor -- torchrun --nproc-per-node 2 {TRAINING} zb-v", f"{TRAINING} zb-v"]
)
def test_a_torch_whose_libraries_are_missing(tmp_path: Path, command: str) -> None:
    """A torch whose libraries are missing gives a one-line error that names the library. A
    container's torch on a node without a driver raises OSError when it is imported."""
    result = run(tmp_path, command, ("torch",), libraries=True)
    assert result.returncode == 2, result.stderr
    assert re.fullmatch(r"megatron[-_]ext: error: .*libcudart.so.13: .*\n", result.stderr)


@pytest.mark.parametrize("libraries", [False, True])
def test_bare_doctor_says_one_cause_once(tmp_path: Path, libraries: bool) -> None:
    """`doctor` without a command says once that torch is missing. It used to say so for each of two
    dozen features."""
    result = run(tmp_path, "doctor", BOTH, libraries)
    assert result.returncode == 1, result.stderr
    cause = "libcudart.so.13" if libraries else "No module named"
    assert result.stdout.count(cause) == 1 and "no patch was checked: torch cannot be" in (
        result.stdout
    )
    assert not result.stderr


def test_what_several_features_miss_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`doctor` names a missing package once, with the features that need it. Here torch and
    Megatron are installed, but not a package that some of Megatron's modules import."""
    cause = "No module named 'einops'"
    missing = tuple(
        PatchState(name, "", "", "", State.MISFIT, True, f"{name}: missing: {cause}", cause=cause)
        for name in ("schedule", "a race", "slices")
    )
    other = PatchState("flags", "a:b", "", "", State.MISFIT, True, "a:b takes (x)")
    _print_summary(Diagnosis({}, (*missing, other), ()), PipelineConfig())
    out = capsys.readouterr().out
    assert out.count(cause) == 1 and "the same is missing for: a race, slices" in out
    assert "a:b takes (x)" in out
