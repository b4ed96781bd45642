"""Tests of the runs that `megatron-ext parity` starts one after the other, with a stand-in for the
trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_ext.cli import app
from megatron_ext.launch import command as launch_command
from megatron_ext.parity import runs
from megatron_ext.parity.run_command import RunCommand, read_run_command
from tests.helpers.recordings import Course, write

OURS = ["torchrun", "p.py", "--pipeline-schedule", "zb-h1"]


class Machine:
    """Stand-in for running commands: it records their words, and writes the files that a run would
    write."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.courses: dict[str, Course] = {}
        self.failing = ""
        self.output = ""

    def call(self, words: Sequence[str], stdout: Any, env: dict[str, str], **_: Any) -> int:
        self.commands.append(list(words))
        self.environments.append(env)
        if "record" not in words:
            folder = Path(words[words.index("--save") + 1])
            folder.mkdir()
            (folder / "latest_checkpointed_iteration.txt").write_text("1")
            return 0
        folder = Path(words[words.index("record") + 1])
        if folder.name == self.failing:
            stdout.write(self.output)
            return 1
        write(folder, self.courses.get(folder.name, Course()))
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine()
    monkeypatch.setattr(runs.subprocess, "call", machine.call)
    monkeypatch.setattr("megatron_ext.commands.parity.check_comparable", lambda a, b: None)
    monkeypatch.chdir(tmp_path)
    return machine


def parity(*words: str) -> Result:
    return CliRunner().invoke(app, ["parity", *words])


def test_a_command_as_stock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EXT_MEMORY_LIMIT", "5")
    result = parity("--", *OURS)
    assert result.exit_code == 0, result.output
    save, a, again, b = machine.commands
    assert "--pipeline-schedule" not in save + a + again
    assert b[-6:-4] == ["--pipeline-schedule", "zb-h1"]
    for words, name in ((a, "A"), (again, "A-second"), (b, "B")):
        assert words[words.index("record") + 1] == f"parity/{name}"
        assert words[-4:] == ["--load", "parity/checkpoint", "--ckpt-format", "torch_dist"]
    ours = ["MEGATRON_EXT_MEMORY_LIMIT" in env for env in machine.environments]
    assert ours == [False, False, False, True]
    assert [line.split(" ...")[0] for line in result.stderr.splitlines()] == [
        "A writes a checkpoint",
        "A, 4 iterations",
        "second run of A",
        "B, 4 iterations",
    ]
    assert "the same to the last bit" in result.stdout


def test_slices_are_looked_at_before_anything_runs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`parity` refuses commands with slices that cannot be compared before it runs anything. With
    dropout, slices draw other numbers than stock."""

    def refuse(a: RunCommand, b: RunCommand) -> None:
        assert "--pipeline-slices" not in a.arguments and "--pipeline-slices" in b.arguments
        raise ValueError("with slices, dropout draws other numbers")

    monkeypatch.setattr("megatron_ext.commands.parity.check_comparable", refuse)
    result = parity("--", *OURS, "--pipeline-slices", "4")
    assert result.exit_code == 2 and not machine.commands
    assert "with slices, dropout draws other numbers" in result.stderr


def test_a_command_that_megatron_rejects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`parity` names a command that Megatron rejects as command A or B. The message used to begin
    with "line A", although there is no line."""

    def parse(arguments: Sequence[str]) -> None:
        raise ValueError("--num-layers: no number")

    parser = SimpleNamespace(parse_arguments=parse)
    monkeypatch.setattr(launch_command, "megatron_arguments", parser, raising=False)
    command = read_run_command(OURS)
    with pytest.raises(ValueError, match=r"^command A: --num-layers: no number$"):
        runs.check_comparable(command, command)


def test_two_commands(machine: Machine) -> None:
    machine.courses["B"] = Course(losses=(3.0, 2.25, 2.0))
    result = parity("--dir", "here", "--", "torchrun", "p.py", "--a", "--", *OURS)
    assert result.exit_code == 1
    assert "first difference: iteration 2, lm loss (2.5 and 2.25" in result.stdout
    assert [words[1] for words in machine.commands] == ["-m"] * 4


def test_commands_that_load_write_no_checkpoint(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert parity("--", *OURS, "--load", str(tmp_path)).exit_code == 0
    assert len(machine.commands) == 3


def test_variables_of_ours_count_as_flags(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_SCHEDULE", "zb-h1")
    assert parity("--from-seed", "--", "torchrun", "p.py").exit_code == 0
    ours = ["MEGATRON_EXT_SCHEDULE" in env for env in machine.environments]
    assert ours == [False, False, True]


def test_a_model_that_cannot_be_saved(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.subprocess, "call", lambda *_, **__: 1)
    result = parity("--", *OURS)
    assert result.exit_code == 2
    assert "A writes a checkpoint: the run failed" in result.stderr
    assert "add --from-seed: both commands then start from the seed" in result.stderr


def test_commands_from_a_seed_write_no_checkpoint(machine: Machine) -> None:
    assert parity("--from-seed", "--", *OURS).exit_code == 0
    assert len(machine.commands) == 3 and not any("--load" in words for words in machine.commands)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "torchrun", "p.py"], "the command has no flag of megatron_ext"),
        (["--", "a.py", "--", "b.py", "--", "c.py"], "give one or two launch commands"),
        (["--", "true"], "begins no launch command"),
    ],
)
def test_words_that_are_no_commands(machine: Machine, words: list[str], says: str) -> None:
    result = parity(*words)
    assert result.exit_code == 2 and says in result.stderr
    assert not machine.commands


def test_a_folder_that_is_there_already(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity" / "kept").touch()
    result = parity("--", *OURS)
    assert result.exit_code == 2 and "parity exists already: name another" in result.stderr
    assert not machine.commands


TORCHRUN = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 1
"""


@pytest.mark.parametrize(
    "reason",
    [
        "megatron_ext: error: --num-layers 7: not so",
        "megatron_ext: error on rank 3: parity/A cannot take the recording: No space left",
        "pretrain_gpt.py: error: argument --num-layers: invalid int value: 'six'",
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory",
        "AssertionError",
        "  what():  [enforce fail at pair.cc:464] Received data size doesn't match expected size",
    ],
)
def test_a_run_that_fails(machine: Machine, reason: str) -> None:
    machine.failing = "A-second"
    machine.output = f"much before\nlog_errors ... False\n{reason}\n{TORCHRUN}"
    result = parity("--", *OURS)
    assert result.exit_code == 2
    assert (
        "second run of A: the run failed with exit status 1; its output is in parity/A-second.log"
        in (result.stderr)
    )
    assert f"It says first: {reason.strip()}\n" in result.stderr
    assert len(machine.commands) == 3


@pytest.mark.parametrize(
    "after",
    ["", "megatron_ext: error on node2: the same\n", "[rank0]: Traceback (most recent\n", TORCHRUN],
)
def test_a_reason_of_several_lines_is_printed_whole(machine: Machine, after: str) -> None:
    reason = (
        "megatron_ext: error: the ranks of this job differ:\n"
        "  torch: 2.9 on global rank 0 (node1); 2.8 on global rank 1 (node2)\n"
        "start every rank with the same versions\n"
    )
    machine.failing, machine.output = "B", f"before\n{reason}{after}"
    assert parity("--", *OURS).stderr.endswith(f"It says first: {reason}")


def test_a_reason_without_end_is_cut(machine: Machine) -> None:
    machine.failing = "B"
    machine.output = "RuntimeError: of many tensors\n" + "".join(
        f"\ttensor {n}\n" for n in range(30)
    )
    result = parity("--", *OURS)
    assert "RuntimeError: of many tensors\n\ttensor 0\n" in result.stderr
    assert "tensor 10\n" in result.stderr and "tensor 11" not in result.stderr


def test_a_run_that_fails_without_a_word(machine: Machine) -> None:
    machine.failing, machine.output = "A", "".join(f"line {n}\n" for n in range(30))
    result = parity("--", *OURS)
    assert "and ends with\n  line 18\n" in result.stderr and "line 17" not in result.stderr


def test_no_room(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Callable[[Any], Any] = lambda folder: type("Usage", (), {"free": 2})  # noqa: E731
    monkeypatch.setattr(runs.shutil, "disk_usage", usage)
    result = parity("--", *OURS)
    assert result.exit_code == 2
    assert "no room in parity: 3 recordings need about" in result.stderr
    assert len(machine.commands) == 1


def test_other_checkpoints(machine: Machine, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("1")
    result = parity("--", *OURS, "--load", "a", "--", *OURS, "--load", "b")
    assert result.exit_code == 2 and "--load a and b: give both commands the same" in result.stderr
